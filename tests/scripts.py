"""Programs of the tests that run in a process of their own, as `python train.py`."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

PATIENCE = 100.0


def run(directory, text, *flags, name="train.py", **variables):
    """Runs a script to its end."""
    (directory / name).write_text(textwrap.dedent(text))
    return subprocess.run(
        [sys.executable, *flags, name],
        cwd=directory,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@contextlib.contextmanager
def running(directory, text):
    """A script that runs, in a process group of its own, while the block lasts."""
    (directory / "train.py").write_text(textwrap.dedent(text))
    process = subprocess.Popen(
        [sys.executable, "-u", "train.py"],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_begin,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _begin():
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run in the background


def is_alive(process):
    """Whether a process of anybody still runs."""
    try:
        stat = pathlib.Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)
