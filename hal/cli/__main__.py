"""`python -m hal.cli`: the command line where the `hal` script is not on the path."""

from hal.cli import main

if __name__ == "__main__":
    main()
