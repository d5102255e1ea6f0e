"""In the place of `torch.distributed.rpc.server_process_global_profiler`."""

from __future__ import annotations

from typing import Any

__all__: list[str] = []


class _server_process_global_profile:
    """Profiles all calls that a worker serves. telegrad does not have it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "telegrad does not profile all served calls of a process: use torch.profiler inside "
            "the functions that are called"
        )
