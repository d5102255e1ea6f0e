"""In the place of `torch.distributed.nn.api.remote_module`."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from telegrad import rpc
from telegrad.compat.rpc.agents import find_face
from telegrad.compat.torchscript import remote_module as scripted
from telegrad.nn import remote_module as native
from telegrad.rpc import RRef

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
            self.on, scripted.create, (*create, self.device, _module_interface_cls)
        )

    def _use_interface(self, interface: Any) -> None:
        if torch.device(self.device).type != "cpu":
            raise ValueError(
                "a remote module with a TorchScript interface must be on the CPU, not on "
                f"{self.device}"
            )
        scripted.give_methods(self, interface)
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
            rpc.rpc_sync(module_rref.owner().id, _prepare, (_module_interface_cls,))
            module._use_interface(_module_interface_cls)
        return module  # type: ignore[no-any-return]


def _prepare(interface: Any) -> None:
    scripted.prepare(interface)
