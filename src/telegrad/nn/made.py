"""A module that a caller has on this worker, and what its methods change in it.

The caller has a tree of stand-ins (see `telegrad.nn.connection`). A method may do to the real
module whatever Python allows: replace a parameter, add a part, freeze a layer, convert, call
`eval()`. `Made.changes` finds that after each call, and the stand-ins follow.

Each change gets the number of the look that found it, its version, and a caller says up to which
version it knows. So a reply that is never read loses nothing, and replies may overtake each other.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from telegrad.autograd.torch_internals import AccumulateGrad
from telegrad.errors import TelegradError
from telegrad.tensors.operations import Spec, spec_of
from telegrad.tensors.table import Table

__all__ = ["Changes", "Made", "PartAt", "PartThere", "TensorAt", "TensorThere"]


@dataclass(frozen=True)
class TensorThere:
    """A parameter or buffer. Those that are tied have one id.

    Args:
        was: an id under which the caller may know it, if a method has put it back.
    """

    id: int
    spec: Spec
    requires_grad: bool
    was: int | None = None


@dataclass(frozen=True)
class PartThere:
    """
    Args:
        path: its name within the whole module; empty for that itself.
        number: of the part. One that is met under several paths has one number.
        classes: modules and names of its class and of the bases that treat extra state as it does.
    """

    path: str
    number: int
    classes: Sequence[tuple[str, str]]
    is_training: bool
    parameters: dict[str, TensorThere | None]
    buffers: dict[str, TensorThere | None]
    not_persistent: frozenset[str]


@dataclass(frozen=True)
class Changes:
    """What has changed in a module since its caller was told last.

    Args:
        parts: all of them, if some were added, removed or replaced, or names of tensors were.
        tensors: by name, those that are others now, or frozen, unfrozen or converted.
        training: by path, the modes that have changed.
    """

    version: int
    parts: Sequence[PartThere] | None
    tensors: dict[str, TensorThere | None]
    training: dict[str, bool]


@dataclass(frozen=True)
class PartAt:
    """A part of the module, in what a method returns."""

    path: str


@dataclass(frozen=True)
class TensorAt:
    """A parameter of the module, in what a method returns."""

    name: str


class _Seen(NamedTuple):
    """A tensor as it was at the last look."""

    tensor: Tensor | None
    is_parameter: bool


_kind_of: Callable[[Any], Any] = operator.attrgetter("requires_grad", "dtype", "shape")
_contents_of: Callable[[Any], Any] = operator.attrgetter("_modules", "_parameters", "_buffers")
_mode_of: Callable[[Any], Any] = operator.attrgetter("training")
_keys_of: Callable[[Any], Iterable[str]] = operator.methodcaller("keys")
_values_of: Callable[[Any], Iterable[Any]] = operator.methodcaller("values")


def _classes_of(cls: type[nn.Module]) -> list[tuple[str, str]]:
    return [
        (each.__module__, each.__qualname__)
        for each in cls.__mro__
        if issubclass(each, nn.Module) and each.get_extra_state is cls.get_extra_state
    ]


class Made:
    def __init__(self, module: nn.Module, table: Table) -> None:
        self.module = module
        self._table = table
        self._lock = threading.RLock()  # guards what follows
        self._ids: dict[int, int] = {}
        """Of tensors, by identity; those that the caller has not been told of have none yet."""
        self._version = 0
        self._rebuilt = 0
        self._changed: dict[str, int] = {}  # tensors, by name: the version of the last change
        self._switched: dict[str, int] = {}  # the same for parts whose mode has changed
        self._numbers: dict[int, int] = {}
        self._next_number = itertools.count()
        self._parts: list[tuple[str, nn.Module]] = []
        self._seen: dict[str, _Seen] = {}
        self._modes: dict[str, bool] = {}
        self._was: dict[int, int] = {}
        self._look()

    # -- what is there

    def describe(self) -> list[PartThere]:
        parts = []
        for path, part in self._parts:
            dot = f"{path}." if path else ""
            parts.append(
                PartThere(
                    path=path,
                    number=self._numbers[id(part)],
                    classes=_classes_of(type(part)),
                    is_training=part.training,
                    parameters={k: self._there(dot + k) for k in list(part._parameters.keys())},
                    buffers={k: self._there(dot + k) for k in list(part._buffers.keys())},
                    not_persistent=frozenset(part._non_persistent_buffers_set),
                )
            )
        return parts

    def _there(self, name: str) -> TensorThere | None:
        tensor = self._seen[name].tensor
        if tensor is None:
            return None
        key = self._ids.get(id(tensor))
        if key is None:
            key = self._ids[id(tensor)] = self._keep(tensor)
        return TensorThere(key, spec_of(tensor), tensor.requires_grad, self._was.get(key))

    def _look(self) -> None:
        """Notes what is there now."""
        seen: dict[str, _Seen] = {}
        parts = list(self.module.named_modules(remove_duplicate=False))
        for path, part in parts:
            dot = f"{path}." if path else ""
            for is_parameter, tensors in ((True, part._parameters), (False, part._buffers)):
                for last, tensor in list(tensors.items()):
                    name = dot + last
                    self._check(name, tensor)
                    seen[name] = _Seen(tensor, is_parameter)
        self._seen, self._parts = seen, parts
        self._modes = {path: part.training for path, part in parts}
        numbers = {id(part): self._numbers.get(id(part)) for _, part in parts}
        self._numbers = {
            key: next(self._next_number) if number is None else number
            for key, number in numbers.items()
        }
        # For `referred`:
        self._paths = {id(part): path for path, part in reversed(parts)}
        self._parameters = {id(s.tensor): name for name, s in seen.items() if s.is_parameter}
        # For the short look. What stands at one place in these lists is in one place of the module.
        dots: dict[int, list[str]] = {}
        for path, part in parts:
            dots.setdefault(id(part), []).append(f"{path}." if path else "")
        self._unique = list({id(part): part for _, part in parts}.values())
        contents = self._contents()
        self._sizes = list(map(len, contents))
        self._keys = list(chain.from_iterable(map(_keys_of, contents)))
        self._names = [
            [dot + key for dot in dots[id(part)]]
            for part in self._unique
            for table in _contents_of(part)
            for key in _keys_of(table)
        ]
        self._note(list(chain.from_iterable(map(_values_of, contents))))

    def _note(self, things: list[Any]) -> None:
        here = set(map(id, things))
        self._ids = {tensor: key for tensor, key in self._ids.items() if tensor in here}
        self._was = {key: was for key, was in self._was.items() if key in self._ids.values()}
        self._things = things
        self._places = [i for i, thing in enumerate(things) if isinstance(thing, Tensor)]
        self._tensors = [things[i] for i in self._places]
        self._kinds = list(map(_kind_of, self._tensors))
        self._flags = list(map(_mode_of, self._unique))

    def _check(self, name: str, tensor: Tensor | None) -> None:
        if tensor is not None and is_lazy(tensor):
            raise TypeError(
                f"{name!r} of a {type(self.module).__name__} has no shape before the first "
                "forward: make the module in a function that runs it once, and returns it"
            )

    def _keep(self, tensor: Tensor) -> int:
        key = self._table.keep(tensor)
        if self._version and isinstance(tensor, nn.Parameter):  # an optimizer may know it
            for old, thing in list(self._table.things.items()):
                if thing is tensor and old != key:
                    self._was[key] = old
        return key

    # -- what has changed

    def changes(self, since: int) -> Changes | None:
        """
        Args:
            since: the version up to which the caller knows.
        """
        with self._lock:
            if not self.has_changed(since):
                return None
            parts = self.describe() if since < self._rebuilt else None
            tensors = {n: self._there(n) for n, v in self._changed.items() if v > since}
            modes = {p: self._modes[p] for p, v in self._switched.items() if v > since}
            return Changes(self._version, parts, tensors, modes)

    def has_changed(self, since: int) -> bool:
        with self._lock:
            self._notice()
            return since < self._version

    @contextlib.contextmanager
    def changed_by_caller(self, bound: Iterable[int] = ()) -> Iterator[None]:
        """Inside, what its caller has changed is done here: that is no news to it.

        Args:
            bound: ids of tensors that the caller puts into places.
        """
        with self._lock:
            self._notice()
            try:
                yield
            finally:
                things = self._table.things
                self._ids.update((id(things[key]), key) for key in bound if key in things)
                self._look()

    def _contents(self) -> list[Any]:
        return list(chain.from_iterable(map(_contents_of, self._unique)))

    def _notice(self) -> None:
        """Compares what is there with what was at the last look. It follows every call, and while
        nothing has changed it runs no Python for each tensor."""
        contents = self._contents()
        things = list(chain.from_iterable(map(_values_of, contents)))
        if (
            list(map(len, contents)) != self._sizes
            or list(chain.from_iterable(map(_keys_of, contents))) != self._keys
        ):
            self._notice_all()
            return
        are_same = all(map(operator.is_, things, self._things))
        kinds = list(map(_kind_of, self._tensors))
        flags = list(map(_mode_of, self._unique))
        if are_same and kinds == self._kinds and flags == self._flags:
            return
        changed = [i for i, old in enumerate(self._things) if things[i] is not old]
        if any(isinstance(each[i], nn.Module) for each in (things, self._things) for i in changed):
            self._notice_all()
            return
        olds = zip(self._places, kinds, self._kinds, strict=True)
        changed += [i for i, kind, old in olds if kind != old]
        self._version += 1
        for i in changed:
            for name in self._names[i]:
                self._check(name, things[i])
                self._seen[name] = _Seen(things[i], self._seen[name].is_parameter)
                self._changed[name] = self._version
        old_flags = self._flags
        self._note(things)
        for part, flag, old_flag in zip(self._unique, self._flags, old_flags, strict=True):
            if flag is not old_flag:
                for path, each in self._parts:
                    if each is part:
                        self._modes[path] = flag
                        self._switched[path] = self._version
        if any(isinstance(things[i], nn.Parameter) for i in changed):
            self._parameters = {id(s.tensor): n for n, s in self._seen.items() if s.is_parameter}

    def _notice_all(self) -> None:
        """There are other parts, or other names."""
        self._version += 1
        self._look()
        self._rebuilt = self._version
        self._changed.clear()
        self._switched.clear()

    def check_reach(self, result: Any, leaves: Sequence[Tensor]) -> None:
        """
        Args:
            leaves: of a call that has changed something, what its caller gets gradients of.

        Raises:
            TelegradError: the result depends on other parameters, too.
        """
        known = set(map(id, leaves))
        missed = {
            id(seen.tensor): name
            for name, seen in self._seen.items()
            if seen.tensor is not None
            and seen.tensor.requires_grad
            and seen.tensor.is_leaf
            and id(seen.tensor) not in known
        }
        if not missed:
            return
        todo = [
            each.grad_fn or each
            for each in tree_leaves(result)
            if isinstance(each, Tensor) and each.requires_grad
        ]
        met = set()
        while todo:
            node = todo.pop()
            if node in met:
                continue
            met.add(node)
            leaf = node if isinstance(node, Tensor) else getattr(node, "variable", None)
            name = missed.get(id(leaf))
            if name is not None and (leaf is node or isinstance(node, AccumulateGrad)):
                raise TelegradError(
                    f"{name!r} of a {type(self.module).__name__} was made, replaced or unfrozen by "
                    "the very call whose result depends on it, too late for its gradient to come "
                    "back to the calling process. Do it in __init__ or in a method of its own, "
                    "which is called before; or call this one again"
                )
            if not isinstance(node, Tensor):
                todo += [following for following, _ in node.next_functions if following is not None]

    def referred(self, result: Any, *, with_tensors: bool) -> Any:
        """What a method returns, in which references stand for the module, its parts and, if
        asked for, its parameters: the caller has stand-ins for them."""
        parts, tensors = self._paths, self._parameters if with_tensors else {}
        if not any(id(leaf) in parts or id(leaf) in tensors for leaf in tree_leaves(result)):
            return result

        def refer(value: Any) -> Any:
            if isinstance(value, nn.Module) and id(value) in parts:
                return PartAt(parts[id(value)])
            if isinstance(value, nn.Parameter) and id(value) in tensors:
                return TensorAt(tensors[id(value)])
            return value

        return tree_map(refer, result)
