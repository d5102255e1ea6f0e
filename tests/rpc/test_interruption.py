"""Ends of waits in a conversation: by what is waited for, by another thread, by Ctrl-C."""

from __future__ import annotations

import contextlib
import dis
import os
import sys
import threading

from telegrad.rpc.conversation import Interruption

PATIENCE = 20.0


@contextlib.contextmanager
def pipe():
    reader, writer = os.pipe()
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


def descriptors():
    return set(os.listdir("/proc/self/fd"))


def test_a_wait_ends_when_there_is_something_to_read():
    with pipe() as (reader, writer), contextlib.closing(Interruption()) as interruption:
        os.write(writer, b"x")
        assert interruption.wait_for(reader)
        assert interruption.wait_for(reader)


def test_an_interruption_ends_a_wait_before_it_begins_and_meanwhile():
    for interrupts_before in (True, False):
        with pipe() as (reader, _), contextlib.closing(Interruption()) as interruption:
            helper = threading.Timer(0.0 if interrupts_before else 0.05, interruption.interrupt)
            helper.start()
            if interrupts_before:
                helper.join(PATIENCE)
            assert not interruption.wait_for(reader)
            helper.join(PATIENCE)


def test_after_the_end_an_interruption_does_nothing():
    interruption = Interruption()
    with pipe() as (reader, writer):
        os.write(writer, b"x")
        interruption.wait_for(reader)
        interruption.close()
        interruption.interrupt()
        interruption.close()


class CtrlC:
    """Raises KeyboardInterrupt in a function, at the n-th of the steps at which the interpreter
    heeds signals: when a call has returned, say, and its result has not been stored."""

    def __init__(self, function, step):
        self._code = function.__code__
        self._steps_left = step
        self._last = ""

    def __enter__(self):
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _enter(self, frame, event, argument):
        if frame.f_code is not self._code:
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame, event, argument):
        if event == "opcode":
            if self._last.startswith(("RESUME", "CALL", "JUMP_BACKWARD")):
                self._steps_left -= 1
                if self._steps_left == 0:
                    raise KeyboardInterrupt
            self._last = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        return self._step


def test_ctrl_c_at_any_step_loses_no_descriptor():
    step = interrupted = 0
    before = descriptors()
    with pipe() as (reader, writer):
        os.write(writer, b"x")
        with_pipe = descriptors()
        while step == interrupted:
            step += 1
            interruption = Interruption()
            with CtrlC(Interruption.wait_for, step):
                try:
                    interruption.wait_for(reader)
                except KeyboardInterrupt:
                    interrupted += 1
            interruption.close()
            assert descriptors() == with_pipe, step
    assert interrupted >= 10
    assert descriptors() == before
