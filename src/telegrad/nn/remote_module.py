"""`RemoteModule`: a module that lives on another worker, used like a local one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.remote_device import _remote_device
from torch.futures import Future
from torch.utils._pytree import tree_map

from telegrad import rpc
from telegrad.drop_in import is_drop_in, torch_phrase
from telegrad.errors import NotInitialized, RRefError
from telegrad.rpc import RRef
from telegrad.rpc.calls.arguments import checked_arguments
from telegrad.rpc.references.fetch import register_reducer

__all__ = ["RemoteModule"]

PICKLED_ATTRIBUTES = ("on", "device", "is_device_map_set", "is_scriptable", "module_rref")
"""What travels when a remote module is sent to another worker; what a program has set on it
besides does not."""

_UNSUPPORTED = (
    "add_module",
    "apply",
    "bfloat16",
    "buffers",
    "children",
    "cpu",
    "cuda",
    "double",
    "extra_repr",
    "float",
    "get_buffer",
    "get_parameter",
    "get_submodule",
    "half",
    "ipu",
    "load_state_dict",
    "modules",
    "named_buffers",
    "named_children",
    "named_modules",
    "named_parameters",
    "register_backward_hook",
    "register_buffer",
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_module",
    "register_parameter",
    "requires_grad_",
    "share_memory",
    "state_dict",
    "to",
    "to_empty",
    "type",
    "xpu",
    "zero_grad",
)
"""Methods of `nn.Module` that would act on the empty shell here, and not on the module there."""


class RemoteModule(nn.Module):
    """A module on another worker. `forward` runs there; gradients find their way there, too.

    Sending it to a third worker sends a reference: the module stays where it is.

    Args:
        remote_device: where: `"worker1"`, `"worker1/cuda:0"`, `"rank:1/cpu"`.
        module_cls: a class of modules, or a function that returns one. TorchScript modules work.
        args, kwargs: what it takes.

    Raises:
        NotInitialized: no worker runs in this process.
        ValueError: `remote_device` cannot be understood.
        TypeError: `module_cls`, `args` or `kwargs` is not of the right type.

    Example::

        linear = RemoteModule("worker1/cpu", nn.Linear, args=(20, 30))
        y = linear(torch.randn(128, 20))
    """

    on: str | int
    device: str
    is_device_map_set: bool
    is_scriptable: bool
    module_rref: RRef[nn.Module]

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._place(remote_device)
        given, named = checked_creation(module_cls, args, kwargs)
        self.module_rref = rpc.remote(
            self.on, _create_module, (module_cls, given, named, self.device)
        )

    @classmethod
    def init_from_module_rref(
        cls, remote_device: str, module_rref: RRef[nn.Module]
    ) -> RemoteModule:
        """A remote module of a module that is there already.

        Args:
            remote_device: the worker and device of the module.
        """
        return from_module_rref(cls, remote_device, module_rref)

    def _place(self, remote_device: str) -> None:
        if not rpc.is_initialized():
            raise NotInitialized("RemoteModule only works in RPC: call init_rpc() first")
        place = _remote_device(remote_device)
        worker = place.worker_name() if place.rank() is None else place.rank()
        if worker is None:
            raise ValueError(f"remote_device {remote_device!r} names no worker")
        self.on = worker
        self.device = str(place.device())
        self.is_device_map_set = self._has_device_map()
        self.is_scriptable = False

    def _has_device_map(self) -> bool:
        """Whether tensors come back on the device that they were sent from."""
        return False

    # -- calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's `forward` returns there."""
        return rpc.rpc_sync(self.module_rref.owner().id, _forward, self._call(args, kwargs))

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """The same, as a future."""
        return rpc.rpc_async(self.module_rref.owner().id, _forward, self._call(args, kwargs))

    def forward_rref(self, *args: Any, **kwargs: Any) -> RRef[Any]:
        """The same, as a reference: the result stays there."""
        return rpc.remote(self.module_rref.owner().id, _forward, self._call(args, kwargs))

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        return self.module_rref, self.device, self.is_device_map_set, args, kwargs

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """References to the module's parameters, for a `DistributedOptimizer`."""
        found: list[RRef[nn.Parameter]] = rpc.rpc_sync(
            self.module_rref.owner().id, _parameter_rrefs, (self.module_rref, recurse)
        )
        return found

    def get_module_rref(self) -> RRef[nn.Module]:
        """A reference to the module itself."""
        return self.module_rref

    def train(self, mode: bool = True) -> RemoteModule:
        """Sets the module, there, to training or evaluation."""
        rpc.rpc_sync(self.module_rref.owner().id, _set_training, (self.module_rref, mode))
        self.training = mode
        return self

    def eval(self) -> RemoteModule:
        return self.train(False)

    # -- what it is not

    def parameters(self, recurse: bool = True) -> NoReturn:
        raise ValueError(
            f"{self._elsewhere('parameters')}: use remote_parameters()"
            + torch_phrase(
                "Method ``parameters`` not supported for RemoteModule. Please use "
                "``remote_parameters`` instead."
            )
        )

    def _elsewhere(self, name: str) -> str:
        return f"{name}() does not work on a RemoteModule, whose module is on worker {self.on!r}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.on}/{self.device})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RRefError(
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when "
            "using RPC"
        )

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in PICKLED_ATTRIBUTES}

    @classmethod
    def _from_fields(cls, fields: Mapping[str, Any]) -> RemoteModule:
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        for name, value in fields.items():
            setattr(module, name, value)
        return module


