"""How passes end when the worker that is to be told is gone."""

from __future__ import annotations

import pytest
from autograd_cluster import Cluster

from telegrad.autograd.passes.live_pass import LivePass
from telegrad.autograd.passes.protocol import Standing
from telegrad.errors import WorkerLost
from telegrad.ids import worker_of


@pytest.fixture
def engine(monkeypatch):
    """Worker 1, which can reach nobody."""
    with Cluster(2, threads=0) as cluster:
        engine = cluster.engines[1]

        def post(to, kind, body):
            raise WorkerLost(f"worker {to} is gone", worker=str(to), reason="gone")

        monkeypatch.setattr(engine._messenger, "post", post)
        yield engine


def begun_elsewhere(engine, number):
    """A pass of worker 0, in a context of the same number, as worker 1 knows it."""
    assert worker_of(number) == 0
    with engine.enter(number):
        context = engine.retrieve(number)
    live = LivePass(number, context, engine.worker_id, retain_graph=False, create_graph=False)
    context.passes[live.id] = live
    return live


def test_a_pass_whose_credit_cannot_go_home_is_dropped(engine):
    # The numbers must not be taken for each other by their bytes.
    others = [begun_elsewhere(engine, number) for number in (5, 5 + (5 << 16), 1)]
    live = begun_elsewhere(engine, 5 + (5 << 8))
    engine._return_credit(live, 1, {})
    assert live.id not in live.context.passes
    assert live.id in live.context.ended
    for other in others:
        assert other.context.passes == {other.id: other}
        assert not other.context.ended


def test_a_pass_whose_answer_cannot_be_told_is_dropped(engine):
    live = begun_elsewhere(engine, 300)
    engine._reachability_asked(0, (300, 300, (False, False)))
    assert not live.context.passes


def test_a_pass_that_is_over_stays_as_it_is(engine):
    live = begun_elsewhere(engine, 300)
    live.context.passes.clear()
    engine._return_credit(live, 1, {})
    assert not live.context.ended


def test_a_worker_that_was_asked_keeps_the_pass_though_nothing_can_arrive(engine, monkeypatch):
    """Else a strike that is on its way to it would find it gone."""
    monkeypatch.setattr(engine._messenger, "post", lambda to, kind, body: None)
    live = begun_elsewhere(engine, 300)
    assert live.standing is Standing.CLOSED
    engine._reachability_asked(0, (300, 300, (False, False)))
    assert live.standing is Standing.OPEN
