"""A worker with an allow-list runs and builds what the list names, and nothing else."""

from __future__ import annotations

import functools
import operator
import os
import pickle
import subprocess

import numpy
import pytest
import torch

import telegrad.autograd as dist_autograd
from telegrad import rpc
from telegrad.errors import NotAllowed, ProtocolError, RemoteError
from telegrad.nn import RemoteModule, remote_module
from telegrad.optim import DistributedOptimizer
from telegrad.rpc import RpcOptions
from telegrad.rpc.functions import guarded as guarded_function
from telegrad.rpc.references.proxy import call_owned, call_owned_async
from telegrad.rpc.references.user import UserState
from telegrad.tensors.operations import function as operation
from telegrad.testing.cluster import cluster
from telegrad.wire.allowed.allow_list import AllowList, loads_data
from telegrad.wire.codec import Codec
from telegrad.wire.function_names import function_named

ran = []


def note(*args):
    """What a hostile message would run."""
    ran.append(args)


def seen():
    return list(ran)


class Hostile:
    def __reduce__(self):
        return note, ("unpacked",)


class Stranger:
    pass


class StrangeError(Exception):
    pass


def raise_strange():
    raise StrangeError("odd")


def raise_key_error():
    raise KeyError("known")


def make_stranger():
    return Stranger()


def double(x):
    return x * 2


class Counter:
    def __init__(self):
        self.count = 0

    def add(self, number):
        self.count += number
        return self.count


class Child(Counter):
    def subtract(self, number):
        self.count -= number
        return self.count


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x * self.weight


class OtherNet(Net):
    def forward(self, x):
        return x


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def make_other_net():
    return OtherNet()


ALLOWED = [
    "torch.add",
    double,
    seen,
    make_stranger,
    make_other_net,
    raise_strange,
    raise_key_error,
    Counter,
    Net,
    "test_allowed.scripted",
    torch.optim.SGD,
]


@pytest.fixture(scope="module")
def guarded():
    with cluster(2, allow=ALLOWED):
        yield


@pytest.fixture(autouse=True)
def nothing_ran(request):
    yield
    assert not ran
    if "guarded" in request.fixturenames:
        assert rpc.rpc_sync("worker1", seen) == []


def refused(name):
    return pytest.raises(NotAllowed, match=f"{name}.*RpcOptions\\(allow=")


def test_what_the_list_names_runs(guarded):
    x = torch.ones(2)
    assert rpc.rpc_sync("worker1", torch.add, (x, 1)).tolist() == [2, 2]
    assert rpc.rpc_sync("worker1", double, (x,)).tolist() == [2, 2]
    assert rpc.rpc_sync("worker1", double, kwargs={"x": {1: 2}.get(1)}) == 4
    assert rpc.rpc_async("worker1", double, (x,)).wait().tolist() == [2, 2]
    assert rpc.remote("worker1", double, (x,)).to_here().tolist() == [2, 2]
    assert rpc.rpc_sync("worker1", scripted, (x,)).tolist() == [2, 2]
    assert rpc.rpc_sync("worker1", double, ([(1, "a", None, 2.5, {"b"})],))[1][1] == "a"


def test_gradients_go_through_it(guarded):
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [rpc.rpc_sync("worker1", double, (x,)).sum()])
        assert dist_autograd.get_gradients(context)[x].tolist() == [2, 2]


@pytest.mark.parametrize(
    "call",
    [
        lambda f, *a: rpc.rpc_sync("worker1", f, a),
        lambda f, *a: rpc.rpc_async("worker1", f, a).wait(),
        lambda f, *a: rpc.remote("worker1", f, a).to_here(),
        lambda f, *a: rpc.rpc_sync("worker0", f, a),
    ],
)
def test_what_it_does_not_name_is_refused(guarded, call):
    for function, name in [(note, "test_allowed.note"), (os.getpid, "posix.getpid")]:
        with refused(name):
            call(function, Hostile())
    for function in (lambda: note(), functools.partial(note, 1), Counter().add):
        with refused("sent by value"):
            call(function)


def test_the_error_names_the_function(guarded):
    with pytest.raises(NotAllowed) as caught:
        rpc.rpc_sync("worker1", note)
    assert caught.value.name == "test_allowed.note"


def test_hostile_arguments_are_not_built(guarded):
    for value in (Hostile(), [1, {"a": Hostile()}], (torch.ones(2), Hostile())):
        with refused("test_allowed.note"):
            rpc.rpc_sync("worker1", double, (value,))
    for function in (os.system, subprocess.Popen, operator.attrgetter("x"), getattr):
        with pytest.raises(NotAllowed):
            rpc.rpc_sync("worker1", double, (function,))


def test_a_hostile_result_is_not_built_at_the_caller(guarded):
    with refused("test_allowed.Stranger"):
        rpc.rpc_sync("worker1", make_stranger)


def test_exceptions_of_other_types_arrive_as_remote_errors(guarded):
    with pytest.raises(KeyError, match="known"):
        rpc.rpc_sync("worker1", raise_key_error)
    with pytest.raises(RemoteError, match="StrangeError: odd"):
        rpc.rpc_sync("worker1", raise_strange)


