"""What a worker runs: a script or a module, on Python, on torch's RPC or on telegrad's."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder

from telegrad.errors import LaunchError

__all__ = ["Program"]


@dataclass(frozen=True, kw_only=True)
class Program:
    """A Python program.

    Args:
        name: the path of a script, or the name of a module.
        arguments: what it gets as `sys.argv[1:]`.
        is_module: whether it is run as `python -m` runs it.
        drop_in: whether telegrad takes the place of torch's RPC before it starts.
    """

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    drop_in: bool = False

    def check(self) -> None:
        """Finds out here, once, what else every worker would complain about.

        Raises:
            LaunchError: there is no such program, or it cannot be read.
        """
        if self.is_module:
            self._check_module()
        else:
            self._check_script()

    def arguments_of_nursery(self) -> list[str]:
        flags = ["--drop-in"] if self.drop_in else []
        flags += ["-m"] if self.is_module else []
        return [*flags, self.name, *self.arguments]

    def _check_script(self) -> None:
        try:
            with open(self.name, "rb"):
                return
        except FileNotFoundError:
            raise LaunchError(f"there is no file {self.name!r}") from None
        except IsADirectoryError:
            raise LaunchError(
                f"{self.name!r} is a directory: name a script in it, or run a package by "
                "`-m package`"
            ) from None
        except PermissionError:
            raise LaunchError(f"{self.name!r} cannot be read: permission denied") from None
        except OSError as error:
            raise LaunchError(f"{self.name!r} cannot be read: {error.strerror}") from None

    def _check_module(self) -> None:
        package = self.name.partition(".")[0]
        # Looked for where `python -m` does. Its parts are not: that would import the package.
        if PathFinder.find_spec(package, [os.getcwd(), *sys.path]) is None:
            hint = ""
            if self.name.endswith(".py") or os.sep in self.name:
                hint = ": leave -m away to run a script"
            raise LaunchError(f"there is no module {self.name!r}{hint}")
