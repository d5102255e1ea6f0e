"""Ctrl-C at any step of a function, one after the other."""

from __future__ import annotations

import dis
import sys


class CtrlC:
    """Raises KeyboardInterrupt at the n-th of the steps at which the interpreter heeds signals:
    when a call has returned, say, and its result has not been stored.

    Args:
        lines: in which functions, by their code, and in which lines of those; None for all.
    """

    def __init__(self, lines, step):
        self._lines = lines
        self._last = ""
        self.steps_left = step

    def __enter__(self):
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _enter(self, frame, event, argument):
        if frame.f_code not in self._lines:
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame, event, argument):
        if event == "opcode":
            lines = self._lines[frame.f_code]
            is_heeded = self._last.startswith(("RESUME", "CALL", "JUMP_BACKWARD"))
            if is_heeded and (lines is None or frame.f_lineno in lines):
                self.steps_left -= 1
                if self.steps_left == 0:
                    raise KeyboardInterrupt
            self._last = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        return self._step
