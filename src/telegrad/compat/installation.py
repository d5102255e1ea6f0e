"""Puts telegrad's modules in the place of torch's, and takes them away again.

Two things happen. `sys.modules` gets telegrad's modules under torch's names, so every import from
now on finds them; those that nobody has imported yet are found when somebody does, since the import
system binds a module in its package only as it loads it. And every module that is loaded
already is looked through for names bound to what was torch's (`from torch.distributed.rpc import
rpc_sync` at the top of a program, `RRef` inside torch's DistributedDataParallel and TorchScript
compiler): they are bound to telegrad's. What is kept elsewhere, in a closure or as an attribute of
an object, is not found: call `install()` before.

(Rejected: an import hook for all, which comes too late, since `import torch` itself imports torch's
RPC; filling torch's own module objects with telegrad's functions, which then would not see what a
program sets on those modules.)
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import multiprocessing.spawn
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from telegrad.compat import futures
from telegrad.drop_in import set_drop_in

__all__ = ["install", "is_installed", "uninstall"]

_RPC = "torch.distributed.rpc"
_PARTS = (
    "_testing",
    "_testing.faulty_agent_backend_registry",
    "_utils",
    "api",
    "backend_registry",
    "constants",
    "functions",
    "internal",
    "options",
    "rref_proxy",
    "server_process_global_profiler",
)
_REPLACED = {
    _RPC: "telegrad.compat.rpc",
    **{f"{_RPC}.{part}": f"telegrad.compat.rpc.{part}" for part in _PARTS},
    "torch.distributed.autograd": "telegrad.compat.autograd",
    "torch.distributed.optim.optimizer": "telegrad.compat.optimizer",
    "torch.distributed.nn.api.remote_module": "telegrad.compat.remote_module",
}
"""Torch's modules, and what stands in their places. Parents come before their parts."""

_OWN_PLACES = (
    "torch.distributed.rpc",
    "torch.distributed.autograd",
    "torch.distributed.optim.optimizer",
    "torch.distributed.nn.api.remote_module",
    "torch._C._distributed_rpc",
    "torch._C._distributed_autograd",
)
"""Where a thing was made that is torch's RPC's own, and not only imported there."""

_MISSING: Any = object()


class _Binding(NamedTuple):
    """A name of a loaded module, and what it was bound to."""

    module: types.ModuleType
    name: str
    original: Any


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds telegrad's modules under torch's names, when somebody asks for them."""

    def __init__(self) -> None:
        self.modules: dict[str, types.ModuleType] = {}
        self._own_specs: dict[str, importlib.machinery.ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.modules:
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = self.modules[spec.name]
        self._own_specs[module.__name__] = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """It has run long ago. What the import system has changed is put right."""
        module.__spec__ = self._own_specs[module.__name__]


class _Installed:
    """What `uninstall` needs."""

    def __init__(self) -> None:
        self.modules: dict[str, types.ModuleType] = {}  # torch's own, where they had been loaded
        self.bindings: list[_Binding] = []
        self.finder = _Finder()


_installed: _Installed | None = None
_lock = threading.RLock()  # one thread installs or uninstalls


def is_installed() -> bool:
    """Whether telegrad stands in the place of torch's RPC in this process."""
    return _installed is not None


def install() -> None:
    """Puts telegrad in the place of torch's RPC, in this process and in those it starts.

    Afterwards `torch.distributed.rpc`, `torch.distributed.autograd`,
    `torch.distributed.optim.DistributedOptimizer` and `torch.distributed.nn.RemoteModule` are
    telegrad's. May be called at any time before `init_rpc`, and more than once.

    Raises:
        RuntimeError: torch's own RPC runs in this process: shut it down first.

    Example::

        import telegrad
        telegrad.install()

        import torch.distributed.rpc as rpc  # telegrad's
    """
    global _installed
    with _lock:
        if _installed is not None:
            return
        _refuse_if_torch_runs()
        new = _Installed()
        ours = {name: importlib.import_module(own) for name, own in _REPLACED.items()}
        for name, module in ours.items():
            loaded = sys.modules.get(name)
            if loaded is None:
                new.finder.modules[name] = module
            else:
                new.modules[name] = loaded
                sys.modules[name] = module
                _bind_in_parent(name, module)
        sys.meta_path.insert(0, new.finder)
        new.bindings = _rebind(_replacements(new.modules, ours) | _other_replacements())
        _follow_children()
        set_drop_in(True)
        _installed = new


