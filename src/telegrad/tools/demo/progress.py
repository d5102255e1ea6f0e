"""How training goes, while it goes: a bar that is drawn over and over on a terminal, or plain lines
where there is none."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from telegrad.observe import TrafficCount
from telegrad.observe.words import amount

__all__ = ["Progress"]

_BAR = 24
_REDRAW_SECONDS = 0.2
_LINES_WITHOUT_A_TERMINAL = 10


class Progress:
    """
    Args:
        steps: how many there will be.
        ask: gives each worker's traffic; called when something is shown, not at every step.
    """

    def __init__(
        self, out: TextIO, steps: int, ask: Callable[[], Mapping[str, TrafficCount]]
    ) -> None:
        self._out = out
        self._steps = steps
        self._ask = ask
        self._is_live = out.isatty()
        self._begun = self._shown_at = time.monotonic()
        self._lines_up = 0
        self._smooth_loss: float | None = None

    def step_done(self, done: int, loss: float) -> None:
        """
        Args:
            done: how many steps are done.
        """
        before = self._smooth_loss
        self._smooth_loss = loss if before is None else 0.9 * before + 0.1 * loss
        now = time.monotonic()
        if self._is_live:
            is_due = done == self._steps or now - self._shown_at >= _REDRAW_SECONDS
        else:
            every = max(1, self._steps // _LINES_WITHOUT_A_TERMINAL)
            is_due = done % every == 0 or done == self._steps
        if is_due:
            self._shown_at = now
            self._show(done, now)

    def _show(self, done: int, now: float) -> None:
        rate = done / max(now - self._begun, 1e-9)
        state = f"{done}/{self._steps}  loss {self._smooth_loss:.3f}  {rate:.0f} steps/s"
        counts = self._ask()
        if not self._is_live:
            traffic = ", ".join(
                f"{name} {amount(c.bytes_sent + c.bytes_received)} {c.calls_made + c.calls_served} "
                "calls"
                for name, c in counts.items()
            )
            self._out.write(f"step {state}  ({traffic})\n")
            self._out.flush()
            return
        filled = _BAR * done // self._steps
        lines = [f"{'█' * filled}{'░' * (_BAR - filled)} {state}"]
        for name, c in counts.items():
            lines.append(
                f"  {name:8} sent {amount(c.bytes_sent):>8}  received "
                f"{amount(c.bytes_received):>8}  calls {c.calls_made} made, "
                f"{c.calls_served} served"
            )
        width = shutil.get_terminal_size().columns - 1
        up = f"\x1b[{self._lines_up}A" if self._lines_up else ""
        self._out.write(up + "".join(f"\r\x1b[K{line[:width]}\n" for line in lines))
        self._out.flush()
        self._lines_up = len(lines)
