"""Signals and kills: whatever happens to the launcher, nothing is left behind. Real processes."""

from __future__ import annotations

import fcntl
import os
import pathlib
import re
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import threading
import time

import pytest
from launching import PATIENCE, is_alive, telegrad, until

from telegrad.testing.cluster import processes
from telegrad.tools.cli import main

FAMILY = r"""
    import os, signal, subprocess, sys, time

    CHILD = r"import os, signal; os.write(1, b'pid %d\n' % os.getpid()); signal.pause()"
    subprocess.Popen([sys.executable, "-c", CHILD])
    subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=True)  # away from the group
    {prepare}
    os.write(1, b"pid %d\n" % os.getpid())  # in one piece: the stream is shared with the children
    while True:  # `pause` would sleep over a signal that Python notes just before
        time.sleep(0.01)
"""
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


@pytest.fixture
def family(tmp_path):
    def write(prepare=""):
        (tmp_path / "script.py").write_text(textwrap.dedent(FAMILY).format(prepare=prepare))
        return tmp_path

    return write


def processes_of(launched, count):
    """All processes, when that many have told their pids."""
    until(lambda: len(found(launched)) == count, "the workers' start")
    return found(launched)


def found(launched):
    return {int(pid) for pid in re.findall(rb"pid (\d+)\r?\n", launched.out)}


def all_gone(pids):
    until(lambda: not any(is_alive(pid) for pid in pids), "the end of all processes")


def keeper_of(launched):
    pid = launched.process.pid
    return int(pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text())


@pytest.mark.parametrize("prepare", ["", STUBBORN], ids=["obedient", "stubborn"])
def test_a_killed_launcher_leaves_nothing(family, prepare):
    where = family(prepare)
    with telegrad("run", "-n", "2", "--grace", "0.2", "script.py", cwd=where) as launched:
        pids = processes_of(launched, 6)
        os.kill(launched.process.pid, signal.SIGKILL)
        assert launched.end() == -signal.SIGKILL
        all_gone(pids)


def test_a_killed_keeper_leaves_nothing(family):
    with telegrad("run", "-n", "2", "script.py", cwd=family()) as launched:
        pids = processes_of(launched, 6)
        os.kill(keeper_of(launched), signal.SIGKILL)
        assert launched.end() == 137
        assert not any(is_alive(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_signals_are_passed_on(tmp_path, number):
    (tmp_path / "script.py").write_text(
        textwrap.dedent(f"""
        import signal, sys, time

        def note(number, _):
            print("got", number, flush=True)
            sys.exit(0)

        signal.signal({int(number)}, note)
        print("up", flush=True)
        while True:
            time.sleep(0.01)
    """)
    )
    with telegrad("run", "-n", "2", "script.py", cwd=tmp_path) as launched:
        launched.expect(b"up", times=2)
        os.kill(launched.process.pid, number)
        assert launched.end() == 128 + number
        assert launched.out.count(b"got %d\n" % number) == 2
        assert launched.err.endswith(b"telegrad: ended by %s\n" % number.name.encode())


def test_a_signal_that_another_thread_gets_is_passed_on(family):
    """As one that comes just before the launcher waits, it ends no system call."""
    where = family()
    done = pathlib.Path(where, "now")
    process = processes.Process(target=_launch_beside_a_thread, args=(where, done))
    process.start()
    until(lambda: len(descendants_of(process.pid)) == 7, "the workers' start")
    pids = descendants_of(process.pid)
    done.touch()
    process.join(PATIENCE)
    assert process.exitcode == 128 + signal.SIGTERM
    assert not any(is_alive(pid) for pid in pids)


def _launch_beside_a_thread(where, done):
    def work():
        until(done.exists)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        time.sleep(PATIENCE)

    threading.Thread(target=work, daemon=True).start()
    os.chdir(where)
    os._exit(main(["run", "-n", "2", "script.py"]))


def descendants_of(pid):
    children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(c) for c in children] + [d for c in children for d in descendants_of(c)]


@pytest.mark.parametrize(
    "before",
    [
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
    ],
    ids=["ignored", "blocked"],
)
def test_the_end_of_workers_is_seen_whatever_was_done_to_signals_before(tmp_path, before):
    (tmp_path / "script.py").write_text("import sys; sys.exit(3)")
    begin = (
        f"import os, signal, sys; {before}; "
        "os.execv(sys.executable, [sys.executable, '-m', 'telegrad', 'run', 'script.py'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", begin], cwd=tmp_path, capture_output=True, timeout=PATIENCE
    )
    assert done.returncode == 3


