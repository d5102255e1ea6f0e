"""A network in memory, with virtual time: a `Messenger` per worker for tests of protocols.

Nothing is delivered until somebody says so: `step` delivers one message, `run` all that follows
from it, `advance` lets time pass. Which message comes next, which is lost and which comes twice is
decided by a seed, so each run can be had again. `deliver_in_background` delivers on a thread of its
own instead, for tests of code that blocks.

Example:
    >>> from telegrad.wire.frames import Kind
    >>> network = SimulatedNetwork(seed=1)
    >>> alice, bob = network.messenger(0), network.messenger(1)
    >>> bob.handle(Kind.PING, lambda source, body: print(source, body))
    >>> alice.post(1, Kind.PING, "hello")
    >>> network.run()
    0 hello
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from telegrad.errors import RpcTimeout, WorkerLost
from telegrad.rpc.calls.outcome import fail
from telegrad.rpc.connections.conversation import Interruption
from telegrad.rpc.seams import Handler, Rescue, Timer
from telegrad.wire.frames import Kind

__all__ = ["SimulatedMessenger", "SimulatedNetwork"]


class _Timer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class SimulatedNetwork:
    """Joins the messengers it makes.

    Args:
        seed: decides the order, and which messages are lost or repeated.
        loss: the chance that a posted message is lost.
        repetition: the chance that a posted message is delivered twice.
    """

    def __init__(self, seed: int = 0, *, loss: float = 0.0, repetition: float = 0.0) -> None:
        self.now = 0.0
        self.sent: Counter[Kind] = Counter()
        self._loss = loss
        self._repetition = repetition
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._changed = threading.Condition()  # guards all below, and the fields above
        self._messengers: dict[int, SimulatedMessenger] = {}
        self._lost: dict[int, str] = {}
        self._to_drop: Counter[Kind] = Counter()
        self._under_way: list[tuple[int, Callable[[], None]]] = []
        self._timers: list[tuple[float, int, _Timer]] = []

    def messenger(self, worker_id: int) -> SimulatedMessenger:
        """The worker's messenger; the same each time."""
        if worker_id not in self._messengers:
            self._messengers[worker_id] = SimulatedMessenger(self, worker_id)
        return self._messengers[worker_id]

    def clock(self) -> float:
        return self.now

    def drop(self, kind: Kind, times: int = 1) -> None:
        """Loses the next messages of this kind."""
        self._to_drop[kind] += times

    def lose(self, worker_id: int, reason: str = "killed by the test") -> None:
        """The worker dies: it gets nothing more, and the others' watchers are told."""
        with self._changed:
            self._lost[worker_id] = reason
            survivors = [m for id_, m in self._messengers.items() if id_ not in self._lost]
        for messenger in survivors:
            for watcher in messenger.watchers:
                watcher(worker_id, reason)

    def step(self) -> bool:
        """Delivers one message; False if there was none."""
        with self._changed:
            if not self._under_way:
                return False
            to, deliver = self._under_way.pop(self._random.randrange(len(self._under_way)))
            if to in self._lost:
                return True
        deliver()
        return True

    def run(self) -> None:
        """Delivers until nothing is under way; time stands still."""
        while self.step():
            pass

    def advance(self, seconds: float) -> None:
        """Lets time pass: fires what is due, in order, and delivers what follows from it."""
        end = self.now + seconds
        while True:
            self.run()
            with self._changed:
                if not self._timers or self._timers[0][0] > end:
                    self.now = end
                    return
                due, _, timer = heapq.heappop(self._timers)
                self.now = max(self.now, due)
            if timer.callback is not None:
                timer.callback()

    @contextmanager
    def deliver_in_background(self) -> Iterator[None]:
        """Messages are delivered by a thread as they are sent; time passes by `advance` only."""
        is_over = False

        def deliver() -> None:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: is_over or bool(self._under_way))
                    if is_over:
                        return
                self.step()

        thread = threading.Thread(target=deliver, name="simulated-network")
        thread.start()
        try:
            yield
        finally:
            with self._changed:
                is_over = True
                self._changed.notify_all()
            thread.join()

    # --- For the messengers ----------------------------------------------------------------------

    def check_reachable(self, worker_id: int) -> None:
        if worker_id in self._lost or worker_id not in self._messengers:
            reason = self._lost.get(worker_id, "no such worker")
            text = f"worker{worker_id} is gone: {reason}"
            raise WorkerLost(text, worker=f"worker{worker_id}", reason=reason)

    def send(self, to: int, kind: Kind, deliver: Callable[[], None], *, reliably: bool) -> None:
        with self._changed:
            self.check_reachable(to)
            self.sent[kind] += 1
            copies = 1
            if self._to_drop[kind]:
                self._to_drop[kind] -= 1
                copies = 0
            elif not reliably:
                chance = self._random.random()
                copies = 0 if chance < self._loss else 1 + (chance > 1 - self._repetition)
            self._under_way += [(to, deliver)] * copies
            self._changed.notify_all()

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        timer = _Timer(callback)
        with self._changed:
            heapq.heappush(self._timers, (self.now + seconds, next(self._numbers), timer))
        return timer


