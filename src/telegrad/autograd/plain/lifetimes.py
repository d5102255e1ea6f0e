"""What recorded calls leave behind on a worker, and how it ends.

- At the callee an entry, which keeps the graph of what was returned, and the result of a submitted
  call. They end when a pass without `retain_graph` has gone through the entry, when what leads to
  them at the caller has died, or with the caller.
- At the caller the token, which keeps the graph of the arguments. It ends when the callee's
  `Received` node has died: until then a function may have kept what came with the call.
- The state of a pass that has not come to its end. It ends with the pass, at the worker where that
  began.

Either end notes what has died, and the next call or reply to that worker takes the notes along; a
timer sends what is left. Such a message may be lost, when Ctrl-C ends the call that it came with.
So what has been kept for long is asked about: whoever keeps it names it to the other end, which
answers with what has died there. That also ends a wait for a result that no call will bring.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Generic, TypeVar

from torch import Tensor

from telegrad.autograd.plain.entries import Entries
from telegrad.autograd.plain.notes import Note, Notes
from telegrad.autograd.plain.passes import Passes, PassName
from telegrad.autograd.plain.values import Value, lost, unknown
from telegrad.errors import TelegradError
from telegrad.ids import worker_of
from telegrad.rpc.calls.agent import Agent
from telegrad.wire.frames import Kind

__all__ = ["Lifetimes"]

_SECONDS = 1.0  # between looks at what has died
_LONG = 5  # looks
_MANY_NOTES = 32  # of what has died here; fewer wait for the timer

_Dead = tuple[Sequence[int], Sequence[int], Sequence[PassName]]
"""Calls to whose results nothing leads; calls whose arguments nothing uses; passes."""

_Key = TypeVar("_Key", bound=Hashable)


class Lifetimes:
    """
    Args:
        is_living: whether a pass that began here is under way, by torch's number.
    """

    def __init__(
        self,
        agent: Agent,
        entries: Entries,
        passes: Passes,
        is_living: Callable[[int], bool],
    ) -> None:
        self.values: dict[int, Value] = {}
        self.tokens: dict[int, Tensor] = {}
        """By call; it lives as long as the callee's `Received` node."""
        self._being_made: dict[int, weakref.ref[object]] = {}
        """Calls of this worker whose result has not been taken, and may still be."""
        self._agent = agent
        self._worker_id = agent.worker_id
        self._entries = entries
        self._passes = passes
        self._is_living = is_living
        self._to: dict[int, int] = {}  # by call, where the token's call went
        self._dead_posts, self._dead_sinks = Notes(), Notes()
        self._being_served: set[int] = set()
        self._released_early: set[int] = set()  # of those, what their callers have given up
        self._old_calls, self._old_tokens = _Old[int](), _Old[int]()
        self._old_passes = _Old[PassName]()
        self._is_timer_set = False
        self.is_closed = False
        agent.handle(Kind.PLAIN_RELEASE, self._released)
        agent.handle(Kind.PLAIN_ASK, self._asked)

    # -- at the caller

    def begin_to_make(self, call: int, end: object) -> None:
        """The call's result has not been taken; it may be as long as `end` lives."""
        self._being_made[call] = weakref.ref(end)

    def _is_being_made(self, call: int) -> bool:
        end = self._being_made.get(call)
        return end is not None and end() is not None

    def keep_token(self, call: int, to: int, token: Tensor) -> None:
        self._to[call] = to
        self.tokens[call] = token

    def drop_tokens(self, calls: Iterable[int]) -> None:
        """Nothing can flow back to the arguments of these calls any more."""
        for call in calls:
            self._to.pop(call, None)
            token = self.tokens.pop(call, None)
            del token

    def keep_result(self, call: int, to: int, *, has_exports: bool = False) -> Note:
        """While it lives, so does what that call has left on its worker."""
        note = self._dead_posts.note(call, to)
        note.has_exports = has_exports
        return note

    def exporting_below(self, calls: Iterable[int]) -> list[Note]:
        """For a result that depends on these calls: the notes of those that bring gradients of
        residents, which need their entries for that."""
        return self._dead_posts.with_exports(calls)

    def give_up(self, call: int, to: int) -> None:
        """Nothing here leads to what that call has left on its worker, or will leave."""
        self._dead_posts.leave(call, to)
        self.watch()

    def tell_of_dead(self, worker: int) -> None:
        """Before a call: what many earlier ones have left there is released first."""
        posts = self._dead_posts.take(worker, at_least=_MANY_NOTES)
        if posts:
            self._release(worker, (posts, (), ()))

    # -- at the callee

    def begin_to_serve(self, call: int) -> None:
        self._being_served.add(call)

    def end_to_serve(self, call: int) -> None:
        self._being_served.discard(call)
        if call in self._released_early:
            self._released_early.discard(call)
            self._drop([call])

    def keep_arguments(self, call: int, caller: int) -> Note:
        """While it lives, so does the graph of what came with the call, at its caller."""
        return self._dead_sinks.note(call, caller)

    def dead_arguments(self, caller: int) -> Sequence[int]:
        """For a reply to take along."""
        return self._dead_sinks.take(caller)

    # -- telling, and asking

    def watch(self) -> None:
        """Sees to it that what has died is told without another call."""
        if self._is_timer_set or self.is_closed:
            return
        self._is_timer_set = True
        self._agent.call_later(_SECONDS, partial(self._agent.run_aside, self._look))

    def _look(self) -> None:
        self._is_timer_set = False
        self.flush()
        self._ask_about_old()
        for call in list(self._being_made):
            if not self._is_being_made(call):
                self._being_made.pop(call, None)
        has_kept = self.tokens or self.values or len(self._entries) or len(self._passes)
        has_notes = [notes.has_any() for notes in (self._dead_posts, self._dead_sinks)]
        if has_kept or any(has_notes):
            self.watch()

    def notes(self) -> int:
        """How many there are, those included that have died since the last look."""
        return len(self._dead_posts) + len(self._dead_sinks)

    def flush(self) -> None:
        """Tells every worker what has died here."""
        for worker in {*self._dead_posts.workers(), *self._dead_sinks.workers()}:
            posts, sinks = self._dead_posts.take(worker), self._dead_sinks.take(worker)
            if posts or sinks:
                self._release(worker, (posts, sinks, ()))

    def _release(self, worker: int, dead: _Dead) -> None:
        if worker == self._worker_id:
            self._released(worker, dead)
            return
        self._post(worker, Kind.PLAIN_RELEASE, dead)

    def _post(self, worker: int, kind: Kind, body: _Dead) -> None:
        with contextlib.suppress(TelegradError):  # it is gone, and all that it had with it
            self._agent.post(worker, kind, tuple(map(list, body)))

    def _released(self, _source: int, dead: _Dead) -> None:
        posts, sinks, passes = dead
        # One that is being served drops what it leaves, or has left it by the time of the drop.
        early = self._being_served.intersection(posts)
        self._released_early |= early
        self._drop(posts)
        self._released_early -= early - self._being_served
        self.drop_tokens(sinks)
        if passes:
            self._passes.drop(set(passes).__contains__)

    def _drop(self, calls: Sequence[int]) -> None:
        self._entries.drop(calls)
        for call in calls:
            value = self.values.pop(call, None)
            if value is not None and call not in self._being_served:  # nothing else will set it
                maker = self._agent.name_of(worker_of(call))
                value.fail(unknown(self._agent.info.name, maker))
            del value

    def _ask_about_old(self) -> None:
        """Of what a worker keeps for itself, the other end is here."""
        questions: dict[int, tuple[list[int], list[int], list[PassName]]]
        questions = defaultdict(lambda: ([], [], []))
        kept = {*self._entries.calls(), *self.values} - self._being_served
        for call in self._old_calls.of(kept):
            if not self._dead_posts.is_living(call):  # else this worker itself keeps it
                questions[worker_of(call)][0].append(call)
        for call in self._old_tokens.of(c for c in list(self.tokens) if not self._is_being_made(c)):
            to = self._to.get(call)
            if to is not None:
                questions[to][1].append(call)
        for name in self._old_passes.of(self._passes.names()):
            questions[name[0]][2].append(name)
        for worker, question in questions.items():
            if worker == self._worker_id:
                self._asked(worker, question)
            elif self._is_gone(worker):
                self._released(worker, question)
            else:
                self._post(worker, Kind.PLAIN_ASK, question)

    def _is_gone(self, worker: int) -> bool:
        """Also if it never was there: messages can name any worker."""
        members = self._agent.network.members
        return members.name_of(worker) is None or members.is_lost(worker)

    def _asked(self, source: int, question: _Dead) -> None:
        """Answers with what has died here."""
        calls, tokens, passes = question
        dead_calls = [
            call
            for call in calls
            if not self._dead_posts.is_living(call) and not self._is_being_made(call)
        ]
        dead_tokens = [
            call
            for call in tokens
            if not self._dead_sinks.is_living(call) and call not in self._being_served
        ]
        dead_passes = [name for name in passes if not self._is_living(name[1])]
        if dead_calls or dead_tokens or dead_passes:
            self._release(source, (dead_calls, dead_tokens, dead_passes))

    # -- the end

    def worker_lost(self, worker: int, name: str, reason: str) -> None:
        self._entries.drop([c for c in self._entries.calls() if worker_of(c) == worker])
        for call in [call for call in list(self.values) if worker_of(call) == worker]:
            self.values.pop(call).fail(lost(name, reason))
        self.drop_tokens([call for call, to in list(self._to.items()) if to == worker])
        self._passes.drop(lambda each: each[0] == worker)
        self._dead_posts.forget(worker)
        self._dead_sinks.forget(worker)

    def close(self, name: str) -> None:
        self.is_closed = True
        for value in list(self.values.values()):
            value.fail(lost(name, "it is shutting down"))


class _Old(Generic[_Key]):
    """Tells what has been there for many looks."""

    def __init__(self) -> None:
        self._looks: dict[_Key, int] = {}

    def of(self, keys: Iterable[_Key]) -> list[_Key]:
        """Those that are old; once in a while each, as long as they are there."""
        self._looks = {key: self._looks.get(key, 0) + 1 for key in keys}
        return [key for key, looks in self._looks.items() if looks % _LONG == 0]
