"""Tensors arrive as they were: values, types, strides, sharing, flags; and no byte too many."""

from __future__ import annotations

import copy
import ctypes
import gc
import mmap
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor

from telegrad.errors import SerializationError
from telegrad.wire.codec import Codec, Encoded, Packet
from telegrad.wire.tensor_table.layout import CODES, INLINE_LIMIT

LARGE = INLINE_LIMIT  # this many elements never ride in the payload


def send(value: Any, attach: Any = None) -> Any:
    codec = Codec()
    message = codec.encode(value)
    return codec.decode(message.payload, received(message), attach)


def received(message: Encoded) -> list[bytearray]:
    for buffer in message.buffers:
        assert buffer.format == "B"
        assert buffer.contiguous
    return [bytearray(buffer) for buffer in message.buffers]


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("count", [3, LARGE])
@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_every_dtype_arrives_bit_by_bit(dtype: torch.dtype, count: int) -> None:
    memory = np.random.default_rng(0).integers(0, 2, count * dtype.itemsize, dtype=np.uint8)
    tensor = torch.frombuffer(bytearray(memory.tobytes()), dtype=dtype)
    arrived = send(tensor)
    assert arrived.dtype is dtype
    assert arrived.shape == tensor.shape
    assert bytes(arrived.untyped_storage()) == memory.tobytes()


def test_all_dtypes_of_torch_are_known_but_the_quantized() -> None:
    every = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert {str(dtype) for dtype in every - set(CODES)} == {
        f"torch.{name}" for name in ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")
    }


STRIDED = {
    "scalar": lambda: torch.tensor(3.5),
    "one": lambda: torch.ones(1),
    "matrix": lambda: torch.randn(3, 4),
    "large": lambda: torch.randn(64, 80),
    "transposed": lambda: torch.randn(3, 4).t(),
    "large transposed": lambda: torch.randn(64, 80).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "every second": lambda: torch.randn(10)[::2],
    "a column": lambda: torch.randn(100, 100)[:, 3],
    "a row": lambda: torch.randn(100, 100)[7],
    "the end": lambda: torch.randn(10)[9:],
    "expanded": lambda: torch.randn(3, 1).expand(3, 1000),
    "expanded scalar": lambda: torch.tensor(2.0).expand(5),
    "unfolded": lambda: torch.randn(10).unfold(0, 4, 1),
    "empty": lambda: torch.empty(0),
    "empty with sizes": lambda: torch.empty(3, 0, 5),
    "empty view": lambda: torch.randn(4, 4)[:, 4:],
    "ten dimensions": lambda: torch.randn(2, 1, 2, 1, 2, 1, 2, 1, 2, 1),
    "ten dimensions turned": lambda: torch.randn(2, 1, 2, 1, 2, 1, 2, 1, 2, 3).mT,
    "conjugated": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
    "a conjugated column": lambda: torch.randn(20, 20, dtype=torch.complex64).conj()[:, 1],
    "a negated column": lambda: torch.randn(20, 20, dtype=torch.complex64).conj().imag[:, 1],
    "a column of many, conjugated": lambda: torch.randn(100, 100, dtype=torch.complex64).conj()[
        :, 1
    ],
    "a column of many, negated": lambda: (
        torch.randn(100, 100, dtype=torch.complex64).conj().imag[:, 1]
    ),
    "most of each row": lambda: torch.randn(100, 100)[:, :60],
    "lazily zero": lambda: torch._efficientzerotensor((3,)),
    "from numpy": lambda: torch.from_numpy(np.arange(7.0)),
}


@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED)
def test_strided_tensors_arrive_equal(make: Any) -> None:
    tensor = make()
    arrived = send(tensor)
    assert type(arrived) is torch.Tensor
    assert arrived.shape == tensor.shape
    assert arrived.dtype is tensor.dtype
    assert torch.equal(arrived, tensor)
    assert (arrived.is_conj(), arrived.is_neg()) == (tensor.is_conj(), tensor.is_neg())
    assert not arrived.requires_grad


@pytest.mark.parametrize(
    "name",
    [
        "matrix",
        "transposed",
        "channels last",
        "expanded",
        "unfolded",
        "empty with sizes",
        "a conjugated column",  # few bytes between its elements
        "most of each row",  # many, and yet less than half
    ],
)
def test_strides_are_kept(name: str) -> None:
    tensor = STRIDED[name]()
    assert send(tensor).stride() == tensor.stride()


