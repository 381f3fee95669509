"""`python -m selective_compile`: the command line of a checkout that is not installed."""

from selective_compile.cli import main

if __name__ == "__main__":
    main()
