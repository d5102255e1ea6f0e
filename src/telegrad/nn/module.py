"""Modules on other workers, used like modules of this process.

`module` makes one. The real module is on the worker; here is a tree of shells with the same names.
Its parameters and buffers are remote tensors, so whatever torch does with a module's tensors works
on them. A call is one message: `forward`, or another public method, runs on the worker.

What either side changes, the other learns with the next call: see `telegrad.nn.connection`.

A shell says it is an instance of the real part's class, or of the nearest base that this process
knows. So functions for `apply` that ask `isinstance(part, nn.Linear)` find what they look for.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from telegrad.errors import SerializationError, TelegradError
from telegrad.nn.connection import Connection
from telegrad.nn.made import PartThere
from telegrad.nn.module_there import (
    FORWARD,
    ModuleThere,
    attribute,
    copy_module,
    extra_representation,
    extra_state,
    make,
    representation,
    set_attribute,
    set_extra_state,
)
from telegrad.remote_calls import RemoteFuture, refuse_history
from telegrad.rpc.calls.arguments import checked_worker, in_words_of_caller
from telegrad.rpc.group.worker_info import WorkerInfo
from telegrad.rpc.references.fetch import register_reducer
from telegrad.tensors.fetching import Together
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
        TelegradError: there is no such worker; or an argument is a tensor with a history, to which
            no gradient would come back.
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
    refuse_history("telegrad.module", args, kwargs)
    stream = stream_to(to)
    hook_steps()
    try:
        return PlacedModule(stream, stream.ask(make, name_of(cls) or cls, args, kwargs, timeout=0))
    except SerializationError as error:
        raise in_words_of_caller(error, _PLACES_IN_MAKE) from error.__cause__


def _makes_modules(cls: Any) -> bool:
    return issubclass(cls, nn.Module)


_PLACES_IN_MAKE = {"args[2][0]": "func", "args[2][1]": "args", "args[2][2]": "kwargs"}


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class PlacedPart(nn.Module):
    """A part of a module on a worker. It can be called, too."""

    _connection: Connection
    _path: str
    _number: int
    _is_removed: bool
    _class: type[nn.Module] | None

    def __init__(self, connection: Connection, there: PartThere) -> None:
        super().__init__()
        self._connection = connection
        self._path = there.path
        self._number = there.number
        self._is_removed = False
        self._class = next(filter(None, map(_known_class, there.classes)), None)
        self._class_name = there.classes[0][1].rpartition(".")[2]

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
            return self._connection.stand_in(self, value)

        def method(*args: Any, **kwargs: Any) -> Any:
            return self._connection.call(self, self._path, name, args, kwargs)

        def submit(*args: Any, **kwargs: Any) -> RemoteFuture[Any]:
            return self._connection.submit(self, self._path, name, args, kwargs)

        method.__name__ = name
        method.submit = submit  # type: ignore[attr-defined]
        return method

    def __delattr__(self, name: str) -> None:
        tables = self._parameters, self._buffers, self._modules
        if any(name in table for table in tables):
            raise TelegradError(
                f"{name!r} of {self._where()} cannot be deleted from here: do it in a method of "
                "the class, or assign None to a parameter or buffer"
            )
        super().__delattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":  # what torch.nn.utils.parametrize does
            raise TelegradError(
                f"{self._where()} cannot get another class from here, as parametrizations give it: "
                "register them in a method of the class there, or in its __init__"
            )
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
                changes = self._ask(set_attribute, name, value, self._connection.version)
            except SerializationError as error:
                raise in_words_of_caller(error, {"args[2][3]": "value"}) from error.__cause__
            self._connection.follow(self, changes)

    def _check(self, name: str, value: object) -> None:
        """
        Raises:
            TelegradError: this tensor cannot be put there under this name.
        """
        if name not in self._parameters and name not in self._buffers:
            raise TelegradError(
                f"{self._where()} has no parameter or buffer {name!r}, and none can be added from "
                "here: do it in its __init__ or in another method of the class"
            )
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
        connection = Connection(Handle(stream, there.id), self, PlacedPart)
        super().__init__(connection, there.parts[0])
        connection.build(self, there.parts)

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