def test_a_received_tensor_is_no_view_and_may_be_changed_in_place() -> None:
    lazy = torch.randn(3, dtype=torch.complex64).conj()
    for tensor in (torch.randn(2, 3), torch.randn(3, 2).t(), torch.tensor(1.0), lazy):
        arrived = send(tensor)
        assert not arrived._is_view()
        arrived.add_(1)
        assert torch.equal(arrived, tensor + 1)


def test_small_tensors_ride_in_the_payload_and_large_ones_beside_it() -> None:
    codec = Codec()
    assert codec.encode([torch.ones(4), torch.ones(5)]).buffers == []
    tensor = torch.ones(LARGE)
    message = codec.encode([tensor, torch.ones(2)])
    assert [buffer.nbytes for buffer in message.buffers] == [tensor.nbytes]
    assert len(message.payload) < INLINE_LIMIT


def test_buffers_are_the_senders_memory_and_outlive_its_reference() -> None:
    tensor = torch.zeros(LARGE)
    message = Codec().encode(tensor)
    tensor[0] = 1.0
    assert bytes(message.buffers[0][:4]) == np.float32(1.0).tobytes()
    del tensor
    gc.collect()
    assert bytes(message.buffers[0][:4]) == np.float32(1.0).tobytes()


@pytest.mark.parametrize("kind", ["bytearray", "memoryview", "numpy"])
def test_decoded_tensors_alias_the_buffer_and_let_it_go_with_the_last_of_them(kind: str) -> None:
    class Memory(np.ndarray):  # can be weakly referenced, unlike a bytearray
        pass

    codec = Codec()
    message = codec.encode((torch.zeros(LARGE), 1))
    owner = np.frombuffer(bytearray(message.buffers[0]), dtype=np.uint8).view(Memory)
    watch = weakref.ref(owner)
    buffer: Any = {"bytearray": owner, "memoryview": memoryview(owner), "numpy": owner}[kind]
    arrived, _ = codec.decode(message.payload, [buffer])
    owner[:4] = np.frombuffer(np.float32(7.0).tobytes(), dtype=np.uint8)
    assert arrived[0] == 7.0
    view = arrived[10:]
    del owner, buffer, arrived
    gc.collect()
    assert watch() is not None
    view.add_(1)
    del view
    gc.collect()
    assert watch() is None


@pytest.mark.parametrize("size", [8, LARGE])
def test_views_of_one_storage_arrive_as_views_of_one_storage(size: int) -> None:
    base = torch.randn(size)
    codec = Codec()
    message = codec.encode({"all": base, "end": base[2:], "bits": base.view(torch.int32)})
    assert len(message.buffers) <= 1
    arrived = codec.decode(message.payload, received(message))
    assert torch.equal(arrived["end"], base[2:])
    arrived["all"][3] = 42.0
    assert arrived["end"][1] == 42.0
    assert arrived["bits"].view(torch.float32)[3] == 42.0
    pointers = {tensor.untyped_storage().data_ptr() for tensor in arrived.values()}
    assert len(pointers) == 1


def test_views_of_different_element_sizes_share_from_any_offset() -> None:
    base = torch.arange(64, dtype=torch.uint8)
    first, second = send((base[1:30], base[4:40].view(torch.float32)))
    assert torch.equal(first, base[1:30])
    assert torch.equal(second, base[4:40].view(torch.float32))
    first[3] = 255
    assert second.view(torch.uint8)[0] == 255


@pytest.mark.parametrize("step", [5, LARGE])
def test_arrays_that_share_memory_without_sharing_a_storage_arrive_equal(step: int) -> None:
    array = np.arange(3.0 * step)
    first, second = send((torch.from_numpy(array[: 2 * step]), torch.from_numpy(array[step:])))
    assert torch.equal(first, torch.from_numpy(array[: 2 * step]))
    assert torch.equal(second, torch.from_numpy(array[step:]))


def test_lazy_zeros_share_nothing() -> None:
    first, second = send((torch._efficientzerotensor((3,)), torch._efficientzerotensor((5,))))
    first.fill_(1)
    assert torch.equal(second, torch.zeros(5))


def test_tensors_at_odd_addresses_of_shared_memory_arrive_equal() -> None:
    memory = bytearray(range(64))
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    odd = torch.frombuffer(memory, dtype=torch.int64, offset=1, count=2)
    first, second = send((whole, odd))
    assert torch.equal(first, whole)
    assert torch.equal(second, odd)


def test_neighbours_in_memory_do_not_keep_each_other() -> None:
    table = torch.randn(2, LARGE)
    first, second = send((table[0], table[1]))
    assert torch.equal(first, table[0])
    assert torch.equal(second, table[1])
    assert first.untyped_storage().nbytes() == second.untyped_storage().nbytes() == 4 * LARGE