def uninstall() -> None:
    """Takes `install()` back: torch's own modules are in their places again.

    Raises:
        RuntimeError: RPC runs in this process: shut it down first.
    """
    global _installed
    with _lock:
        old = _installed
        if old is None:
            return
        from telegrad.rpc.group import current

        if current.is_set():
            raise RuntimeError("RPC is running on telegrad: call shutdown() before uninstall()")
        _leave_children()
        set_drop_in(False)
        sys.meta_path.remove(old.finder)
        ours = {name: importlib.import_module(own) for name, own in _REPLACED.items()}
        # Only these: some of torch's change others as they are imported.
        asked_for = [name for name in ours if name in sys.modules]
        for name in asked_for:
            if name in old.modules:
                sys.modules[name] = old.modules[name]
                _bind_in_parent(name, old.modules[name])
            else:
                del sys.modules[name]
        for binding in reversed(old.bindings):
            setattr(binding.module, binding.name, binding.original)
        # What was imported in the meantime holds telegrad's: give it torch's.
        back = {name: importlib.import_module(name) for name in asked_for}
        _rebind(_replacements(ours, back, places=("telegrad.",)))
        _installed = None


def _refuse_if_torch_runs() -> None:
    loaded = sys.modules.get(_RPC)
    is_set = getattr(loaded, "_is_current_rpc_agent_set", None)
    if is_set is not None and is_set():
        raise RuntimeError(
            "torch's own RPC runs in this process: call telegrad.install() before init_rpc(), or "
            "shut it down first"
        )


def _bind_in_parent(name: str, module: types.ModuleType) -> None:
    parent_name, _, attribute = name.rpartition(".")
    parent = sys.modules.get(parent_name)
    if parent is not None:
        setattr(parent, attribute, module)


def _replacements(
    old: dict[str, types.ModuleType],
    new: dict[str, types.ModuleType],
    places: tuple[str, ...] = _OWN_PLACES,
) -> dict[int, tuple[Any, Any]]:
    """What is to be replaced by what, by identity. Values are (old, new): the old one is kept
    alive, so that its id stays its own."""
    found: dict[int, tuple[Any, Any]] = {}
    for name, old_module in old.items():
        new_module = new.get(name)
        if new_module is None:
            continue
        found[id(old_module)] = (old_module, new_module)
        for attribute, value in vars(old_module).items():
            made_in = getattr(value, "__module__", None)
            if not isinstance(made_in, str) or not made_in.startswith(places):
                continue
            replacement = getattr(new_module, attribute, _MISSING)
            if replacement is not _MISSING and replacement is not value:
                found.setdefault(id(value), (value, replacement))
    return found


def _other_replacements() -> dict[int, tuple[Any, Any]]:
    torchs = importlib.import_module("torch.futures")
    pairs = [(getattr(torchs, name), getattr(futures, name)) for name in futures.__all__]
    legacy = importlib.import_module("torch.autograd.profiler_legacy")
    pairs.append((legacy.profile, importlib.import_module("telegrad.compat.rpc.profiling").profile))
    return {id(old): (old, new) for old, new in pairs}


def _rebind(replacements: dict[int, tuple[Any, Any]]) -> list[_Binding]:
    """Binds the names of all loaded modules anew; returns what they were bound to."""
    done = []
    own = set(_REPLACED.values()) | set(_REPLACED)
    for module_name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or module.__name__ in own:
            continue
        if module_name.startswith(("telegrad.", *_OWN_PLACES)):
            continue  # what torch's own consists of stays as it is
        for name, value in list(vars(module).items()):
            pair = replacements.get(id(value))
            if pair is not None and pair[0] is value:
                setattr(module, name, pair[1])
                done.append(_Binding(module, name, value))
    return done


# -- processes that `multiprocessing` starts
#
# A forked child has everything already. A spawned one is sent a dict that tells it how to prepare
# (`sys.path`, the main module, ...). An entry of it installs telegrad as it is unpickled: before
# the child's main module is imported, so that the names it binds are telegrad's from the start.

_INSTALL = """
import sys
before = list(sys.path)
sys.path[:] = {path!r}  # the child gets its parent's path only later
try:
    import telegrad
    telegrad.install()
finally:
    sys.path[:] = before
"""

_original: Callable[[str], dict[str, Any]] | None = None


class _InstallOnArrival:
    """Unpickled, it has installed telegrad, and is None."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (_INSTALL.format(path=list(sys.path)), {})


def _follow_children() -> None:
    global _original
    if _original is None:
        _original = multiprocessing.spawn.get_preparation_data
        multiprocessing.spawn.get_preparation_data = _get_preparation_data


def _leave_children() -> None:
    global _original
    if _original is not None:
        multiprocessing.spawn.get_preparation_data = _original  # type: ignore[assignment]
        _original = None


def _get_preparation_data(name: str) -> dict[str, Any]:
    assert _original is not None
    return {"telegrad": _InstallOnArrival(), **_original(name)}
