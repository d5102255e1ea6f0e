"""In the place of `torch.distributed.rpc.rref_proxy`."""

from telegrad.rpc.rref_proxy import RRefProxy

__all__ = ["RRefProxy"]
