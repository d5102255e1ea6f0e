"""A tensor that lives on another worker.

`RemoteTensor` is a wrapper subclass: sizes, strides and dtype are here, the numbers are on a
worker. An operation on it is sent to the worker, and the program goes on at once with results whose
shapes were inferred here. Only what needs numbers waits: `item`, `cpu`, `tolist`, `numpy`,
printing, saving, and operations whose results' shapes depend on numbers.

Its device is `cpu:<n>`, n being the worker's id plus one. So torch treats two workers like two
devices: optimizers and clipping group tensors by it, `.cpu()` is a copy, and mixing them is an
error, except in `copy_` and in comparisons that wait. Tensors of this process may take part if they
have no dimensions. (Rejected:
`meta`, on which parts of torch.optim and nn.init silently do nothing, and torch's slot for other
devices, of which a process has one.) The price: torch drops the index of a cpu device, so
`torch.zeros(n, device=p.device)` stays here, and code that takes a pointer because `is_cpu` is true
would read nothing. Whatever hands out pointers is therefore refused.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from telegrad.errors import TelegradError
from telegrad.rpc.references.fetch import register_reducer
from telegrad.tensors.fetching import Together, fetch, fetch_one
from telegrad.tensors.operations import (
    Gives,
    Operation,
    Plan,
    Spec,
    infer,
    kind_of,
    meta_of,
    plan_of,
    spec_of,
    tensors_in,
    written_by,
)
from telegrad.tensors.stream import Handle, Stream
from telegrad.tensors.table import infer_there, number_of

__all__ = [
    "RemoteTensor",
    "is_staying_there",
    "moved_there",
    "moved_to",
    "operate",
    "respecify",
    "send",
    "specials",
    "staying_there",
]


class _Thread(threading.local):
    stays = False


_thread = _Thread()


@contextlib.contextmanager
def staying_there() -> Iterator[None]:
    """Inside, `.cpu()` and `.to("cpu")` leave remote tensors where they are: a module that is
    converted stays on its worker."""
    before, _thread.stays = _thread.stays, True
    try:
        yield
    finally:
        _thread.stays = before


def is_staying_there() -> bool:
    return _thread.stays


_grad: Any = torch._C.TensorBase.grad
_refuse_pointers: Callable[[Tensor], None] = torch._C._set_throw_on_mutable_data_ptr
"""Makes torch's own code raise an error where it would read from address 0."""