def test_only_the_bytes_that_are_looked_at_travel() -> None:
    table = torch.randn(1000, 1000)
    codec = Codec()
    rows = codec.encode([table[3], table[700]])
    assert rows.buffers == []
    assert len(rows.payload) < 2 * 4000 + 300
    column = codec.encode(table[:, 5])
    assert column.buffers == []
    assert len(column.payload) < 4000 + 200


def test_one_object_twice_arrives_as_one_object() -> None:
    tensor = torch.randn(3)
    parameter = nn.Parameter(torch.randn(3))
    first, again, (weight, weight_again) = send((tensor, [tensor], (parameter, parameter)))[0:3]
    assert again[0] is first
    assert weight is weight_again


def test_requires_grad_travels_and_the_originals_are_told() -> None:
    leaf = torch.randn(3, requires_grad=True)
    inner = leaf * 2
    parameter = nn.Parameter(torch.randn(2))
    value = [torch.ones(2), leaf, inner, parameter]
    codec = Codec()
    message = codec.encode(value)
    assert [id(tensor) for tensor in message.tensors] == [id(leaf), id(inner), id(parameter)]
    arrived = codec.decode(message.payload)
    assert [tensor.requires_grad for tensor in arrived] == [False, True, True, True]
    assert all(tensor.is_leaf for tensor in arrived)


@pytest.mark.parametrize("count", [3, LARGE])
def test_complex_tensors_require_grad_too(count: int) -> None:
    assert send(torch.randn(count, dtype=torch.complex64, requires_grad=True)).requires_grad


@pytest.mark.parametrize("count", [3, LARGE])
def test_what_was_computed_has_no_history_where_gradients_are_off(count: int) -> None:
    leaf = torch.randn(count, requires_grad=True)
    computed = leaf * 2
    codec = Codec()
    with torch.no_grad():
        message = codec.encode([leaf, computed])
    assert len(message.tensors) == 1
    assert message.tensors[0] is leaf
    arrived = codec.decode(message.payload, received(message))
    assert [tensor.requires_grad for tensor in arrived] == [True, False]


