"""The command line, `telegrad`.

Each command is a file with a `COMMAND`; `main` lists them.
"""

from telegrad.tools.cli.main import main

__all__ = ["main"]