class RemoteTensor(Tensor):
    """A tensor on a worker: what the parameters and buffers of a remote module are, their
    gradients, and what is computed from them. Programs do not make one themselves.

    It has the methods of `torch.Tensor`. Shape, dtype and `requires_grad` are known here. Methods
    that need numbers wait for the worker: `item`, `cpu`, `tolist`, `numpy`, printing, saving.

    Args:
        handle: of the tensor there.
        spec: what is known of it here.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    handle: Handle
    spec: Spec
    together: Together | None

    @staticmethod
    def __new__(cls, handle: Handle, spec: Spec) -> RemoteTensor:
        if torch.is_inference_mode_enabled():
            # A view of a tensor that is no inference tensor must not be one, and one that is no
            # view may as well not be.
            with torch.inference_mode(False):
                return RemoteTensor.__new__(cls, handle, spec)
        is_dense = spec.layout is torch.strided
        tensor: RemoteTensor = Tensor._make_wrapper_subclass(
            cls,
            spec.shape,
            spec.stride if is_dense else None,
            spec.offset if is_dense else None,
            dtype=spec.dtype,
            layout=spec.layout,
            device=handle.stream.device,
        )
        if is_dense:
            _refuse_pointers(tensor)
        tensor.handle = handle
        tensor.spec = spec
        tensor.together = None
        return tensor

    def __init__(self, handle: Handle, spec: Spec) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        special = specials.get(func)
        if special is not None:
            return special(*args, **kwargs or {})
        plan = plan_of(func)
        run = _run_here if plan.draws_numbers else operate
        return run(plan, args, kwargs or {})

    @property
    def worker(self) -> str:
        """The name of the worker that it is on."""
        return self.handle.stream.worker_name

    # -- what waits for numbers

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        """A copy in this process. Waits for the worker. Gradients flow through it."""
        if _thread.stays:
            return self
        if self.requires_grad and torch.is_grad_enabled():
            here: Tensor = _Fetch.apply(self)  # type: ignore[no-untyped-call]
            return here
        return fetch_one(self)

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        named = {name: value for name, value in kwargs.items() if name != "copy"}
        parsed: Any = torch._C._nn._parse_to(*args, **named)
        device, dtype, *_ = parsed
        if device is None or device.type != "cpu" or device.index is not None:
            return super().to(*args, **kwargs)
        return self.cpu().to(dtype=dtype or self.dtype)

    def numpy(self, *, force: bool = False) -> Any:
        return self.cpu().numpy(force=force)

    def tolist(self) -> Any:
        return fetch_one(self).tolist()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        here: Any = self.cpu()
        return here.__array__(*args, **kwargs)

    def __format__(self, format_spec: str) -> str:
        if not format_spec:
            return str(self)
        return format(fetch_one(self), format_spec)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        kind = "Parameter" if isinstance(self, nn.Parameter) else "RemoteTensor"
        try:
            here = fetch_one(self).requires_grad_(self.requires_grad)
        except TelegradError as error:  # a debugger, say, must be able to print it
            return f"{kind} of shape {tuple(self.shape)} on worker {self.worker!r} ({error})"
        text = repr(nn.Parameter(here, self.requires_grad) if kind == "Parameter" else here)
        return f"{text} on worker {self.worker!r}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as the ordinary tensor that it is: a file says nothing of workers."""
        here: Any = fetch_one(self).requires_grad_(self.requires_grad)
        if isinstance(self, nn.Parameter):
            here = nn.Parameter(here, self.requires_grad)
        return here.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        known = memo.get(id(self))
        if isinstance(known, Tensor):
            return known
        if not self.is_leaf:
            raise RuntimeError(
                "only tensors made by the program itself can be deep-copied: use detach() first"
            )
        new: Tensor = self.detach().clone()
        if isinstance(self, nn.Parameter):
            new = nn.Parameter(new, self.requires_grad)
        memo[id(self)] = new.requires_grad_(self.requires_grad)
        return new

    # -- what torch's own would do to this side only

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        there = moved_to(self.handle.stream, new)
        self.handle.stream.put(("set_data", None, (self.handle.id, there.handle.id), (), {}))
        torch._C.TensorBase.data.__set__(self, there)  # type: ignore[attr-defined]
        self.spec = there.spec

    @property
    def grad(self) -> Tensor | None:
        gradient: Tensor | None = _grad.__get__(self)
        return gradient

    @grad.setter
    def grad(self, new: Tensor | None) -> None:
        if isinstance(new, Tensor) and not isinstance(new, RemoteTensor):
            raise RuntimeError(
                f"the gradient of a tensor on worker {self.worker!r} must be there too: assign "
                "torch.zeros_like(p).copy_(gradient)"
            )
        _grad.__set__(self, new)

    @grad.deleter
    def grad(self) -> None:
        _grad.__set__(self, None)

    # -- what would need the memory

    def data_ptr(self) -> NoReturn:
        self._refuse("data_ptr()")

    def untyped_storage(self) -> NoReturn:
        self._refuse("untyped_storage()")

    def storage(self) -> NoReturn:
        self._refuse("storage()")

    def share_memory_(self) -> NoReturn:
        self._refuse("share_memory_()")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("DLPack")

    def __dlpack_device__(self) -> NoReturn:
        self._refuse("DLPack")

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"{what} needs memory of this process, and this tensor is on worker {self.worker!r}: "
            "use .cpu() for a copy here"
        )


# -- between here and there


def send(stream: Stream, local: Tensor) -> RemoteTensor:
    """A copy, on a worker, of a tensor that is here."""
    tensor = RemoteTensor(Handle(stream), spec_of(torch.empty_like(local, device="meta")))
    stream.put(("keep", tensor.handle.id, (local.detach().clone(),), (), {}))
    return tensor


