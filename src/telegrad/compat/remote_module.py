"""In the place of `torch.distributed.nn.api.remote_module`."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from telegrad.compat.rpc.agents import _get_current_rpc_agent
from telegrad.nn import remote_module as native
from telegrad.rpc import RRef

__all__ = ["RemoteModule"]

_REMOTE_MODULE_PICKLED_ATTRIBUTES = native.PICKLED_ATTRIBUTES
_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING = ("forward_async", "forward")


class _RemoteModule(native.RemoteModule):
    """
    Args:
        _module_interface_cls: a TorchScript interface, for a remote module that can be scripted.
            Not supported yet.
    """

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        _refuse_interface(_module_interface_cls)
        super().__init__(remote_device, module_cls, args, kwargs)

    def _has_device_map(self) -> bool:
        agent = _get_current_rpc_agent()
        return bool(agent._get_device_map(agent.get_worker_info(self.on)))

    @classmethod
    def _from_fields(cls, fields: Mapping[str, Any]) -> _RemoteModule:
        # As torch makes it: the fields and two methods, and none of what nn.Module sets up.
        module = cls.__new__(cls)
        module.__dict__.update(fields)
        for method in (native.RemoteModule.forward_async, native.RemoteModule.forward):
            module.__dict__[method.__name__] = types.MethodType(method, module)
        return module


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
        _refuse_interface(_module_interface_cls)
        return native.from_module_rref(RemoteModule, remote_device, module_rref)


def _refuse_interface(interface: Any) -> None:
    if interface is not None:
        raise NotImplementedError(
            "telegrad cannot make a remote module with a TorchScript interface yet; without one, "
            "it can be used from Python, also if it is a TorchScript module"
        )
