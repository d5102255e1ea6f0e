"""Starts the workers of this machine, and ends all of them together.

`launch`, behind `telegrad run`, starts a program once per worker:

- Each worker finds the environment that `torchrun` would give it, with a port that no other process
  can take meanwhile (`environment`).
- The workers are forked from one process, and run the program as Python would (`forking`).
- Their output arrives in whole lines, marked with the worker (`output`).
- When one worker fails, the others are ended, and its last output is shown last (`group`).
- No process outlives the launcher, even if it is killed and the workers have children of their own
  (`supervision`).

`workers` starts workers of the process that calls it (`worker_starter`, `monitor`); `membership`
lets a process join a group that another launcher has started.
"""

from telegrad.launch.program import LaunchOptions, Program
from telegrad.launch.supervision import launch

__all__ = ["LaunchOptions", "Program", "launch"]
