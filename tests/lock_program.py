"""Prints which locks of telegrad are taken while which others are held, by module.

A lock that one thread takes and another releases is a gate, not a critical section: it is left out.
So is one that is taken where it is made.
"""

from __future__ import annotations

import collections
import sys
import threading

held = threading.local()
Place = tuple[str, int]
"""The module and line where a lock is made."""

nested: set[tuple[Place, Place]] = set()
gates: set[Place] = set()


class Traced:
    """A lock that notes the locks its thread holds when it is taken."""

    def __init__(self, lock, place, maker):
        self._lock, self.place, self._maker = lock, place, maker

    def acquire(self, *args, **kwargs):
        if sys._getframe(1).f_code is self._maker:
            gates.add(self.place)
        is_taken = self._lock.acquire(*args, **kwargs)
        if is_taken:
            mine = held.__dict__.setdefault("locks", collections.Counter())
            nested.update((other.place, self.place) for other in mine if other is not self)
            mine[self] += 1
        return is_taken

    __enter__ = acquire

    def release(self):
        mine = held.__dict__.setdefault("locks", collections.Counter())
        if self in mine:
            mine[self] -= 1
            mine += collections.Counter()
        else:
            gates.add(self.place)
        self._lock.release()

    def __exit__(self, *_):
        self.release()

    def __getattr__(self, name):
        return getattr(self._lock, name)


def traced(make):
    def make_traced():
        frame = sys._getframe(1)
        _, is_ours, rest = frame.f_code.co_filename.partition("/telegrad/")
        place = rest.removesuffix(".py"), frame.f_lineno
        return Traced(make(), place, frame.f_code) if is_ours else make()

    return make_traced


def main():
    threading.Lock, threading.RLock = traced(threading.Lock), traced(threading.RLock)
    import torch

    import telegrad
    from telegrad import autograd, rpc

    with telegrad.workers("a", "b"):
        module = telegrad.module("a", torch.nn.Linear, 3, 3)
        optimizer = torch.optim.Adam(module.parameters())
        for _ in range(5):
            future = telegrad.submit("b", torch.mul, module(torch.ones(2, 3)), 2)
            telegrad.call("a", torch.sum, future).backward()
            optimizer.step()
            optimizer.zero_grad()
        references = [rpc.remote("a", torch.ones, args=(3,)) for _ in range(50)]
        sums = [rpc.rpc_async("b", torch.sum, args=(r.to_here(),)) for r in references]
        assert all(each.wait() == 3 for each in sums)
        x = torch.ones(3, requires_grad=True)
        for _ in range(5):
            with autograd.context() as context_id:
                y = rpc.rpc_sync("a", torch.mul, args=(x, 2))
                autograd.backward(context_id, [rpc.rpc_sync("b", torch.sum, args=(y,))])
        del references
    for outer, inner in sorted(nested):
        if outer not in gates and inner not in gates:
            print(outer[0], inner[0])


if __name__ == "__main__":
    main()
