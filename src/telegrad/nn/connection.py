"""What the stand-ins of one module share: the real module, and what each side has told the other.

What this side has changed travels ahead of the next call (`tell`). What a method has changed there
comes with its result (`follow`): the stand-ins then have the names, tensors and modes that the real
parts have. A parameter that stays is the same tensor for this process, so optimizers and `.grad` go
on; one that is new is unknown to an optimizer made before, as it is in one process.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from telegrad.autograd.caller_modes import capture
from telegrad.autograd.plain import Residents, engine_here, record_call, refuse_transforms
from telegrad.errors import (
    NotInitialized,
    RpcTimeout,
    SerializationError,
    TelegradError,
    WorkerLost,
)
from telegrad.nn.made import Changes, PartAt, PartThere, TensorAt, TensorThere
from telegrad.nn.module_there import Reference, call_method, changes_since, submit_method
from telegrad.remote_calls import RemoteFuture
from telegrad.rpc.calls.arguments import in_words_of_caller
from telegrad.tensors.operations import Spec
from telegrad.tensors.remote_tensor import RemoteTensor, moved_there, moved_to, respecify
from telegrad.tensors.stream import Handle, Stream
from telegrad.tensors.table import Exported

__all__ = ["Connection"]

_PLACES_IN_CALL = {"args[6]": "args", "args[7]": "kwargs"}
"""Where the program's arguments are among those of the call that brings them."""

_REMEMBERED = 4096  # ids; news that were overtaken are a few calls late


