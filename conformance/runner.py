"""Runs one test in a process group of its own, so that whatever it does, it ends.

The runner has imported torch and the suites and starts no threads; each test is forked from it. The
test's processes write to one file. When its time is over, each of them is asked for its stacks and
the whole group is killed.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import unittest
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import IO

from conformance.suites import TestId, make_case

__all__ = ["Outcome", "run_all"]

_fork = multiprocessing.get_context("fork")
_DUMP_SECONDS = 0.3


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a test ended: "passed", "failed" or "skipped", why, and what its processes wrote."""

    test: TestId
    status: str
    reason: str
    seconds: float
    output: str


@dataclass(kw_only=True)
class _Running:
    test: TestId
    process: BaseProcess
    verdict: Connection
    output: IO[bytes]
    began: float
    deadline: float

    def read_output(self) -> str:
        self.output.seek(0)
        return self.output.read().decode(errors="replace")


def run_all(
    tests: Sequence[TestId], *, jobs: int, timeout: Callable[[TestId], float]
) -> Iterator[Outcome]:
    """Runs tests, `jobs` at a time, each for `timeout(test)` seconds at most; gives each outcome
    as it comes."""
    waiting = list(reversed(tests))
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                test = waiting.pop()
                running.append(_start(test, timeout(test)))
            first_end = min(run.deadline for run in running)
            wait([run.verdict for run in running], max(0.0, first_end - time.monotonic()))
            for run in list(running):
                is_over = time.monotonic() > run.deadline
                if run.verdict.poll() or is_over or not run.process.is_alive():
                    running.remove(run)
                    yield _finish(run)
    finally:
        for run in running:
            _kill(run)


def _start(test: TestId, timeout: float) -> _Running:
    ours, theirs = _fork.Pipe(duplex=False)
    output = tempfile.TemporaryFile()  # noqa: SIM115 - until the test has ended
    process = _fork.Process(target=_run, args=(test, theirs, output.fileno()))
    process.start()
    theirs.close()
    began = time.monotonic()
    return _Running(
        test=test,
        process=process,
        verdict=ours,
        output=output,
        began=began,
        deadline=began + timeout,
    )


def _run(test: TestId, verdict: Connection, output: int) -> None:
    os.setpgid(0, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - until the process ends
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    result = unittest.TestResult()
    make_case(test).run(result)
    if result.errors or result.failures:
        verdict.send(("failed", (result.errors + result.failures)[0][1]))
    elif result.skipped:
        verdict.send(("skipped", result.skipped[0][1]))
    elif result.unexpectedSuccesses:
        verdict.send(("failed", "it is marked as an expected failure, and passed"))
    else:
        verdict.send(("passed", ""))
    sys.stdout.flush()


def _finish(run: _Running) -> Outcome:
    try:
        if run.verdict.poll():
            status, reason = run.verdict.recv()
        elif run.process.is_alive():
            _dump_stacks(run)
            status, reason = (
                "failed",
                f"TimeoutError: not done after {run.deadline - run.began:g} seconds",
            )
        else:
            status, reason = "failed", f"its process died with code {run.process.exitcode}"
    except EOFError:
        run.process.join(5.0)
        status, reason = "failed", f"its process died with code {run.process.exitcode}"
    seconds = time.monotonic() - run.began
    _kill(run)
    output = run.read_output()
    run.output.close()
    return Outcome(test=run.test, status=status, reason=reason, seconds=seconds, output=output)


def _dump_stacks(run: _Running) -> None:
    for pid in _group(run):
        try:
            os.kill(pid, signal.SIGUSR1)
        except ProcessLookupError:
            continue  # it has just ended
        time.sleep(_DUMP_SECONDS)  # nobody tells when a dump is done, and two at once mix


def _group(run: _Running) -> list[int]:
    """The processes of a test."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.getpgid(int(name)) == run.process.pid:
                    found.append(int(name))
            except ProcessLookupError:
                continue  # it has just ended
    return sorted(found)


def _kill(run: _Running) -> None:
    _signal(run, signal.SIGKILL)
    run.process.join(5.0)
    run.verdict.close()


def _signal(run: _Running, number: int) -> None:
    try:
        os.killpg(run.process.pid or 0, number)
    except ProcessLookupError:
        pass  # all of its processes have ended
