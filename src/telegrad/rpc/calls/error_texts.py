"""What exceptions say, whatever a program has made of them.

An exception's own methods may raise, anything: often because a message needs an attribute that is
not there. Whoever waits for a result must hear of its failure all the same.
"""

from __future__ import annotations

import traceback

from telegrad.drop_in import torch_phrase

__all__ = ["text_of", "timeout_text", "traceback_of", "type_name_of"]


def timeout_text(worker: str, what: str, seconds: float, *, was_sent: bool = True) -> str:
    """What an `RpcTimeout` says.

    Args:
        what: was asked of the worker: "the call of module.function".
        was_sent: whether the worker may have begun with it.
    """
    if was_sent:
        text = f"{worker} did not answer {what} within {seconds:g} s; it may still be running there"
    else:
        text = f"{what} could not be sent to {worker} within {seconds:g} s"
    phrase = f"RPC ran for more than set timeout ({seconds * 1000:.0f} ms)"
    return f"{text} (timeout=, or RpcOptions.rpc_timeout, sets the limit)" + torch_phrase(phrase)


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
