"""What a type checker makes of the plain face: `test_typing` runs mypy on it. An ignored error that
is none would be an error itself. It never runs."""

from __future__ import annotations

import torch
from torch import nn
from typing_extensions import assert_type

import telegrad


def add(a: int, b: int = 0) -> str:
    return str(a + b)


async def later(a: int) -> bytes:
    return bytes(a)


class Index:
    def __init__(self, path: str) -> None: ...

    def lookup(self, word: str) -> list[int]:
        return [len(word)]


# A call has the type of what the function returns, also of an async one.
assert_type(telegrad.call("a", add, 1, b=2), str)
assert_type(telegrad.call(1, later, 1), bytes)
assert_type(telegrad.call("a", lambda: 3), int)
assert_type(telegrad.submit("a", add, 1), telegrad.RemoteFuture[str])
assert_type(telegrad.submit("a", later, 1), telegrad.RemoteFuture[bytes])
assert_type(telegrad.submit("a", later, 1).result(timeout=1), bytes)


async def awaits() -> None:
    assert_type(await telegrad.submit("a", add, 1), str)
    assert_type(await telegrad.submit("a", later, 1), bytes)


# Arguments are checked against the function's signature.
telegrad.call("a", add, "x")  # type: ignore[call-overload]
telegrad.call("a", add)  # type: ignore[call-overload]
telegrad.call("a", add, 1, c=2)  # type: ignore[call-arg, arg-type]
telegrad.submit("a", later, "x")  # type: ignore[call-overload]

# So are frequent mistakes: no worker, the function's result, the future for its result.
telegrad.call(add, 1)  # type: ignore[call-overload]
telegrad.call("a", add(1))  # type: ignore[call-overload]
telegrad.submit("a", add, 1).upper()  # type: ignore[attr-defined]

# A stand-in has the type of its object.
index = telegrad.object("a", Index, "words")
assert_type(index, Index)
assert_type(index.lookup("x"), list[int])
assert_type(telegrad.submit("a", Index.lookup, index, "x").result(), list[int])
telegrad.object("a", Index, 3)  # type: ignore[arg-type]
index.missing()  # type: ignore[attr-defined]

# A remote module is a module.
layer = telegrad.module("a", nn.Linear, 3, 3)
assert_type(layer.worker, str)
torch.optim.SGD(nn.Sequential(layer, nn.Tanh()).parameters(), lr=0.1)
telegrad.module("a", dict)  # type: ignore[arg-type]
telegrad.module(nn.Linear, 3, 3)  # type: ignore[arg-type]

with telegrad.workers("a", "b") as group:
    assert_type(group.names, tuple[str, ...])
with telegrad.join() as membership:
    assert_type(membership.name, str)
