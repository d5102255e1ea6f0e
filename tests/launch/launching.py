"""Starts `telegrad ...` in a process of its own, quickly: from the fork server, which has torch."""

from __future__ import annotations

import contextlib
import os
import pathlib
import pty
import signal
import sys
import threading
import time

from telegrad.testing.cluster import processes
from telegrad.tools.cli import main

PATIENCE = 100.0


def is_alive(process):
    """Whether a process, of anybody's, still runs. A zombie that init has not buried does not."""
    try:
        stat = pathlib.Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def until(condition, what="it"):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"{what} did not come about"
        time.sleep(0.005)


class Launched:
    """A running command, and what it has printed so far."""

    def __init__(self, *arguments, cwd, environment=None, terminal=False):
        self._changed = threading.Condition()
        self._printed = {1: bytearray(), 2: bytearray()}
        self._threads = []
        self._master = -1
        lines = {}
        tty = ""
        if terminal:
            self._master, slave = pty.openpty()
            tty = os.ttyname(slave)
        else:
            lines = {number: processes.Pipe(duplex=False) for number in (1, 2)}
        self.process = processes.Process(
            target=_run,
            args=(
                [str(argument) for argument in arguments],
                str(cwd),
                environment or {},
                {number: writer for number, (_, writer) in lines.items()},
                tty,
            ),
        )
        self.process.start()
        if terminal:
            self._follow(1, self._master)
            self.expect(b"ready\r\n")  # it has the terminal, so we may let go of this end
            os.close(slave)
        for number, (reader, writer) in lines.items():
            writer.close()
            self._follow(number, os.dup(reader.fileno()))
            reader.close()

    def _follow(self, number, descriptor):
        thread = threading.Thread(target=self._read, args=(number, descriptor))
        thread.start()
        self._threads.append(thread)

    def _read(self, number, descriptor):
        while True:
            try:
                data = os.read(descriptor, 1 << 16)
            except OSError:  # a terminal whose other end is closed
                data = b""
            with self._changed:
                self._printed[number] += data
                self._changed.notify_all()
            if not data:
                os.close(descriptor)
                return

    def type(self, data):
        os.write(self._master, data)

    def expect(self, text, times=1):
        """Returns when the text has been printed, on whichever stream."""
        with self._changed:
            there = self._changed.wait_for(
                lambda: sum(bytes(p).count(text) for p in self._printed.values()) >= times, PATIENCE
            )
            assert there, f"{text} did not come, but {self._printed}"

    @property
    def out(self):
        return bytes(self._printed[1]).removeprefix(b"ready\r\n")

    @property
    def err(self):
        return bytes(self._printed[2])

    def end(self):
        """Waits for the command's end and returns its exit code."""
        self.process.join(PATIENCE)
        assert self.process.exitcode is not None, "the launcher did not end"
        for thread in self._threads:
            thread.join(PATIENCE)
        return self.process.exitcode

    def close(self):
        with contextlib.suppress(ValueError):
            if self.process.is_alive():
                self.process.kill()
            self.process.join()
            for thread in self._threads:
                thread.join(PATIENCE)
            self.process.close()


@contextlib.contextmanager
def telegrad(*arguments, **options):
    """A command that runs while the block lasts."""
    launched = Launched(*arguments, **options)
    try:
        yield launched
    finally:
        launched.close()


def _run(arguments, cwd, environment, lines, tty):
    os.chdir(cwd)
    for name in ("OMP_NUM_THREADS", "NO_COLOR", "TERM", "PYTHONUNBUFFERED"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    # If the tests run in the background, or by `nohup`:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if tty:
        os.setsid()
        descriptor = os.open(tty, os.O_RDWR)  # becomes the terminal of this session
        for number in (0, 1, 2):
            os.dup2(descriptor, number)
        os.write(1, b"ready\n")
    for number, line in lines.items():
        os.dup2(line.fileno(), number)
        line.close()
    code = main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
