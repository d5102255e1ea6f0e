"""Ctrl-C in Python code that a script function has called.

The interpreter makes a RuntimeError of whatever such code raises. That it was a KeyboardInterrupt
is told by the text alone: it may come at the first step of an operator, where no code of ours could
take note of it.
"""

from __future__ import annotations

import re

__all__ = ["was_interrupted"]

_CAUSE = re.compile("^RuntimeError: (.*)$", re.MULTILINE)  # after the trace through the script
_CTRL_C = "KeyboardInterrupt: <EMPTY MESSAGE>"


def was_interrupted(error: RuntimeError) -> bool:
    """Whether a script function has ended in this error because of a KeyboardInterrupt. One that
    another worker has raised does not count: its text says so."""
    cause = _CAUSE.search(str(error))
    return cause is not None and cause[1] == _CTRL_C
