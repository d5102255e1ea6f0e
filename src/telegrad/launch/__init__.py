"""Starts a program on several workers of this machine, and ends all of them together.

What it guarantees:

- Each worker finds the environment that `torchrun` would give it (`environment`), at a port that
  nobody else can get in the meantime (`ports`).
- All of them are forked from one process, and lie at the same addresses; the program runs as Python
  would run it (`nursery`).
- Output arrives in whole lines, marked with the worker they are from (`output`).
- When one worker fails, the others are ended, and what it said is shown last (`group`).
- Nothing outlives the launcher, not even when it is killed and the workers have children of their
  own (`custody`).
"""

from telegrad.launch.options import LaunchOptions
from telegrad.launch.program import Program
from telegrad.launch.supervision import launch

__all__ = ["LaunchOptions", "Program", "launch"]
