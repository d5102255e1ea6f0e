"""What exceptions say, whatever a program has made of them.

An exception's own methods may raise, anything: often because a message needs an attribute that is
not there. Whoever waits for a result must hear of its failure all the same.
"""

from __future__ import annotations

import traceback

__all__ = ["text_of", "traceback_of", "type_name_of"]


def type_name_of(error: BaseException) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")


def text_of(error: BaseException) -> str:
    """Its message."""
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - it may raise anything
        return "<its message could not be made>"


def traceback_of(error: BaseException) -> str:
    """Where it was raised, as Python shows it."""
    try:
        return "".join(traceback.format_exception(error))
    except BaseException:  # noqa: BLE001 - it may raise anything
        where = "".join(traceback.format_tb(error.__traceback__))
        return f"Traceback (most recent call last):\n{where}{type_name_of(error)}\n"
