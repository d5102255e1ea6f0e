"""The modes of torch that travel with a call: grad mode and autocast.

On the plain face a remote call runs as a local one would, so `torch.no_grad()` and
`torch.autocast(...)` around the call hold for the function as well. Both are thread-local.

`torch.utils.checkpoint` runs a function a second time in the backward pass, with the random numbers
of the first run. It restores the generator of its own process only: a function that draws random
numbers on a worker would draw different ones, and the gradients would be wrong. So a call made in
such a second run says so, and fails if the function draws random numbers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

import torch
import torch.utils.checkpoint

from telegrad.autograd.torch_internals import current_task, is_any_autocast_enabled
from telegrad.errors import TelegradError

__all__ = ["CallerModes", "capture", "entered"]

_DEVICES = ("cpu", "cuda")


class CallerModes(NamedTuple):
    """The modes of a caller.

    Args:
        autocast: the devices for which it is on, with its dtype there.
        is_run_again: `torch.utils.checkpoint` makes the call again, in a backward pass.
    """

    has_gradients: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    caches_casts: bool
    is_run_again: bool = False


def capture() -> CallerModes | None:
    """The modes of this thread; None if they are those of a new thread."""
    has_gradients = torch.is_grad_enabled()
    is_run_again = current_task() != -1 and _is_run_by_checkpoint()
    if not is_any_autocast_enabled():
        is_usual = has_gradients and not is_run_again
        return None if is_usual else CallerModes(has_gradients, (), True, is_run_again)
    autocast = tuple(
        (device, torch.get_autocast_dtype(device))
        for device in _DEVICES
        if torch.is_autocast_enabled(device)
    )
    caches_casts = torch.is_autocast_cache_enabled()
    return CallerModes(has_gradients, autocast, caches_casts, is_run_again)


def _is_run_by_checkpoint() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def entered(modes: CallerModes | None) -> Iterator[None]:
    """Runs the block in the modes of a caller."""
    if modes is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(modes.has_gradients))
        for device, dtype in modes.autocast:
            if device == "cuda" and not torch.cuda.is_available():
                continue  # torch would warn and leave it off
            stack.enter_context(torch.autocast(device, dtype, cache_enabled=modes.caches_casts))
        state = torch.get_rng_state() if modes.is_run_again else None
        yield
        if state is not None and not torch.equal(state, torch.get_rng_state()):
            raise TelegradError(
                "torch.utils.checkpoint has run a function on a worker again, and it drew other "
                "random numbers than the first time (dropout?), so the gradients would be "
                "wrong: use checkpoint inside that function or module, not around the call"
            )
