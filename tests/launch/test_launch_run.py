"""`telegrad run`: what workers get, what is shown of them, and how a run ends. Real processes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap

import pytest
from launching import telegrad


@pytest.fixture
def script(tmp_path):
    def write(code, name="script.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(code))
        return path

    return write


def run(tmp_path, *arguments, **options):
    with telegrad("run", *arguments, cwd=tmp_path, **options) as launched:
        code = launched.end()
        return code, launched.out, launched.err


# -- what workers get

SHOW = """
    import os, sys
    for name in sorted({names}):
        print(name, os.environ.get(name))
    print(sys.argv, __name__)
"""


def test_workers_get_what_torchrun_gives(tmp_path, script):
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    script(SHOW.format(names=names))
    code, out, err = run(tmp_path, "-n", "2", "script.py", "-n", "--x=1", "a b")
    assert code == 0, err
    for rank in (0, 1):
        mine = [line for line in out.decode().splitlines() if line.startswith(f"[{rank}] ")]
        assert mine == [
            f"[{rank}] LOCAL_RANK {rank}",
            f"[{rank}] LOCAL_WORLD_SIZE 2",
            f"[{rank}] MASTER_ADDR 127.0.0.1",
            f"[{rank}] RANK {rank}",
            f"[{rank}] WORLD_SIZE 2",
            f"[{rank}] ['script.py', '-n', '--x=1', 'a b'] __main__",
        ]


WHERE = """
    import ctypes, os, sys
    assert "torch" not in sys.modules  # what a program sets before it imports that must count
    print(ctypes.cast(ctypes.pythonapi.Py_IncRef, ctypes.c_void_p).value, os.getppid())
