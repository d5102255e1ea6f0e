"""The way of a call and of a training step through telegrad's modules, drawn from a run.

`python docs/call_paths.py` writes it into the architecture page; a test compares the page with a
run. `--figures` prints how many functions it takes, and how often the file changes on the way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

import telegrad
from telegrad import autograd, rpc

SOURCE = Path(telegrad.__file__).parent
PAGE = Path(__file__).parent / "explanation" / "architecture.md"
BEGIN, END = "<!-- paths -->\n", "<!-- end of paths -->\n"
OPTIONAL = "transport/same_host/"
"""What a message passes there depends on the machine and on luck."""


class Trace:
    """The functions of telegrad that this thread enters."""

    def __init__(self) -> None:
        self.entered: list[tuple[str, int]] = []

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SOURCE):
            module = str(path.relative_to(SOURCE).with_suffix("")).removesuffix("/__init__")
            if not module.startswith(OPTIONAL):
                self.entered.append((module, frame.f_code.co_firstlineno))

    @property
    def modules(self) -> list[str]:
        """In the order in which they are entered first."""
        return list(dict.fromkeys(module for module, _ in self.entered))

    def figures(self) -> str:
        changes = sum(a[0] != b[0] for a, b in zip(self.entered, self.entered[1:], strict=False))
        functions = len(set(self.entered))
        return f"{len(self.modules)} files, {functions} functions, {changes} changes of file"


def traced(work: Callable[[], object]) -> Trace:
    """The shortest of several: in others something else was due, a timer say."""
    for _ in range(30):  # connections are open then, and names are known
        work()
    traces = []
    for _ in range(20):
        trace = Trace()
        sys.setprofile(trace)
        try:
            work()
        finally:
            sys.setprofile(None)
        traces.append(trace)
    return min(traces, key=lambda trace: len(trace.entered))


def plain_step() -> None:
    x = torch.ones(3, requires_grad=True)
    telegrad.call("a", torch.add, x, 1).sum().backward()


def context_step() -> None:
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("a", torch.add, args=(x, 1)).sum()
        autograd.backward(context_id, [loss])
        autograd.get_gradients(context_id)


def all_traces() -> dict[str, Trace]:
    x = torch.ones(3)
    with telegrad.workers("a"):
        return {
            'telegrad.call("a", f, x)': traced(lambda: telegrad.call("a", torch.add, x, 1)),
            "the same, and loss.backward()": traced(plain_step),
            'rpc_sync("a", f, args=(x,))': traced(
                lambda: rpc.rpc_sync("a", torch.add, args=(x, 1))
            ),
            "a step in an autograd context": traced(context_step),
        }


def drawn(traces: dict[str, Trace]) -> str:
    """Rooms, and the modules that are entered in each, in the order of the first entry."""
    lines = ["```text"]
    for name, trace in traces.items():
        lines.append(name)
        rooms: dict[str, list[str]] = {}
        for module in trace.modules:
            room, _, last = module.rpartition("/")
            rooms.setdefault(room, []).append(last)
        for room, modules in rooms.items():
            lines.append(f"    {room or 'telegrad':22} {' → '.join(modules)}")
        lines.append("")
    lines[-1] = "```"
    return "\n".join(lines) + "\n"


def main() -> None:
    traces = all_traces()
    if "--figures" in sys.argv:
        for name, trace in traces.items():
            print(f"{name}: {trace.figures()}")
        return
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + BEGIN + drawn(traces) + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
