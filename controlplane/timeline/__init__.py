"""A recorded run and its traces as one file for Perfetto."""
