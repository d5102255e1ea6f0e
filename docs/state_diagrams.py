"""State diagrams of the protocols, found by running them.

The protocols are pure, so their diagrams need not be written down a second time: every event is
tried in every situation that events lead to, and what happens is what is drawn.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from telegrad.autograd.passes.protocol import PassControl, Reports, Standing
from telegrad.ids import COUNTER_BITS, ForkId, RRefId
from telegrad.observe.svg import document, text_at
from telegrad.rpc.connections.liveness import Connected, Ended, Heard, Liveness, TimePassed
from telegrad.rpc.references.events import Timing
from telegrad.rpc.references.owner import OwnerLedger
from telegrad.rpc.references.user import Outbox, UserLedger

Transitions = dict[tuple[str, str], list[str]]
"""(state, next state) → the events that lead from one to the other."""

_FORK, _RREF = ForkId(1, 0), RRefId(1, 0)
_OWNER, _OTHER = 0, 2


def explore(
    start: Any,
    events: Mapping[str, Callable[[Any], object]],
    state_of: Callable[[Any], str],
    situation_of: Callable[[Any], str] | None = None,
) -> Transitions:
    """All transitions between different states, from any situation that can be reached.

    Args:
        situation_of: tells situations apart; by default everything that the machine knows does.
    """
    found: Transitions = {}
    situation_of = situation_of or _all_it_knows
    seen = {situation_of(start)}
    todo = [start]
    while todo:
        machine = todo.pop(0)
        for name, apply in events.items():
            after = copy.deepcopy(machine)
            apply(after)
            edge = (state_of(machine), state_of(after))
            if edge[0] != edge[1] and name not in found.setdefault(edge, []):
                found[edge].append(name)
            if situation_of(after) not in seen:
                seen.add(situation_of(after))
                todo.append(after)
    return {edge: names for edge, names in found.items() if names}


def _all_it_knows(machine: Any) -> str:
    return repr(sorted((name, repr(value)) for name, value in vars(machine).items()))


def liveness() -> Transitions:
    def at(event: Any, now: float) -> Callable[[Liveness], object]:
        return lambda machine: machine.handle(event, now)

    return explore(
        Liveness(2.0, 30.0, 0.0),
        {
            "connected": at(Connected(), 0.0),
            "heard": at(Heard(), 0.0),
            "silent for too long": lambda m: [m.handle(TimePassed(), t) for t in range(32)],
            "connection ended": at(Ended("why"), 0.0),
        },
        lambda machine: machine.state.name,
    )


def backward_pass() -> Transitions:
    message = 1 << COUNTER_BITS

    def report(control: PassControl, standing: Standing) -> Reports:
        return {1: (control.resolutions + 1, standing)}

    return explore(
        PassControl(),
        {
            "all credit home": lambda m: m.credit_returned(1, report(m, Standing.CLOSED)),
            "all credit home, a worker waits": lambda m: m.credit_returned(
                1, report(m, Standing.WAITING)
            ),
            "reachability told": lambda m: m.reachability_told(1, {message}, {message: ()}),
            "error or loss": lambda m: m.failed(),
        },
        lambda machine: machine.state.name,
        lambda machine: machine.state.name,  # how often it was resolved makes no difference
    )


def reference_user() -> Transitions:
    def state(ledger: UserLedger) -> str:
        found = ledger.state_of(_FORK)
        return "(absent)" if found is None else found.name

    class Quiet(Outbox):
        """What is to be sent again is no part of the diagram."""

        def __repr__(self) -> str:
            return "outbox"

    def once(event: Callable[[UserLedger], object]) -> Callable[[UserLedger], object]:
        """A fork begins once; afterwards its id is over."""

        def apply(ledger: UserLedger) -> None:
            if not getattr(ledger, "_has_begun", False):
                event(ledger)
                ledger._has_begun = True  # type: ignore[attr-defined]

        return apply

    return explore(
        UserLedger(Quiet(Timing())),
        {
            "remote()": once(lambda m: m.creation_started(_RREF, _FORK, _OWNER)),
            "received": once(lambda m: m.received(_RREF, _FORK, _OWNER, _OTHER, 0.0)),
            "received from owner": once(lambda m: m.received(_RREF, _FORK, _OWNER, _OWNER, 0.0)),
            "creation confirmed": lambda m: m.creation_confirmed(_FORK, 0.0),
            "creation failed": lambda m: m.creation_failed(_FORK, 0.0),
            "fork accepted": lambda m: m.fork_answered(_FORK, False, 0.0),
            "value gone": lambda m: m.fork_answered(_FORK, True, 0.0),
            "last handle died": lambda m: m.handle_died(_FORK, 0.0),
            "deleted": lambda m: m.deleted(_FORK),
            "owner lost": lambda m: m.worker_died(_OWNER, 0.0),
        },
        state,
    )


def reference_owner() -> Transitions:
    def state(ledger: OwnerLedger) -> str:
        found = ledger.state_of(_RREF)
        return "(absent)" if found is None else found.name

    return explore(
        OwnerLedger(_OWNER, Timing()),
        {
            "REMOTE arrives": lambda m: m.creation_arrived(_RREF, _FORK, 1, 0.0),
            "asked for early": lambda m: m.value_wanted(_RREF, 0.0),
            "last fork deleted": lambda m: m.delete_arrived(_RREF, _FORK, 1, 0.0),
            "creator lost": lambda m: m.worker_died(1, 0.0),
            "REMOTE never came": lambda m: m.tick(1e9) if state(m) == "PLACEHOLDER" else None,
        },
        state,
    )


# -- drawing: states in a row, ways forward above them, ways back below

_CHARACTER = 6.7
_TRACK = 24.0
_STATE_HEIGHT = 34.0
_PORT = 14.0


def draw(title: str, states: list[str], transitions: Transitions) -> str:
    """
    Args:
        states: from left to right; all that occur.
    """
    unknown = {state for edge in transitions for state in edge} - set(states)
    if unknown:
        raise ValueError(f"{title}: the protocol has states that are not drawn: {unknown}")
    rank = {state: number for number, state in enumerate(states)}
    edges = [(rank[a], rank[b], " / ".join(names)) for (a, b), names in sorted(transitions.items())]
    ports: dict[tuple[int, bool], list[tuple[int, int, str]]] = {}
    for edge in edges:
        for end in edge[:2]:
            ports.setdefault((end, edge[0] < edge[1]), []).append(edge)
    lefts, widths, x = [], [], 24.0
    for number, state in enumerate(states):
        most = max(len(ports.get((number, forward), ())) for forward in (True, False))
        widths.append(max(len(state) * 7.3 + 24, most * _PORT + 12))
        lefts.append(x)
        x += widths[-1] + (34 if len(states) > 5 else 64)
    exits = {}
    for (number, _), found in ports.items():
        found.sort(key=lambda e, n=number: (-abs(e[0] + e[1] - 2 * n), e))
        found.sort(key=lambda e, n=number: (e[0] + e[1] - n) - n)
        middle = lefts[number] + widths[number] / 2
        for place, edge in enumerate(found):
            exits[edge, number] = middle + _PORT * (place - (len(found) - 1) / 2)
    tracks = {forward: _tracks(edges, exits, forward) for forward in (True, False)}
    above = 52 + _TRACK * (max(tracks[True].values(), default=-1) + 1) + 10
    below = above + _STATE_HEIGHT + 10 + _TRACK * (max(tracks[False].values(), default=-1) + 1)
    parts, labels, width = [], [], x
    for edge in edges:
        forward = edge[0] < edge[1]
        start, end = exits[edge, edge[0]], exits[edge, edge[1]]
        track = tracks[forward][edge]
        y = above - 14 - _TRACK * track if forward else above + _STATE_HEIGHT + 20 + _TRACK * track
        side = above if forward else above + _STATE_HEIGHT
        parts.append(
            f'<path class="message" marker-end="url(#head)" d="M{start:.1f} {side:.1f} '
            f'V{y:.1f} H{end:.1f} V{side + (-1 if forward else 1):.1f}"/>'
        )
        middle = (start + end) / 2
        width = max(width, middle + len(edge[2]) * _CHARACTER / 2 + 24)
        labels.append(text_at(middle, y - 4, edge[2], "label", "middle"))
    for state, left, state_width in zip(states, lefts, widths, strict=True):
        parts.append(
            f'<rect class="box" x="{left:.1f}" y="{above:.1f}" width="{state_width:.1f}" '
            f'height="{_STATE_HEIGHT}" rx="6"/>'
        )
        labels.append(text_at(left + state_width / 2, above + 21, state, "", "middle"))
    height = below + 24
    return document(title, width, height, [*parts, *labels])


def _tracks(
    edges: list[tuple[int, int, str]], exits: dict[Any, float], forward: bool
) -> dict[tuple[int, int, str], int]:
    """Short ways near the states, long ones further out; nothing meets on a track."""
    chosen = [edge for edge in edges if (edge[0] < edge[1]) == forward]
    chosen.sort(key=lambda e: (abs(e[0] - e[1]), e))
    taken: list[list[tuple[float, float]]] = []
    found = {}
    for edge in chosen:
        ends = sorted((exits[edge, edge[0]], exits[edge, edge[1]]))
        half = len(edge[2]) * _CHARACTER / 2 + 6
        middle = sum(ends) / 2
        left, right = min(ends[0], middle - half), max(ends[1], middle + half)
        number = 0
        while number < len(taken) and any(a < right and left < b for a, b in taken[number]):
            number += 1
        if number == len(taken):
            taken.append([])
        taken[number].append((left, right))
        found[edge] = number
    return found


def all_diagrams() -> dict[str, str]:
    """File name → the picture."""
    return {
        "liveness.svg": draw(
            "another worker, as one worker sees it", ["APART", "PRESENT", "LOST"], liveness()
        ),
        "pass.svg": draw(
            "a backward pass, as its caller sees it",
            ["RUNNING", "RESOLVING", "COMPLETE", "FAILED"],
            backward_pass(),
        ),
        "reference-user.svg": draw(
            "a reference, at the worker that holds it",
            ["CREATING", "FORKING", "CONFIRMED", "FAILED", "DELETING", "LOST", "(absent)"],
            {edge: names for edge, names in reference_user().items() if edge[0] != "(absent)"},
        ),
        "reference-owner.svg": draw(
            "a value, at its owner", ["PLACEHOLDER", "CREATED", "(absent)"], reference_owner()
        ),
    }
