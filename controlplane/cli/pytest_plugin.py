"""The pytest plugin that makes test cases of recorded runs. Every pytest beside rolloutctl loads it: keep it light."""
