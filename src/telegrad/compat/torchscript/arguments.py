"""Whether a TorchScript function takes the given arguments: asked before a call leaves.

The texts are torch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from telegrad.errors import TelegradError

__all__ = ["check_arguments"]


def check_arguments(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """
    Raises:
        TelegradError: there are too many, too few, or one has a name that the function lacks.
    """
    arguments = schema.arguments
    if len(args) > len(arguments):
        raise TelegradError(
            f"{schema.name}() expected at most {len(arguments)} argument(s) but received "
            f"{len(args)} argument(s). Declaration: {schema}"
        )
    left = {argument.name: argument for argument in arguments[len(args) :]}
    for keyword in kwargs:
        if left.pop(keyword, None) is None:
            raise TelegradError(
                f"Unknown keyword argument '{keyword}' for operator '{schema.name}'. "
                f"Schema: {schema}"
            )
    for name, argument in left.items():
        if not argument.has_default_value():
            raise TelegradError(
                f"{schema.name}() is missing value for argument '{name}'. Declaration: {schema}"
            )
