"""Values of every kind travel; what cannot is refused with the place where it stands."""

from __future__ import annotations

import collections
import functools
import operator
import pickle
import sys
import threading
import types
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad.errors import ProtocolError, RRefError, SerializationError
from telegrad.wire.codec import Codec
from telegrad.wire.frames import Unread

codec = Codec()


def send(value: Any) -> Any:
    message = codec.encode(value)
    return codec.decode(message.payload, [bytearray(buffer) for buffer in message.buffers])


def module_function(x: int) -> int:
    return x + 1


class Thing:
    kind = "thing"

    def __init__(self, value: Any) -> None:
        self.value = value

    def method(self) -> Any:
        return self.value

    @classmethod
    def made(cls) -> Thing:
        return cls(1)


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class Brittle:
    def __setstate__(self, state: Any) -> None:
        raise ValueError("no life here")

    def __getstate__(self) -> Any:
        return {"x": 1}


Pair = collections.namedtuple("Pair", ["left", "right"])


def test_a_value_without_tensors_is_a_bare_pickle() -> None:
    message = codec.encode({"a": [1, 2.5, None, "x"]})
    assert pickle.loads(message.payload) == {"a": [1, 2.5, None, "x"]}
    assert (message.buffers, message.tensors) == ([], [])


def test_any_kind_of_buffer_holds_a_payload() -> None:
    for value in ([1, "a"], [torch.ones(2)]):
        payload = codec.encode(value).payload
        for form in (bytes, bytearray, memoryview):
            assert len(codec.decode(form(payload))) == len(value)


def test_large_values_travel() -> None:
    value = [b"x" * 200_000, bytearray(b"y" * 200_000), "z" * 200_000, list(range(50_000))]
    assert send(value) == value
    assert send([1]) == [1]


def test_functions_classes_and_methods_travel_by_reference() -> None:
    value = [module_function, Thing, Thing.made, len, torch.add, torch.Tensor.add, operator.add]
    assert send(value) == value
    assert send(Thing(5).method)() == 5
    assert send(torch.ops.aten.add.Tensor) is torch.ops.aten.add.Tensor
    assert send(torch.ops.aten.add) is torch.ops.aten.add
    assert send(torch.nn.functional.max_pool2d) is torch.nn.functional.max_pool2d
    assert send(functools.partial(module_function, 2))() == 3


def test_lambdas_closures_and_local_classes_travel_by_value() -> None:
    weight = torch.ones(3, requires_grad=True)

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return module_function(1) * weight * x

    class Local:
        def area(self) -> int:
            return 12

    message = codec.encode([scaled, lambda x: x * 2, Local(), weight])
    assert len(message.tensors) == 1
    assert message.tensors[0] is weight
    function, double, local, arrived = codec.decode(message.payload)
    assert function(torch.ones(3)).tolist() == [2.0] * 3
    assert function.__closure__[0].cell_contents is arrived
    assert double(4) == 8
    assert local.area() == 12


def test_by_value_is_for_what_cannot_be_imported_only() -> None:
    arrived = send(lambda: Thing)
    assert arrived() is Thing


def test_reducers_are_called_once_with_the_destination_also_for_subclasses() -> None:
    calls = []

    class Special(Thing):
        pass

    def reduce(thing: Thing, destination: int) -> tuple[Any, ...]:
        calls.append(destination)
        return str, (f"{thing.value} to {destination}",)

    with_reducers = Codec({Thing: reduce})
    message = with_reducers.encode([Thing(1), lambda: 0, Special(2), torch.ones(1)], 7)
    arrived = with_reducers.decode(message.payload)
    assert [arrived[0], arrived[2]] == ["1 to 7", "2 to 7"]
    assert calls == [7, 7]


def test_a_failing_encode_calls_no_reducer_a_second_time() -> None:
    calls = []

    def reduce(thing: Thing, destination: int) -> tuple[Any, ...]:
        calls.append(destination)
        return str, ("x",)

    with pytest.raises(SerializationError):
        Codec({Thing: reduce}).encode([Thing(1), threading.Lock()])
    assert calls == [-1]


