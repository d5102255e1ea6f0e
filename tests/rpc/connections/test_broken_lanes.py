"""One of several connections to a worker breaks or goes silent, and the worker lives on."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
import time

import pytest
import torch

import telegrad
from telegrad import rpc
from telegrad.autograd import backward, context, get_gradients
from telegrad.errors import ReplyLost, SerializationError, WorkerLost
from telegrad.rpc.connections.liveness import Connected, State
from telegrad.rpc.connections.peer import Peer
from telegrad.rpc.group import current
from telegrad.rpc.group.worker_info import WorkerInfo
from telegrad.testing.cluster import cluster
from telegrad.transport.base import ConnectionClosed
from telegrad.wire.frames import Kind, Limits

PATIENCE = 20.0
WEIGHT = torch.tensor([2.0, 3.0, 4.0], requires_grad=True)
runs = []


def lanes_with(worker_id):
    peer = current.current().agent.network.members.peer(worker_id)
    multiplexed = {multiplex._connection for multiplex in peer._multiplexes}
    return [lane for lane in peer._connections if lane not in multiplexed]


def break_lanes(worker_id=0):
    """Ends every lane between this worker and another, without a word to either."""
    broken = 0
    for lane in lanes_with(worker_id):
        try:
            lane._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # the worker has just closed this one itself
        broken += 1
    return broken


def silence_lanes(worker_id=0):
    """Lets the kernel drop what comes on them: the network has forgotten these connections."""
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    program = struct.pack("HL", 1, ctypes.addressof(drop_all))
    lanes = lanes_with(worker_id)
    for lane in lanes:
        lane._socket.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER
    return len(lanes)


def break_lanes_and_answer():
    runs.append(break_lanes())
    return "an answer that cannot be sent"


def note(x):
    runs.append(x)
    return x


def noted():
    return list(runs)


def scale(x):
    return x * WEIGHT


def gradient_of_weight(context_id):
    return get_gradients(context_id)[WEIGHT]


def peer(worker_id=1):
    return current.current().agent.network.members.peer(worker_id)


@pytest.fixture(params=["tcp", "unix"])
def group(request):
    # No shared memory: a mailbox in it takes a request though the socket beside it is broken, and
    # such a call has begun.
    options = {"transport": request.param, "shared_memory": False}
    with cluster(2, graceful=False, **options) as running:
        yield running


@pytest.mark.parametrize("breaks", ["here", "there"])
def test_a_lane_that_breaks_while_idle_is_replaced(group, breaks):
    reference = rpc.remote("worker1", torch.ones, (3,))
    assert reference.to_here().sum() == 3
    losses = []
    current.current().agent.watch_losses(lambda worker, reason: losses.append(reason))
    if breaks == "here":
        assert break_lanes(1)
    else:
        assert rpc.rpc_async("worker1", break_lanes).wait()
    for number in range(5):
        assert rpc.rpc_sync("worker1", note, (number,)) == number
    assert rpc.rpc_sync("worker1", noted) == [0, 1, 2, 3, 4]
    assert reference.to_here().sum() == 3
    assert not peer().is_lost
    assert losses == []


def test_a_call_that_has_begun_is_not_run_again(group):
    reference = rpc.remote("worker1", torch.ones, (3,))
    assert reference.to_here().sum() == 3
    with pytest.raises(ReplyLost, match=r"connection to worker 'worker1' broke.*worker is alive"):
        rpc.rpc_sync("worker1", break_lanes_and_answer)
    assert len(rpc.rpc_sync("worker1", noted)) == 1
    assert reference.to_here().sum() == 3
    assert not peer().is_lost


def test_references_in_a_call_whose_reply_is_lost_stay_with_whoever_read_them(group):
    value = rpc.RRef(torch.ones(3))
    with pytest.raises(ReplyLost):
        rpc.rpc_sync("worker1", break_lanes_with, (value,))
    assert rpc.rpc_sync("worker1", kept_sum) == 3
    assert rpc.rpc_sync("worker1", forget) is None


kept = []


def break_lanes_with(reference):
    kept.append(reference)
    break_lanes()


def kept_sum():
    return kept[0].to_here().sum().item()


def forget():
    kept.clear()


@pytest.mark.parametrize("width", [3, 1 << 18])
def test_gradients_arrive_though_lanes_break(width):
    # The weight is as wide as what it scales: small gradients ride on lanes, large ones do not.
    with cluster(2, transport="tcp", graceful=False):
        x = torch.ones(3, width, requires_grad=True)
        with context() as context_id:
            loss = rpc.rpc_sync("worker1", scale_rows, (x,)).sum()
            assert rpc.rpc_async("worker1", break_lanes).wait()
            backward(context_id, [loss])
            assert torch.equal(get_gradients(context_id)[x], WEIGHT[:, None].expand(3, width))
            found = rpc.rpc_sync("worker1", gradient_of_weight, (context_id,))
            assert found.tolist() == [width] * 3


def take_gradient():
    gradient, WEIGHT.grad = WEIGHT.grad, None
    return gradient


def test_gradients_of_plain_calls_arrive_though_lanes_break(group):
    x = torch.ones(3, requires_grad=True)
    loss = telegrad.call("worker1", scale, x).sum()
    assert rpc.rpc_async("worker1", break_lanes).wait()
    loss.backward()
    assert torch.equal(x.grad, WEIGHT)
    assert rpc.rpc_sync("worker1", take_gradient).tolist() == [1.0] * 3
    assert not peer().is_lost


def scale_rows(x):
    return x * WEIGHT[:, None]


@pytest.mark.parametrize("way", ["call", "backward"])
def test_a_lane_that_the_network_has_forgotten_ends_within_the_heartbeat(way):
    options = {"transport": "tcp", "heartbeat_interval": 0.2, "heartbeat_timeout": 2.0}
    with cluster(2, graceful=False, **options):
        x = torch.ones(3, requires_grad=True)
        with context() as context_id:
            loss = rpc.rpc_sync("worker1", scale, (x,)).sum()
            assert rpc.rpc_async("worker1", silence_lanes).wait()
            if way == "call":
                assert rpc.rpc_sync("worker1", note, (7,), timeout=0) == 7
                assert rpc.rpc_sync("worker1", noted) == [7]
            else:
                backward(context_id, [loss])
                assert torch.equal(get_gradients(context_id)[x], WEIGHT)
    # Neither has a time limit of its own: the kernel ends the connection.


def test_a_worker_that_is_killed_is_lost_at_once_all_the_same():
    with cluster(2, graceful=False) as group:
        rpc.rpc_sync("worker1", note, (1,))
        group.kill("worker1")
        with pytest.raises(WorkerLost) as caught:
            rpc.rpc_sync("worker1", note, (2,))
        assert not isinstance(caught.value, ReplyLost)
        assert peer().is_lost


# -- what only decides about a call, and not about the worker


def large_bytes(count):
    return bytes(count)


@pytest.mark.parametrize("call", [rpc.rpc_sync, lambda *args: rpc.rpc_async(*args).wait()])
@pytest.mark.parametrize("argument", [torch.ones(1 << 19), bytes(1 << 21)])
@pytest.mark.parametrize("options", [{}, {"shared_memory": False}])
def test_a_message_over_the_receivers_limits_fails_its_call_alone(call, argument, options):
    with cluster(2, graceful=False, **options):
        rpc.rpc_sync("worker1", lower_limits)
        reference = rpc.remote("worker1", torch.ones, (3,))
        assert reference.to_here().sum() == 3
        limit = "max_body" if isinstance(argument, bytes) else "max_message"
        with pytest.raises(SerializationError, match=limit):
            call("worker1", len, (argument,))
        lower_limits()
        with pytest.raises(SerializationError, match="max_body"):
            call("worker1", large_bytes, (1 << 21,))
        assert reference.to_here().sum() == 3
        assert not peer().is_lost


def lower_limits():
    """What this worker takes, from now on; what it sends is not checked against it."""
    for member in current.current().agent.network.members.peers():
        for connection in member._connections:
            connection._limits = Limits(max_body=1 << 20, max_message=1 << 20)
    return os.getpid()


# -- the peer itself


class Lane:
    """A lane on which nothing comes until it is interrupted."""

    reads = 0

    def __init__(self, may_raise=None):
        self.is_interrupted = threading.Event()
        self._may_raise = may_raise or self.is_interrupted

    def close(self):
        pass

    def interrupt(self):
        self.is_interrupted.set()

    def set_timeout(self, *_):
        pass

    def send(self, *_):
        pass

    def receive(self):
        assert self.is_interrupted.wait(PATIENCE)
        assert self._may_raise.wait(PATIENCE)
        raise ConnectionClosed("the other end closed the connection")


class Multiplexed:
    is_closed = False
    heard_at = 0.0
    reads = 0

    def start(self, **_):
        pass

    def send_if_free(self, kind):
        pass


def new_peer(losses):
    made = Peer(
        WorkerInfo("w1", 1),
        b"",
        None,
        None,
        lambda _, loss: losses.append(loss.reason),
        None,
        (2.0, 30.0),
        lambda *_: None,
    )
    made._liveness.handle(Connected(), time.monotonic())
    return made


def test_a_call_on_a_lane_from_before_a_loss_says_nothing_about_the_worker_that_is_back():
    losses, is_back = [], threading.Event()
    peer = new_peer(losses)
    old = Lane(may_raise=is_back)
    peer.add(old)
    peer.requests.lanes.put_back(old)
    caught = []

    def call():
        try:
            peer.requests.exchange(Kind.CALL, -1, -1, (), (), None, lambda: "a call")
        except WorkerLost as error:
            caught.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    while peer.requests.lanes._idle:
        time.sleep(0.001)
    peer.lose("the network failed")
    new = Lane()
    peer.add(new)
    peer.adopt(Multiplexed())
    is_back.set()
    caller.join(PATIENCE)
    assert [error.reason for error in caught] == ["the network failed"]
    assert peer._liveness.state is State.PRESENT
    assert losses == ["the network failed"]
    assert not new.is_interrupted.is_set()


def test_a_lane_that_is_taken_while_the_worker_is_lost_hides_the_loss_from_nobody():
    losses = []
    peer = new_peer(losses)

    class Idle(list):
        def pop(self):
            list.clear(self)  # another thread has taken the last one in this moment
            return super().pop()

    idle, used = Lane(), Lane()
    peer.add(idle)
    peer.add(used)
    peer.requests.lanes._idle = Idle([idle])
    peer.lose("no sign of life for 30.0 seconds")
    peer.lose("the connection was closed")
    assert losses == ["no sign of life for 30.0 seconds"]
    assert idle.is_interrupted.is_set()
    assert used.is_interrupted.is_set()


def test_a_goodbye_is_not_a_silence_though_the_clock_ticks_in_that_moment():
    """A worker that waits in `shutdown` complains about a silence, and not about a goodbye."""
    silences = []

    def lost(peer, loss):
        peer.tick(time.monotonic())
        silences.append(loss.by_silence)

    peer = Peer(WorkerInfo("w1", 1), b"", None, None, lost, None, (2.0, 30.0), lambda *_: None)
    connection = Multiplexed()
    connection.tick = lambda _: None
    connection.peer_process = 0
    peer.adopt(connection)
    peer.lose("it has shut down")
    assert silences == [False]
    peer.adopt(connection)
    connection.heard_at = -100.0
    peer._liveness.handle(Connected(), connection.heard_at)
    for at in range(-99, 0):
        peer.tick(float(at))
    assert silences == [False, True]
