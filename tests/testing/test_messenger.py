"""The simulated network keeps the promises of `Messenger`, and those of its own."""

from __future__ import annotations

import doctest

import pytest
import torch

from telegrad.errors import RpcTimeout, WorkerLost
from telegrad.testing import messenger
from telegrad.testing.messenger import SimulatedNetwork
from telegrad.wire.frames import Kind


def test_the_example_in_its_documentation_runs():
    assert doctest.testmod(messenger).failed == 0


def test_nothing_is_delivered_until_asked_for_and_order_is_the_seeds():
    def run(seed: int) -> list[int]:
        network = SimulatedNetwork(seed)
        network.messenger(0).handle(Kind.PING, lambda _, body: got.append(body))
        got: list[int] = []
        for n in range(8):
            network.messenger(1).post(0, Kind.PING, n)
        assert got == []
        network.run()
        return got

    assert run(1) == run(1) != run(2)
    assert sorted(run(1)) == list(range(8))


def test_messages_are_lost_and_repeated():
    network = SimulatedNetwork(3, loss=0.3, repetition=0.3)
    got: list[int] = []
    network.messenger(0).handle(Kind.PING, lambda _, body: got.append(body))
    network.messenger(0).handle(Kind.PONG, lambda _, body: got.append(body))
    for n in range(50):
        network.messenger(1).post(0, Kind.PING, n)
    network.run()
    assert len(set(got)) < 50
    assert len(got) > len(set(got))
    network = SimulatedNetwork()
    got.clear()
    network.messenger(0).handle(Kind.PING, lambda _, body: got.append(body))
    network.drop(Kind.PING)
    for n in range(3):
        network.messenger(1).post(0, Kind.PING, n)
    network.run()
    assert sorted(got) == [1, 2]


def test_a_request_ends_in_the_answer_or_the_error_or_a_timeout_or_a_loss():
    network = SimulatedNetwork()
    asker, other = network.messenger(0), network.messenger(1)

    def answer(source: int, body: int) -> object:
        future: torch.futures.Future[int] = torch.futures.Future()
        future.set_result(10 // body)
        return future

    other.handle(Kind.CALL, answer)
    good, bad = asker.request(1, Kind.CALL, 2), asker.request(1, Kind.CALL, 0)
    network.run()
    assert good.wait() == 5
    with pytest.raises(ZeroDivisionError):
        bad.wait()
    network.drop(Kind.CALL)
    late = asker.request(1, Kind.CALL, 2, timeout=1.0)
    network.advance(2.0)
    with pytest.raises(RpcTimeout, match="RPC ran for more than"):
        late.wait()
    losses: list[tuple[int, str]] = []
    asker.watch_losses(lambda *loss: losses.append(loss))
    network.lose(1, "power cut")
    assert losses == [(1, "power cut")]
    with pytest.raises(WorkerLost, match="power cut"):
        asker.request(1, Kind.CALL, 2).wait()
    with pytest.raises(WorkerLost, match="power cut"):
        asker.post(1, Kind.CALL, 2)


def test_time_passes_only_by_advance_and_cancelled_timers_do_not_fire():
    network = SimulatedNetwork()
    fired: list[float] = []
    for seconds in (2.0, 1.0):
        network.messenger(0).call_later(seconds, lambda: fired.append(network.now))
    network.messenger(0).call_later(1.5, lambda: fired.append(-1.0)).cancel()
    network.advance(1.0)
    assert fired == [1.0]
    network.advance(5.0)
    assert fired == [1.0, 2.0]
    assert network.clock() == 6.0
