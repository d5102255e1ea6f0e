"""TorchScript functions that use telegrad by its own names: nothing is installed.

Not `from __future__ import annotations`: TorchScript reads some annotations at run time.
"""

import threading
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

import telegrad.autograd as dist_autograd
import telegrad.rpc as rpc
from telegrad.rpc import RRef, rpc_async, rpc_sync
from telegrad.rpc import remote as make_remotely

threads_seen: list[int] = []
sleeping: list[float] = []


@torch.jit.script
def add(x, y):
    return x + y


@torch.jit.script
def scaled_sum(x: Tensor, y: Tensor, factor: float = 1.0, offset: int = 0) -> Tensor:
    return (x + y) * factor + offset


@torch.jit.script
def assorted(count: int) -> tuple[list[int], dict[str, Tensor], str | None, float]:
    numbers: list[int] = []
    for i in range(count):
        numbers.append(i)
    word: str | None = None
    if count > 1:
        word = "several"
    return numbers, {"ones": torch.ones(count)}, word, 0.5


@torch.jit.script
def nothing() -> None:
    pass


@torch.jit.script
def fail(x: Tensor) -> Tensor:
    raise ValueError("expected failure")


@torch.jit.ignore
def sleep(seconds: float) -> None:
    sleeping.append(seconds)
    time.sleep(seconds)
    sleeping.remove(seconds)


@torch.jit.script
def slowly(x: Tensor, seconds: float) -> Tensor:
    sleep(seconds)
    return x


@torch.jit.ignore
def note_thread() -> None:
    threads_seen.append(threading.get_native_id())


@torch.jit.script
def append_one(rref: RRef[list[int]]) -> int:
    rref.local_value().append(1)
    return 1


# -- calls


@torch.jit.ignore
def interrupt() -> None:
    raise KeyboardInterrupt


@torch.jit.script
def interrupted_here(x: Tensor) -> Tensor:
    interrupt()
    return x


@torch.jit.script
def interrupted_there(dst: str, x: Tensor):
    return rpc_sync(dst, interrupted_here, (x,))


@torch.jit.script
def add_async(dst: str, x: Tensor, y: Tensor):
    return rpc_async(dst, add, (x, y)).wait()


@torch.jit.script
def add_sync(dst: str, x: Tensor, y: Tensor):
    return rpc_sync(dst, add, (x, y))


@torch.jit.script
def add_remote(dst: str, x: Tensor, y: Tensor):
    return make_remotely(dst, add, (x, y)).to_here()


@torch.jit.script
def with_keywords(dst: str, x: Tensor, keywords: dict[str, float]):
    return rpc.rpc_async(dst, scaled_sum, (x, x), keywords).wait()


@torch.jit.script
def assorted_everywhere(dst: str, count: int):
    later = rpc.rpc_async(dst, assorted, (count,))
    kept = rpc.remote(dst, assorted, (count,))
    return rpc.rpc_sync(dst, assorted, (count,)), later.wait(), kept.to_here()


@torch.jit.script
def nothing_everywhere(dst: str):
    rpc.rpc_sync(dst, nothing)
    rpc.rpc_async(dst, nothing).wait()
    rpc.remote(dst, nothing).to_here()
    return 1


@torch.jit.script
def fail_async(dst: str, x: Tensor):
    return rpc.rpc_async(dst, fail, (x,)).wait()


@torch.jit.script
def fail_sync(dst: str, x: Tensor):
    return rpc.rpc_sync(dst, fail, (x,))


@torch.jit.script
def fail_remote(dst: str, x: Tensor):
    return rpc.remote(dst, fail, (x,)).to_here()


@torch.jit.script
def matrix_product(x: Tensor) -> Tensor:
    return torch.mm(x, x)


@torch.jit.script
def product_async(dst: str, x: Tensor):
    return rpc.rpc_async(dst, matrix_product, (x,)).wait()


@torch.jit.script
def product_sync(dst: str, x: Tensor):
    return rpc.rpc_sync(dst, matrix_product, (x,))


@torch.jit.script
def product_remote(dst: str, x: Tensor):
    return rpc.remote(dst, matrix_product, (x,)).to_here()


