"""`_all_gather` and its kin, made of calls as torch makes them.

telegrad has a meeting of its own (`telegrad.rpc.group.gather`), which programs for torch do not
know: they replace the functions of this one, look for its words, and rely on the leader being the
worker with the smallest name.
"""

from __future__ import annotations

import collections
import logging
import os
import threading
from collections.abc import Iterable
from typing import Any

from telegrad import rpc as native
from telegrad.compat.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from telegrad.errors import RpcTimeout, TelegradError, WorkerLost
from telegrad.forks import renewed
from telegrad.rpc.group import current

__all__ = ["AllGatherStates", "forget_all", "set_all_names", "worker_lost"]

_log = logging.getLogger("telegrad.rpc")


class AllGatherStates:
    """One gathering, on one worker."""

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()
        self.awaited: set[str] = set()
        """Whose loss ends it: the leader, or, at the leader, those that have not told yet."""
        self.lost: str | None = None


_all_names: set[str] = set()
_all_gather_dict_lock = renewed(threading.RLock())  # guards the two below
_all_gather_sequence_id: dict[str, int] = {}
_all_gather_sequence_id_to_states: collections.defaultdict[str, AllGatherStates] = (
    collections.defaultdict(AllGatherStates)
)


def set_all_names(names: set[str]) -> None:
    """The workers of a group that has just been joined. Others may have told something already."""
    global _all_names
    _all_names = names


def forget_all() -> None:
    """The group is left: gatherings of the next one are counted anew."""
    with _all_gather_dict_lock:
        _all_gather_sequence_id.clear()
        _all_gather_sequence_id_to_states.clear()


os.register_at_fork(after_in_child=forget_all)  # a group that it joins is another one


def _gather_to_leader(
    sequence_id: str, worker_name: str, obj: Any, worker_names: set[str] | None = None
) -> None:
    with _all_gather_dict_lock:
        names = worker_names or _all_names
        if worker_name not in names:
            raise AssertionError(f"{worker_name} is not expected by leader.")
        states = _all_gather_sequence_id_to_states[sequence_id]
        if worker_name in states.gathered_objects:
            raise AssertionError(f"{worker_name} reported intent sequence id {sequence_id} twice. ")
        states.gathered_objects[worker_name] = obj
        states.awaited.discard(worker_name)
        if names == set(states.gathered_objects):
            states.proceed_signal.set()


def _broadcast_to_followers(sequence_id: str, objects_map: dict[str, Any]) -> None:
    with _all_gather_dict_lock:
        states = _all_gather_sequence_id_to_states[sequence_id]
    if states.proceed_signal.is_set():
        raise AssertionError(f"Termination signal sequence id {sequence_id} got set twice.")
    states.gathered_objects = objects_map
    states.proceed_signal.set()


def _all_gather(
    obj: Any, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """What each worker has passed to this function, by worker name; all must call it.

    Args:
        worker_names: the workers that take part; by default all.
        timeout: seconds; by default that of calls.

    Raises:
        RuntimeError: a worker did not take part in time, or is lost.
    """
    from telegrad.compat.rpc import api  # programs replace its functions

    worker = current.current()
    names = set(worker_names) if worker_names else _names_now()
    leader, own_name = min(names), worker.info.name
    with _all_gather_dict_lock:
        together = "".join(sorted(names))
        number = _all_gather_sequence_id.get(together, 0)
        _all_gather_sequence_id[together] = number + 1
        sequence_id = f"{together}{number}"
    seconds = worker.agent.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else timeout
    try:
        is_leader = leader == own_name
        if is_leader:
            api._gather_to_leader(sequence_id, own_name, obj, names)
        else:
            call = (sequence_id, own_name, obj, names)
            native.rpc_sync(leader, api._gather_to_leader, call, timeout=seconds)
        with _all_gather_dict_lock:
            states = _all_gather_sequence_id_to_states[sequence_id]
        _await_signal(states, names - {leader} if is_leader else {leader}, timeout)
        if is_leader:
            _tell_followers(sequence_id, states.gathered_objects, names - {leader}, seconds)
        return states.gathered_objects
    finally:
        with _all_gather_dict_lock:
            _all_gather_sequence_id_to_states.pop(sequence_id, None)


def _names_now() -> set[str]:
    worker = current.current()
    if worker.directory.is_open:
        return {member.name for member in worker.agent.network.members.infos()}
    return _all_names


def _await_signal(states: AllGatherStates, awaited: set[str], timeout: float) -> None:
    """Ends by the signal, by the loss of an awaited worker, or after an explicit timeout. The
    default timeout does not count, as with torch: workers may come at very different times."""
    network = current.current().agent.network
    with _all_gather_dict_lock:
        states.awaited = awaited - set(states.gathered_objects)
    for name in awaited:
        worker_id = network.members.id_of(name)
        if worker_id is not None and network.members.is_lost(worker_id):
            worker_lost(name)
    has_end = timeout not in (UNSET_RPC_TIMEOUT, DEFAULT_SHUTDOWN_TIMEOUT)
    if not states.proceed_signal.wait(timeout if has_end else None):
        raise RpcTimeout(
            f"RPC ran for more than {timeout:.2f} seconds: workers timed out in _all_gather "
            f"after {timeout:.2f} seconds",
            seconds=timeout,
        )
    if states.lost is not None:
        raise WorkerLost(f"worker {states.lost!r} was lost in _all_gather", worker=states.lost)


def worker_lost(name: str) -> None:
    """Ends the gatherings that can no longer come together."""
    with _all_gather_dict_lock:
        for states in _all_gather_sequence_id_to_states.values():
            if name in states.awaited and not states.proceed_signal.is_set():
                states.lost = name
                states.proceed_signal.set()


def _tell_followers(
    sequence_id: str, objects: dict[str, Any], followers: set[str], seconds: float
) -> None:
    from telegrad.compat.rpc import api  # programs replace its functions

    errors: list[tuple[str, Exception]] = []
    told = (sequence_id, objects)
    calls = [
        (name, native.rpc_async(name, api._broadcast_to_followers, told, timeout=seconds))
        for name in sorted(followers)
    ]
    for name, future in calls:
        try:
            future.wait()
        except RuntimeError as error:
            errors.append((name, error))
    if errors:
        raise TelegradError(
            f"Followers {[name for name, _ in errors]} timed out in _all_gather "
            f"after {seconds:.2f} seconds. The first exception is {errors[0][1]}"
        )


def _barrier(worker_names: Iterable[str]) -> None:
    """Waits until each of the workers has called it. A failure is logged."""
    try:
        _all_gather(None, set(worker_names))
    except RuntimeError:
        _log.exception("Failed to complete barrier")


def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Waits until all workers have called it."""
    try:
        _all_gather(None, timeout=timeout)
    except RuntimeError:
        _log.exception("Failed to respond to 'Shutdown Proceed' in time")
        raise
