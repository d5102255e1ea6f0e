"""Stands in for `expecttest`, which torch's test helpers import, where it is not installed.

They take two names of it: a base class of all test cases, and a flag. The RPC suites use none of
what it adds to `unittest` (`assertExpected…`), so a plain `unittest.TestCase` serves; one that did
use it would fail with an `AttributeError`, not pass.
"""

from __future__ import annotations

import importlib.util
import sys
import types
import unittest

__all__ = ["provide_expecttest"]


def provide_expecttest() -> None:
    if importlib.util.find_spec("expecttest") is not None:
        return
    module = types.ModuleType("expecttest", __doc__)
    module.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    module.ACCEPT = False  # type: ignore[attr-defined]
    sys.modules["expecttest"] = module
