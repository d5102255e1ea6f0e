"""Which table an RRef that is made or unpacked on this thread belongs to.

Several agents may live in one process (tests do that), so the answer is a matter of the thread.
The agent's side connects it; this module holds only the slot, so that neither imports the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from telegrad.errors import NotInitialized

if TYPE_CHECKING:
    from telegrad.rpc.references.table import RRefTable

__all__ = ["current_table", "set_table_lookup"]


def _no_table() -> RRefTable:
    raise NotInitialized("no RPC agent runs in this process: call init_rpc() first")


_lookup: Callable[[], RRefTable] = _no_table


def set_table_lookup(lookup: Callable[[], RRefTable]) -> Callable[[], RRefTable]:
    """`lookup()` gives the table of the agent that acts on this thread, or raises
    `NotInitialized`. Returns the lookup that was in force before."""
    global _lookup
    before, _lookup = _lookup, lookup
    return before


def current_table() -> RRefTable:
    return _lookup()