def from_module_rref(
    cls: type[RemoteModule], remote_device: str, module_rref: RRef[nn.Module]
) -> RemoteModule:
    """See `RemoteModule.init_from_module_rref`."""
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    module._place(remote_device)
    module.module_rref = module_rref
    return module


def _refuse(name: str) -> Callable[..., NoReturn]:
    def method(self: RemoteModule, *args: Any, **kwargs: Any) -> NoReturn:
        if "parameters" in name or name == "named_modules":
            hint = "use remote_parameters() for references to its parameters"
        elif name in ("modules", "children", "named_children"):  # what nn.Module walks by itself
            hint = "it cannot be walked from here; remote_parameters() refers to its parameters"
        else:
            hint = f"call it there, by get_module_rref().rpc_sync().{name}(...)"
        phrase = torch_phrase(f"Method ``{name}`` not supported for RemoteModule")
        raise ValueError(f"{self._elsewhere(name)}: {hint}{phrase}")

    method.__name__ = name
    method.__qualname__ = f"RemoteModule.{name}"
    method.__doc__ = "Not supported: the module is elsewhere."
    return method


for _name in _UNSUPPORTED:
    setattr(RemoteModule, _name, _refuse(_name))


def _reduce(module: RemoteModule, destination: int) -> tuple[Any, ...]:
    return _rebuild, (type(module), module._fields())


def _rebuild(cls: type[RemoteModule], fields: Mapping[str, Any]) -> RemoteModule:
    return cls._from_fields(fields)


register_reducer(RemoteModule, _reduce)


def checked_creation(
    module_cls: object, args: object, kwargs: object
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a module's constructor.

    Raises:
        TypeError: `module_cls` cannot make a module, or the arguments are not a tuple and a dict.
    """
    is_module = isinstance(module_cls, nn.Module)
    is_other_class = isinstance(module_cls, type) and not issubclass(module_cls, nn.Module)
    if is_drop_in():
        is_other_class = False  # torch finds out when the module is used
    if is_module or is_other_class or not callable(module_cls):
        got = f"an instance of {type(module_cls).__name__}"
        if is_other_class:
            got = f"the class {getattr(module_cls, '__name__', '')}, which is not a module's"
        raise TypeError(
            "module_cls must be a class of modules, such as nn.Linear, or a function that returns "
            f"a module, got {got}. What it takes goes into args="
        )
    given, named = checked_arguments("RemoteModule", args, kwargs)
    return given, named or {}


# -- at the owner


def _create_module(
    module_cls: Callable[..., nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: str,
) -> nn.Module:
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"module_cls must return an nn.Module, and returned a {type(module).__name__}"
            + torch_phrase(
                "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, "
                f"but it returns an instance of {type(module)}."
            )
        )
    try:
        return module.to(device)
    except Exception as error:
        raise ValueError(
            f"the module cannot be moved to {device!r} on worker "
            f"{rpc.get_worker_info().name!r}: {error}"
        ) from error


def _forward(
    module_rref: RRef[nn.Module],
    device: str,
    is_device_map_set: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    module = module_rref.local_value()
    place = torch.device(device)
    if place.type == "cpu":
        return module(*args, **kwargs)
    args, kwargs = tree_map(lambda value: _moved(value, place), (args, kwargs))
    result = module(*args, **kwargs)
    if is_device_map_set:
        return result
    return tree_map(lambda value: _moved(value, torch.device("cpu")), result)


def _moved(value: Any, place: torch.device) -> Any:
    return value.to(place) if isinstance(value, torch.Tensor) else value


def _parameter_rrefs(module_rref: RRef[nn.Module], recurse: bool) -> list[RRef[nn.Parameter]]:
    return [RRef(parameter) for parameter in module_rref.local_value().parameters(recurse)]


def _set_training(module_rref: RRef[nn.Module], mode: bool) -> None:
    module_rref.local_value().train(mode)
