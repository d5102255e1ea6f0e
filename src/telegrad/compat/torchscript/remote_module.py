"""Remote modules with a TorchScript interface, which script functions can call.

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
from telegrad.rpc.references.fetch import register_reducer
from telegrad.rpc.references.rref import RRef
from telegrad.wire import revival

_SOURCE = """
def remote_forward(module_rref: ModuleRRef{parameters}) -> Result:
    return module_rref.local_value().forward({names})

def forward(self{parameters}) -> Result:
    return rpc.rpc_sync(self.module_rref.owner(), remote_forward, (self.module_rref, {names}))

def forward_async(self{parameters}) -> Future[Result]:
    return rpc.rpc_async(self.module_rref.owner(), remote_forward, (self.module_rref, {names}))
"""


def prepare(interface: Any) -> Any:
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


def give_methods(module: nn.Module, interface: Any) -> None:
    """Gives a remote module the methods that its interface has."""
    written = prepare(interface)
    for name in ("forward", "forward_async"):
        method = types.MethodType(torch.jit.export(getattr(written, name)), module)
        module.__dict__[name] = method


def create(
    make: Callable[..., nn.Module],
    module_cls: Callable[..., nn.Module],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: str,
    interface: Any,
) -> RRef[Any]:
    """At the owner: the module, scripted."""
    prepare(interface)
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
