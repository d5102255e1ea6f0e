"""Processes of a test's own, each at the other end of a line."""

from __future__ import annotations

import contextlib

from telegrad.testing.cluster import processes

PATIENCE = 30.0


@contextlib.contextmanager
def lined_process(target, *args):
    """Runs `target(*args, line)` in a process of its own while the block lasts; gives the process,
    and this end of the line."""
    line, far_line = processes.Pipe()
    process = processes.Process(target=target, args=(*args, far_line))
    process.start()
    far_line.close()
    try:
        yield process, line
    finally:
        process.kill()
        process.join()
        process.close()
        line.close()


def said(line):
    """What comes on a line next."""
    assert line.poll(PATIENCE)
    return line.recv()
