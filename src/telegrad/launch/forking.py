"""Forks the workers of a group, and runs the program in each.

It is started by its path, as `python forking.py DESCRIPTORS [--drop-in] [-m] PROGRAM ...`, with two
descriptors for each worker's output. It prints their processes, or the error's number after a minus
when there is no room for another, and ends: they become the launcher's, which adopts orphans. It
imports nothing of telegrad's or torch's before it forks: what the program sets in its environment
before it imports them counts.

Why workers are forked at all: the system loads each program that it starts to other addresses,
which whoever attacks it would have to guess, and forked ones stay where their parent was. A
processor predicts branches by their addresses. Workers that share one push each other's predictions
out if they are loaded to different places, although all of them run the same code: that is the
likely reason for what was measured with three trainers and a server on two processors, where a step
takes 17 % less time at the median of twelve pairs of runs (3 to 28 %) if all are forked from one.

(Rejected: no random addresses at all, `personality(ADDR_NO_RANDOMIZE)`. It gains as much, and makes
every memory error easier to exploit.)

The program sees what it would see under plain Python: it is `__main__`, `sys.argv` and `sys.path`
begin with it, its tracebacks too, and processes that it spawns find its main module.
"""

from __future__ import annotations

import os
import sys
import time
from types import ModuleType, TracebackType

_FLAGS = ("--drop-in", "-m")


def main() -> None:
    _leave_path()
    nursery = os.getpid()
    descriptors = [int(text) for text in sys.argv[1].split(",")]
    pipes = list(zip(descriptors[::2], descriptors[1::2], strict=True))
    for rank in range(len(pipes)):
        try:
            process = os.fork()
        except OSError as error:  # told, and the launcher ends those that run
            os.write(1, f"-{error.errno}\n".encode())
            break
        if process == 0:
            _become(rank, pipes)
            while os.getppid() == nursery:  # ends when all are forked
                time.sleep(0.001)  # who looks who its parent is sees the one that it keeps
            _run(sys.argv[2:])
            return
        os.write(1, f"{process}\n".encode())
    os._exit(0)


def _leave_path() -> None:
    """Python has put the directory of this file where that of the program belongs."""
    if not _is_path_safe():
        del sys.path[0]


def _is_path_safe() -> bool:
    return bool(getattr(sys.flags, "safe_path", False))  # Python 3.11 has it


def _become(rank: int, pipes: list[tuple[int, int]]) -> None:
    """A worker, in a session of its own: what the terminal sends goes to the launcher alone.

    Worker 0 gets the launcher's stdin unless that is a terminal, which a process of another session
    cannot read; the others have none.
    """
    os.setsid()
    if rank != 0 or os.isatty(0):
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
    for number, descriptor in enumerate(pipes[rank], start=1):
        os.dup2(descriptor, number)
    for pipe in pipes:
        for descriptor in pipe:
            os.close(descriptor)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))


def _run(arguments: list[str]) -> None:
    """Runs a program as Python does; what it raises has been shown as Python shows it."""
    flags = []
    while arguments[0] in _FLAGS:
        flags.append(arguments.pop(0))
    if "--drop-in" in flags:
        import telegrad

        telegrad.install()
    # It stays in its place, as Python's own does: what outlives the program may look for it.
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__builtins__ = sys.modules["builtins"]  # type: ignore[attr-defined]
    sys.argv[:] = arguments
    try:
        if "-m" in flags:
            _run_module(arguments[0])
        else:
            _run_script(arguments[0], module)
    except SystemExit:
        raise
    except BaseException as error:
        error.__traceback__ = _of_program(error.__traceback__)
        if not _was_idle(error):
            sys.excepthook(type(error), error, error.__traceback__)
        sys.excepthook = lambda *_: None
        raise


def _run_module(name: str) -> None:
    import runpy

    if not _is_path_safe():
        sys.path.insert(0, os.getcwd())
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # what `python -m` runs


def _run_script(path: str, module: ModuleType) -> None:
    from importlib.machinery import SourceFileLoader, SourcelessFileLoader
    from pkgutil import get_importer

    directory = os.path.dirname(os.path.realpath(path))
    path = os.path.abspath(path)
    if get_importer(path) is not None:  # an archive with a main module in it
        import runpy

        sys.path.insert(0, path)
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    if not _is_path_safe():
        sys.path.insert(0, directory)
    module.__file__ = path
    if path.endswith(".pyc"):
        module.__loader__ = compiled = SourcelessFileLoader("__main__", path)
        code = compiled.get_code("__main__")
    else:
        module.__loader__ = source = SourceFileLoader("__main__", path)
        code = compile(source.get_data(path), path, "exec", dont_inherit=True)
    assert code is not None
    exec(code, module.__dict__)


def _was_idle(error: BaseException) -> bool:
    """Whether Ctrl-C has ended a worker that only waited for the others, in `shutdown`: there is
    nothing in its traceback that anybody looks for."""
    traceback = error.__traceback__
    while isinstance(error, KeyboardInterrupt) and traceback is not None:
        frame = traceback.tb_frame
        module = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name == "shutdown" and module.startswith("telegrad."):
            return True
        traceback = traceback.tb_next
    return False


def _of_program(traceback: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that belongs to the program."""
    runpy = getattr(sys.modules.get("runpy"), "__file__", None)
    not_its_own = (__file__, runpy, "<frozen runpy>")
    while traceback is not None and traceback.tb_frame.f_code.co_filename in not_its_own:
        traceback = traceback.tb_next
    return traceback


if __name__ == "__main__":
    main()
