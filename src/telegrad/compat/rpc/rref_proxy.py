"""In the place of `torch.distributed.rpc.rref_proxy`."""

from telegrad.rpc.references.proxy import RRefProxy

__all__ = ["RRefProxy"]
