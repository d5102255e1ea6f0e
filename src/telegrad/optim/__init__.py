"""Optimizers for parameters that live on other workers."""

from telegrad.optim.distributed import DistributedOptimizer
from telegrad.optim.scheduler import DistributedLRScheduler

__all__ = ["DistributedLRScheduler", "DistributedOptimizer"]
