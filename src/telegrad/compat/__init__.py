"""The face of torch's `rpc`, `autograd`, `optim` and `nn` on telegrad, and TorchScript's.

`install()` puts it in the place of torch's own, in this process and in those that it starts. A
leaf: nothing in telegrad imports it but the top, which lets TorchScript load its part.
"""

from telegrad.compat.installation import install, is_installed, uninstall

__all__ = ["install", "is_installed", "uninstall"]
