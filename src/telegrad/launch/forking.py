"""Forks the workers of a group, and runs the program in each.

It runs by its path, as `python forking.py DESCRIPTORS [--drop-in] [-m] PROGRAM ...`, with two
descriptors for each worker's output. It prints the workers' process ids (or, if a fork fails, the
error number after a minus) and ends; the launcher, which adopts orphans, adopts them. It imports
neither telegrad nor torch before it forks, so the program can still set environment variables for
them.

Workers are forked because forked processes share their addresses, while separately started ones are
loaded to random addresses. A processor predicts branches by address, so workers that share one
evict each other's predictions if their addresses differ, although they run the same code. With
three trainers and a server on two processors, forking made a step 17 % faster (median of twelve
pairs).

(Rejected: `personality(ADDR_NO_RANDOMIZE)`. It gains as much, and makes every memory error easier
to exploit.)

The program sees what it would see under plain Python: it is `__main__`, `sys.argv`, `sys.path` and
its tracebacks begin with it, and processes that it spawns find its main module.
"""

from __future__ import annotations

import os
import sys
import time
from types import ModuleType, TracebackType

_FLAGS = ("--drop-in", "-m")


def main() -> None:
    _leave_path()
    parent = os.getpid()
    descriptors = [int(text) for text in sys.argv[1].split(",")]
    pipes = list(zip(descriptors[::2], descriptors[1::2], strict=True))
    for rank in range(len(pipes)):
        try:
            process = os.fork()
        except OSError as error:  # the launcher reads it, and ends the workers that run
            os.write(1, f"-{error.errno}\n".encode())
            break
        if process == 0:
            _become(rank, pipes)
            while os.getppid() == parent:  # ends when all are forked
                time.sleep(0.001)  # so that the program sees its final parent
            _run(sys.argv[2:])
            return
        os.write(1, f"{process}\n".encode())
    os._exit(0)


def _leave_path() -> None:
    """Removes this file's directory from the place of the program's."""
    if not _is_path_safe():
        del sys.path[0]


def _is_path_safe() -> bool:
    return bool(getattr(sys.flags, "safe_path", False))  # Python 3.11 has it


def _become(rank: int, pipes: list[tuple[int, int]]) -> None:
    """Turns this process into a worker, in a session of its own: only the launcher gets the
    terminal's signals.

    Worker 0 gets the launcher's stdin, unless that is a terminal, which a process of another
    session cannot read. The others have none.
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
    """Runs a program as Python does, and shows its exception as Python does."""
    flags = []
    while arguments[0] in _FLAGS:
        flags.append(arguments.pop(0))
    if "--drop-in" in flags:
        import telegrad

        telegrad.install()
    # It stays there, as Python's own does, for code that outlives the program.
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
    """Whether Ctrl-C has ended a worker that only waited for others in `shutdown`, so that its
    traceback is of no interest."""
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
