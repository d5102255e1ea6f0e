"""What a worker of `telegrad.workers` does, from its fork to its end."""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import pickle
import socket
import sys
from typing import Any

import torch

from telegrad import rpc
from telegrad.rpc.group import current
from telegrad.wire import by_value

__all__ = ["live"]

_PATIENCE = 0.2  # seconds for calls that still run: the driver has waited for those it cares about


def live(name: str, rank: int, plan: Any, control: socket.socket, stop: int) -> None:
    """Joins the group, and serves until a byte can be read from `stop`, or it is closed: the driver
    closes the group, or is dead."""
    faulthandler.enable(all_threads=False)
    os.environ.clear()
    os.environ.update(plan["environment"])
    os.chdir(plan["directory"])
    if plan["threads"] is not None:
        torch.set_num_threads(plan["threads"])
    torch.set_default_dtype(getattr(torch, plan["dtype"]))  # by name: the starter has no torch yet
    by_value.travel(by_value.Role.AWAY)
    options: rpc.RpcOptions = pickle.loads(plan["options"])
    rpc.init_rpc(name, rank=rank, rpc_backend_options=options)
    control.sendall(f"joined {name}\n".encode())
    control.close()
    os.read(stop, 1)
    worker = current.acting()
    if worker is not None:  # a call may have ended it already
        logging.getLogger("telegrad.rpc").setLevel(logging.ERROR)  # calls are given up on purpose
        worker.close(patience=_PATIENCE)
    # What a program has registered for its end runs. Unloading torch would take half a second.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
