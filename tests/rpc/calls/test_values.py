"""Values through real calls between two processes."""

from __future__ import annotations

import dataclasses
import enum
import gc
import math
import os

import pytest
import torch

from telegrad import rpc
from telegrad.rpc.group import current
from telegrad.testing.cluster import cluster

# torch warns once a process of what it calls experimental
pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:.*quantiz.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.ao.*"),
]

MB = 1 << 20
LARGE = 1 << 18  # elements: enough to leave the payload and to go through shared memory

DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
    },
    key=str,
)


def echo(value):
    return value


def describe(tensor):
    return str(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()), str(tensor.layout)


def fill(tensor, value):
    tensor.fill_(value)
    return tensor


@pytest.fixture(scope="module", params=["shared memory", "tcp"])
def group(request):
    options = {"transport": "tcp"} if request.param == "tcp" else {}
    with cluster(2, **options) as running:
        yield running


@pytest.fixture(autouse=True)
def _group(group):
    """Started before anything is counted as left over."""


def bits(tensor):
    """A dense tensor's bytes: also of types that cannot be compared."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def sample(dtype, count):
    data = torch.arange(count * dtype.itemsize, dtype=torch.int64) % 251
    if dtype is torch.bool:
        data = data % 2
    return data.to(torch.uint8).view(dtype)


@pytest.mark.filterwarnings("ignore:BComplex32 support is experimental")  # torch 2.15
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 7, 70_000])
def test_every_dtype(dtype, count):
    try:
        tensor = sample(dtype, count)
    except RuntimeError as error:
        pytest.skip(f"torch cannot make one: {error}")
    got = rpc.rpc_sync("worker1", echo, (tensor,))
    assert got.dtype == dtype
    assert got.shape == tensor.shape
    assert bits(got) == bits(tensor)


@pytest.mark.parametrize("size", [3, 600], ids=["small", "large"])
@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.t(),
        lambda t: t[::2, 1:],
        lambda t: t[1],
        lambda t: t.expand(2, *t.shape),
        lambda t: t.as_strided((t.shape[0] - 1, 2), (t.shape[1], 1), 1),
        lambda t: t.unsqueeze(0).unsqueeze(-1).permute(3, 1, 0, 2),
        lambda t: t[0, 0],
        lambda t: t[:0],
        lambda t: torch.complex(t, -t),
        lambda t: torch.complex(t, -t).conj(),
        lambda t: torch.complex(t, -t).imag,
        lambda t: t.to(memory_format=torch.contiguous_format),
    ],
    ids=range(12),
)
def test_views_and_strides(make, size):
    tensor = make(torch.arange(float(size * size)).reshape(size, size))
    got = rpc.rpc_sync("worker1", echo, (tensor,))
    assert torch.equal(got, tensor)
    assert got.shape == tensor.shape
    dtype, shape, _, layout = rpc.rpc_sync("worker1", describe, (tensor,))
    assert (dtype, shape, layout) == (str(tensor.dtype), tuple(tensor.shape), str(tensor.layout))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1, 1)])
def test_scalars_and_empty_shapes(shape):
    tensor = torch.full(shape, math.pi)
    got = rpc.rpc_sync("worker1", echo, (tensor,))
    assert got.shape == tensor.shape
    assert torch.equal(got, tensor)


@pytest.mark.parametrize("size", [4, 1000])
@pytest.mark.parametrize("is_coalesced", [True, False])
def test_sparse_coo(size, is_coalesced):
    indices = torch.stack([torch.arange(size) % 3, torch.arange(size) % 5])
    tensor = torch.sparse_coo_tensor(indices, torch.arange(float(size)), (3, 5))
    if is_coalesced:
        tensor = tensor.coalesce()
    got = rpc.rpc_sync("worker1", echo, (tensor,))
    assert got.layout == torch.sparse_coo
    assert got.is_coalesced() == is_coalesced
    assert torch.equal(got._indices(), tensor._indices())
    assert torch.equal(got._values(), tensor._values())


@pytest.mark.parametrize("size", [4, 300])
def test_sparse_csr(size):
    tensor = torch.eye(size).to_sparse_csr()
    got = rpc.rpc_sync("worker1", echo, (tensor,))
    assert got.layout == torch.sparse_csr
    assert torch.equal(got.to_dense(), torch.eye(size))


@pytest.mark.parametrize("size", [8, LARGE])
def test_quantized(size):
    plain = torch.linspace(-1, 1, size)
    for tensor in (
        torch.quantize_per_tensor(plain, 0.1, 3, torch.qint8),
        torch.quantize_per_channel(
            plain.reshape(2, -1), torch.tensor([0.1, 0.2]), torch.tensor([1, 2]), 0, torch.quint8
        ),
    ):
        got = rpc.rpc_sync("worker1", echo, (tensor,))
        assert got.qscheme() == tensor.qscheme()
        assert torch.equal(got.int_repr(), tensor.int_repr())
        assert torch.equal(got.dequantize(), tensor.dequantize())


class Labelled(torch.Tensor):
    """A subclass with an attribute of its own."""


def test_parameters_and_subclasses_keep_their_type():
    parameter = torch.nn.Parameter(torch.ones(3))
    got = rpc.rpc_sync("worker1", echo, (parameter,))
    assert isinstance(got, torch.nn.Parameter)
    assert torch.equal(got, parameter)
    assert got.requires_grad
    labelled = torch.ones(3).as_subclass(Labelled)
    labelled.label = "x"
    got = rpc.rpc_sync("worker1", echo, (labelled,))
    assert type(got) is Labelled
    assert got.label == "x"


def test_modules_travel_whole():
    module = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300))
    got = rpc.rpc_sync("worker1", echo, (module,))
    for name, value in module.state_dict().items():
        assert torch.equal(got.state_dict()[name], value)


@pytest.mark.parametrize("size", [4, LARGE])
def test_shared_storage_arrives_shared_and_once(size):
    base = torch.zeros(size)
    a, b, same = rpc.rpc_sync("worker1", echo, ((base[: size // 2], base[size // 4 :], base),))
    assert a.untyped_storage().data_ptr() == same.untyped_storage().data_ptr()
    a.fill_(1)
    assert same.sum() == size // 2
    assert b.sum() == size // 4
    twice = rpc.rpc_sync("worker1", echo, ([base, base],))
    assert twice[0] is twice[1]


@pytest.mark.parametrize("size", [4, LARGE])
def test_what_arrives_is_a_copy(size):
    mine = torch.zeros(size)
    theirs = rpc.rpc_sync("worker1", fill, (mine, 5.0))
    assert mine.sum() == 0
    assert theirs.sum() == 5.0 * size
    theirs.fill_(7.0)  # writable, and nobody else's
    again = rpc.rpc_sync("worker1", echo, (mine,))
    assert theirs.sum() == 7.0 * size
    assert again.sum() == 0
    to_self = rpc.rpc_sync("worker0", fill, (mine, 5.0))
    assert mine.sum() == 0
    assert to_self.sum() == 5.0 * size


@pytest.mark.parametrize("size", [4, LARGE])
def test_arguments_may_change_once_an_asynchronous_call_is_made(size):
    tensor = torch.zeros(size)
    futures = []
    for number in range(5):
        tensor.fill_(number)
        futures.append(rpc.rpc_async("worker1", echo, (tensor,)))
    tensor.fill_(-1)
    for number, future in enumerate(futures):
        assert bool((future.wait() == number).all())


def test_many_buffers_in_one_message():
    tensors = [torch.full((size,), float(size)) for size in (1, 50, 20_000, 100_000)] * 40
    got = rpc.rpc_sync("worker1", echo, (tensors,))
    assert all(torch.equal(a, b) for a, b in zip(tensors, got, strict=True))


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: float
    where: torch.Tensor


def test_containers_and_other_objects():
    value = {
        "list": [1, 2.5, None, True, b"bytes", "text"],
        ("tuple", 1): {frozenset([1]), Colour.RED},
        "range": range(3),
        "slice": slice(1, None, 2),
        "size": torch.Size([1, 2]),
        "dtype": torch.float16,
        "device": torch.device("cpu"),
        "large": "x" * (3 * MB),
    }
    assert rpc.rpc_sync("worker1", echo, (value,)) == value
    point = rpc.rpc_sync("worker1", echo, (Point(1.0, torch.ones(2)),))
    assert (point.x, point.where.sum()) == (1.0, 2)
    loop = []
    loop.append(loop)
    got = rpc.rpc_sync("worker1", echo, (loop,))
    assert got[0] is got


def numbers_of_segments():
    """The number of the segment that this worker has lent last, and how many it has borrowed."""
    peers = current.current().agent.network.members.peers()
    memories = [peer.memory for peer in peers if peer.memory is not None]
    last = max((number for memory in memories for number in memory._own), default=0)
    return last, sum(len(memory._theirs) for memory in memories)


def test_memory_is_used_again():
    tensor = torch.zeros(MB)  # 4 MB
    rpc.rpc_sync("worker1", echo, (tensor,))
    lent_before, _ = numbers_of_segments()
    lent_there_before, _ = rpc.rpc_sync("worker1", numbers_of_segments)
    resident_before = resident()
    for number in range(50):
        tensor.fill_(number)
        assert rpc.rpc_sync("worker1", echo, (tensor,))[-1] == number
    assert numbers_of_segments()[0] - lent_before <= 2
    assert rpc.rpc_sync("worker1", numbers_of_segments)[0] - lent_there_before <= 2
    assert resident() - resident_before < 64 * MB


def resident():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_kept_tensor_stays_as_it_is_while_others_come():
    kept = [rpc.rpc_sync("worker1", echo, (torch.full((LARGE,), float(i)),)) for i in range(5)]
    for _ in range(20):
        rpc.rpc_sync("worker1", echo, (torch.full((LARGE,), -1.0),))
    for number, tensor in enumerate(kept):
        assert bool((tensor == number).all())


def test_memory_comes_back_when_tensors_die():
    memories = [
        p.memory for p in current.current().agent.network.members.peers() if p.memory is not None
    ]
    kept = [rpc.rpc_sync("worker1", echo, (torch.zeros(LARGE),)) for _ in range(5)]
    lent = rpc.rpc_sync("worker1", in_use)
    if memories:
        assert lent >= 5
    kept.clear()
    gc.collect()
    assert rpc.rpc_sync("worker1", in_use) <= 1


def in_use():
    """Segments that this worker has lent and not got back."""
    gc.collect()
    peers = current.current().agent.network.members.peers()
    return sum(
        segment.mapping[0] != 0
        for peer in peers
        if peer.memory is not None
        for segment in peer.memory._own.values()
    )
