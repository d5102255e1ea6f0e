"""Bytes, messages and calls, counted by the worker's own instrument."""

from __future__ import annotations

import pytest
import torch

from telegrad import rpc
from telegrad.errors import TelegradError
from telegrad.observe import Traffic, TrafficCount, traffic
from telegrad.testing.cluster import cluster


@pytest.mark.parametrize("options", [{}, {"shared_memory": False}, {"transport": "tcp"}])
def test_bytes_and_calls_are_counted_on_both_ends(options):
    megabyte = torch.zeros(1 << 18)
    with cluster(2, wrap_transport=Traffic(), **options):
        rpc.rpc_sync("worker1", torch.add, args=(1, 1))
        here, there = traffic(), rpc.rpc_sync("worker1", traffic)
        for _ in range(3):
            rpc.rpc_sync("worker1", torch.sum, args=(megabyte,))
        rpc.rpc_async("worker1", torch.sum, args=(megabyte,)).wait()
        here_after, there_after = traffic(), rpc.rpc_sync("worker1", traffic)
        assert here_after.calls_made - here.calls_made == 5  # with the one that asked
        assert there_after.calls_served - there.calls_served == 5
        assert 4 << 20 < here_after.bytes_sent - here.bytes_sent < (4 << 20) + 4096
        assert 4 << 20 < there_after.bytes_received - there.bytes_received < (4 << 20) + 4096
        assert here_after.bytes_received - here.bytes_received < 4096
        assert here_after.messages_sent > here.messages_sent


def test_counts_outlive_their_connections():
    with cluster(2, wrap_transport=Traffic()) as group:
        rpc.rpc_sync("worker1", torch.add, args=(1, 1))
        before = traffic()
        group.kill("worker1")
        with pytest.raises(TelegradError):
            rpc.rpc_sync("worker1", torch.add, args=(1, 1))
        assert traffic().calls_made >= before.calls_made == 1


def test_a_worker_that_does_not_count_says_how_to():
    with cluster(1):
        with pytest.raises(TelegradError, match="wrap_transport"):
            traffic()


def test_nothing_is_counted_before_anything_is_sent():
    assert Traffic().count == TrafficCount()
