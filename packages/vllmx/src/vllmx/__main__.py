"""`python -m vllmx`, the same as the command."""

from vllmx.cli import main

if __name__ == "__main__":
    main()