def test_methods_of_allowed_classes_run(guarded):
    counter = rpc.remote("worker1", Counter)
    assert counter.rpc_sync().add(2) == 2
    assert counter.rpc_async().add(2).wait() == 4
    assert counter.remote().add(2).to_here() == 6


def test_other_methods_are_refused(guarded):
    net = rpc.remote("worker1", make_other_net)
    with refused("torch.nn.modules.module.Module.apply"):
        rpc.rpc_sync("worker1", call_owned, (net.rref_id, "apply", (double,), {}))
    with refused("__reduce_ex__"):
        rpc.rpc_sync("worker1", call_owned, (net.rref_id, "__reduce_ex__", (2,), {}))
    with refused("test_allowed.OtherNet.forward"):
        rpc.rpc_sync("worker1", call_owned, (net.rref_id, "forward", (1,), {}))


def test_remote_modules_and_optimizers_are_of_allowed_classes(guarded):
    module = RemoteModule("worker1/cpu", Net)
    assert module(torch.ones(2)).tolist() == [1, 1]
    with dist_autograd.context() as context:
        optimizer = DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.5)
        dist_autograd.backward(context, [module(torch.ones(2)).sum()])
        optimizer.step(context)
    assert module(torch.ones(2)).tolist() == [0.5, 0.5]
    with refused("test_allowed.OtherNet"):
        RemoteModule("worker1/cpu", OtherNet)(torch.ones(2))
    with pytest.raises(RemoteError, match="Adam"):
        DistributedOptimizer(torch.optim.Adam, module.remote_parameters())


# --- The unpickler -------------------------------------------------------------------------------


class Call:
    def __init__(self, function, *args):
        self._reduced = function, args

    def __reduce__(self):
        return self._reduced


def load(stream, *entries):
    codec = Codec()
    codec.allowed = AllowList(entries)
    return codec.decode(stream)


@pytest.mark.parametrize("protocol", [4, 5])
def test_a_stream_builds_only_what_is_allowed(protocol):
    for function in (note, os.system, eval, getattr, __import__, exec):
        with pytest.raises(NotAllowed):
            load(pickle.dumps(Call(function, "1"), protocol), double)
    value = {"a": [1, 2.5, "x", b"y", {1}, frozenset((2,)), complex(1, 2), None, True]}
    assert load(pickle.dumps(value, protocol)) == value


def global_stream(module, name):
    return (
        b"\x80\x04\x8c"
        + bytes([len(module)])
        + module
        + b"\x8c"
        + bytes([len(name)])
        + name
        + b"\x93."
    )


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (b"test_allowed", b"os.system"),  # through a module that the allowed one has imported
        (b"test_allowed", b"subprocess.Popen"),
        (b"test_allowed", b"os"),
        (b"test_allowed", b"ran"),  # data, which could be changed
        (b"test_allowed", b"RpcOptions"),  # imported, not defined there
        (b"test_allowed", b"note.__globals__"),
        (b"test_allowed", b"Counter.__init__.__globals__"),
        (b"test_allowed", b"Counter.__class__"),
        (b"torch.nn.parameter", b"Parameter.__init__"),
        (b"collections", b"OrderedDict.fromkeys"),
        (b"telegrad.wire.allowed.allow_list", b"AllowList"),
        (b"telegrad.rpc.group.worker", b"os.system"),
        (b"telegrad.launch.program", b"run"),
        (b"this", b"s"),  # importing a module is a side effect
    ],
)
def test_a_prefix_stands_for_what_is_defined_below_it(module, name):
    with pytest.raises(NotAllowed):
        load(global_stream(module, name), "test_allowed")


def test_nothing_is_imported_for_a_refusal():
    import sys

    sys.modules.pop("antigravity", None)
    with pytest.raises(NotAllowed):
        load(global_stream(b"antigravity", b"fly"), "test_allowed")
    assert "antigravity" not in sys.modules


def test_no_stream_changes_a_class_or_function():
    for name in (b"Counter", b"double"):
        stream = global_stream(b"test_allowed", name)[:-1]
        stream += b"N}\x8c\x04evilK\x01s\x86b."
        with pytest.raises(NotAllowed, match="not part of it"):
            load(stream, "test_allowed")
    assert not hasattr(Counter, "evil")
    assert not hasattr(double, "evil")


def test_functions_by_name_inside_a_value_are_checked():
    codec = Codec()
    stream = codec.encode([torch.ops.aten.add]).payload
    assert load(stream, "torch.ops.aten") == [torch.ops.aten.add]
    with pytest.raises(NotAllowed):
        load(stream, double)


def test_messages_of_numbers_hold_nothing_else():
    assert loads_data(pickle.dumps((1, [2, 3], {"a": None}))) == (1, [2, 3], {"a": None})
    with pytest.raises(ProtocolError):
        loads_data(pickle.dumps(Hostile()))


