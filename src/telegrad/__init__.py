"""telegrad: distributed autograd for PyTorch."""
