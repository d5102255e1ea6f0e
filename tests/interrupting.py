"""Ctrl-C at any step of a function, one after the other."""

from __future__ import annotations

import dis
import sys

HEEDED_AFTER = ("RESUME", "CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
"""Beginnings of the names of instructions after which the interpreter looks for signals."""
DEAF_BEFORE = ("SETUP_FINALLY", "SETUP_WITH")
"""Python 3.10 does not look for any before these."""


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
        # Python 3.12 reports single instructions only if some frame asked for them before.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _enter(self, frame, event, argument):
        if frame.f_code not in self._lines:
            return None
        frame.f_trace = self._step  # Python 3.13 needs it before the next line
        frame.f_trace_opcodes = True
        self._last = "RESUME"  # Python 3.10 has no such instruction
        return self._step

    def _step(self, frame, event, argument):
        if event == "opcode":
            lines = self._lines[frame.f_code]
            name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            is_heeded = self._last.startswith(HEEDED_AFTER) and name not in DEAF_BEFORE
            if is_heeded and (lines is None or frame.f_lineno in lines):
                self.steps_left -= 1
                if self.steps_left == 0:
                    raise KeyboardInterrupt
            self._last = name
        return self._step
