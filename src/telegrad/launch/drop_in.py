"""What a worker of `telegrad run --drop-in` runs: the program, with telegrad in torch's place.

The program sees what it would see under plain Python: it is `__main__`, `sys.argv` and `sys.path`
begin with it, and processes that it spawns find its main module, and telegrad in torch's place.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
from types import ModuleType, TracebackType

import telegrad

__all__ = ["main"]


def main() -> int:
    """Runs the program that `sys.argv` names; returns its exit code unless it exits by itself."""
    arguments = sys.argv[1:]
    is_module = arguments[0] == "-m"
    name = arguments[1] if is_module else arguments[0]
    sys.argv[:] = arguments[1:] if is_module else arguments
    telegrad.install()
    try:
        if is_module:
            sys.path[0] = os.getcwd()
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.realpath(name))
            _run_script(name)
    except Exception as error:  # noqa: BLE001 - shown as the interpreter shows it
        error = error.with_traceback(_below_this_file(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _run_script(path: str) -> None:
    # It stays in its place, as Python's own does: what outlives the script may look for it.
    module = ModuleType("__main__")
    module.__file__ = path = os.path.abspath(path)
    module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = module
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _below_this_file(traceback: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that belongs to the program."""
    here = (__file__, runpy.__file__, "<frozen runpy>")
    below = traceback
    while below is not None and below.tb_frame.f_code.co_filename in here:
        below = below.tb_next
    return below if below is not None else traceback


if __name__ == "__main__":
    raise SystemExit(main())
