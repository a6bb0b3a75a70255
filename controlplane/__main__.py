"""`python -m controlplane` is `rolloutctl`, for environments whose scripts are not on the path."""

from controlplane.cli.__main__ import main

if __name__ == "__main__":
    main()
