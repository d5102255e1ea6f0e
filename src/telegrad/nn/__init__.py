"""Modules that live on other workers."""

from telegrad.nn.remote_module import RemoteModule

__all__ = ["RemoteModule"]