@torch.jit.script
def product_forked(dst: str, x: Tensor):
    return torch.jit.fork(product_sync, dst, x).wait()


@torch.jit.script
def slow_async(dst: str, x: Tensor, seconds: float, timeout: float):
    return rpc.rpc_async(dst, slowly, (x, seconds), {}, timeout).wait()


@torch.jit.script
def slow_sync(dst: str, x: Tensor, seconds: float, timeout: float):
    return rpc.rpc_sync(dst, slowly, (x, seconds), {}, timeout)


@torch.jit.script
def slow_remote(dst: str, x: Tensor, seconds: float, timeout: float):
    return rpc.remote(dst, slowly, (x, seconds)).to_here(timeout)


@torch.jit.script
def whole_seconds(dst: str, x: Tensor):
    later = rpc.rpc_async(dst, add, (x, x), {}, 60)
    kept = rpc.remote(dst, add, (x, x), {}, 60)
    return rpc.rpc_sync(dst, add, (x, x), {}, 60) + later.wait() + kept.to_here()


@torch.jit.script
def seconds_in_words(dst: str, x: Tensor):
    return rpc.rpc_sync(dst, add, (x, x), {}, "60")


@torch.jit.script
def future_of(dst: str, x: Tensor):
    return rpc.rpc_async(dst, add, (x, x))


@torch.jit.script
def forked(dst: str, x: Tensor):
    first = torch.jit._fork(add_async, dst, x, x)
    second = torch.jit._fork(add_sync, dst, x, x)
    return torch.jit._wait(first) + second.wait()


@torch.jit.script
def two_calls(dst: str, x: Tensor, seconds: float):
    note_thread()
    first = rpc.rpc_async(dst, slowly, (x, seconds)).wait()
    note_thread()
    return rpc.rpc_async(dst, add, (first, x)).wait()


@torch.jit.script
def chained_in_background(dst: str, x: Tensor):
    """A fork that makes its second call after the caller has got the future."""
    return torch.jit.fork(two_calls, dst, x, 0.1)


@torch.jit.script
def call_back(to: str, x: Tensor) -> Tensor:
    return rpc.rpc_async(to, two_calls, (to, x, 0.0)).wait()


@torch.jit.script
def fetch_back(to: str, x: Tensor) -> Tensor:
    return rpc.remote(to, call_back, (to, x)).to_here()


@torch.jit.script
def back_and_forth(dst: str, here: str, x: Tensor):
    first = rpc.rpc_sync(dst, call_back, (here, x))
    return first + rpc.remote(dst, fetch_back, (here, x)).to_here()


@torch.jit.script
def many_back_and_forth(dst: str, here: str, x: Tensor, count: int):
    futures: list[Future[Tensor]] = []
    for _ in range(count):
        futures.append(torch.jit.fork(back_and_forth, dst, here, x))
    total = torch.zeros(2)
    for future in futures:
        total += future.wait()
    return total


@torch.jit.script
def left_alone(dst: str, rref: RRef[list[int]]) -> None:
    """Nobody looks at what these calls give."""
    rpc.rpc_async(dst, append_one, (rref,))
    rpc.remote(dst, append_one, (rref,))
    rpc.rpc_sync(dst, append_one, (rref,))


@torch.jit.script
class Caller:
    def __init__(self, dst: str):
        self.dst = dst

    def add(self, x: Tensor) -> Tensor:
        return rpc.rpc_sync(self.dst, add, (x, x))


@torch.jit.script
def through_a_class(dst: str, x: Tensor):
    return Caller(dst).add(x)


