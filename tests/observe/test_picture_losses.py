"""Pictures of groups in which a worker is gone, or silent."""

from __future__ import annotations

import torch

import telegrad
from telegrad import autograd, rpc
from telegrad.observe import draw
from telegrad.testing.cluster import cluster


def test_a_dead_worker_is_drawn_as_lost_with_what_is_known_of_it():
    x = torch.ones(3, requires_grad=True)
    with cluster(3) as group:
        with autograd.context() as context_id:
            y = rpc.rpc_sync("worker1", torch.mul, args=(x, 2))
            z = rpc.rpc_sync("worker2", torch.mul, args=(y, 2))
            group.kill("worker1")
            picture = draw(context_id, [z.sum()])
            lost = picture.graph.workers[1]
            assert lost.name == "worker1"
            assert lost.trouble.startswith("lost: ")
            assert lost.boxes == ()
            shown = str(picture)
            assert "worker1 lost: " in shown
            assert "2 receive (unknown)" in shown
            assert "1 send (unknown)" in shown
            assert 'class="lane lost"' in picture.svg
            assert 'class="missing"' in picture.svg


def test_a_silent_worker_is_drawn_so_after_the_timeout():
    x = torch.ones(3, requires_grad=True)
    with cluster(2) as group:
        with autograd.context() as context_id:
            y = rpc.rpc_sync("worker1", torch.mul, args=(x, 2))
            group.pause("worker1")
            try:
                picture = draw(context_id, [y.sum()], timeout=0.3)
            finally:
                group.resume("worker1")
            assert picture.graph.workers[1].trouble == "did not answer within 0.3 seconds"


def test_a_worker_that_came_back_does_not_know_the_context():
    x = torch.ones(3, requires_grad=True)
    with cluster(2) as group:
        with autograd.context() as context_id:
            y = rpc.rpc_sync("worker1", torch.mul, args=(x, 2))
            group.kill("worker1")
            group.start("worker1", 1)
            group.wait_until_ready("worker1")
            rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1))
            # That call was one of the context, so the new worker knows it, from the call alone.
            picture = draw(context_id, [y.sum()])
            assert picture.graph.workers[1].trouble == ""
            assert picture.graph.workers[1].boxes == ()
            assert str(picture).count("(unknown)") == 2


def test_the_graph_behind_a_loss_shows_lost_and_silent_workers_too():
    x = torch.ones(3, requires_grad=True)
    with cluster(3) as group:
        y = telegrad.call("worker1", torch.mul, x, 2)
        z = telegrad.call("worker2", torch.mul, y, 2)
        group.pause("worker2")
        try:
            silent = draw(z.sum(), timeout=0.3)
        finally:
            group.resume("worker2")
        assert silent.graph.workers[2].trouble == "did not answer within 0.3 seconds"
        group.kill("worker1")
        lost = draw(z.sum())
        assert lost.graph.workers[1].trouble.startswith("lost: ")
        assert str(lost).count("(unknown)") == 2
        assert lost.graph.workers[2].trouble == ""