def test_attach_gives_history() -> None:
    seen: list[torch.Tensor] = []

    def attach(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        assert not any(tensor.requires_grad for tensor in tensors)
        seen.extend(tensors)
        return [tensor.requires_grad_() * 1 for tensor in tensors]

    leaf = torch.randn(3, requires_grad=True)
    parameter = nn.Parameter(torch.randn(2))
    sparse = torch.eye(2).to_sparse().requires_grad_()
    plain, first, second, third = send([torch.ones(1), leaf, parameter, sparse], attach)
    assert [tensor.is_leaf and tensor.requires_grad for tensor in seen] == [True] * 3
    assert plain.grad_fn is None
    assert first.grad_fn is not None
    assert third.grad_fn is not None
    assert isinstance(second, nn.Parameter)  # a parameter, though no leaf any more
    (first.sum() + second.sum()).backward()
    assert torch.equal(seen[0].grad, torch.ones(3))
    assert torch.equal(seen[1].grad, torch.ones(2))


def test_attach_is_not_called_without_need() -> None:
    assert send([torch.ones(2)], attach=lambda tensors: pytest.fail("called"))


def quiet(make: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def block_matrix() -> torch.Tensor:
    return torch.kron(torch.eye(3), torch.ones(2, 2))


SPARSE = {
    "coo": lambda: block_matrix().to_sparse(),
    "hybrid": lambda: block_matrix().to_sparse(1),
    "uncoalesced": lambda: torch.sparse_coo_tensor([[0, 0, 2]], [1.0, 2.0, 3.0], (4,)),
    "no entries": lambda: torch.sparse_coo_tensor(size=(3, 4)),
    "large": lambda: torch.randn(100, 100).to_sparse(),
    "csr": lambda: block_matrix().to_sparse_csr(),
    "csc": lambda: block_matrix().to_sparse_csc(),
    "bsr": lambda: block_matrix().to_sparse_bsr((2, 2)),
    "bsc": lambda: block_matrix().to_sparse_bsc((2, 2)),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE)
def test_sparse_tensors_arrive_equal(make: Any, grad: bool) -> None:
    tensor = quiet(make).requires_grad_(grad)
    arrived = send([tensor, torch.ones(1)])[0]
    assert arrived.layout is tensor.layout
    assert arrived.shape == tensor.shape
    assert arrived.requires_grad is grad
    if tensor.layout is torch.sparse_coo:
        assert arrived.is_coalesced() == tensor.is_coalesced()
        assert torch.equal(arrived.detach()._indices(), tensor.detach()._indices())
        assert arrived.sparse_dim() == tensor.sparse_dim()
    assert torch.equal(arrived.detach().to_dense(), tensor.detach().to_dense())


QUANTIZED = {
    "per tensor": lambda: torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 2, torch.qint8),
    "per channel": lambda: torch.quantize_per_channel(
        torch.randn(3, 4), torch.rand(3) + 0.1, torch.zeros(3, dtype=torch.int64), 0, torch.quint8
    ),
    "qint32": lambda: torch.quantize_per_tensor(torch.randn(5), 0.1, 2, torch.qint32),
    "a view": lambda: torch.quantize_per_tensor(torch.randn(9, 9), 0.1, 2, torch.qint8)[2].t(),
    "the end": lambda: torch.quantize_per_tensor(torch.randn(9), 0.1, 2, torch.qint8)[2:],
}


@pytest.mark.filterwarnings("ignore:.*quantize.*:UserWarning")
def test_of_a_quantized_tensor_only_a_part_travels() -> None:
    message = Codec().encode(
        torch.quantize_per_tensor(torch.randn(99_999), 0.1, 2, torch.qint8)[:9]
    )
    assert not message.buffers
    assert len(message.payload) < 1000


@pytest.mark.filterwarnings("ignore:.*quantize.*:UserWarning")
@pytest.mark.parametrize("make", QUANTIZED.values(), ids=QUANTIZED)
def test_quantized_tensors_arrive_equal(make: Any) -> None:
    tensor = quiet(make)
    arrived = send(tensor)
    assert arrived.qscheme() is tensor.qscheme()
    assert torch.equal(arrived.int_repr(), tensor.int_repr())
    assert torch.equal(arrived.dequantize(), tensor.dequantize())


class Tagged(torch.Tensor):
    """Keeps attributes, and has no way of its own to be pickled."""


class Custom(torch.Tensor):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return restore_custom, (self.as_subclass(torch.Tensor) + 1,)


def restore_custom(tensor: torch.Tensor) -> Custom:
    return tensor.as_subclass(Custom)


def test_subclasses_keep_type_attributes_and_grad() -> None:
    tensor = torch.randn(3).as_subclass(Tagged)
    tensor.tag = {"unit": "m"}
    tensor.requires_grad_()
    message = Codec().encode(tensor)
    assert message.tensors[0] is tensor
    arrived = send(tensor)
    assert type(arrived) is Tagged
    assert arrived.tag == {"unit": "m"}
    assert arrived.requires_grad
    assert arrived.is_leaf
    assert torch.equal(arrived, tensor)
    with_history = send(tensor, lambda tensors: [t.requires_grad_() * 1 for t in tensors])
    assert type(with_history) is Tagged
    assert with_history.grad_fn is not None
    assert with_history.tag == {"unit": "m"}


def test_a_subclass_with_its_own_reduction_has_its_way() -> None:
    arrived = send(torch.zeros(2).as_subclass(Custom))
    assert type(arrived) is Custom
    assert arrived.tolist() == [1.0, 1.0]


def test_attributes_of_a_plain_tensor_travel_even_in_a_circle() -> None:
    tensor = torch.ones(2)
    tensor.myself = tensor
    tensor.note = "x"
    arrived = send(tensor)
    assert arrived.note == "x"
    assert arrived.myself is arrived


def test_parameters_and_buffers_stay_what_they_are() -> None:
    parameter = nn.Parameter(torch.randn(2), requires_grad=False)
    arrived, buffer = send((parameter, nn.Buffer(torch.ones(2), persistent=False)))
    assert type(arrived) is nn.Parameter
    assert not arrived.requires_grad
    assert isinstance(buffer, nn.Buffer)
    assert buffer.persistent is False


def test_a_module_arrives_with_its_parameters_tied_as_they_were() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    arrived = send(module)
    assert arrived[2].weight is arrived[0].weight
    assert all(type(p) is nn.Parameter and p.is_leaf for p in arrived.parameters())
    x = torch.randn(4, 3)
    assert torch.equal(arrived.eval()(x), copy.deepcopy(module).eval()(x))


def test_meta_tensors_travel_as_their_description() -> None:
    tensor = torch.empty(3, 4, device="meta").t()
    arrived, parameter = send((tensor, nn.Parameter(torch.empty(2, device="meta"))))
    assert arrived.device.type == "meta"
    assert (arrived.shape, arrived.stride()) == (tensor.shape, tensor.stride())
    assert type(parameter) is nn.Parameter
    assert parameter.requires_grad


def test_nested_tensors_travel() -> None:
    nested = quiet(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    arrived = send(nested)
    assert [part.tolist() for part in arrived.unbind()] == [[1.0] * 2, [1.0] * 3]


def test_layouts_that_cannot_travel_are_refused_with_advice() -> None:
    with pytest.raises(SerializationError, match="to_dense"):
        Codec().encode(torch.ones(3).to_mkldnn())


def test_dual_tensors_are_refused_with_advice() -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3), torch.ones(3))
        for value in (dual, {"x": [dual * 2]}, nn.Parameter(torch.ones(3)) * dual):
            with pytest.raises(SerializationError, match="unpack_dual"):
                Codec().encode(value)
        with pytest.raises(SerializationError, match="unpack_dual"):
            Codec().encode(((torch.ones(3), dual), None), labels=("args", "kwargs"))
        with pytest.raises(SerializationError, match="unpack_dual"):
            Codec().encode(Packet(b"", [dual]))
        primal, tangent = send(tuple(forward_ad.unpack_dual(dual)))
        assert torch.equal(primal, tangent)