def test_ctrl_c_at_a_terminal_ends_all(family):
    where = family("signal.signal(signal.SIGINT, signal.default_int_handler)")
    with telegrad("run", "-n", "2", "script.py", cwd=where, terminal=True) as launched:
        pids = processes_of(launched, 6)
        launched.type(b"\x03")
        assert launched.end() == 130
        assert not any(is_alive(pid) for pid in pids)
        assert launched.out.count(b"KeyboardInterrupt") >= 2


def test_a_second_ctrl_c_kills_at_once(family):
    where = family("signal.signal(signal.SIGINT, lambda *_: print('not yet', flush=True))")
    arguments = ("run", "-n", "2", "--grace", "1000", "script.py")
    with telegrad(*arguments, cwd=where, terminal=True) as launched:
        pids = processes_of(launched, 6)
        launched.type(b"\x03")
        launched.expect(b"not yet", times=2)
        launched.type(b"\x03")
        assert launched.end() == 130
        assert not any(is_alive(pid) for pid in pids)


def test_ctrl_z_stops_the_workers_too(family):
    def state(pid):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

    with telegrad("run", "-n", "2", "script.py", cwd=family()) as launched:
        pids = processes_of(launched, 6) | {launched.process.pid}
        os.kill(launched.process.pid, signal.SIGTSTP)
        until(lambda: all(state(pid) == "T" for pid in pids), "their standstill")
        os.kill(launched.process.pid, signal.SIGCONT)
        until(lambda: all(state(pid) != "T" for pid in pids), "their going on")
        os.kill(launched.process.pid, signal.SIGTERM)
        assert launched.end() == 143


def test_workers_that_are_done_leave_nothing_either(tmp_path):
    """Children that outlive their worker get a moment, then are ended; the run was a success."""
    (tmp_path / "script.py").write_text(
        textwrap.dedent(r"""
        import subprocess, sys
        CHILD = r"import os, signal; os.write(1, b'pid %d\n' % os.getpid()); signal.pause()"
        child = subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=True)
    """)
    )
    with telegrad("run", "script.py", cwd=tmp_path) as launched:
        (child,) = processes_of(launched, 1)
        assert launched.end() == 0
        assert not is_alive(child)


def test_what_a_dead_worker_has_left_is_ended_with_the_others(family):
    where = family("if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)")
    with telegrad("run", "-n", "2", "--grace", "5", "script.py", cwd=where) as launched:
        assert launched.end() == 137
        assert not any(is_alive(pid) for pid in found(launched))


@pytest.mark.parametrize("way", ["second Ctrl-C", "patience"])
def test_a_reader_that_does_not_read_cannot_keep_the_workers_alive(tmp_path, way):
    """The keeper is stuck in writing then, and cannot end the workers: the front does."""
    (tmp_path / "script.py").write_text(
        "import os\n"
        "with open('begun', 'w') as file: file.write(str(os.getpid()))\n"
        "os.rename('begun', 'pid')\n"
        "while True: print('y' * 10000)\n"
    )
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        code = 70
        try:
            os.dup2(writer, 1)
            os.dup2(writer, 2)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.chdir(tmp_path)
            code = main(["run", "--grace", "0", "script.py"])
        finally:
            os._exit(code)
    os.close(writer)
    until((tmp_path / "pid").exists)
    until(lambda: unread(reader) > 60000, "a full pipe")
    worker = int((tmp_path / "pid").read_text())
    os.kill(process, signal.SIGINT)
    if way == "patience":
        ended = os.waitpid(process, 0)
    else:
        while (ended := os.waitpid(process, os.WNOHANG)) == (0, 0):
            os.kill(process, signal.SIGINT)  # also when the keeper has just ended
    os.close(reader)
    assert os.waitstatus_to_exitcode(ended[1]) == 128 + signal.SIGINT
    assert not is_alive(worker)


def unread(descriptor):
    return struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))[0]