class SimulatedMessenger:
    """One worker's `Messenger`. Handlers run on the thread that delivers; bodies are not copied."""

    def __init__(self, network: SimulatedNetwork, worker_id: int) -> None:
        self.watchers: list[Callable[[int, str], None]] = []
        self._network = network
        self._worker_id = worker_id
        self._handlers: dict[Kind, Handler] = {}

    @property
    def worker_id(self) -> int:
        return self._worker_id

    def name_of(self, worker: int) -> str:
        return f"worker{worker}"

    def post(self, to: int, kind: Kind, body: Any, *, reach: bool = False) -> None:
        receiver = self._network.messenger(to)
        self._network.send(
            to, kind, lambda: receiver._deliver(kind, self._worker_id, body), reliably=False
        )

    def run_aside(self, work: Callable[[], None]) -> None:
        work()

    def converse(
        self,
        to: int,
        kind: Kind,
        body: Any,
        interruption: Interruption,
        meanwhile: Callable[[], None],
    ) -> list[tuple[Kind, Any]]:
        """As if interrupted at once: what comes back takes the usual way."""
        self.post(to, kind, body)
        meanwhile()
        return []

    def end_conversation(self) -> None:
        pass

    def request(
        self, to: int, kind: Kind, body: Any, *, timeout: float | None = None
    ) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()

        def settle(answer: Any, error: Exception | None) -> None:
            if future.done():
                return
            if error is not None:
                fail(future, error)
            else:
                future.set_result(answer)

        def answer() -> None:
            try:
                result = self._network.messenger(to)._deliver(kind, self._worker_id, body)
                if isinstance(result, torch.futures.Future):
                    result = result.wait()
            except Exception as error:  # noqa: BLE001 it is the caller's to raise
                self._reply(settle, None, error)
            else:
                self._reply(settle, result, None)

        if timeout:
            late = RpcTimeout(f"RPC ran for more than {timeout} s", seconds=timeout)
            self.call_later(timeout, lambda: settle(None, late))
        try:
            self._network.send(to, kind, answer, reliably=True)
        except WorkerLost as loss:
            fail(future, loss)
        return future

    def handle(self, kind: Kind, handler: Handler, rescue: Rescue | None = None) -> None:
        self._handlers[kind] = handler

    def offer(
        self, kind: Kind, take: Callable[[int], bytes | None], can_wait: Callable[[bytes], bool]
    ) -> None:
        """Nothing rides here: it has no calls."""

    def watch_losses(self, callback: Callable[[int, str], None]) -> None:
        self.watchers.append(callback)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        return self._network.call_later(seconds, callback)

    def _deliver(self, kind: Kind, source: int, body: Any) -> Any:
        return self._handlers[kind](source, body)

    def _reply(self, settle: Callable[..., None], answer: Any, error: Exception | None) -> None:
        self._network.send(
            self._worker_id, Kind.REPLY, lambda: settle(answer, error), reliably=True
        )
