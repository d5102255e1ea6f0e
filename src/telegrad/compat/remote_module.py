"""In the place of `torch.distributed.nn.api.remote_module`."""

from telegrad.nn.remote_module import (
    _REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING,
    _REMOTE_MODULE_PICKLED_ATTRIBUTES,
    RemoteModule,
    _RemoteModule,
)

__all__ = [
    "_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING",
    "_REMOTE_MODULE_PICKLED_ATTRIBUTES",
    "RemoteModule",
    "_RemoteModule",
]
