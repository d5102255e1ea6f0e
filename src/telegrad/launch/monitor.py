"""Reads the output of the workers of `telegrad.workers`, and the starter's reports on them.

A thread of the driver shows the output on `sys.stdout` and `sys.stderr`, whatever these are at that
moment: in a notebook, the output of the cell.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from telegrad.errors import LaunchError
from telegrad.launch.output import ErrorOutput, Stream
from telegrad.launch.worker_process import end_in_words
from telegrad.launch.worker_starter import KILL, KILL_ONE, STOP

__all__ = ["GRACE", "Monitor", "write"]

GRACE = 5.0
"""Seconds between asking workers to end and killing them."""


class Monitor:
    """Reads output and reports on a thread of its own, until the starter and all workers end.

    Args:
        names: the workers', by rank from 1.
        process: the starter.
        control: the socket to the starter.
        readers: of the workers' output and errors, in turn, and of the starter's.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        process: subprocess.Popen[bytes],
        control: socket.socket,
        readers: list[int],
    ) -> None:
        self._names = names
        self._process = process
        self._control = control
        self._changed = threading.Condition()  # guards the two below
        self._joined: set[str] = set()
        self._ended: dict[str, int] = {}
        self._sent: set[bytes] = set()  # commands to the starter
        self._killed: set[str] = set()  # workers that were lost and then killed
        self._reports = b""
        self._starter = Stream(readers[-1])
        self._starter_errors = ErrorOutput()
        self._starter_has_ended = False
        self._errors = {name: ErrorOutput() for name in names}
        self._streams = {
            name: (Stream(readers[2 * i]), Stream(readers[2 * i + 1]))
            for i, name in enumerate(names)
        }
        self._thread = threading.Thread(target=self._run, name="telegrad-workers", daemon=True)
        self._thread.start()

    def send(self, command: bytes) -> None:
        self._sent.add(command)
        with contextlib.suppress(OSError):  # the starter has ended
            self._control.sendall(command)

    def kill(self, name: str) -> None:
        self._killed.add(name)
        rank = self._names.index(name) + 1
        with contextlib.suppress(OSError):  # the starter has ended
            self._control.sendall(KILL_ONE + rank.to_bytes(2, "big"))

    def wait_until_joined(self, deadline: float, seconds: float) -> None:
        """
        Raises:
            LaunchError: a worker, or the starter, has ended; or the deadline has passed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._ended or self._starter_has_ended or len(self._joined) == len(self._names)
                ),
                max(0.0, deadline - time.monotonic()),
            )
            ended, joined = dict(self._ended), set(self._joined)
            starter_has_ended = self._starter_has_ended
        if ended:
            name, code = next(iter(ended.items()))
            how = end_in_words(f"worker {name!r}", code)
            raise LaunchError(f"{how} before it had joined{_quoted(self._errors[name])}")
        missing = [name for name in self._names if name not in joined]
        if not missing:
            return
        if starter_has_ended:
            how = end_in_words("the process that starts them", self._process.wait())
            raise LaunchError(
                f"{_listed(missing)} cannot be started: {how}{_quoted(self._starter_errors)}"
            )
        raise LaunchError(
            f"{_listed(missing)} did not start within {seconds:g} s; workers(..., timeout=...) "
            f"sets this limit{_quoted(self._errors[missing[0]])}"
        )

    def finish(self) -> None:
        """Shows the rest of the output, after all processes have ended."""
        self._thread.join()  # ends with the last process that holds the control stream
        self._control.close()

    def leave_to_parent(self) -> None:
        self._control.close()
        for stream in (self._starter, *(s for pair in self._streams.values() for s in pair)):
            stream.close()

    # -- on the thread

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            watch = partial(selector.register, events=selectors.EVENT_READ)
            watch(self._control, data=None)
            watch(self._starter.descriptor, data=(None, self._starter))
            for name, pair in self._streams.items():
                for stream in pair:
                    watch(stream.descriptor, data=(name, stream))
            is_open = True
            while is_open:  # ends with the last process that holds the control stream
                for key, _ in selector.select():
                    if key.data is None:
                        is_open = self._read_reports(selector)
                        continue
                    name, stream = key.data
                    if not stream.has_ended():
                        self._show(name, stream, stream.read())
                        if stream.has_ended():
                            selector.unregister(key.fd)
            for name in self._names:
                self._drain(name, selector)
            self._starter_errors.add(self._starter.finish(), time.monotonic())
            if not self._sent and len(self._joined) == len(self._names) > len(self._ended):
                write(sys.stderr, "telegrad: the process that starts the workers has died\n")
            with self._changed:
                self._starter_has_ended = True
                self._changed.notify_all()

    def _read_reports(self, selector: selectors.BaseSelector) -> bool:
        try:
            data = self._control.recv(1 << 12)
        except ConnectionResetError:  # the starter died before it had read everything
            data = b""
        *lines, self._reports = (self._reports + data).split(b"\n")
        for line in lines:
            event, name, *code = line.decode().split()
            if event == "ended":
                self._drain(name, selector)
                if name in self._joined:
                    self._report_end(name, int(code[0]))
            with self._changed:
                if event == "ended":
                    self._ended[name] = int(code[0])
                else:
                    self._joined.add(name)
                self._changed.notify_all()
        return bool(data)

    def _report_end(self, name: str, code: int) -> None:
        if code == 0 and STOP in self._sent:
            return
        how = end_in_words(f"worker {name!r}", code)
        if code == -signal.SIGKILL and name in self._killed:
            how = f"worker {name!r} was lost and has been killed"
        elif code == -signal.SIGKILL and KILL in self._sent:
            how = f"worker {name!r} did not end within {GRACE:g} s and was killed"
        write(sys.stderr, f"telegrad: {how}\n")

    def _drain(self, name: str, selector: selectors.BaseSelector) -> None:
        """Shows the rest of the output of a worker that has ended."""
        for stream in self._streams[name]:
            if not stream.has_ended():
                selector.unregister(stream.descriptor)
                self._show(name, stream, stream.finish())

    def _show(self, name: str | None, stream: Stream, lines: Sequence[bytes]) -> None:
        if name is None:
            self._starter_errors.add(lines, time.monotonic())
            return
        is_err = stream is self._streams[name][1]
        if is_err:
            self._errors[name].add(lines, time.monotonic())
        text = "".join(f"[{name}] {line.decode(errors='replace')}\n" for line in lines)
        write(sys.stderr if is_err else sys.stdout, text)


def write(stream: Any, text: str) -> None:
    if text and stream is not None:
        try:
            encoding = getattr(stream, "encoding", None) or "utf-8"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()
        except (OSError, ValueError):
            pass  # the stream is closed


def _listed(names: Sequence[str]) -> str:
    return f"{'worker' if len(names) == 1 else 'workers'} {', '.join(map(repr, names))}"


def _quoted(errors: ErrorOutput) -> str:
    lines = [line.decode(errors="replace") for line in errors.lines()]
    return ". It printed:\n" + "\n".join(f"    {line}" for line in lines) if lines else ""