# --- The option ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allow", "error", "text"),
    [
        ("torch.add", TypeError, "collection"),
        (torch.add, TypeError, "collection"),
        ([3], TypeError, "a int"),
        ([""], ValueError, "dotted name"),
        (["torch."], ValueError, "dotted name"),
        ([lambda: None], ValueError, "no name"),
    ],
)
def test_the_option_is_checked(allow, error, text):
    with pytest.raises(error, match=text):
        RpcOptions(allow=allow)


def test_it_is_off_by_default_and_may_be_empty():
    assert RpcOptions().allow_list() is None
    empty = RpcOptions(allow=()).allow_list()
    assert not empty.permits("torch", "add")


# --- Ways around it ------------------------------------------------------------------------------


def named(function):
    """What a stream calls for a function that it names."""
    return Call(function_named, f"{function.__module__}\0{function.__qualname__}".encode())


@pytest.mark.parametrize("function", [call_owned, call_owned_async, remote_module._forward])
def test_a_stream_does_not_find_what_messages_run_with_a_check(function):
    """There it would run methods of any value unchecked: `__getattribute__`, and so anything."""
    with pytest.raises(NotAllowed, match=function.__name__):
        load(pickle.dumps(named(function)), Counter)


class Changing:
    """One value when it is looked at, another when it is used."""

    def __init__(self, *values):
        self.values = list(values)

    def wait(self):
        return self.values.pop(0)

    local_value = wait


def test_a_value_that_changes_after_the_check_is_not_used():
    allowed = AllowList([Counter, Net])
    call = guarded_function(call_owned, allowed)
    with pytest.raises(NotAllowed):
        call(Changing(Counter(), note), "__call__", (1,), {})
    forward = guarded_function(remote_module._forward, allowed)
    found = forward(Changing(Net(), note), "cpu", False, (torch.ones(2),), {})
    assert found.tolist() == [1, 1]


class Dtype:
    """A type of numpy's with the state that a stream likes."""

    def __init__(self, name, state, *, copy=True):
        self._reduced = numpy.dtype, (name, False, copy), state

    def __reduce__(self):
        return self._reduced


@pytest.mark.parametrize(
    "dtype",
    [
        Dtype("O8", (3, "|", None, None, None, -1, -1, 0)),  # numbers as addresses of objects
        Dtype("O8", (3, "|", None, None, None, -1, -1, 0), copy=False),  # for everybody
        Dtype("i8", (3, "<", None, None, None, -1, -1, 63)),
        Dtype("V8", (3, "|", None, ("a",), {"a": (numpy.dtype("i8"), 100)}, 8, 1, 0)),
        Dtype("V8", (3, "|", None, ("b",), {"a": (numpy.dtype("i8"), 0)}, 8, 1, 0)),
        Dtype("V8", (3, "|", (numpy.dtype("i8"), (9,)), None, None, 8, 8, 0)),
    ],
)
def test_a_stream_makes_no_types_that_numpy_would_not_make(dtype):
    with pytest.raises(NotAllowed, match="numpy"):
        load(pickle.dumps(dtype, 5))
    assert numpy.dtype("O").hasobject


def test_a_numpy_array_is_filled_once():
    array = numpy.ones(4)
    with pytest.raises(NotAllowed, match="contents already"):
        load(pickle.dumps(Refilled(array.__reduce__()[2]), 4))


class Refilled:
    """An array with numbers in it, which gets others: the memory of the first is still in use."""

    def __init__(self, state):
        self._reduced = numpy.ndarray, ((4,), "f8"), state

    def __reduce__(self):
        return self._reduced


def test_arrays_of_all_kinds_arrive():
    aligned = numpy.dtype([("a", "i1"), ("b", "f8", (2,))], align=True)
    for dtype in ("f8", ">i4", "U5", "S3", "M8[s]", "m8[ms]", "?", "O", [("x", "O")], aligned):
        array = numpy.zeros(3, dtype)
        for protocol in (4, 5):
            stream = pickle.dumps([array, array.dtype], protocol)
            arrived, expected = load(stream), pickle.loads(stream)
            assert arrived[0].dtype == expected[0].dtype
            assert arrived[1] == array.dtype
            assert str(arrived[0]) == str(array)


def test_no_stream_changes_a_member_of_an_enumeration():
    member = UserState.CONFIRMED
    stream = pickle.dumps(member, 4)[:-1] + b"}\x8c\x04evilK\x01sb."
    with pytest.raises(NotAllowed, match="not part of it"):
        load(stream)
    assert not hasattr(member, "evil")


def test_operations_on_remote_tensors_are_operations():
    """Not whatever can be reached from torch's namespaces by attributes."""
    for name in ("aten.__init__.__globals__.get", "aten.__class__.mro", "aten.add", "aten.x.y"):
        with pytest.raises((NotImplementedError, AttributeError)):
            operation(name)
    assert operation("aten.add.Tensor") is torch.ops.aten.add.Tensor
    assert operation("aten.__and__.Tensor") is torch.ops.aten.__and__.Tensor
