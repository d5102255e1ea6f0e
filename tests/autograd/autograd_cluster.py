"""Several autograd engines in one process, joined by a network that delivers in random order.

`Cluster.call` does what an agent does for a call: it records the request on both sides, runs the
function under the context on the callee, and records the reply.
"""

from __future__ import annotations

import random
import threading
from collections import Counter

import torch

from telegrad.autograd import AutogradEngine
from telegrad.errors import WorkerLost
from telegrad.rpc.seams import NO_CONTEXT
from telegrad.wire.codec import Packet


def copied(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (tuple, list)):
        return type(value)(copied(v) for v in value)
    if isinstance(value, Packet):
        return Packet(value.head, copied(value.tensors))
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    return value


class _Timer:
    def cancel(self):
        pass


class SimulatedMessenger:
    def __init__(self, network, worker_id):
        self.network, self.worker_id = network, worker_id
        self.handlers, self.watchers, self.timers = {}, [], []

    def post(self, to, kind, body):
        talk = getattr(self.network.thread, "talk", None)
        is_dropped = self.network.dropped(self.worker_id, to, kind)
        if talk is not None and talk[:2] == (self.worker_id, to) and not is_dropped:
            self.network.sent[kind] += 1
            talk[2].append((kind, copied(body)))
        else:
            self.network.post(self.worker_id, to, kind, copied(body))

    def converse(self, to, kind, body, interruption, meanwhile):
        """Runs the handler here and now, or does as if interrupted at once: then what comes back
        takes the usual way, in any order."""
        is_dropped = self.network.dropped(self.worker_id, to, kind)
        if self.network.tosses_tails() or is_dropped or {to, self.worker_id} & self.network.dead:
            self.post(to, kind, body)
            meanwhile()
            return []
        meanwhile()
        self.network.sent[kind] += 1
        came = []
        self.network.thread.talk = (to, self.worker_id, came)
        try:
            self.network.messengers[to].handlers[kind](self.worker_id, copied(body))
        finally:
            self.network.thread.talk = None
        return came

    def name_of(self, worker):
        return f"worker{worker}"

    def end_conversation(self):
        self.network.thread.talk = None

    def request(self, to, kind, body, *, timeout=None):
        raise NotImplementedError

    def handle(self, kind, handler, rescue=None):
        assert kind not in self.handlers
        self.handlers[kind] = handler

    def offer(self, kind, take, can_wait):
        pass

    def watch_losses(self, callback):
        self.watchers.append(callback)

    def run_aside(self, work):
        work()

    def call_later(self, seconds, callback):
        if seconds < 0.1:
            self.network.soon(callback)
        else:
            self.timers.append(callback)
        return _Timer()


class Cluster:
    def __init__(self, size, *, seed=0, threads=1):
        self._random = random.Random(seed)
        self.thread = threading.local()
        self._changed = threading.Condition()
        self._pending = []
        self._busy = 0
        self._is_closed = False
        self.dead = set()
        self.dropped = lambda source, to, kind: False
        self.sent = Counter()
        self.failures = []
        self.messengers = [SimulatedMessenger(self, i) for i in range(size)]
        self.engines = [AutogradEngine(m) for m in self.messengers]
        self._threads = [threading.Thread(target=self._deliver) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def tosses_tails(self):
        with self._changed:
            return self._random.random() < 0.5

    def __enter__(self):
        return self

    def __exit__(self, *error):
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        if error[0] is None:
            assert not self.failures, self.failures

    def post(self, source, to, kind, body):
        with self._changed:
            if to in self.dead or source in self.dead:
                raise WorkerLost(f"worker {to} is gone", worker=str(to))
            self.sent[kind] += 1
            if not self.dropped(source, to, kind):
                self._pending.append((source, to, kind, body))
                self._changed.notify_all()

    def soon(self, callback):
        with self._changed:
            self._pending.append((None, None, None, callback))
            self._changed.notify_all()

    def _deliver(self):
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._is_closed)
                if not self._pending:
                    return
                index = self._random.randrange(len(self._pending))
                source, to, kind, body = self._pending.pop(index)
                if to in self.dead:
                    continue
                self._busy += 1
            try:
                if to is None:
                    body()
                else:
                    self.messengers[to].handlers[kind](source, body)
            except Exception as error:
                self.failures.append(error)
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def settle(self):
        """Waits until every message has been handled."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending and not self._busy)

    def kill(self, worker):
        with self._changed:
            self.dead.add(worker)
        for i, messenger in enumerate(self.messengers):
            if i not in self.dead:
                for callback in messenger.watchers:
                    callback(worker, "killed")

    def call(self, source, to, function, *args):
        """Runs `function(*args)` on worker `to`, called from `source`; tensors in, tensors out."""
        context_id = self.engines[source].current_context()
        args = self._travel(context_id, source, to, args)
        with self.engines[to].enter(context_id):
            result = function(*args)
        is_single = isinstance(result, torch.Tensor)
        result = self._travel(context_id, to, source, (result,) if is_single else result)
        return result[0] if is_single else result

    def _travel(self, context_id, source, to, values):
        if context_id == NO_CONTEXT:
            return copied(tuple(values))
        chosen = [
            i for i, v in enumerate(values) if isinstance(v, torch.Tensor) and v.requires_grad
        ]
        message = self.engines[source].record_send(context_id, to, [values[i] for i in chosen])
        moved = list(copied(tuple(values)))
        if message % 2:  # agents do so when a call has been answered; that it helps must not matter
            self.engines[source].foresee(context_id, message)
        received = self.engines[to].record_receive(
            context_id, message, source, [moved[i] for i in chosen]
        )
        for i, tensor in zip(chosen, received, strict=True):
            moved[i] = tensor
        return tuple(moved)
