"""In the place of `torch.distributed.rpc.server_process_global_profiler`."""

from telegrad.compat.rpc.profiling import _server_process_global_profile

__all__ = ["_server_process_global_profile"]
