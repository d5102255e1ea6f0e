"""Modules on other workers, used like modules of this process.

`module` makes one. The real module is on the worker; here is a tree of shells with the same names.
Its parameters and buffers are remote tensors, so whatever torch does with a module's tensors works
on them. A call is one message: `forward`, or another public method, runs on the worker.

What this side may have changed since the last call travels in order with the operations on
tensors, ahead of the call: which tensor has which name, which of them require grad, and which parts
are in training mode.

A shell says it is an instance of the real part's class, if this process knows that class. So
functions for `apply` that ask `isinstance(part, nn.Linear)` find what they look for.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from telegrad.autograd.caller_modes import capture
from telegrad.autograd.plain import Residents, engine_here, record_call
from telegrad.errors import SerializationError, TelegradError
from telegrad.nn.module_there import (
    FORWARD,
    ModuleThere,
    PartThere,
    Reference,
    TensorThere,
    attribute,
    call_method,
    copy_module,
    extra_representation,
    extra_state,
    make,
    representation,
    set_attribute,
    set_extra_state,
    submit_method,
)
from telegrad.remote_calls import RemoteFuture
from telegrad.rpc.calls.arguments import in_words_of_caller
from telegrad.rpc.calls.plain_arguments import checked_worker
from telegrad.rpc.group.worker_info import WorkerInfo
from telegrad.rpc.references.fetch import register_reducer
from telegrad.tensors.fetching import Together
from telegrad.tensors.operations import Spec
from telegrad.tensors.optimizers import hook_steps
from telegrad.tensors.remote_tensor import RemoteTensor, moved_to, staying_there
from telegrad.tensors.stream import Handle, Stream, stream_to
from telegrad.wire.function_names import name_of

__all__ = ["PlacedModule", "PlacedPart", "module"]


def module(
    worker: str | int | WorkerInfo, cls: Callable[..., nn.Module], /, *args: Any, **kwargs: Any
) -> PlacedModule:
    """Makes a module on a worker. Here it is an `nn.Module` like any other, whose parameters are
    real tensors that live on the worker.

    Args:
        worker: its name or rank, or what `rpc.get_worker_info` has returned for it.
        cls: a class of modules, or a function that returns a module. It runs on the worker, with
            the random numbers of that process: see `manual_seed`.
        args, kwargs: its arguments.

    Raises:
        Exception: what `cls` raises there.
        NotInitialized: this process is in no group.
        TypeError: `cls` is neither a class of modules nor a function, or `worker` is not a worker.
        TelegradError: there is no such worker.
        SerializationError: an argument cannot be sent. It says which.
        WorkerLost: the worker dies, or does not answer.

    Example::

        encoder = telegrad.module("worker1", nn.Linear, 20, 30)
        optimizer = torch.optim.AdamW(encoder.parameters())
        encoder(torch.randn(128, 20)).sum().backward()
        optimizer.step()
    """
    to = checked_worker("telegrad.module", worker)
    is_class = isinstance(cls, type)
    if not callable(cls) or isinstance(cls, nn.Module) or (is_class and not _makes_modules(cls)):
        what = f"the class {cls.__name__}" if isinstance(cls, type) else f"a {type(cls).__name__}"
        raise TypeError(
            f"telegrad.module() needs a class of modules, or a function that returns one, and got "
            f"{what}. Pass the class and its arguments apart: "
            'telegrad.module("name", nn.Linear, 3, 3)'
        )
    stream = stream_to(to)
    hook_steps()
    try:
        return PlacedModule(stream, stream.ask(make, name_of(cls) or cls, args, kwargs, timeout=0))
    except SerializationError as error:
        raise in_words_of_caller(error, _PLACES_IN_MAKE) from error.__cause__


def _makes_modules(cls: Any) -> bool:
    return issubclass(cls, nn.Module)


_PLACES_IN_MAKE = {"args[2][0]": "func", "args[2][1]": "args", "args[2][2]": "kwargs"}
_PLACES_IN_CALL = {"args[6]": "args", "args[7]": "kwargs"}
"""Where the program's arguments are among those of the call that brings them."""


