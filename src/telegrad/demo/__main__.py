"""`python -m telegrad.demo`."""

import sys

from telegrad.demo.command import main

if __name__ == "__main__":
    sys.exit(main())
