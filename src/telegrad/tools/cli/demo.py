"""`telegrad demo`: training over three processes, and what it proves."""

from __future__ import annotations

from telegrad.tools.cli.command import Command
from telegrad.tools.demo import command

__all__ = ["COMMAND"]

COMMAND = Command(
    name="demo",
    summary="train a small model over three processes and check its gradients",
    description=command.DESCRIPTION,
    configure=command.configure,
    run=command.run,
)