def moved_there(stream: Stream, local: Tensor) -> Tensor:
    """A copy, on a worker, of a tensor that is here. Gradients flow through it."""
    there: Tensor = _Send.apply(stream, local)  # type: ignore[no-untyped-call]
    return there


def moved_to(stream: Stream, tensor: Tensor) -> RemoteTensor:
    """The tensor itself if it is there, a copy if it is here.

    Raises:
        RuntimeError: it is on another worker.
    """
    if not isinstance(tensor, RemoteTensor):
        return send(stream, tensor)
    if tensor.handle.stream is not stream:
        raise RuntimeError(
            f"a tensor is on worker {tensor.worker!r}, and is needed on worker "
            f"{stream.worker_name!r}: copy_ copies from one worker to another"
        )
    return tensor


def respecify(tensor: RemoteTensor, spec: Spec) -> None:
    """Another shape or dtype for a tensor that has been converted there."""
    new = RemoteTensor(tensor.handle, spec)
    torch._C.TensorBase.data.__set__(tensor, new)  # type: ignore[attr-defined]
    tensor.spec = spec
    tensor.together = None


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: RemoteTensor) -> Tensor:
        ctx.stream = tensor.handle.stream
        return fetch_one(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Send.apply(ctx.stream, gradient)  # type: ignore[no-untyped-call]


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stream: Stream, tensor: Tensor) -> Tensor:
        return send(stream, tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, gradient.cpu()


def _reduce_for_wire(tensor: RemoteTensor, destination: int) -> Any:
    """As an argument or result of a call it is a copy, which has no history."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise TelegradError(
            f"a tensor on worker {tensor.worker!r} that requires grad cannot be sent in a call, "
            "which its gradient could not come back through: send p.cpu(), or p.detach() if no "
            "gradient is needed"
        )
    return _itself, (fetch_one(tensor),)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


register_reducer(RemoteTensor, _reduce_for_wire)


# -- operations

specials: dict[Any, Callable[..., Any]] = {}
"""What runs for operations that are more than one message, or less: see `special_operations`."""


def operate(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sends one operation; returns its results, which are not there yet."""
    stream: Stream | None = None
    key: list[Any] = [plan.name]  # what the results' shapes may depend on
    sent: list[Any] = []
    references: list[int] = []
    for place, value in enumerate(args):
        if type(value) is RemoteTensor:
            if value.handle.stream is not stream:
                stream = _meet(plan, stream, value.handle.stream)
            sent.append(value.handle.id)
            references.append(place)
            key.append(value.spec)
        elif isinstance(value, Tensor) or (
            isinstance(value, list | tuple) and any(isinstance(each, Tensor) for each in value)
        ):
            stream, reference = _refer(plan, stream, value, key)
            sent.append(reference)
            references.append(place)
        else:
            sent.append(value)
            key.append(kind_of(value))
    named: dict[str, Any] = {}
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            stream, reference = _refer(plan, stream, value, key)
            named[name] = [reference]
        elif isinstance(value, torch.device):
            if stream is None or value != stream.device:
                raise RuntimeError(
                    f"{plan.name} cannot make a tensor on {value} from one on a worker: "
                    "use .cpu() first"
                )
        elif isinstance(value, list):
            raise NotImplementedError(f"{plan.name}: {name}= does not work on remote tensors")
        else:
            named[name] = value
            key.append((name, kind_of(value)))
    assert stream is not None  # it was dispatched because of a remote tensor
    operation: Operation = plan.name, None, tuple(sent), tuple(references), named
    if plan.gives is Gives.NUMBERS:
        return stream.ask(number_of, operation)
    written = written_by(plan, args, kwargs) if plan.written else []
    local = [each for each in tensors_in(written) if type(each) is not RemoteTensor]
    if local:
        return _write_here(plan, args, kwargs, stream, local)
    specs = infer(tuple(key), plan, lambda: (_metas(args), _metas(kwargs)))
    if plan.gives is Gives.WRITTEN or plan.gives is Gives.NOTHING:
        stream.put(operation)
        if plan.gives is Gives.NOTHING:
            return None
        return written[0] if len(written) == 1 else tuple(written)
    count = plan.results if specs is None else len(specs)
    handles = [Handle(stream) for _ in range(count)]
    ids = handles[0].id if plan.gives is Gives.ONE else tuple(handle.id for handle in handles)
    operation = plan.name, ids, tuple(sent), tuple(references), named
    if specs is None:
        specs = tuple(Spec(*spec) for spec in stream.ask(infer_there, operation))
    else:
        stream.put(operation)
    results = list(map(RemoteTensor, handles, specs))
    if plan.gives is Gives.ONE:
        return results[0]
    return results if plan.gives is Gives.LIST else tuple(results)


def _meet(plan: Plan, stream: Stream | None, other: Stream) -> Stream:
    if stream is not None and stream is not other:
        raise RuntimeError(
            f"{plan.name}: expected all tensors to be on the same worker, but found at least two, "
            f"{stream.worker_name!r} and {other.worker_name!r}: copy_ copies from one to another"
        )
    return other


def _refer(plan: Plan, stream: Stream | None, value: Any, key: list[Any]) -> tuple[Any, Any]:
    """The stream and the reference (see `Operation`) of a tensor or a list of some."""
    if type(value) is RemoteTensor:
        key.append(value.spec)
        return _meet(plan, stream, value.handle.stream), value.handle.id
    if isinstance(value, list | tuple):
        references = []
        for each in value:
            stream, reference = _refer(plan, stream, each, key)
            references.append(reference)
        key.append(len(references))
        return stream, references
    if value is None:
        key.append(None)
        return stream, None
    key.append((value.dtype, tuple(value.shape)))
    is_plain = type(value) in (Tensor, nn.Parameter) and value.device.type == "cpu"
    if not is_plain or (value.dim() and not plan.takes_local_tensors):
        raise RuntimeError(
            f"{plan.name}: expected all tensors to be on the same worker, but one, a "
            f"{type(value).__name__} of shape {tuple(value.shape)}, is in this process: use .cpu() "
            "to compute here, or copy_ to copy it to a tensor there"
        )
    return stream, value.detach().clone() if value.dim() else (value.item(), value.dtype)


def _write_here(
    plan: Plan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    stream: Stream,
    targets: Sequence[Tensor],
) -> Any:
    """An operation that writes to tensors of this process. Those without dimensions mix with remote
    tensors: a copy is written to, and comes back.

    Raises:
        RuntimeError: one has dimensions.
    """
    if any(target.dim() for target in targets):
        raise RuntimeError(
            f"{plan.name} would write what is on worker {stream.worker_name!r} to a tensor of this "
            "process: use copy_"
        )
    copies = {id(target): send(stream, target) for target in targets}
    there = tree_map(lambda value: copies.get(id(value), value), (args, kwargs))
    result = operate(plan, *there)
    for target, value in zip(targets, fetch(list(copies.values())), strict=True):
        target.copy_(value)
    return targets[0] if plan.gives is Gives.WRITTEN and len(plan.written) == 1 else result


def _metas(value: Any) -> Any:
    return tree_map(_as_meta, value)


def _as_meta(value: Any) -> Any:
    if type(value) is RemoteTensor:
        return meta_of(value.spec)
    if isinstance(value, Tensor):
        return value.to("meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _run_here(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Random numbers come from this process's generator: they are those that the same program draws
    in one process. So the operation runs here, on copies, and its results go to the worker."""
    remote = next(each for each in tree_leaves((args, kwargs)) if type(each) is RemoteTensor)
    stream = remote.handle.stream

    def here(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return fetch_one(value) if type(value) is RemoteTensor else value

    copies, named = tree_map(here, args), tree_map(here, kwargs)
    results = plan.func(*copies, **named)
    if plan.gives is Gives.WRITTEN:
        (target,) = written_by(plan, args, kwargs)
        return target.copy_(results)
    return tree_map(lambda each: send(stream, each) if isinstance(each, Tensor) else each, results)