"""


def test_workers_lie_at_the_same_addresses_and_those_of_another_run_elsewhere(tmp_path, script):
    script(WHERE)
    found = []
    for _ in range(2):
        code, out, err = run(tmp_path, "-n", "4", "script.py")
        assert code == 0, err
        found.append({tuple(line.split()[1:]) for line in out.splitlines()})
    assert [len(each) for each in found] == [1, 1]  # and each has the keeper as its parent
    assert found[0] != found[1]


def test_a_worker_that_cannot_be_forked_ends_those_that_run(tmp_path, script):
    script("import signal; print('up', flush=True); signal.pause()")
    script(
        """
        import errno, os
        forked, fork = [], os.fork

        def fork_once():
            if forked:
                raise BlockingIOError(errno.EAGAIN, "no more processes")
            forked.append(True)
            return fork()

        os.fork = fork_once
        """,
        "sitecustomize.py",
    )
    environment = {"PYTHONPATH": str(tmp_path)}
    code, _, err = run(tmp_path, "-n", "3", "script.py", environment=environment)
    assert code == 2
    reason = b"Resource temporarily unavailable"
    assert err.endswith(b"telegrad: worker 1 cannot be started: %s\n" % reason)


def test_a_python_that_does_not_start_is_told_of(tmp_path, script):
    script("pass")
    script("import os; os._exit(3)", "sitecustomize.py")
    environment = {"PYTHONPATH": str(tmp_path)}
    code, _, err = run(tmp_path, "script.py", environment=environment)
    assert code == 2
    assert b"worker 0 cannot be started: the process that starts the workers has ended" in err


def test_the_cores_are_shared_out_and_it_says_so(tmp_path, script):
    script(SHOW.format(names=["OMP_NUM_THREADS"]))
    cores = len(os.sched_getaffinity(0))
    _, out, err = run(tmp_path, "-n", str(cores + 1), "script.py")
    assert out.count(b"OMP_NUM_THREADS 1\n") == cores + 1
    assert err == b"telegrad: OMP_NUM_THREADS=1 for each of %d workers\n" % (cores + 1)
    _, out, err = run(tmp_path, "-n", "2", "script.py", environment={"OMP_NUM_THREADS": "7"})
    assert out.count(b"OMP_NUM_THREADS 7\n") == 2
    assert err == b""
    _, out, err = run(tmp_path, "script.py")
    assert b"OMP_NUM_THREADS None\n" in out
    assert err == b""


def test_a_group_has_a_secret_of_its_own_unless_one_is_given(tmp_path, script):
    script(SHOW.format(names=["TELEGRAD_SECRET"]))
    secrets = {
        line.removeprefix(b"[0] ").removeprefix(b"[1] ")
        for _ in range(2)
        for line in run(tmp_path, "-n", "2", "script.py")[1].splitlines()
        if b"TELEGRAD_SECRET" in line
    }
    assert len(secrets) == 2
    assert all(len(secret.split()[1]) == 64 for secret in secrets)
    _, out, _ = run(tmp_path, "script.py", environment={"TELEGRAD_SECRET": "mine"})
    assert b"TELEGRAD_SECRET mine\n" in out


def test_what_torchrun_left_in_the_environment_is_not_passed_on(tmp_path, script):
    script(SHOW.format(names=["TORCHELASTIC_USE_AGENT_STORE", "RANK"]))
    inherited = {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "5"}
    _, out, _ = run(tmp_path, "script.py", environment=inherited)
    assert b"TORCHELASTIC_USE_AGENT_STORE None\n" in out
    assert b"RANK 0\n" in out


def test_a_module_is_run_from_the_current_directory(tmp_path, script):
    (tmp_path / "package").mkdir()
    script("", "package/__init__.py")
    script("import sys; print(__spec__.name, sys.argv[1:])", "package/train.py")
    code, out, err = run(tmp_path, "-m", "package.train", "--epochs", "3")
    assert (code, out, err) == (0, b"package.train ['--epochs', '3']\n", b"")


def test_worker_0_reads_what_is_piped_in_and_the_others_nothing(tmp_path, script):
    script("import sys; print(repr(sys.stdin.read()))")
    reader, writer = os.pipe()
    os.write(writer, b"data")
    os.close(writer)
    with os.fdopen(reader, "rb") as stdin:
        done = subprocess.run(
            [sys.executable, "-m", "telegrad", "run", "-n", "2", "script.py"],
            cwd=tmp_path,
            stdin=stdin,
            capture_output=True,
            timeout=100,
            check=False,
        )
    assert sorted(done.stdout.splitlines()) == [b"[0] 'data'", b"[1] ''"]


def test_the_workers_form_a_group(tmp_path, script):
    script("""
        import os, torch
        import telegrad.rpc as rpc
        rank = int(os.environ["RANK"])
        rpc.init_rpc(f"worker{rank}")
        other = f"worker{(rank + 1) % 3}"
        print(rpc.rpc_sync(other, torch.add, args=(torch.ones(1), rank)).item())
        rpc.shutdown()
    """)
    code, out, err = run(tmp_path, "-n", "3", "script.py")
    assert code == 0, err
    assert sorted(out.splitlines()) == [b"[0] 1.0", b"[1] 2.0", b"[2] 3.0"]


def test_the_meeting_place_can_be_chosen(tmp_path, script):
    script(SHOW.format(names=["MASTER_PORT"]))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    code, out, _ = run(tmp_path, "--master-port", port, "script.py")
    assert code == 0
    assert f"MASTER_PORT {port}\n".encode() in out


def test_nobody_is_given_the_port_where_workers_meet(tmp_path, script):
    """It is held from its choice to its use, and still can be used."""
    script("""
        import os, socket
        port = int(os.environ["MASTER_PORT"])
        try:
            socket.socket().bind(("127.0.0.1", port))
        except OSError:
            print("held")
        store = socket.socket()
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's does
        store.bind(("0.0.0.0", port))
        store.listen()
        print("used")
    """)
    code, out, err = run(tmp_path, "script.py")
    assert (code, out) == (0, b"held\nused\n"), err


# -- what is shown of them


def test_streams_stay_apart_and_lines_whole(tmp_path, script):
    script("""
        import os
        rank = os.environ["RANK"].encode()
        for i in range(200):  # in pieces, as unbuffered programs write
            for piece in (rank * 10, b"-", rank * 4000, b"\\n"):
                os.write(1, piece)
            os.write(2, rank * 30 + b"\\n")
    """)
    code, out, err = run(tmp_path, "-n", "3", "script.py")
    assert code == 0
    expected = [b"[%d] %s-%s" % (r, b"%d" % r * 10, b"%d" % r * 4000) for r in range(3)]
    assert sorted(set(out.splitlines())) == expected
    assert len(out.splitlines()) == 600
    marked = [line for line in err.splitlines() if not line.startswith(b"telegrad")]
    assert sorted(set(marked)) == [b"[%d] %s" % (r, b"%d" % r * 30) for r in range(3)]
    assert len(marked) == 600


def test_half_lines_long_lines_and_garbage_arrive_as_they_are(tmp_path, script):
    script(r"""
        import os
        garbage = bytes(byte for byte in range(256) if byte != 10)
        long = b"x" * 900_000
        for data in (garbage + b"\n", long + b"\n", b"half"):
            while data:
                data = data[os.write(1, data):]
    """)
    code, out, _ = run(tmp_path, "-n", "2", "script.py")
    garbage = bytes(byte for byte in range(256) if byte != 10)
    assert code == 0
    lines = out.split(b"\n")
    for rank in (b"[0] ", b"[1] "):
        assert lines.count(rank + garbage) == 1
        assert lines.count(rank + b"x" * 900_000) == 1
        assert lines.count(rank + b"half") == 1
    assert out.endswith(b"half\n")


def test_what_is_printed_is_seen_when_it_is_printed(tmp_path, script):
    script("import signal; print('now'); signal.pause()")
    with telegrad("run", "-n", "2", "script.py", cwd=tmp_path) as launched:
        launched.expect(b"now\n", times=2)
        os.kill(launched.process.pid, signal.SIGTERM)
        assert launched.end() == 143


@pytest.mark.parametrize("no_colour", ["", "1"])
def test_a_terminal_gets_colours(tmp_path, script, no_colour):
    script("import sys; print('out'); print('err', file=sys.stderr)")
    environment = {"NO_COLOR": no_colour, "OMP_NUM_THREADS": "1"}
    arguments = ("run", "-n", "2", "script.py")
    with telegrad(*arguments, cwd=tmp_path, environment=environment, terminal=True) as launched:
        assert launched.end() == 0
        lines = sorted(launched.out.splitlines())
    marks = [b"[0] ", b"[1] "] if no_colour else [b"\x1b[33m[1]\x1b[0m ", b"\x1b[36m[0]\x1b[0m "]
    assert lines == [mark + word for mark in marks for word in (b"err", b"out")]


# -- how it ends

FAIL = """
    import os, signal, sys
    if os.environ["RANK"] == "1":
        {fail}
    signal.pause()
