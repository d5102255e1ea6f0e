"""Makes lanes move to the host whenever they may, whatever the machine has to do meanwhile."""

from __future__ import annotations

from telegrad import rpc
from telegrad.rpc.connections import lane_server
from telegrad.rpc.group.current import current

CHANGED = {"_CROWDED": (0.0, 100.0), "_TURNS": 2, "_WINDOW": 8}


def invite(**more):
    """On this worker, for good."""
    for name, value in {**CHANGED, **more}.items():
        setattr(lane_server, name, value)


def invite_at(workers, **more):
    for worker in workers:
        rpc.rpc_sync(worker, invite, kwargs=more)


def hosted():
    """Whose lanes the host of this worker has."""
    host = current().agent.network._reception._host
    return [] if host is None else [guest.source for guest in list(host._guests.values())]
