"""`python -m telegrad` is the command `telegrad`."""

from telegrad.tools.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
