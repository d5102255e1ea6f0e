"""Whether telegrad stands in the place of torch's RPC, which `telegrad.install()` decides.

Programs written for torch's RPC may look for words of its messages, and rely on a few of its
habits. What is below `compat` asks here.
"""

from __future__ import annotations

__all__ = ["is_drop_in", "set_drop_in", "torch_phrase"]

_is_drop_in = False


def set_drop_in(is_so: bool) -> None:
    global _is_drop_in
    _is_drop_in = is_so


def is_drop_in() -> bool:
    return _is_drop_in


def torch_phrase(text: str) -> str:
    """What torch's RPC says of the same mistake, to be put after a message; empty unless telegrad
    stands in its place."""
    return f" ({text})" if _is_drop_in else ""
