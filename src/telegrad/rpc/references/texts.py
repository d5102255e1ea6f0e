"""The errors of references.

Some texts are upstream's, because its suites and existing programs look for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from telegrad.drop_in import torch_phrase
from telegrad.errors import RpcTimeout, RRefError, WorkerLost
from telegrad.ids import ForkId, RRefId

if TYPE_CHECKING:
    from telegrad.rpc.group.worker_info import WorkerInfo

__all__ = [
    "creation_error",
    "creator_lost",
    "deleted",
    "leak_error",
    "no_attribute",
    "no_method",
    "not_callable",
    "not_owner",
    "owner_lost",
    "text_of_id",
    "value_gone",
    "value_never_found",
]


def text_of_id(id_: RRefId | ForkId) -> str:
    return f"GloballyUniqueId(created_on={id_.created_on}, local_id={id_.local_id})"


def creation_error(cause: BaseException) -> Exception:
    """Raised by uses of a reference whose creation failed because of `cause`."""
    how = "timed out" if isinstance(cause, RpcTimeout) else "failed"
    text = (
        f"RRef creation via rpc.remote() {how}, and it is possible that the RRef on the owner node "
        f"does not exist: {cause}"
    )
    error: Exception
    if isinstance(cause, WorkerLost):
        error = WorkerLost(text, worker=cause.worker, reason=cause.reason)
    else:
        error = RRefError(text)
    error.__cause__ = cause
    return error


def not_owner(rref_id: RRefId, fork_id: ForkId, here: WorkerInfo, owner: WorkerInfo) -> RRefError:
    """`local_value()` at a user."""
    return RRefError(
        f"local_value() works only on the owner, worker {owner.name!r}; here, on {here.name!r}, "
        "use to_here() for a copy, or rpc_sync().method(...) to call it there"
        + torch_phrase(
            f"For UserRRef(rref_id={text_of_id(rref_id)}, fork_id={text_of_id(fork_id)}), can't "
            f"call localValue() on user WorkerInfo(id={here.id}, name={here.name}). Call it on "
            f"owner WorkerInfo(id={owner.id}, name={owner.name}). "
            "Can't call RRef.local_value() on a non-owner RRef."
        )
    )


def no_attribute(name: str) -> AttributeError:
    """The program reads an attribute of the value from the reference."""
    if name.startswith("_"):
        return AttributeError(f"'RRef' object has no attribute {name!r}")
    return AttributeError(
        f"'RRef' object has no attribute {name!r}; to call a method of its value where it lives: "
        f"rref.rpc_sync().{name}(...)"
    )


def not_callable(mode: str) -> TypeError:
    """The program calls a reference, or its proxy, itself."""
    return TypeError(f"a reference cannot be called: name a method, rref.{mode}().forward(...)")


def no_method(type_name: str, name: str, owner: str) -> AttributeError:
    """The value's class has no such method."""
    return AttributeError(
        f"{type_name} has no attribute {name!r} on worker {owner!r}: a reference calls methods of "
        "its value's class; for anything else call a function that takes the reference"
    )


def deleted(rref_id: RRefId, fork_id: ForkId, attempt: str) -> RRefError:
    end = "on it after deletion." if attempt.endswith("()") else "after deletion."
    return RRefError(
        f"User RRef with RRefId={text_of_id(rref_id)} and ForkId={text_of_id(fork_id)} has been "
        f"deleted. Cannot call {attempt} {end}"
    )


def leak_error(leaks: list[str]) -> RRefError:
    return RRefError(
        "Detected RRef Leaks during shutdown. This usually occurs when the application code still "
        "holds references to RRef instances when calling shutdown(). If the program has completed "
        "correctly and the process is exiting, it is OK to ignore these leaks. However, if your "
        "program will keep running after this, these leaks could result in memory leaks on RRef "
        "owners. Please make sure all RRefs are out of scope and Python GC has deleted them before "
        "calling shutdown():\n" + "\n".join(leaks)
    )


def value_gone(rref_id: RRefId, worker: int) -> RRefError:
    """At the owner, for a value that it no longer has."""
    return RRefError(
        f"the value of RRef {text_of_id(rref_id)} is gone from worker {worker}: the worker that "
        "passed the reference on was lost, or the reference was used after its end"
    )


def creator_lost(rref_id: RRefId, creator: str, reason: str) -> WorkerLost:
    """At the owner, for a value that will never be made."""
    return WorkerLost(
        f"RRef {text_of_id(rref_id)} was never created: {creator}, which was about to create it "
        f"here, was lost ({reason})",
        worker=creator,
        reason=reason,
    )


def owner_lost(rref_id: RRefId, owner: str, reason: str, attempt: str) -> WorkerLost:
    return WorkerLost(
        f"cannot call {attempt} on RRef {text_of_id(rref_id)}: its owner {owner} was lost "
        f"({reason})",
        worker=owner,
        reason=reason,
    )


def value_never_found(rref_id: RRefId, owner: str, attempt: str) -> RRefError:
    """At a user, for a value that its owner no longer has."""
    return RRefError(
        f"cannot call {attempt} on RRef {text_of_id(rref_id)}: {owner} no longer has its value, "
        "because the worker that passed the reference on was lost on the way"
    )
