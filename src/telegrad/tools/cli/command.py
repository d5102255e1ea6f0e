"""What a command is, and how it says that it was called wrongly."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

__all__ = ["MISUSED", "Command", "Parser"]

MISUSED = 2
"""The exit code of a command that was called wrongly, and has done nothing."""


class Parser(argparse.ArgumentParser):
    """Complains in one line: the usage of a command with ten options hides what was wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(MISUSED, f"{self.prog}: {message} (see {self.prog} --help)\n")


@dataclass(frozen=True, kw_only=True)
class Command:
    """
    Args:
        name: what is typed.
        summary: one line for the list of commands.
        description: what its help begins with.
        configure: adds its arguments.
        run: carries it out; returns the exit code.
    """

    name: str
    summary: str
    description: str
    configure: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], int]

    def parser(self) -> Parser:
        parser = Parser(
            prog=f"telegrad {self.name}",
            description=self.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.configure(parser)
        return parser
