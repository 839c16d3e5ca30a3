"""`python -m bitempered` is the command `bitempered`."""

from bitempered.cli import main

if __name__ == "__main__":
    main()
