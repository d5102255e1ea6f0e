"""A program sees of `telegrad run` what it sees of Python, and shows the same. Real processes."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
import textwrap
import zipfile

import pytest
from launching import telegrad

SHOW = """
    import __main__, pickle, sys

    def function():
        pass

    print(sys.argv, sys.path[0], __name__, __file__, __package__, sys.flags.optimize)
    print(__spec__ and __spec__.name, type(__loader__).__name__, vars(__main__) is globals())
    print(pickle.loads(pickle.dumps(function)) is function)
"""
OUTLIVES = """
    import pickle, threading

    def function():
        return 3

    def later():
        threading.main_thread().join()
        print(pickle.loads(pickle.dumps(function))())

    threading.Thread(target=later).start()
"""
SPAWNS = """
    import multiprocessing

    def function(number):
        print(__name__, number, flush=True)

    if __name__ == "__main__":
        for method in ("spawn", "fork", "forkserver"):
            start = multiprocessing.get_context(method)
            process = start.Process(target=function, args=(7,))
            process.start()
            process.join()
            print(method, process.exitcode)
"""
RAISES = """
    def function():
        raise ValueError("why")

    function()
"""
HOOKED = """
    import sys
    sys.excepthook = lambda kind, value, traceback: print(kind, value, traceback.tb_lineno)
    raise ValueError("why")
"""
NEIGHBOUR = """
    import neighbour
    print(neighbour.here)
"""
ENDINGS = {
    "text": "import sys; sys.exit('complaint')",
    "number": "import atexit; atexit.register(print, 'at exit'); raise SystemExit(9)",
    "nothing": "raise SystemExit",
    "syntax": "def f(:\n",
    "encoding": "# coding: latin-1\nprint('\xe4')",
}


@pytest.fixture
def both(tmp_path):
    """Runs a program by Python and by the launcher; gives code, stdout and stderr of each."""

    def run(*program, options=(), **environment):
        plain = subprocess.run(
            [sys.executable, *program],
            cwd=tmp_path,
            env={**os.environ, **environment},
            capture_output=True,
            timeout=100,
            check=False,
        )
        arguments = ("run", *options, *program)
        with telegrad(*arguments, cwd=tmp_path, environment=environment) as launched:
            code = launched.end()
        return (plain.returncode, plain.stdout, plain.stderr), (code, launched.out, launched.err)

    return run


def write(tmp_path, code, name="program.py"):
    (tmp_path / name).write_bytes(textwrap.dedent(code).encode("latin-1"))


@pytest.mark.parametrize("options", [(), ("--drop-in",)], ids=["", "drop-in"])
@pytest.mark.parametrize(
    "program",
    [SHOW, OUTLIVES, SPAWNS, RAISES, HOOKED],
    ids=["show", "outlives", "spawns", "raises", "hooked"],
)
def test_a_script_runs_as_python_runs_it(tmp_path, both, program, options):
    write(tmp_path, program)
    plain, launched = both("program.py", "-n", "--drop-in", "-m", options=options)
    assert plain[1] or plain[2]
    assert launched == plain


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_ends_as_it_ends_under_python(tmp_path, both, ending):
    write(tmp_path, ENDINGS[ending])
    plain, launched = both("program.py")
    assert launched == plain


def test_a_script_finds_its_neighbours_also_by_a_link(tmp_path, both):
    (tmp_path / "there").mkdir()
    write(tmp_path, "here = True", "there/neighbour.py")
    write(tmp_path, NEIGHBOUR, "there/program.py")
    (tmp_path / "link.py").symlink_to("there/program.py")
    plain, launched = both("link.py")
    assert plain == (0, b"True\n", b"")
    assert launched == plain


def test_a_module_an_archive_and_a_compiled_script_run_so_too(tmp_path, both):
    write(tmp_path, SHOW)
    py_compile.compile(str(tmp_path / "program.py"), cfile=str(tmp_path / "compiled.pyc"))
    with zipfile.ZipFile(tmp_path / "archive.pyz", "w") as archive:
        archive.write(tmp_path / "program.py", "__main__.py")
    for program in (["-m", "program"], ["archive.pyz"], ["compiled.pyc"]):
        plain, launched = both(*program, "--x", "1")
        assert plain[0] == 0
        assert launched == plain


def test_a_module_that_raises_shows_only_itself(tmp_path, both):
    write(tmp_path, RAISES)
    plain, launched = both("-m", "program")
    assert b"runpy" in plain[2]
    assert b"ValueError: why" in launched[2]
    assert b"runpy" not in launched[2]
    assert b"nursery" not in launched[2]


def test_an_interrupt_ends_it_as_it_ends_python(tmp_path, both):
    write(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGINT); signal.pause()")
    plain, launched = both("program.py")
    assert plain[0] == -2
    assert launched[0] == 130  # as a shell has it
    assert launched[2] == plain[2] + b"telegrad: worker 0 was killed by SIGINT\n"


def test_directories_that_python_is_told_not_to_look_in_are_left_out(tmp_path, both):
    write(tmp_path, "here = True", "neighbour.py")
    write(tmp_path, NEIGHBOUR)
    plain, launched = both("program.py", PYTHONSAFEPATH="1")
    if sys.version_info >= (3, 11):
        assert b"No module named 'neighbour'" in plain[2]
    assert launched == plain
