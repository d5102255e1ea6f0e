"""What tests with real processes call on their workers, and how they look into them."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref

import torch

import telegrad.autograd as dist_autograd
from telegrad import rpc

PATIENCE = 10.0

leaves = {}
"""This process's leaves by name. Each process can make each leaf, and they are equal."""


def leaf(name, *shape, dtype=torch.double):
    if name not in leaves:
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        value = torch.rand(*(shape or (3, 3)), dtype=dtype, generator=generator)
        leaves[name] = value.requires_grad_()
    return leaves[name]


def gradients_here(context_id):
    if not dist_autograd._is_valid_context(context_id):
        return {}
    found = dist_autograd.get_gradients(context_id)
    return {name: found[leaf].detach() for name, leaf in leaves.items() if leaf in found}


def gradients_everywhere(context_id, workers):
    total = {}
    for worker in workers:
        found = rpc.rpc_sync(worker, gradients_here, (context_id,))
        assert not total.keys() & found.keys()
        total |= found
    return total


# Ways to call a function somewhere else, all of which give what the function gives


def plainly(to, func, *args):
    return func(*args)


def synchronously(to, func, *args):
    return rpc.rpc_sync(to, func, args)


def asynchronously(to, func, *args):
    return rpc.rpc_async(to, func, args).wait()


def by_reference(to, func, *args):
    return rpc.remote(to, func, args).to_here()


class Caller:
    """An object on another worker, whose method is called through a reference to it."""

    def run(self, func, *args):
        return func(*args)


def by_proxy(to, func, *args):
    return rpc.remote(to, Caller).rpc_sync().run(func, *args)


def by_async_proxy(to, func, *args):
    return rpc.remote(to, Caller).rpc_async().run(func, *args).wait()


def by_remote_proxy(to, func, *args):
    return rpc.remote(to, Caller).remote().run(func, *args).to_here()


@rpc.functions.async_execution
def run_as_continuation(func, *args):
    """Runs in a continuation of a call to oneself: the context has followed it there."""
    here = rpc.get_worker_info().name
    return rpc.rpc_async(here, torch.zeros, (1,)).then(lambda done: func(*args))


def by_async_function(to, func, *args):
    return rpc.rpc_sync(to, run_as_continuation, (func, *args))


def by_continuation(to, func, *args):
    return rpc.rpc_async(to, func, args).then(lambda done: done.wait()).wait()


ways = {
    way.__name__: way
    for way in (
        synchronously,
        asynchronously,
        by_reference,
        by_proxy,
        by_async_proxy,
        by_remote_proxy,
        by_async_function,
        by_continuation,
        plainly,
    )
}

# Functions with parameters of the worker that runs them


def scaled(x, name, side):
    return (x * leaf(name, side, side, dtype=x.dtype)).sum()


def layer(worker, x):
    return torch.tanh(x @ leaf(worker))


def parameter_of(worker):
    """Requires grad though no argument does."""
    return leaf(worker) * 2


def relay(way, route, x):
    """Through all workers of a route, each called by the one before, and back."""
    if not route:
        return x
    here, *rest = route
    y = layer(here, x)
    if rest:
        y = y + ways[way](rest[0], relay, way, rest, y)
    return torch.sin(y) * x


def sort(worker, values):
    """Containers, of which some tensors require grad."""
    first, (second, constant), named = values["first"], values["pair"], values["named"]
    product = first @ leaf(worker)
    return {
        "sum": product + second,
        "constant": constant + 1,
        "several": [named["x"] * constant, (second.detach(), product * 2)],
        "text": "as it is",
    }


def cast(worker, x, dtype):
    return x.to(dtype) * leaf(f"{worker} {dtype}", 3, 3, dtype=dtype)


def look_up(worker, indices):
    weight = leaf(f"{worker} embedding", 10, 3)
    bag = torch.nn.EmbeddingBag(10, 3, mode="sum", sparse=True, _weight=weight)
    # The module wraps what it gets in a parameter of its own.
    return torch.nn.functional.embedding_bag(
        indices.view(-1, 2), weight, mode=bag.mode, sparse=bag.sparse
    )


def two_outputs(worker, x):
    return x * leaf(worker), x + leaf(f"{worker} other")


# Faults

gate = threading.Event()
reached = threading.Semaphore(0)
faults = set()


class Gate(torch.autograd.Function):
    """In backward: says that it was reached, and waits until it is opened, if it is shut; raises
    or dies if it shall."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if "raise" in faults:
            raise ValueError("a fault in a backward function")
        if "exit" in faults:
            raise SystemExit("a program that ends itself")
        if "die" in faults:
            os.kill(os.getpid(), signal.SIGKILL)
        if "block" in faults:
            reached.release()
            assert gate.wait(60)
        return gradient


class LateCaller(Caller):
    """Is made when the gate is open."""

    def __init__(self):
        assert gate.wait(60)


def gated(worker, x):
    return Gate.apply(layer(worker, x))


def gated_on_a_way(worker, to, x):
    """Gated here, and behind that on another worker."""
    return rpc.rpc_sync(to, layer, (to, gated(worker, x)))


def set_fault(*names):
    faults.clear()
    faults.update(names)
    if "block" in faults:
        gate.clear()
    else:
        gate.set()


def wait_until_reached(times=1):
    for _ in range(times):
        assert reached.acquire(timeout=PATIENCE)


# Looking


def counts():
    info = dist_autograd._get_debug_info()
    return info["num_current_backward_passes"], info["num_autograd_contexts"]


def counts_at(workers):
    return {worker: rpc.rpc_sync(worker, counts) for worker in workers}


def until(condition, patience=PATIENCE):
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def wait_until_clean(workers):
    """No context and no pass is left anywhere."""
    clean = dict.fromkeys(workers, (0, 0))
    until(lambda: counts_at(workers) == clean)


def wait_until_no_pass(workers):
    until(lambda: all(passes == 0 for passes, _ in counts_at(workers).values()))


watched = []


def watched_layer(worker, x):
    hidden = torch.exp(x @ leaf(worker))  # the node keeps its result
    watched.append(weakref.ref(hidden))
    watched.append(weakref.ref(x))
    return hidden * x


def watched_alive():
    return sum(reference() is not None for reference in watched)


class Waiter:
    """Something that waits, in a thread of its own."""

    def __init__(self, wait, *args):
        self.error = None
        self.value = None
        self.ended_at = None
        self._thread = threading.Thread(target=self._run, args=(wait, args))
        self._thread.start()

    def _run(self, wait, args):
        try:
            self.value = wait(*args)
        except BaseException as error:  # looked at by the test
            self.error = error
        self.ended_at = time.monotonic()

    def join(self):
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self


def together(*waits):
    """Runs them at the same time; raises what one of them raised."""
    waiters = [Waiter(wait) for wait in waits]
    for waiter in waiters:
        waiter.join()
    for waiter in waiters:
        if waiter.error is not None:
            raise waiter.error
    return [waiter.value for waiter in waiters]
