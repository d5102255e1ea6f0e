"""Optimizers for parameters that live on other workers."""

from telegrad.optim.distributed import DistributedLRScheduler, DistributedOptimizer

__all__ = ["DistributedLRScheduler", "DistributedOptimizer"]