def test_storages_arrive_shared_with_their_tensors() -> None:
    tensor = torch.arange(4.0)
    arrived, storage, empty = send((tensor, tensor.untyped_storage(), torch.UntypedStorage(0)))
    assert storage.nbytes() == 16
    assert storage._cdata == arrived.untyped_storage()._cdata
    assert empty.nbytes() == 0
    typed = quiet(lambda: torch.tensor([1, 2]).storage())
    arrived_typed = send(typed)
    assert arrived_typed.dtype is torch.int64
    assert quiet(arrived_typed.tolist) == [1, 2]


def test_numpy_arrays_go_beside_the_payload_and_come_back_writable() -> None:
    codec = Codec()
    arrays = [np.arange(5), np.zeros((100, 100)), np.zeros((0, 3)), np.asfortranarray(np.eye(60))]
    message = codec.encode(arrays)
    assert len(message.buffers) == 2
    arrived = codec.decode(message.payload, received(message))
    for array, original in zip(arrived, arrays, strict=True):
        assert np.array_equal(array, original)
        assert array.dtype == original.dtype
        assert array.flags.writeable
    frozen = np.arange(5)
    frozen.flags.writeable = False
    assert np.array_equal(codec.decode(codec.encode(frozen).payload), frozen)


@pytest.mark.parametrize("value", [torch.arange(5000.0), np.arange(5000.0)], ids=["torch", "numpy"])
def test_memory_may_come_from_ctypes(value: Any) -> None:
    codec = Codec()
    message = codec.encode([value])
    mapped = mmap.mmap(-1, message.buffers[0].nbytes)
    mapped[:] = message.buffers[0].tobytes()
    memory = (ctypes.c_char * len(mapped)).from_buffer(mapped)
    (arrived,) = codec.decode(message.payload, [memory])
    assert arrived.tolist() == value.tolist()
    del arrived, memory
    mapped.close()  # would fail if anything still looked at it


def test_the_default_device_does_not_matter() -> None:
    tensor = torch.randn(90, 90)
    with torch.device("meta"):
        whole, turned, empty, storage = send(
            (tensor, tensor.t(), torch.ones(0, 3, device="cpu"), tensor.untyped_storage())
        )
    assert torch.equal(turned, tensor.t())
    assert storage.data_ptr() == whole.data_ptr()
    assert empty.device.type == "cpu"


def test_wrapper_subclasses_travel_with_the_tensors_they_wrap() -> None:
    message = Codec().encode(TwoTensor(torch.ones(5000), torch.zeros(2500, 2).view(-1)))
    assert len(message.buffers) == 2
    arrived = Codec().decode(message.payload, received(message))
    assert type(arrived) is TwoTensor
    assert torch.equal(arrived.a, torch.ones(5000))


def test_those_that_require_grad_are_refused_with_advice() -> None:
    """They would arrive as leaves, and gradients would never find their way back."""
    parts = [torch.ones(2), torch.ones(3)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    two = TwoTensor(torch.ones(3), torch.ones(3)).requires_grad_()
    for tensor in (jagged, two, two * 2, nn.Parameter(two.detach())):
        with pytest.raises(SerializationError, match=r"detach\(\)"):
            Codec().encode(tensor)
        arrived = send(tensor.detach())
        assert type(arrived) is type(tensor)
        assert not arrived.requires_grad


def test_other_objects_of_torch_are_just_pickled() -> None:
    value = [torch.Size([1, 2]), torch.float16, torch.device("cpu"), torch.strided]
    assert send(value) == value
    generator = torch.Generator().manual_seed(3)
    arrived = send(generator)
    assert torch.equal(torch.rand(2, generator=arrived), torch.rand(2, generator=generator))