class _Connection:
    """What the parts of one module share: the real module, and what it was told last."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.bound: dict[str, tuple[int | None, bool]] = {}
        self.training: dict[str, bool] = {}

    @property
    def stream(self) -> Stream:
        return self.handle.stream

    def tell(self, part: PlacedPart, path: str) -> None:
        """Sends what has changed in a part since the worker was told last."""
        bound: dict[str, tuple[int | None, bool]] = {}
        training: dict[str, bool] = {}
        for name, each in part.named_modules(prefix=path):
            if not isinstance(each, PlacedPart):
                raise TelegradError(
                    f"{name!r} of the module on worker {self.stream.worker_name!r} was replaced by "
                    "a module of this process. Make it part of the class there, or use it outside"
                )
            if self.training.get(name) is not each.training:
                training[name] = each.training
            dot = f"{name}." if name else ""
            for table in (each._parameters, each._buffers):
                for last, tensor in table.items():
                    state = self._state(dot + last, tensor)
                    if self.bound.get(dot + last) != state:
                        bound[dot + last] = state
        unknown = bound.keys() - self.bound.keys()
        if unknown:
            raise TelegradError(
                f"the module on worker {self.stream.worker_name!r} has no {sorted(unknown)}. Make "
                "that part of the class there"
            )
        # Noted after it is sent: another thread that finds it noted comes later.
        if bound:
            self.stream.put(("bind", None, (self.handle.id, bound), (), {}))
            self.bound.update(bound)
        if training:
            self.stream.put(("train", None, (self.handle.id, training), (), {}))
            self.training.update(training)

    def _state(self, name: str, tensor: Tensor | None) -> tuple[int | None, bool]:
        if tensor is None:
            return None, False
        if not isinstance(tensor, RemoteTensor):
            raise TelegradError(
                f"{name!r} of the module on worker {self.stream.worker_name!r} is a tensor of this "
                "process: copy_ it to the tensor there"
            )
        return moved_to(self.stream, tensor).handle.id, tensor.requires_grad

    def call(
        self, part: PlacedPart, path: str, method: str, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Runs a method of a part on the worker."""
        self.tell(part, path)
        leaves, ids, args, kwargs = self._inputs(part, args, kwargs)
        with self.stream.before() as before:
            try:
                result, replaced = record_call(
                    self.stream.worker,
                    call_method,
                    (before, self.handle.id, path, method, capture(), ids, args, kwargs),
                    residents=Residents(leaves, self.revive) if leaves else None,
                )
            except SerializationError as error:
                raise in_words_of_caller(error, _PLACES_IN_CALL) from error.__cause__
        self.note_replaced(part, path, replaced)
        return result

    def submit(
        self, part: PlacedPart, path: str, method: str, args: Any, kwargs: dict[str, Any]
    ) -> RemoteFuture[Any]:
        """The same, without waiting."""
        self.tell(part, path)
        leaves, ids, args, kwargs = self._inputs(part, args, kwargs)
        engine, worker = engine_here(), self.stream.worker
        before = self.stream.after_all()
        try:
            submitted = engine.submit(
                worker,
                submit_method,
                (before, self.handle.id, path, method, capture(), ids, args, kwargs),
                {},
                residents=Residents(leaves, self.revive) if leaves else None,
                on_news=partial(self.note_replaced, part, path),
            )
        except SerializationError as error:
            raise in_words_of_caller(error, _PLACES_IN_CALL) from error.__cause__
        return RemoteFuture(engine, worker, submitted)

    def leaves_of(self, part: PlacedPart) -> tuple[list[Tensor], list[int]]:
        """Parameters that get gradients by a call that is made now, and their ids there."""
        if not torch.is_grad_enabled():
            return [], []
        leaves: list[Tensor] = [p for p in part.parameters() if p.requires_grad]
        return leaves, [p.handle.id for p in leaves if isinstance(p, RemoteTensor)]

    def _inputs(
        self, part: PlacedPart, args: Any, kwargs: dict[str, Any]
    ) -> tuple[list[Tensor], list[int], Any, Any]:
        """Of a call: what gets gradients there, the ids of the parameters among that, and its
        arguments, in which references stand for what is there."""
        leaves, ids = self.leaves_of(part)
        if any(type(each) is RemoteTensor for each in tree_leaves((args, kwargs))):
            refer = partial(self._refer, leaves)
            args, kwargs = tree_map(refer, args), tree_map(refer, kwargs)
        return leaves, ids, args, kwargs

    def note_replaced(
        self, part: PlacedPart, path: str, replaced: Sequence[tuple[str, TensorThere]]
    ) -> None:
        """Buffers that a call has replaced on the worker are so here."""
        for name, buffer in replaced:
            tensor = RemoteTensor(Handle(self.stream, buffer.id), Spec(*buffer.spec))
            self.bound[name] = buffer.id, buffer.requires_grad
            owner, _, last = name[len(path) + 1 if path else 0 :].rpartition(".")
            part.get_submodule(owner)._buffers[last] = tensor

    def _refer(self, leaves: list[Tensor], value: Any) -> Any:
        if type(value) is not RemoteTensor:
            return value
        tensor = moved_to(self.stream, value)
        needs_gradient = tensor.requires_grad and torch.is_grad_enabled()
        if needs_gradient:
            leaves.append(tensor)
        return Reference(tensor.handle.id, needs_gradient)

    def revive(self, exported: Sequence[tuple[int, Spec] | None]) -> list[Tensor | None]:
        return [
            None if each is None else RemoteTensor(Handle(self.stream, each[0]), Spec(*each[1]))
            for each in exported
        ]


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class PlacedPart(nn.Module):
    """A part of a module on a worker. It can be called, too."""

    _connection: _Connection
    _path: str
    _class: type[nn.Module] | None

    def __init__(self, connection: _Connection, there: PartThere) -> None:
        super().__init__()
        self._connection = connection
        self._path = there.path
        self._class = _known_class(there.cls)
        self._class_name = there.cls[1].rpartition(".")[2]
        self.training = there.is_training
        self._non_persistent_buffers_set = set(there.not_persistent)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self.__dict__.get("_class") or type(self)

    @property
    def worker(self) -> str:
        """The name of the worker that the module is on."""
        return self._connection.stream.worker_name

    def _where(self) -> str:
        what = f"{self._path!r} of the module" if self._path else f"the {self._class_name}"
        return f"{what} on worker {self.worker!r}"

    # -- calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs on the worker."""
        return self._connection.call(self, self._path, FORWARD, args, kwargs)

    def submit(self, *args: Any, **kwargs: Any) -> RemoteFuture[Any]:
        """Calls the module without waiting. `module.method.submit(...)` does it for a method.

        The result stays on the worker until it is asked for. As an argument of a call or another
        `submit` the future stands for its result, which goes straight to the worker that needs it.
        Gradients go into `.grad` as those of a plain call do. Hooks that are registered in this
        process do not run.

        Returns:
            what `telegrad.submit` returns.

        Example::

            hidden = encoder.submit(x)  # does not wait
            loss = decoder(hidden).square().mean()  # from worker to worker
            loss.backward()
        """
        return self._connection.submit(self, self._path, FORWARD, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """What this side does not have: methods, and attributes that are not tensors."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
        is_method, value = self._ask(attribute, name)
        if not is_method:
            return value

        def method(*args: Any, **kwargs: Any) -> Any:
            return self._connection.call(self, self._path, name, args, kwargs)

        def submit(*args: Any, **kwargs: Any) -> RemoteFuture[Any]:
            return self._connection.submit(self, self._path, name, args, kwargs)

        method.__name__ = name
        method.submit = submit  # type: ignore[attr-defined]
        return method

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name == "training":
            super().__setattr__(name, value)
        elif isinstance(value, nn.Module) or name in self._modules:
            raise TelegradError(
                f"{self._where()} cannot get a module {name!r} from here. Make it part of the "
                "class there, or use it outside"
            )
        elif name in self._parameters or name in self._buffers or isinstance(value, Tensor):
            self._check(name, value)
            super().__setattr__(name, value)
        else:
            try:
                self._ask(set_attribute, name, value)
            except SerializationError as error:
                raise in_words_of_caller(error, {"args[2][3]": "value"}) from error.__cause__

    def _check(self, name: str, value: object) -> None:
        """
        Raises:
            TelegradError: this tensor cannot be put there under this name.
        """
        if name not in self._parameters and name not in self._buffers:
            raise TelegradError(f"{self._where()} has no parameter or buffer {name!r}")
        if isinstance(value, Tensor) and not isinstance(value, RemoteTensor):
            raise TelegradError(
                f"{name!r} is a tensor of this process, and belongs to {self._where()}: copy_ it "
                f"to the one there, or assign nn.Parameter(torch.empty_like(old).copy_(new))"
            )
        if isinstance(value, Tensor):
            moved_to(self._connection.stream, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        self._check(name, param)
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        self._check(name, tensor)
        super().register_buffer(name, tensor, persistent)

    def _ask(self, func: Callable[..., Any], *args: Any) -> Any:
        self._connection.tell(self, self._path)
        stream, handle = self._connection.stream, self._connection.handle
        return stream.ask(func, handle.id, self._path, *args)

    # -- like the real one

    def __getitem__(self, key: Any) -> Any:
        """Of lists, dictionaries and sequences of modules or parameters."""
        items = self._items()
        if isinstance(key, slice):
            raise TypeError(f"{self._where()} cannot be sliced from here")
        return items[key] if isinstance(key, str) else list(items.values())[key]

    def __iter__(self) -> Iterator[Any]:
        items = self._items()
        is_dictionary = isinstance(self, nn.ModuleDict | nn.ParameterDict)
        return iter(items if is_dictionary else items.values())

    def __len__(self) -> int:
        return len(self._items())

    def __bool__(self) -> bool:
        return not isinstance(self, _CONTAINERS) or bool(self._items())

    def _items(self) -> Mapping[str, Any]:
        if not isinstance(self, _CONTAINERS):
            raise TypeError(f"{self._where()} is not a container of modules or parameters")
        of_parameters = isinstance(self, nn.ParameterList | nn.ParameterDict)
        return self._parameters if of_parameters else self._modules

    def get_extra_state(self) -> Any:
        return self._ask(extra_state)

    def set_extra_state(self, state: Any) -> None:
        self._ask(set_extra_state, state)

    def extra_repr(self) -> str:
        text: str = self._ask(extra_representation)
        return text

    def __repr__(self) -> str:
        try:
            return f"{self._ask(representation)} on worker {self.worker!r}"
        except TelegradError as error:  # a debugger, say, must be able to print it
            return f"{self._class_name}(...) on worker {self.worker!r} ({error})"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PlacedPart:
        """Converts its tensors. It stays on its worker."""
        stream = self._connection.stream

        def convert(tensor: Tensor) -> Tensor:
            with staying_there():
                return moved_to(stream, fn(tensor))

        super()._apply(convert, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        if local_metadata.get("assign_to_params_buffers", False):
            state_dict = dict(state_dict)  # what is assigned has to be on the worker
            for name in (*self._parameters, *self._buffers):
                given = state_dict.get(prefix + name)
                if isinstance(given, Tensor):
                    with torch.no_grad():
                        state_dict[prefix + name] = moved_to(self._connection.stream, given)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    # -- what this side cannot do

    def add_module(self, name: str, module: nn.Module | None) -> None:
        raise TelegradError(
            f"{self._where()} cannot get a module {name!r} from here. Make it part of the class "
            "there, or use it outside"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"{self._where()} cannot be pickled or sent: save its state_dict(), and load it into "
            "one that is made in the same way"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(f"{self._where()} can only be copied with the whole module")

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TelegradError(
            f"{self._where()} runs on the worker, where a hook of this process is not called. "
            "Register it on the whole module, or in the class's __init__"
        )

    register_forward_hook = _refuse_hook
    register_forward_pre_hook = _refuse_hook
    register_full_backward_hook = _refuse_hook
    register_full_backward_pre_hook = _refuse_hook


class PlacedModule(PlacedPart):
    """A module on a worker; see `module`."""

    def __init__(self, stream: Stream, there: ModuleThere) -> None:
        connection = _Connection(Handle(stream, there.id))
        super().__init__(connection, there.parts[0])
        parts: dict[str, PlacedPart] = {"": self}
        tensors: dict[int, RemoteTensor] = {}

        def revived(each: TensorThere | None, *, is_parameter: bool) -> Any:
            if each is None:
                return None
            if each.id not in tensors:
                tensor = RemoteTensor(Handle(stream, each.id), Spec(*each.spec))
                if is_parameter:
                    tensor = nn.Parameter(tensor, each.requires_grad)  # type: ignore[assignment]
                tensors[each.id] = tensor
            return tensors[each.id]

        for each in there.parts:
            if each.same_as is not None:
                part = parts[each.same_as]
            else:
                part = self if not each.path else PlacedPart(connection, each)
                for name, parameter in each.parameters.items():
                    part._parameters[name] = revived(parameter, is_parameter=True)
                for name, buffer in each.buffers.items():
                    part._buffers[name] = revived(buffer, is_parameter=False)
                dot = f"{each.path}." if each.path else ""
                for name, tensor in {**part._parameters, **part._buffers}.items():
                    connection.bound[dot + name] = connection._state(dot + name, tensor)
                connection.training[each.path] = each.is_training
            parts[each.path] = part
            if each.path:
                owner, _, last = each.path.rpartition(".")
                parts[owner]._modules[last] = part

    register_forward_hook = nn.Module.register_forward_hook  # type: ignore[assignment]
    register_forward_pre_hook = nn.Module.register_forward_pre_hook  # type: ignore[assignment]
    register_full_backward_hook = nn.Module.register_full_backward_hook  # type: ignore[assignment]
    register_full_backward_pre_hook = nn.Module.register_full_backward_pre_hook  # type: ignore[assignment]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Its tensors are on the worker. Saving them, or `.cpu()`, fetches them together."""
        found = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        mine = [v for k, v in found.items() if k.startswith(prefix) and type(v) is RemoteTensor]
        Together([v for v in mine if v.handle.stream is self._connection.stream])
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> PlacedModule:
        stream = self._connection.stream
        new = PlacedModule(stream, self._ask(copy_module))
        memo[id(self)] = new
        for old, to in zip(self.modules(), new.modules(), strict=True):
            for tables in ((old._parameters, to._parameters), (old._buffers, to._buffers)):
                for name, tensor in tables[0].items():  # those of another module may be tied to it
                    tables[1][name] = memo.setdefault(id(tensor), tables[1][name])
        for name, value in self.__dict__.items():
            if "_hooks" in name:
                new.__dict__[name] = copy.deepcopy(value, memo)
        return new


def _known_class(name: tuple[str, str]) -> type[nn.Module] | None:
    """A class of this process by its module and qualified name."""
    found: Any = sys.modules.get(name[0])
    for each in name[1].split("."):
        found = getattr(found, each, None)
    return found if isinstance(found, type) and issubclass(found, nn.Module) else None


def _refuse_to_send(part: PlacedPart, _destination: int) -> NoReturn:
    raise TelegradError(
        f"{part._where()} cannot be sent to another worker: call it here and send its result, or "
        "make an object there that holds the module (telegrad.object) and call its methods"
    )


register_reducer(PlacedPart, _refuse_to_send)