class Connection:
    """
    Args:
        root: the stand-in of the whole module. It is not kept alive.
        new_part: makes the stand-in of a part.

    Attributes:
        version: of the module there, up to which this side knows its changes.
    """

    def __init__(
        self, handle: Handle, root: Any, new_part: Callable[[Connection, PartThere], Any]
    ) -> None:
        self.handle = handle
        self.bound: dict[str, tuple[int | None, bool]] = {}
        self.training: dict[str, bool] = {}
        self.version = 0
        self._root = weakref.ref(root)
        self._new_part = new_part
        self._removed: weakref.WeakValueDictionary[int, RemoteTensor] = (
            weakref.WeakValueDictionary()
        )
        """Parameters that a method has removed and the program still has, by their ids."""
        self._given: deque[int] = deque(maxlen=_REMEMBERED)  # ids that `follow` has made handles of
        self._lock = threading.RLock()  # guards what `follow` changes

    @property
    def stream(self) -> Stream:
        return self.handle.stream

    def tell(self, part: Any, path: str) -> None:
        """Sends what has changed in a part since the worker was told last.

        Raises:
            TelegradError: it is not a part of the module any more, or has been given what cannot be
                there.
        """
        if part._is_removed:
            raise TelegradError(
                f"{path!r} was a part of the module on worker {self.stream.worker_name!r}, which a "
                "method has removed or replaced: take the part from the module again"
            )
        bound: dict[str, tuple[int | None, bool]] = {}
        training: dict[str, bool] = {}
        for name, each in part.named_modules(prefix=path):
            if getattr(each, "_connection", None) is not self:
                raise TelegradError(
                    f"{name!r} of the module on worker {self.stream.worker_name!r} was replaced by "
                    "a module of this process. Make it part of the class there, or use it outside"
                )
            if self.training.get(name) is not each.training:
                training[name] = each.training
            dot = f"{name}." if name else ""
            for table in (each._parameters, each._buffers):
                for last, tensor in table.items():
                    state = self._state(dot + last, tensor)
                    if self.bound.get(dot + last) != state:
                        bound[dot + last] = state
        unknown = bound.keys() - self.bound.keys()
        if unknown:
            raise TelegradError(
                f"the module on worker {self.stream.worker_name!r} has no {sorted(unknown)}. Make "
                "that part of the class there"
            )
        # Noted after it is sent: another thread that finds it noted comes later.
        if bound:
            self.stream.put(("bind", None, (self.handle.id, bound), (), {}))
            self.bound.update(bound)
        if training:
            self.stream.put(("train", None, (self.handle.id, training), (), {}))
            self.training.update(training)

    def _state(self, name: str, tensor: Tensor | None) -> tuple[int | None, bool]:
        if tensor is None:
            return None, False
        if not isinstance(tensor, RemoteTensor):
            refuse_transforms()  # which put wrappers in the places of parameters
            raise TelegradError(
                f"{name!r} of the module on worker {self.stream.worker_name!r} is a tensor of this "
                "process: copy_ it to the tensor there"
            )
        return moved_to(self.stream, tensor).handle.id, tensor.requires_grad

    def call(self, part: Any, path: str, method: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs a method of a part on the worker."""
        leaves, arguments = self._arguments(part, path, method, args, kwargs)
        try:
            with self.stream.before() as before:
                result, changes = record_call(
                    self.stream.worker,
                    call_method,
                    (before, *arguments),
                    residents=Residents(leaves, self.revive) if leaves else None,
                )
        except Exception as error:
            if not isinstance(error, (WorkerLost, RpcTimeout, NotInitialized)):
                self.catch_up(part)  # the method may have changed something before it failed
            if isinstance(error, SerializationError):
                raise in_words_of_caller(error, _PLACES_IN_CALL) from error.__cause__
            raise
        self.follow(part, changes)
        return self.stand_in(part, result)

    def submit(
        self, part: Any, path: str, method: str, args: Any, kwargs: dict[str, Any]
    ) -> RemoteFuture[Any]:
        """The same, without waiting."""
        leaves, arguments = self._arguments(part, path, method, args, kwargs)
        engine, worker = engine_here(), self.stream.worker
        before = self.stream.after_all()
        try:
            submitted = engine.submit(
                worker,
                submit_method,
                (before, *arguments),
                {},
                residents=Residents(leaves, self.revive) if leaves else None,
                on_news=partial(self.follow, part),
            )
        except SerializationError as error:
            raise in_words_of_caller(error, _PLACES_IN_CALL) from error.__cause__
        return RemoteFuture(engine, worker, submitted)

    def leaves_of(self, part: Any) -> tuple[list[Tensor], list[int]]:
        """Parameters that get gradients by a call that is made now, and their ids there."""
        self.stream.is_recording = torch.is_grad_enabled()
        if not self.stream.is_recording:
            return [], []
        leaves: list[Tensor] = [p for p in part.parameters() if p.requires_grad]
        return leaves, [p.handle.id for p in leaves if isinstance(p, RemoteTensor)]

    def _arguments(
        self, part: Any, path: str, method: str, args: Any, kwargs: dict[str, Any]
    ) -> tuple[list[Tensor], tuple[Any, ...]]:
        """Of a call: what gets gradients there, and what `call_method` takes behind `before`.
        References stand for remote tensors."""
        self.tell(part, path)
        leaves, ids = self.leaves_of(part)
        if any(type(each) is RemoteTensor for each in tree_leaves((args, kwargs))):
            refer = partial(self._refer, leaves)
            args, kwargs = tree_map(refer, args), tree_map(refer, kwargs)
        return leaves, (self.handle.id, path, method, capture(), ids, args, kwargs, self.version)

    def _refer(self, leaves: list[Tensor], value: Any) -> Any:
        if type(value) is not RemoteTensor:
            return value
        tensor = moved_to(self.stream, value)
        needs_gradient = tensor.requires_grad and torch.is_grad_enabled()
        if needs_gradient:
            leaves.append(tensor)
        return Reference(tensor.handle.id, needs_gradient)

    def revive(self, exported: Sequence[Exported | None]) -> list[Tensor | None]:
        """Gradients of what `export` has returned there."""
        return [self._revived(each) for each in exported]

    def _revived(self, each: Exported | None) -> Tensor | None:
        if each is None:
            return None
        if isinstance(each, Tensor):
            return moved_there(self.stream, each)
        return RemoteTensor(Handle(self.stream, each[0]), Spec(*each[1]))

    # -- what has changed there

    def catch_up(self, part: Any) -> None:
        """After a call that has failed: asks what has changed, and leaves it to the next call if
        the worker cannot say."""
        with contextlib.suppress(TelegradError):
            key, path = self.handle.id, part._path
            self.follow(part, self.stream.ask(changes_since, key, path, self.version))

    def follow(self, part: Any, changes: Changes | None) -> None:
        """Makes the stand-ins what the real parts are now.

        Args:
            part: one of them, in case that the program has kept nothing else of the module.
        """
        if changes is None:
            return
        with self._lock:
            if changes.version <= self.version:  # a later reply was faster
                self._release(changes)
                return
            self.version = changes.version
            top, path = self._top(part)
            ids = {key for key, _ in self.bound.values()}
            is_known = any(each and each.id in ids for each in changes.tensors.values())
            known = _tensors_of(top) if changes.parts is not None or is_known else {}
            if changes.parts is not None:
                self.build(top, changes.parts, known)
            for name, there in changes.tensors.items():
                place = self._place(top, path, name)
                if place is not None:
                    table, last, is_parameter = place
                    old, new = table[last], self._tensor(there, known, is_parameter=is_parameter)
                    table[last] = new
                    self.bound[name] = self._state(name, new)
                    if new is not old and is_parameter and isinstance(old, RemoteTensor):
                        self._removed[old.handle.id] = old
            for name, mode in changes.training.items():
                self.training[name] = mode
                shell = self._shell(top, path, name)
                if shell is not None:
                    shell.training = mode

    def _release(self, changes: Changes) -> None:
        """Of news that are not needed, the tensors that this side does not have."""
        given = set(self._given)
        for there in [*changes.tensors.values(), *_tensors_in(changes.parts or ())]:
            if there is not None and there.id not in given:
                self._new_handle(there.id)

    def _new_handle(self, key: int) -> Handle:
        self._given.append(key)
        return Handle(self.stream, key)

    def _top(self, part: Any) -> tuple[Any, str]:
        root = self._root()
        return (root, "") if root is not None else (part, part._path)

    @staticmethod
    def _shell(top: Any, path: str, name: str) -> Any:
        """The stand-in of the part of this name; None if the program has not kept it."""
        if name == path or not path:
            return top.get_submodule(name[len(path) :])
        return top.get_submodule(name[len(path) + 1 :]) if name.startswith(f"{path}.") else None

    def _place(self, top: Any, path: str, name: str) -> tuple[dict[str, Any], str, bool] | None:
        """Where the tensor of this name is: in which table, by which name in it, and whether it is
        a parameter."""
        owner, _, last = name.rpartition(".")
        shell = self._shell(top, path, owner)
        if shell is None:
            return None
        is_parameter = last in shell._parameters
        return (shell._parameters if is_parameter else shell._buffers), last, is_parameter

    def _tensor(
        self, there: TensorThere | None, known: dict[int, RemoteTensor], *, is_parameter: bool
    ) -> RemoteTensor | None:
        """What stands for a parameter or buffer.

        Args:
            known: what stands for those that were there before, by their ids.
        """
        if there is None:
            return None
        spec = Spec(*there.spec)
        tensor = known.get(there.id)
        if tensor is None and there.was is not None:
            tensor = self._removed.pop(there.was, None)
        if tensor is None:
            tensor = RemoteTensor(self._new_handle(there.id), spec)
            if is_parameter:
                tensor = nn.Parameter(tensor, there.requires_grad)  # type: ignore[assignment]
            known[there.id] = tensor
        elif tensor.handle.id != there.id:
            known[there.id] = tensor
            self._new_handle(there.id)  # of which nothing is needed: it is released
        if tensor.spec != spec:
            respecify(tensor, spec)
        if tensor.requires_grad is not there.requires_grad:
            tensor.requires_grad_(there.requires_grad)
        return tensor

    def build(
        self, top: Any, parts: Sequence[PartThere], known: dict[int, RemoteTensor] | None = None
    ) -> None:
        """Makes the tree of stand-ins under `top` what the tree of the real parts is. Those of
        parts that are still there stay."""
        known = {} if known is None else known
        old = {shell._number: shell for shell in top.modules()}
        at = next((each.path for each in parts if each.number == top._number), None)
        if at is None:
            top._is_removed = True
            return
        before = [p for shell in old.values() for p in shell._parameters.values() if p is not None]
        shells: dict[str, Any] = {}
        placed: dict[int, Any] = {}
        self.bound, self.training = {}, {}
        for each in parts:
            if each.path != at and not each.path.startswith(f"{at}." if at else ""):
                continue
            shell = placed.get(each.number)
            if shell is None:
                shell = old.get(each.number)  # which may be empty, and so false
                if shell is None:
                    shell = self._new_part(self, each)
                placed[each.number] = shell
                shell._path = each.path
                shell.training = each.is_training
                shell._non_persistent_buffers_set = set(each.not_persistent)
                shell.__dict__["_modules"] = {}
                for kind in ("_parameters", "_buffers"):  # new ones: others may iterate over these
                    is_parameter = kind == "_parameters"
                    tensors = each.parameters if is_parameter else each.buffers
                    shell.__dict__[kind] = {
                        name: self._tensor(there, known, is_parameter=is_parameter)
                        for name, there in tensors.items()
                    }
            dot = f"{each.path}." if each.path else ""
            for name, tensor in {**shell._parameters, **shell._buffers}.items():
                self.bound[dot + name] = self._state(dot + name, tensor)
            self.training[each.path] = each.is_training
            shells[each.path] = shell
            if each.path != at:
                owner, _, last = each.path.rpartition(".")
                shells[owner]._modules[last] = shell
        for number, shell in old.items():
            shell._is_removed = number not in placed
        after = set(map(id, top.parameters()))
        self._removed.update((p.handle.id, p) for p in before if id(p) not in after)

    def stand_in(self, part: Any, result: Any) -> Any:
        """What a method has returned, with stand-ins for parts of the module and parameters."""
        if not any(isinstance(leaf, PartAt | TensorAt) for leaf in tree_leaves(result)):
            return result
        top, path = self._top(part)

        def find(value: Any) -> Any:
            if isinstance(value, PartAt):
                name = value.path
                found = self._shell(top, path, value.path)
            elif isinstance(value, TensorAt):
                name = value.name
                place = self._place(top, path, value.name)
                found = None if place is None else place[0][place[1]]
            else:
                return value
            if found is None:
                raise TelegradError(
                    f"a method has returned {name!r} of the module on worker "
                    f"{self.stream.worker_name!r}, of which this process has kept the part "
                    f"{path!r} only: keep the whole module"
                )
            return found

        return tree_map(find, result)


def _tensors_of(top: Any) -> dict[int, RemoteTensor]:
    """Of a tree of stand-ins: the parameters and buffers by their ids."""
    tables = [table for each in top.modules() for table in (each._parameters, each._buffers)]
    return {t.handle.id: t for table in tables for t in table.values() if t is not None}


def _tensors_in(parts: Sequence[PartThere]) -> Iterator[TensorThere | None]:
    for each in parts:
        yield from each.parameters.values()
        yield from each.buffers.values()
