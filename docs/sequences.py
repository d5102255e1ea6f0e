"""Sequence diagrams: who does what, one after another."""

from __future__ import annotations

from typing import NamedTuple

from telegrad.observe.svg import document, text_at

_LANE = 168.0
_STEP = 44.0


class Step(NamedTuple):
    """Something that an actor does (`to` is itself) or gives to another."""

    actor: int
    to: int
    text: str


SYNCHRONOUS = (
    ["your thread", "lane's thread, worker1"],
    [
        Step(0, 0, "takes an idle lane"),
        Step(0, 1, "request"),
        Step(1, 1, "runs the function"),
        Step(1, 0, "reply"),
    ],
)
ASYNCHRONOUS = (
    ["your thread", "reader on worker1", "pool on worker1", "reader on worker0"],
    [
        Step(0, 1, "request"),
        Step(1, 2, "hands it over"),
        Step(2, 2, "runs the function"),
        Step(2, 3, "reply"),
        Step(3, 3, "completes the future"),
        Step(3, 0, "wakes who waits"),
    ],
)


def draw(title: str, actors: list[str], steps: list[Step]) -> str:
    width = _LANE * len(actors) + 32
    height = 92 + _STEP * len(steps)
    middles = [16 + _LANE * (number + 0.5) for number in range(len(actors))]
    parts, labels = [], []
    for actor, x in zip(actors, middles, strict=True):
        half = len(actor) * 3.35 + 8
        parts.append(f'<path class="cut" d="M{x:.1f} 68 V{height - 16:.1f}"/>')
        parts.append(
            f'<rect class="lane" x="{x - half:.1f}" y="42" width="{2 * half:.1f}" '
            'height="26" rx="5"/>'
        )
        labels.append(text_at(x, 59, actor, "small", "middle"))
    for number, (actor, to, text) in enumerate(steps):
        y = 100 + _STEP * number
        start, end = middles[actor], middles[to]
        if actor == to:
            half = len(text) * 3.35 + 8
            parts.append(
                f'<rect class="box" x="{start - half:.1f}" y="{y - 14:.1f}" '
                f'width="{2 * half:.1f}" height="24" rx="4"/>'
            )
            labels.append(text_at(start, y + 2, text, "small", "middle"))
        else:
            tip = end - 2 if end > start else end + 2
            parts.append(
                f'<path class="message" marker-end="url(#head)" d="M{start:.1f} {y:.1f} '
                f'H{tip:.1f}"/>'
            )
            labels.append(text_at((start + end) / 2, y - 6, text, "label", "middle"))
    return document(title, width, height, [*parts, *labels])


def all_diagrams() -> dict[str, str]:
    """File name → the picture."""
    return {
        "rpc-sync.svg": draw("rpc_sync", *SYNCHRONOUS),
        "rpc-async.svg": draw("rpc_async", *ASYNCHRONOUS),
    }
