"""The launcher's options: the program that each worker runs, and how many workers."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder

from telegrad.errors import LaunchError
from telegrad.ids import MAX_WORKER_ID

__all__ = ["MOST_WORKERS", "LaunchOptions", "Program"]

MOST_WORKERS = MAX_WORKER_ID + 1


@dataclass(frozen=True, kw_only=True)
class Program:
    """A Python program.

    Args:
        name: the path of a script, or the name of a module.
        arguments: its `sys.argv[1:]`.
        is_module: whether it is run as `python -m` runs it.
        drop_in: whether telegrad replaces torch's RPC before it starts.
    """

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    drop_in: bool = False

    def check(self) -> None:
        """Reports a missing program here, once, instead of on every worker.

        Raises:
            LaunchError: there is no such program, or it cannot be read.
        """
        if self.is_module:
            self._check_module()
        else:
            self._check_script()

    def arguments_of_forking(self) -> list[str]:
        flags = ["--drop-in"] if self.drop_in else []
        flags += ["-m"] if self.is_module else []
        return [*flags, self.name, *self.arguments]

    def _check_script(self) -> None:
        try:
            with open(self.name, "rb"):
                return
        except FileNotFoundError:
            raise LaunchError(f"there is no file {self.name!r}: check the path") from None
        except IsADirectoryError:
            raise LaunchError(
                f"{self.name!r} is a directory: name a script in it, or run a package with "
                "`-m package`"
            ) from None
        except PermissionError:
            raise LaunchError(f"{self.name!r} cannot be read: permission denied") from None
        except OSError as error:
            raise LaunchError(f"{self.name!r} cannot be read: {error.strerror}") from None

    def _check_module(self) -> None:
        package = self.name.partition(".")[0]
        # Searched where `python -m` searches. Submodules are not: that would import the package.
        if PathFinder.find_spec(package, [os.getcwd(), *sys.path]) is None:
            hint = ""
            if self.name.endswith(".py") or os.sep in self.name:
                hint = ": leave out -m to run a script"
            raise LaunchError(f"there is no module {self.name!r}{hint}")


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Options of `launch`.

    Args:
        program: what each worker runs.
        workers: how many to start.
        master_port: where the workers meet; 0 takes a free one.
        grace: seconds between asking workers to end and killing them.
    """

    program: Program
    workers: int = 1
    master_port: int = 0
    grace: float = 10.0

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MOST_WORKERS:
            raise ValueError(f"workers must be within 1 and {MOST_WORKERS}, got {self.workers}")
        if not 0 <= self.master_port < 1 << 16:
            raise ValueError(f"master_port must be within 0 and 65535, got {self.master_port}")
        if self.grace < 0:
            raise ValueError(f"grace must not be negative, got {self.grace}")

    @property
    def threads(self) -> int | None:
        """How many threads each worker's torch should use; None leaves it to torch.

        The cores are divided among the workers. Otherwise every worker would start a thread per
        core, and they would wait for each other. (torchrun gives each worker one thread.)
        """
        if self.workers == 1 or "OMP_NUM_THREADS" in os.environ:
            return None
        return max(1, len(os.sched_getaffinity(0)) // self.workers)
