"""In the place of `torch.distributed.nn.api.remote_module`; with remote modules that have a
TorchScript interface, which script functions can call.

The methods of such a module have the types that the interface gives them. They are written for each
interface, in a module of a name that is the same on all workers, since one calls a function of it
on the other.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from telegrad import rpc
from telegrad.compat.rpc.agents import find_face
from telegrad.compat.torchscript.compiling import (
    Exactly,
    compiled,
    core,
    generating,
    internal,
    module_of,
    script,
    state,
)
from telegrad.compat.torchscript.references import reference_type
from telegrad.errors import SerializationError
from telegrad.nn import remote_module as native
from telegrad.rpc.references.fetch import register_reducer
from telegrad.rpc.references.rref import RRef
from telegrad.wire import revival

__all__ = ["RemoteModule"]

_REMOTE_MODULE_PICKLED_ATTRIBUTES = native.PICKLED_ATTRIBUTES
_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING = ("forward_async", "forward")


class _RemoteModule(native.RemoteModule):
    """
    Args:
        _module_interface_cls: a TorchScript interface, for a remote module that can be scripted.
            `module_cls` may return an ordinary module, which is scripted there.
    """

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        if _module_interface_cls is None:
            super().__init__(remote_device, module_cls, args, kwargs)
            return
        nn.Module.__init__(self)
        self._place(remote_device)
        self._use_interface(_module_interface_cls)
        create = (native._create_module, module_cls, tuple(args or ()), dict(kwargs or {}))
        self.module_rref = rpc.rpc_sync(
            self.on, _create, (*create, self.device, _module_interface_cls)
        )

    def _use_interface(self, interface: Any) -> None:
        if torch.device(self.device).type != "cpu":
            raise ValueError(
                "a remote module with a TorchScript interface must be on the CPU, not on "
                f"{self.device}"
            )
        _give_methods(self, interface)
        self.is_scriptable = True

    # Of a scripted remote module, torch.save calls these.
    @torch.jit.export
    def __getstate__(self) -> None:
        raise RuntimeError(
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when "
            "using RPC"
        )

    @torch.jit.export
    def __setstate__(self, state: None) -> None:
        raise RuntimeError(
            "Cannot unpickle RemoteModule in python pickler. RemoteModule can only be unpickled "
            "when using RPC"
        )

    def _has_device_map(self) -> bool:
        agent = find_face()
        return agent is not None and bool(agent._get_device_map(agent.get_worker_info(self.on)))

    @classmethod
    def _from_fields(cls, fields: Mapping[str, Any]) -> _RemoteModule:
        # As torch makes it: the fields and two methods, and none of what nn.Module sets up.
        module = cls.__new__(cls)
        module.__dict__.update(fields)
        for method in (native.RemoteModule.forward_async, native.RemoteModule.forward):
            module.__dict__[method.__name__] = types.MethodType(method, module)
        return module


# In the place of the annotations of the base, whose texts TorchScript cannot read: the types of
# other attributes are taken from their values.
_RemoteModule.__annotations__ = {"is_scriptable": bool}


class RemoteModule(_RemoteModule):
    """A module on another worker: see `telegrad.nn.RemoteModule`."""

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(remote_device, module_cls, args, kwargs)

    @staticmethod
    def init_from_module_rref(  # torch has a static method
        remote_device: str, module_rref: RRef[nn.Module], _module_interface_cls: Any = None
    ) -> native.RemoteModule:
        """A remote module of a module that is there already."""
        module: Any = native.from_module_rref(RemoteModule, remote_device, module_rref)
        if _module_interface_cls is not None:
            rpc.rpc_sync(module_rref.owner().id, _prepare_here, (_module_interface_cls,))
            module._use_interface(_module_interface_cls)
        return module  # type: ignore[no-any-return]


_SOURCE = """
def remote_forward(module_rref: ModuleRRef{parameters}) -> Result:
    return module_rref.local_value().forward({names})

def forward(self{parameters}) -> Result:
    return rpc.rpc_sync(self.module_rref.owner(), remote_forward, (self.module_rref, {names}))

def forward_async(self{parameters}) -> Future[Result]:
    return rpc.rpc_async(self.module_rref.owner(), remote_forward, (self.module_rref, {names}))
"""


def _prepare(interface: Any) -> Any:
    """The module with the methods for an interface, made now if need be.

    Raises:
        ValueError: it is no TorchScript interface.
    """
    if not getattr(interface, "__torch_script_interface__", False):
        raise ValueError(
            f"module_interface_cls {interface} must be a type object decorated by "
            "@torch.jit.interface"
        )
    qualified_name = internal._qualified_name(interface)
    name = f"telegrad_remote_module_{qualified_name.replace('.', '_')}"
    with generating:
        if name not in sys.modules:
            _write(name, state._python_cu.get_interface(qualified_name))
        return sys.modules[name]


def _prepare_here(interface: Any) -> None:
    """The same, called by another worker: a module cannot be sent."""
    _prepare(interface)


def _write(name: str, interface: Any) -> None:
    if "forward" not in interface.getMethodNames():
        raise ValueError(f"{interface} has no method forward")
    schema = interface.getMethod("forward")
    known: dict[str, Any] = {}
    parameters = ""
    for number, argument in enumerate(schema.arguments[1:]):
        known[f"T{number}"] = Exactly(argument.type)
        parameters += f", {argument.name}: T{number}"
        if argument.has_default_value():
            known[f"D{number}"] = argument.default_value
            parameters += f" = D{number}"
    names = "".join(f"{argument.name}, " for argument in schema.arguments[1:])
    result = schema.returns[0].type
    source = _SOURCE.format(parameters=parameters, names=names).replace("Future[Result]", "Later")
    known.update(
        rpc=rpc,
        ModuleRRef=Exactly(reference_type(interface)),
        Result=Exactly(result),
        Later=Exactly(core.FutureType(result)),
    )
    module = module_of(source, name, **known)
    try:
        module.remote_forward = compiled(module.remote_forward)
    except BaseException:
        del sys.modules[name]
        raise


def _give_methods(module: nn.Module, interface: Any) -> None:
    """Gives a remote module the methods that its interface has."""
    written = _prepare(interface)
    for name in ("forward", "forward_async"):
        method = types.MethodType(torch.jit.export(getattr(written, name)), module)
        module.__dict__[name] = method


def _create(
    make: Callable[..., nn.Module],
    module_cls: Callable[..., nn.Module],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: str,
    interface: Any,
) -> RRef[Any]:
    """At the owner: the module, scripted."""
    _prepare(interface)
    module = make(module_cls, args, kwargs, device)
    if not isinstance(module, torch.jit.ScriptModule):
        with generating:
            module = compiled(module)
    return RRef(module, interface)


def _reduce(module: Any, destination: int) -> tuple[Any, ...]:
    if hasattr(module._c, "module_rref"):
        raise SerializationError(
            "Passing a script RemoteModule over RPC is not supported. Please create a RemoteModule "
            "in the sender, send the `module_rref` to the receiver, and create a new instance on "
            "the receiver end by passing this `module_rref`."
        )
    return revival.script, (module.save_to_buffer(),)


register_reducer(script.RecursiveScriptModule, _reduce)