def test_a_reducer_may_encode_and_its_own_errors_pass() -> None:
    def reduce(thing: Thing, destination: int) -> tuple[Any, ...]:
        if thing.value is None:
            raise RRefError("not here")
        return bytes, (nested.encode(thing.value).payload,)

    nested = Codec({Thing: reduce})
    inner, after = nested.decode(nested.encode([Thing([1]), torch.ones(1)]).payload)
    assert nested.decode(inner) == [1]
    assert after.tolist() == [1.0]
    with pytest.raises(RRefError, match="not here") as caught:
        nested.encode(Thing(None))
    assert caught.value.__cause__ is None


UNSENDABLE = {
    "args[1]['hook']": lambda lock: ((1, {"hook": lock}), {}),
    "kwargs['x'][0]": lambda lock: ((), {"x": [lock]}),
    "args[0].value": lambda lock: ((Thing(lock),), {}),
    "args[0].inner": lambda lock: ((Slotted(lock),), {}),
    "args[0].left": lambda lock: ((Pair(lock, 2),), {}),
    "args[0].args[1]": lambda lock: ((functools.partial(module_function, 1, lock),), {}),
    "args[0].__self__.value": lambda lock: ((Thing(lock).method,), {}),
    "args[0] variable 'lock'": lambda lock: ((lambda: lock,), {}),
    "args[0].args[0]": lambda lock: ((ValueError(lock),), {}),
    "args[0].note": lambda lock: ((with_note(torch.ones(1), lock),), {}),
}


def with_note(tensor: torch.Tensor, note: Any) -> torch.Tensor:
    tensor.note = note
    return tensor


@pytest.mark.parametrize("path", UNSENDABLE)
def test_what_cannot_be_sent_is_named_by_its_path(path: str) -> None:
    value = UNSENDABLE[path](threading.Lock())
    with pytest.raises(SerializationError) as caught:
        codec.encode(value, labels=("args", "kwargs"))
    assert caught.value.path == path
    assert str(caught.value).startswith(f"{path} (_thread.lock) cannot be sent")
    assert caught.value.__cause__ is not None


class CannotBeSaved(torch.nn.Module):
    def forward(self) -> int:
        return 1

    @torch.jit.export
    def __getstate__(self) -> int:
        assert self.forward() > 1, "not to be saved"
        return 1

    @torch.jit.export
    def __setstate__(self, state: int) -> None:
        self.training = state == 1


def test_a_script_module_that_cannot_be_saved_says_why_itself() -> None:
    with pytest.raises(SerializationError, match="not to be saved") as caught:
        codec.encode([torch.jit.script(CannotBeSaved())])
    assert caught.value.path == "value[0]"


def test_the_root_has_a_name_too() -> None:
    with pytest.raises(SerializationError, match=r"^result\[1\] .*lock") as caught:
        codec.encode([1, threading.Lock()], root="result")
    assert caught.value.path == "result[1]"


def test_generators_and_futures_are_refused_with_advice() -> None:
    async def coroutine() -> None: ...

    pending = coroutine()
    with pytest.raises(SerializationError, match=r"generators cannot be sent; .* list"):
        codec.encode(x for x in "ab")
    with pytest.raises(SerializationError, match="wait") as caught:
        codec.encode({"f": torch.futures.Future()}, root="result")
    assert caught.value.path == "result['f']"
    with pytest.raises(SerializationError, match="await"):
        codec.encode(pending)
    pending.close()


def test_a_value_that_contains_itself_travels_and_too_deep_a_one_is_refused() -> None:
    circle: list[Any] = [torch.ones(1)]
    circle.append(circle)
    arrived = send(circle)
    assert arrived[1] is arrived
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(SerializationError, match="nested too deeply"):
        codec.encode(deep)
    while deep:  # taken apart by hand, lest its deallocation recurse
        deep = deep[0]


def test_the_codec_works_on_after_a_failure() -> None:
    for _ in range(3):
        with pytest.raises(SerializationError):
            codec.encode([torch.ones(2), threading.Lock()])
        assert send([torch.ones(2)])[0].tolist() == [1.0, 1.0]