class CallingModule(nn.Module):
    def __init__(self, dst: str):
        super().__init__()
        self.dst = dst
        self.weight = nn.Parameter(torch.full((2,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        later = rpc.rpc_async(self.dst, add, (x * self.weight, x))
        return later.wait() + rpc.rpc_sync(self.dst, add, (x, x))


@torch.jit.script
def shadowed(remote: Tensor, rpc_sync: Tensor):
    """Its arguments have the names of telegrad's functions."""
    return remote.sum() + rpc_sync.sum()


# -- futures from Python


@torch.jit.script
def one_more(future: Future[Tensor]) -> Tensor:
    return future.wait() + 1


@torch.jit.script
def sum_of_futures(futures: list[Future[Tensor]]) -> Tensor:
    total = torch.zeros(2)
    for future in futures:
        total += future.wait()
    return total


@torch.jit.ignore
def future_from_python(dst: str, x: Tensor) -> Future[Tensor]:
    return rpc.rpc_async(dst, torch.add, (x, x))


@torch.jit.script
def one_more_than_python(dst: str, x: Tensor) -> Tensor:
    return future_from_python(dst, x).wait() + 1


@rpc.functions.async_execution
@torch.jit.script
def relay(to: str, x: Tensor) -> Future[Tensor]:
    return rpc.rpc_async(to, add, (x, x))


@rpc.functions.async_execution
@torch.jit.script
def no_future(x: Tensor) -> Tensor:
    return x


# -- references


@torch.jit.script
def here_plus_one(rref: RRef[Tensor]) -> Tensor:
    return rref.to_here() + 1


@torch.jit.script
def all_about(rref: RRef[Tensor]):
    return rref.is_owner(), rref.owner_name(), rref.owner(), rref.confirmed_by_owner()


@torch.jit.script
def local(rref: RRef[Tensor]) -> Tensor:
    return rref.local_value()


@torch.jit.script
def numbers_up_to(count: int) -> list[int]:
    numbers: list[int] = []
    for i in range(count):
        numbers.append(i)
    return numbers


@torch.jit.script
def append(rref: RRef[list[int]], number: int) -> None:
    rref.local_value().append(number)


@torch.jit.script
def made_remotely(dst: str, x: Tensor) -> RRef[Tensor]:
    return rpc.remote(dst, add, (x, x))


@torch.jit.script
def ask_the_owner(rref: RRef[Tensor]) -> Tensor:
    return rpc.rpc_sync(rref.owner(), local, (rref,))


@torch.jit.script
def sum_of_all(rrefs: list[RRef[Tensor]]) -> Tensor:
    total = torch.zeros(2)
    for rref in rrefs:
        total += rref.to_here()
    return total


@torch.jit.interface
class Scaling(nn.Module):
    def forward(self, x: Tensor, times: int) -> Tensor:
        pass


class Scale(nn.Module):
    def __init__(self, factor: float):
        super().__init__()
        self.factor = nn.Parameter(torch.full((2,), factor))

    def forward(self, x: Tensor, times: int) -> Tensor:
        return x * self.factor * times


def make_scale(factor):
    return RRef(torch.jit.script(Scale(factor)), Scaling)


@torch.jit.script
def run_scaling(rref: RRef[Scaling], x: Tensor) -> Tensor:
    return rref.local_value().forward(x, 1)


@torch.jit.script
def fetch_scaling(rref: RRef[Scaling], x: Tensor) -> Tensor:
    return rref.to_here().forward(x, 1)


@torch.jit.script
def scale_by_interface(module: Scaling, x: Tensor) -> Tensor:
    return module.forward(x, 2)


# -- gradients


@torch.jit.script
def switching(dst: str, a: Tensor, b: Tensor):
    note_thread()
    first = rpc.rpc_async(dst, slowly, (a * 2, 0.05)).wait()
    note_thread()
    second = rpc.rpc_async(dst, add, (b, first)).wait()
    return second.sum()


@torch.jit.script
def backward_in_script(context_id: int, loss: Tensor) -> dict[Tensor, Tensor]:
    dist_autograd.backward(context_id, [loss])
    return dist_autograd.get_gradients(context_id)


@torch.jit.script
def keep_and_go_again(context_id: int, loss: Tensor) -> None:
    dist_autograd.backward(context_id, [loss], retain_graph=True)
    dist_autograd.backward(context_id, [loss], False)


@torch.jit.script
def through_reference(rref: RRef[Tensor], x: Tensor) -> Tensor:
    return (rref.to_here() * x).sum()


def load_and_run(saved: bytes, *args: Any):
    import io

    return torch.jit.load(io.BytesIO(saved))(*args)
