"""Plain calls, objects and modules on workers with an allow-list: what the list names works as
without one, and there is no way around it."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable

import pytest
import torch
from torch import nn

import telegrad
from telegrad import ids, observe, remote_calls, rpc
from telegrad.autograd.caller_modes import CallerModes
from telegrad.errors import NotAllowed, RemoteError, SerializationError, TelegradError
from telegrad.nn import module_there
from telegrad.nn.module_there import FORWARD
from telegrad.nn.pipeline import Pipeline
from telegrad.tensors.table import (
    Batch,
    Before,
    close_table,
    fetch_values,
    number_of,
    open_table,
    run_batch,
    run_call,
)
from telegrad.testing.cluster import cluster
from telegrad.wire.allowed.allow_list import AllowList
from telegrad.wire.codec import Codec

weight = torch.full((3,), 2.0, requires_grad=True)
ran = []


def note(*args):
    """What a hostile message would run."""
    ran.append(args)


def seen():
    return list(ran)


def scale(x):
    return x * weight


def plus_one(x):
    return x + 1


async def slowly(x):
    return x * 3


def grad_mode():
    return torch.is_grad_enabled()


def apply_linear(x):
    return make_linear(3, 2)(x)


def draw():
    return torch.rand(3)


class Counter:
    def __init__(self, count=0):
        self.count = count

    def add(self, number):
        self.count += number
        return self.count

    def __len__(self):
        return self.count


def count_of(value):
    if isinstance(value, dict):
        value = value["counter"][0]
    return value.add(0)


def make_counter():
    return Counter(1)


class Stranger:
    def __init__(self):
        self.values = []

    def run(self):
        ran.append("run")

    def __call__(self, *args):
        ran.append(args)

    def append(self, value):
        ran.append(value)

    def __setstate__(self, state):
        ran.append(state)


def make_stranger():
    return Stranger()


class BaseNet(nn.Module):
    def of_base(self):
        ran.append("of_base")


class Net(BaseNet):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.body = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        self.factor = 2

    def forward(self, x):
        return self.body(self.linear(x)) * self.factor

    def halved(self, x):
        return self(x) / 2

    @property
    def doubled(self):
        return self.factor * 2


class OtherNet(BaseNet):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    @property
    def secret(self):
        ran.append("secret")
        return 1

    def forward(self, x):
        ran.append("forward")
        return x

    def extra_repr(self):
        ran.append("extra_repr")
        return ""


def make_other_net():
    return OtherNet()


def make_linear(columns, rows):
    return nn.Linear(columns, rows)


ALLOWED = [
    scale,
    plus_one,
    slowly,
    grad_mode,
    apply_linear,
    draw,
    seen,
    count_of,
    make_counter,
    make_stranger,
    make_other_net,
    make_linear,
    Counter,
    Net,
    nn.Linear,
    "torch.mul",
]


@pytest.fixture(scope="module", autouse=True)
def group():
    with cluster(3, allow=ALLOWED) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_ran(group):
    yield
    assert [telegrad.call(worker, seen) for worker in range(3)] == [[], [], []]


def ones():
    return torch.ones(3, requires_grad=True)


def refused(text="RpcOptions"):
    return pytest.raises(NotAllowed, match=text)


# --- What works ----------------------------------------------------------------------------------


def test_backward_goes_through_calls():
    x = ones()
    telegrad.call("worker1", scale, x).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]
    loss = telegrad.call("worker2", scale, telegrad.call("worker1", scale, x)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert x.grad.tolist() == [10, 10, 10]


def test_second_derivatives():
    x = ones()
    y = telegrad.call("worker1", torch.mul, x, x).sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second.tolist() == [2, 2, 2]


def test_calls_run_in_the_modes_of_the_caller():
    with torch.no_grad():
        assert telegrad.call("worker1", grad_mode) is False
        assert telegrad.submit("worker1", grad_mode).result() is False
        assert telegrad.call("worker1", torch.mul, torch.ones(2), 2).tolist() == [2, 2]
        assert telegrad.object("worker1", Counter, 4).add(1) == 5
    with torch.autocast("cpu", torch.bfloat16):
        assert telegrad.call("worker1", apply_linear, ones()).dtype is torch.bfloat16


def test_futures_are_asked_and_passed_on():
    x = ones()
    future = telegrad.submit("worker1", scale, x)
    assert future.result().tolist() == [2, 2, 2]
    telegrad.call("worker2", scale, future).sum().backward()
    assert x.grad.tolist() == [4, 4, 4]
    assert telegrad.call("worker1", slowly, ones()).tolist() == [3, 3, 3]


def test_objects_are_used_and_passed_on():
    counter = telegrad.object("worker1", Counter, 1)
    assert counter.add(2) == 3
    assert counter.add.submit(2).result() == 5
    assert len(counter) == 5
    assert telegrad.call("worker1", count_of, counter) == 5
    assert telegrad.call("worker2", count_of, counter) == 5
    assert telegrad.call("worker1", count_of, {"counter": [counter]}) == 5


def test_seeds_are_sent():
    telegrad.manual_seed(1)
    first = telegrad.call("worker1", draw)
    telegrad.manual_seed(1)
    assert telegrad.call("worker1", draw).tolist() == first.tolist()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_modules_are_trained(kind):
    telegrad.manual_seed(3)
    far, near = telegrad.module("worker1", Net), Net()
    near.load_state_dict({name: value.cpu() for name, value in far.state_dict().items()})
    x = torch.arange(6.0).view(2, 3)
    results = []
    for net in (far, near):
        optimizer = kind(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        with torch.no_grad():
            results.append(net(x))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_modules_are_used():
    net = telegrad.module("worker1", Net)
    x = torch.ones(2, 3)
    assert torch.equal(net.halved(x) * 2, net(x))
    assert torch.equal(net.submit(x).result(), net(x))
    assert net.factor == 2
    net.factor = 3
    assert net.doubled == 6
    assert "Linear" in repr(net)
    assert torch.equal(copy.deepcopy(net)(x), net(x))
    assert net.to(torch.float64).linear.weight.dtype is torch.float64
    assert telegrad.module("worker1", make_linear, 3, 2)(x).shape == (2, 2)
    assert net.float().linear(x).shape == (2, 2)  # its class is on the list, too


def test_graphs_are_drawn():
    y = telegrad.call("worker1", scale, ones())
    assert "worker1" in str(observe.draw([y.sum()]))


def test_pipelines_run():
    stages = [telegrad.module("worker1", Net), telegrad.module("worker2", nn.Linear, 2, 2)]
    pipeline = Pipeline(stages, micro_batches=2)
    x = torch.ones(4, 3)
    result = pipeline(x)
    assert torch.equal(result, stages[1](stages[0](x)))
    result.sum().backward()
    assert stages[0].linear.weight.grad.shape == (2, 3)


# --- What is refused -----------------------------------------------------------------------------


def without_gradients(use):
    with torch.no_grad():
        return use()


@pytest.mark.parametrize("mode", [lambda use: use(), without_gradients])
@pytest.mark.parametrize(
    "use",
    [
        lambda f: telegrad.call("worker1", f, 1),
        lambda f: telegrad.submit("worker1", f, 1).result(),
        lambda f: telegrad.object("worker1", f, 1),
        lambda f: telegrad.module("worker1", f, 1),
    ],
)
def test_other_functions_are_refused(mode, use):
    for function in (note, os.getpid, os.system, print):
        with refused("may not be run here: RpcOptions"):
            mode(lambda function=function: use(function))
    for function in (lambda x: note(x), functools.partial(note, 1), Counter().add):
        with refused("sent by value"):
            mode(lambda function=function: use(function))


def test_other_classes_are_refused():
    with refused("Stranger may not be run here"):
        telegrad.object("worker1", Stranger)
    with refused("OtherNet may not be run here"):
        telegrad.module("worker1", OtherNet)
    with refused("Conv1d may not be run here"):
        telegrad.module("worker1", nn.Conv1d, 1, 1, 1)


def test_methods_of_other_classes_are_refused():
    stranger = telegrad.object("worker1", make_stranger)
    with refused("Stranger.run"):
        stranger.run()
    with refused("Stranger.run"):
        without_gradients(stranger.run)
    with refused("Stranger.run"):
        stranger.run.submit().result()
    for name in ("__reduce_ex__", "__getattribute__", "__init_subclass__"):
        counter = telegrad.object("worker1", Counter)
        with refused(f"object.{name}|{name}"):
            rpc.rpc_sync("worker1", remote_calls._call_method, (Counter(), name, "add"))
        assert counter.add(1) == 1


def test_an_attribute_does_not_stand_for_a_method():
    counter = Counter()
    counter.add = plus_one
    with refused("an attribute of that name"):
        rpc.rpc_sync("worker1", remote_calls._call_method, (counter, "add", 1))


MODES = CallerModes(has_gradients=False, autocast=(), caches_casts=True)


@pytest.mark.parametrize(
    "name",
    [
        b"os\0system",
        b"test_allowed_plain\0note",
        b"test_allowed_plain\0os.system",
        b"telegrad.remote_calls\0_run_in_modes",
        b"telegrad.remote_calls\0_call_method",
        b"telegrad.rpc.references.proxy\0call_owned",
        b"builtins\0dict",
        b"collections\0OrderedDict",
        b"",
    ],
)
def test_functions_given_to_telegrads_own_are_checked_like_others(name):
    with refused("may not be run here"):
        rpc.rpc_sync("worker1", remote_calls._run_in_modes, (MODES, name, 1))
    with refused("may not be run here"):
        telegrad.module("worker1", nn.Linear, 1, 1)._connection.stream.ask(
            module_there.make, name, (), {}
        )


def test_a_refusal_never_asks_to_name_what_is_telegrads_own():
    with refused() as caught:
        rpc.rpc_sync("worker1", remote_calls._about_arguments, (1, 2, 3))
    assert "not available" in str(caught.value)
    assert "add" not in str(caught.value)


class Call:
    def __init__(self, function, *args, state=None, items=None):
        self._reduced = (function, args, state, items)

    def __reduce__(self):
        return self._reduced


@pytest.mark.parametrize("what", ["stated", "filled", "listed", "inside"])
def test_a_stream_gets_no_hold_of_a_value(what):
    """It would call it, set its state, or add to it, whatever its class is."""
    stranger = telegrad.object("worker1", make_stranger)
    rref, found = stranger._rref, remote_calls._object_of
    value = Call(found, rref, "Stranger", [])
    hostile = {
        "stated": lambda: Call(found, rref, "Stranger", [], state={"a": 1}),
        "filled": lambda: Call(found, rref, "Stranger", [], items=iter([1])),
        "listed": lambda: Call(list, value),
        "inside": lambda: Call(Counter, value),
    }[what]()
    with pytest.raises((NotAllowed, SerializationError), match=r"not be rebuilt|is inside"):
        rpc.rpc_sync("worker1", plus_one, (hostile,))


def test_a_stream_does_not_call_a_value():
    codec = Codec()
    codec.allowed = AllowList([plus_one])
    stream = b"\x80\x04\x8c\x15telegrad.remote_calls\x8c\x09_value_of\x93"
    stream += b"K\x01K\x02N\x87R" + b"K\x01\x85R."
    with pytest.raises(SerializationError, match="not callable"):
        codec.decode(stream)


def test_what_a_message_refers_to_is_found_in_plain_containers_only():
    counter = telegrad.object("worker1", Counter)
    for value in ({counter}, Counter(counter)):
        with refused("inside a value"):
            telegrad.call("worker1", count_of, value)


# --- Modules -------------------------------------------------------------------------------------


def ask(net, function, *args):
    connection = net._connection
    return connection.stream.ask(function, connection.handle.id, "", *args)


def test_methods_that_the_class_inherits_from_another_are_refused():
    net = telegrad.module("worker1", Net)
    with refused("BaseNet.of_base"):
        net.of_base()
    for name in ("apply", "register_forward_hook", "__setattr__", "__reduce_ex__", "_apply"):
        with refused(name):
            net._connection.call(net, "", name, (plus_one,), {})


def test_a_module_of_another_class_does_nothing_for_others():
    other = telegrad.module("worker1", make_other_net)
    for use in (
        lambda: other(torch.ones(2)),
        lambda: other.submit(torch.ones(2)).result(),
        lambda: Pipeline([other], micro_batches=1)(torch.ones(2)),
        lambda: other.of_base(),
        lambda: other.secret,
    ):
        with refused("OtherNet|BaseNet"):
            use()
    with refused("OtherNet"):
        ask(other, module_there.representation)
    with refused("OtherNet"):
        ask(other, module_there.extra_representation)
    net = telegrad.module("worker1", Net)
    with refused("Sequential.forward"):
        net.body(torch.ones(2, 2))


def test_attributes_are_data():
    net = telegrad.module("worker1", Net)
    for name, value in (
        ("forward", 1),
        ("halved", 1),
        ("forward", plus_one),
        ("other", plus_one),
        ("other", [plus_one]),
        ("other", Counter()),
        ("_parameters", {}),
        ("__class__", 1),
        ("doubled", Counter),
    ):
        with refused("may not be set"):
            ask(net, module_there.set_attribute, name, value)
    for name in ("__class__", "_parameters", "__init__", "__dict__"):
        with refused("may not be read"):
            ask(net, module_there.attribute, name)
    connection = net._connection
    with connection.stream.before() as before, pytest.raises(AttributeError, match="no part"):
        args = (before, connection.handle.id, "doubled", FORWARD, None, [], (), {})
        rpc.rpc_sync("worker1", module_there.call_method, args)


def test_other_functions_do_not_work_on_tensors():
    net = telegrad.module("worker1", Net)
    stream = net._connection.stream
    for function in (plus_one, make_other_net, note):
        with refused():
            stream.ask(function)
    with stream.before() as before, refused():
        rpc.rpc_sync("worker1", run_call, (before, plus_one, ()))
    with pytest.raises((KeyError, RemoteError)), stream.before() as before:
        rpc.rpc_sync("worker1", run_call, (before, "call_method", ()))


def test_operations_that_reach_outside_of_tensors_are_refused(tmp_path):
    net = telegrad.module("worker1", Net)
    stream, path = net._connection.stream, str(tmp_path / "written")
    for name, args in (
        ("aten.from_file.default", (path, True, 8)),
        ("aten.save.default", ([1], path)),
        ("aten.len.t", ([1],)),
        ("aten._print.default", ("text",)),
        ("aten.backward.default", (torch.ones(1),)),
        ("aten._unsafe_index.Tensor", (torch.ones(1), [torch.tensor([10_000])])),
    ):
        with refused(f"{name} may not be run on tensors"):
            stream.ask(number_of, (name, None, args, (), {}))
    assert not os.path.exists(path)


def test_optimizers_are_torchs_own():
    net = telegrad.module("worker1", Net)
    stream = net._connection.stream
    stream.put(("step", None, (10**6, "Counter", [], [], []), (), {}))
    with pytest.raises(RemoteError, match="not an optimizer of torch's"):
        stream.ask(fetch_values, [])


def test_tensors_are_for_those_who_have_made_a_module():
    """Or else every list would let others run the operations of torch."""
    stream = telegrad.module("worker1", nn.Linear, 1, 1)._connection.stream
    key = stream.key._replace(stream=10**6)
    rpc.rpc_sync("worker1", open_table, (key,))
    operation = ("aten.ones.default", None, ([2],), (), {})
    with refused("made a module here"):
        rpc.rpc_sync("worker1", run_call, (Before(key, 0, None), "number_of", (operation,)))


def test_a_call_without_a_name_inside_a_value():
    codec = Codec()
    codec.allowed = AllowList([plus_one])
    function: Callable[..., int] = functools.partial(plus_one, 1)
    with refused("sent by value"):
        codec.decode(codec.encode([function]).payload)


def test_names_that_are_not_the_programs_own_come_with_other_advice():
    for func, advice in (
        (torch.cumsum, "this one function or class.*not all of torch"),
        (torch._utils._rebuild_tensor, "Do not add it"),
        (os.getpid, "part of Python. Do not add it"),
    ):
        with refused(advice):
            telegrad.call("worker1", func)


@pytest.mark.parametrize("maker", [0, 1, 30_000])
def test_a_future_that_was_never_submitted_does_not_block_a_worker(maker):
    """As one that a message makes up, of this worker, of the other one, and of none."""
    number = (maker << ids.COUNTER_BITS) + 10**6
    future = made_up_future("worker1", number)
    with pytest.raises(TelegradError, match="does not know to have submitted"):
        telegrad.call("worker1", plus_one, future)


def made_up_future(worker, number):
    class MadeUp:
        def __reduce__(self):
            return remote_calls._value_of, (rpc.get_worker_info(worker).id, number, None)

    return MadeUp()


def test_a_table_can_be_used_by_its_caller_only():
    module = telegrad.module("worker1", nn.Linear, 1, 1)
    stream = module._connection.stream
    key = stream.key._replace(caller=2)
    for func, args in (
        (open_table, (key,)),
        (close_table, (key,)),
        (run_batch, (key, Batch(0, [], []))),
        (run_call, (Before(key, 0, None), "fetch_values", ([],))),
    ):
        with pytest.raises(TelegradError, match=r"of worker 'worker2': these can be used by that"):
            rpc.rpc_sync("worker1", func, args)
    assert module.weight.shape == (1, 1)
