"""A worker that has no file descriptor left fails calls, and is there when it has some again."""

from __future__ import annotations

import os
import resource

import pytest
import torch

from telegrad import rpc
from telegrad.autograd import backward, context, get_gradients
from telegrad.errors import SerializationError, TelegradError
from telegrad.testing.cluster import cluster

LARGE = 1 << 18

_held: list[int] = []
_limits = resource.getrlimit(resource.RLIMIT_NOFILE)


def use_up_descriptors():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        while True:
            _held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass


def give_descriptors_back():
    while _held:
        os.close(_held.pop())
    resource.setrlimit(resource.RLIMIT_NOFILE, _limits)


def same(tensor):
    return tensor


def test_a_large_argument_fails_its_call_alone():
    with cluster(2):
        reference = rpc.remote("worker1", same, (torch.ones(3),))
        reference.to_here()
        assert rpc.rpc_sync("worker1", same, (1,)) == 1
        rpc.rpc_sync("worker1", use_up_descriptors)
        for _ in range(3):
            with pytest.raises(SerializationError, match="no file descriptor") as caught:
                rpc.rpc_sync("worker1", same, (torch.ones(LARGE),))
            assert "worker1" in str(caught.value.__cause__)
            with pytest.raises(SerializationError, match="no file descriptor"):
                rpc.rpc_async("worker1", same, (torch.ones(LARGE),)).wait()
        assert reference.to_here().tolist() == [1, 1, 1]
        rpc.rpc_sync("worker1", give_descriptors_back)
        assert rpc.rpc_sync("worker1", same, (torch.ones(LARGE),)).sum() == LARGE
        assert reference.to_here().tolist() == [1, 1, 1]


def ones():
    return torch.ones(LARGE)


def test_a_large_result_fails_its_call_alone_and_names_it():
    with cluster(2):
        assert rpc.rpc_sync("worker1", same, (1,)) == 1
        assert rpc.rpc_async("worker1", same, (1,)).wait() == 1
        use_up_descriptors()
        try:
            named = r"result of the call of .*ones on worker 'worker1': .*no file descriptor"
            with pytest.raises(SerializationError, match=named):
                rpc.rpc_sync("worker1", ones)
            with pytest.raises(SerializationError, match=named):
                rpc.rpc_async("worker1", ones).wait()
            assert rpc.rpc_sync("worker1", same, (1,)) == 1
        finally:
            give_descriptors_back()
        assert rpc.rpc_sync("worker1", ones).sum() == LARGE


def test_a_caller_without_a_descriptor_for_a_connection_says_so():
    with cluster(2):
        use_up_descriptors()
        try:
            with pytest.raises(TelegradError, match=r"'worker1' cannot be .* here: .*open files"):
                rpc.rpc_sync("worker1", same, (1,))
        finally:
            give_descriptors_back()
        assert rpc.rpc_sync("worker1", same, (1,)) == 1


def test_a_reference_beside_a_large_argument_ends():
    with cluster(2):
        rpc.rpc_sync("worker1", same, (1,))
        rpc.rpc_sync("worker1", use_up_descriptors)
        reference = rpc.RRef(torch.ones(3))
        with pytest.raises(SerializationError, match="no file descriptor"):
            rpc.rpc_sync("worker1", len, ([reference, torch.ones(LARGE)],))
        rpc.rpc_sync("worker1", give_descriptors_back)
    # The end of the group waits for all references, and would fail.


def spread(tensor):
    return tensor.expand(LARGE).clone()


def test_large_gradients_fail_their_pass_alone():
    weight = torch.ones(1, requires_grad=True)
    with cluster(2):
        for is_scarce in (True, False):
            with context() as context_id:
                result = rpc.rpc_sync("worker1", spread, (weight,))
                loss = (result * result).sum()
                if is_scarce:
                    rpc.rpc_sync("worker1", use_up_descriptors)
                    with pytest.raises(RuntimeError, match=r"Node 1: .*(descriptor|open files)"):
                        backward(context_id, [loss])
                    rpc.rpc_sync("worker1", give_descriptors_back)
                else:
                    backward(context_id, [loss])
                    assert get_gradients(context_id)[weight].sum() == 2 * LARGE
