"""Standard streams that whoever started us has closed (`>&-`).

Their numbers would go to the next files and sockets that are opened, and what is said to the user
would end up there. Python has None in their place.
"""

from __future__ import annotations

import os
import sys

__all__ = ["open_closed_streams"]


def open_closed_streams() -> None:
    """Lets the closed ones lead nowhere. Called first of all, while their numbers are free."""
    for descriptor, mode in ((0, "r"), (1, "w"), (2, "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            os.set_inheritable(nowhere, True)
            stream = open(nowhere, mode, encoding="utf-8")  # noqa: SIM115 - as long as we run
            setattr(sys, ("stdin", "stdout", "stderr")[descriptor], stream)