def test_a_name_that_is_missing_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("visiting")
    exec("def helper(): pass\nclass Type: pass", module.__dict__)
    with monkeypatch.context() as present:
        present.setitem(sys.modules, "visiting", module)
        function = codec.encode([Thing, module.helper, torch.ones(1)]).payload
        instance = codec.encode([module.Type()]).payload
    with pytest.raises(SerializationError, match="'helper' of module 'visiting'"):
        codec.decode(function)
    with pytest.raises(SerializationError, match="'Type' of module 'visiting'"):
        codec.decode(instance)
    monkeypatch.setitem(sys.modules, "visiting", types.ModuleType("visiting"))
    with pytest.raises(SerializationError, match="'helper' of module 'visiting'"):
        codec.decode(function)


def test_an_exception_while_rebuilding_is_the_cause() -> None:
    payload = codec.encode(Brittle()).payload
    with pytest.raises(SerializationError, match="ValueError: no life here") as caught:
        codec.decode(payload)
    assert isinstance(caught.value.__cause__, ValueError)


class Interrupted:
    def __setstate__(self, state: Any) -> None:
        raise KeyboardInterrupt

    def __getstate__(self) -> Any:
        return {"x": 1}


def test_an_interruption_while_rebuilding_stays_one() -> None:
    with pytest.raises(KeyboardInterrupt):
        send(Interrupted())


def test_an_error_without_words_is_named_by_its_type() -> None:
    class Silent:
        def __reduce__(self) -> Any:
            raise LookupError

    with pytest.raises(SerializationError, match="cannot be sent: LookupError"):
        codec.encode(Silent())


def test_garbage_is_an_error_of_ours() -> None:
    for payload in (b"", b"\x80", b"hello", b"T", b"\x80\x05."):
        with pytest.raises((SerializationError, ProtocolError)):
            codec.decode(payload)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_stream_behind_tensors_that_were_not_received_is_told_of() -> None:
    class Told(Codec):
        def _not_decoded(self, stream: bytes | bytearray | memoryview) -> None:
            streams.append(bytes(stream))

    streams: list[bytes] = []
    sides = torch.randn(3, 4).t()  # its strides are in the table
    message = codec.encode([torch.randn(1 << 14), sides, torch.ones(2), "text"])
    with pytest.raises(SerializationError, match="not received"):
        Told().decode(message.payload, Unread())
    (stream,) = streams
    assert pickle.loads(stream, buffers=[1, 2, 3]) == [1, 2, 3, "text"]


def test_torchscript_travels() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function = torch.jit.script(scripted_source)
        module = torch.jit.script(torch.nn.Linear(2, 2))
    arrived = send(module)
    x = torch.randn(1, 2)
    assert torch.equal(arrived(x), module(x))
    assert send(function)(x).tolist() == (x + 1).tolist()


def scripted_source(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_many_threads_share_a_codec() -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(200):
                value = [torch.full((3,), float(number)), step, {"n": number}]
                arrived = send(value)
                assert arrived[0].tolist() == [float(number)] * 3
                assert arrived[1:] == value[1:]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
)
sizes = st.lists(st.integers(0, 4), max_size=4)
tensors = st.builds(
    lambda shape, turned, grad: (
        lambda t: (t.transpose(0, -1) if turned and t.dim() else t).requires_grad_(grad)
    )(torch.arange(float(torch.Size(shape).numel())).reshape(shape)),
    sizes,
    st.booleans(),
    st.booleans(),
)
values = st.recursive(
    scalars | tensors,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
        | st.builds(Thing, inner)
    ),
    max_leaves=12,
)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.requires_grad == right.requires_grad and torch.equal(left, right)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, Thing):
        return same(left.value, right.value)
    return bool(left == right)


@settings(max_examples=200, deadline=None)
@given(values)
def test_nested_values_come_back_the_same(value: Any) -> None:
    arrived = send(value)
    assert type(arrived) is type(value)
    assert same(value, arrived)