"""


@pytest.mark.parametrize(
    ("fail", "code", "words"),
    [
        ("raise ValueError('why')", 1, b"worker 1 failed with exit code 1"),
        ("sys.exit(7)", 7, b"worker 1 failed with exit code 7"),
        ("os._exit(255)", 255, b"worker 1 failed with exit code 255"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, b"worker 1 was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, b"worker 1 was killed by SIGTERM"),
        ("os.abort()", 134, b"worker 1 was killed by SIGABRT"),
    ],
)
def test_the_failure_of_one_ends_all_and_is_the_exit_code(tmp_path, script, fail, code, words):
    script(FAIL.format(fail=fail))
    ended, _, err = run(tmp_path, "-n", "3", "script.py")
    assert ended == code
    assert words in err
    assert b"; 2 others ended with it" in err


def test_what_the_failed_one_said_is_shown_last(tmp_path, script):
    """Others talk while they are ended."""
    script("""
        import os, pathlib, signal, sys, time

        def talk(*_):
            print("goodbye", file=sys.stderr)
            sys.exit(0)

        if os.environ["RANK"] == "0":
            while not pathlib.Path("up").exists():
                pass
            try:
                raise KeyError("the cause")
            except KeyError:
                raise ValueError("what it led to")
        signal.signal(signal.SIGTERM, talk)
        pathlib.Path("up").touch()
        while True:
            time.sleep(0.01)
    """)
    code, _, err = run(tmp_path, "-n", "2", "script.py")
    assert code == 1
    said, _, last = err.partition(b"; 1 other ended with it. Its last output:\n")
    assert b"[1] goodbye" in said
    assert last.startswith(b"[0] Traceback (most recent call last):\n")
    assert b"KeyError: 'the cause'" in last
    assert last.endswith(b"[0] ValueError: what it led to\n")


@pytest.mark.parametrize("lingers", ["until the others are gone", "for ever"])
def test_the_cause_is_named_and_not_who_fails_for_want_of_it(tmp_path, script, lingers):
    """The worker that raises has left the group before it ends; others see that, and end first."""
    until = "all(map(pathlib.Path.exists, GONE))" if lingers != "for ever" else "False"
    script(f"""
        import os, pathlib, threading, torch
        import telegrad.rpc as rpc

        GONE = [pathlib.Path("gone0"), pathlib.Path("gone2")]

        def linger():
            while not {until}:
                pass

        rank = int(os.environ["RANK"])
        rpc.init_rpc(f"worker{{rank}}")
        if rank == 1:
            threading.Thread(target=linger).start()
            rpc.shutdown(graceful=False)
            raise ValueError("the cause")
        try:
            while True:
                rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1))
        finally:
            pathlib.Path(f"gone{{rank}}").touch()
    """)
    code, _, err = run(tmp_path, "-n", "3", "script.py")
    assert code == 1
    assert b"worker 1 failed with exit code 1" in err
    assert 0 < err.rindex(b"WorkerLost") < err.rindex(b"[1] ValueError: the cause\n")


def test_a_worker_that_ignores_the_request_is_killed_after_the_grace(tmp_path, script):
    script("""
        import os, pathlib, signal
        rank = int(os.environ["RANK"])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path(f"up{rank}").touch()
        if rank == 0:
            while not pathlib.Path("up1").exists():
                pass
            raise SystemExit(5)
        while True:
            signal.pause()
    """)
    code, _, err = run(tmp_path, "-n", "2", "--grace", "0.2", "script.py")
    assert code == 5
    assert b"telegrad: worker 1 did not end within 0.2 s: killed\n" in err


def test_a_single_worker_ends_as_without_a_launcher(tmp_path, script):
    script("import sys; print('out'); sys.exit('complaint')")
    assert run(tmp_path, "script.py") == (1, b"out\n", b"complaint\n")


def test_a_reader_that_goes_away_ends_the_run(tmp_path, script):
    script("while True: print('y')")
    command = (
        f"{sys.executable} -m telegrad run -n 2 script.py | head -n 1; echo ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, timeout=100, check=False
    )
    first, code = done.stdout.splitlines()
    assert first.endswith(b"] y")
    assert code == b"141"
    assert b"Traceback" not in done.stderr


def test_a_disk_that_is_full_ends_the_run(tmp_path, script):
    script("while True: print('y' * 1000)")
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m telegrad run script.py > /dev/full"],
        cwd=tmp_path,
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 141
    assert b"telegrad: output cannot be written: No space left on device\n" in done.stderr
    assert b"Traceback" not in done.stderr


def test_workers_that_the_system_has_no_room_for_end_those_that_run(tmp_path, script):
    script("import signal; signal.pause()")
    done = subprocess.run(
        ["bash", "-c", f"ulimit -n 40; {sys.executable} -m telegrad run -n 60 script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2
    assert re.fullmatch(
        r"telegrad: worker \d+ cannot be started: Too many open files",
        done.stderr.splitlines()[-1],
    )
