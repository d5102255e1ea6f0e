"""The face of `torch.distributed.rpc`, `.autograd`, `.optim` and `.nn` on telegrad.

`install()` puts it in the place of torch's own, in this process and in those that it starts. A
leaf: nothing in telegrad imports it.
"""

from telegrad.compat.installation import install, is_installed, uninstall

__all__ = ["install", "is_installed", "uninstall"]
