"""The shape of the package: who may import whom, and which names are public."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import telegrad
import telegrad.errors
import telegrad.rpc

SOURCE = Path(telegrad.__file__).parent

LAYERS = [
    {"drop_in", "errors", "forks", "ids", "locks", "threads"},
    {"wire"},
    {"transport"},
    {"rpc"},
    {"autograd"},
    {"tensors"},
    {"optim", "nn", "remote_calls"},
    {"observe"},
    {"testing"},
    {"compat"},
    {"launch"},
    {"tools"},
]
"""Section 2 of the design, from the bottom up: imports point to the same layer or to one before."""

LEAVES = {"compat", "testing", "tools"}
"""Nothing below them may need them, and nothing beside them either."""

ABOVE_ALL = {"__init__", "__main__"}

LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
MODULES = sorted(SOURCE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every import in a file, also those in functions and for type checkers only."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} is a relative import"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_upward_only(path):
    part = part_of(path)
    if part in ABOVE_ALL:
        return
    assert part in LEVEL, f"{part} has no place among the layers of the design"
    for line, name in imports(path):
        if not name.startswith("telegrad."):
            continue
        imported = name.split(".")[1]
        assert imported in LEVEL, f"{path}:{line} imports {name}"
        assert LEVEL[imported] <= LEVEL[part], f"{path}:{line}: {part} must not import {name}"
        if imported in LEAVES:
            assert imported == part or LEVEL[part] > LEVEL[imported], f"{path}:{line}: {name}"


ROOMS = {
    ".".join(path.parent.relative_to(SOURCE.parent).parts): set(re.findall(r"`(\w+)`", doors))
    for path in MODULES
    if path.name == "__init__.py"
    for _, named, doors in [
        (ast.get_docstring(ast.parse(path.read_text())) or "").partition("Doors:")
    ]
    if named
}
"""Packages that name their doors in their docstrings."""


def module_of(name: str) -> str:
    """The module of an imported name: itself, or what it is imported from."""
    is_module = SOURCE.parent.joinpath(*name.split(".")).with_suffix(".py").exists()
    return name if is_module else name.rpartition(".")[0]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_rooms_are_entered_by_their_doors(path):
    here = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
    for line, name in imports(path):
        module = module_of(name)
        room, _, last = module.rpartition(".")
        if room in ROOMS and not here.startswith(f"{room}."):
            assert last in ROOMS[room], f"{path}:{line}: {last} is not a door of {room}"


def test_every_door_is_there():
    assert len(ROOMS) >= 10
    for room, doors in ROOMS.items():
        for door in doors:
            place = SOURCE.parent.joinpath(*room.split("."), f"{door}.py")
            if not place.exists():
                assert hasattr(importlib.import_module(room), door), f"{room} has no {door}"


def test_the_command_line_does_not_load_the_yardstick():
    for module in sorted((SOURCE / "tools" / "cli").glob("*.py")):
        tree = ast.parse(module.read_text(encoding="utf-8"))
        for node in tree.body:  # at the top: a command may import it when it runs
            names = [alias.name for alias in getattr(node, "names", [])]
            assert not getattr(node, "module", "").startswith("telegrad.tools.bench"), module
            assert not any(name.startswith("telegrad.tools.bench") for name in names), module


YARDSTICK = SOURCE / "tools" / "demo" / "timing.py"
"""Times the demo's training step on torch's RPC, too."""


@pytest.mark.parametrize(
    "path",
    [path for path in MODULES if path != YARDSTICK],
    ids=lambda path: str(path.relative_to(SOURCE)),
)
def test_torchs_own_rpc_is_never_imported(path):
    if path.is_relative_to(SOURCE / "tools" / "bench"):
        return  # it is the yardstick there
    for line, name in imports(path):
        for upstream in ("torch.distributed.rpc", "torch.distributed.autograd"):
            assert not name.startswith(upstream), f"{path}:{line} imports {name}"
        assert not name.startswith("torch") or "tensorpipe" not in name.lower(), f"{path}:{line}"


def test_the_protocols_are_pure():
    """State machines know no sockets, threads, torch or clocks."""
    impure = ("torch", "socket", "threading", "time", "select", "queue", "asyncio")
    for name in (
        "rpc/references/protocol.py",
        "rpc/references/owner.py",
        "rpc/references/user.py",
        "rpc/references/events.py",
        "rpc/connections/liveness.py",
        "autograd/passes/protocol.py",
        "autograd/contexts/lifetime.py",
    ):
        for line, imported in imports(SOURCE / name):
            assert imported.split(".")[0] not in impure, f"{name}:{line} imports {imported}"


def test_the_public_names_of_rpc_are_these():
    assert sorted(telegrad.rpc.__all__) == [
        "RRef",
        "RpcOptions",
        "TlsOptions",
        "UNSET_RPC_TIMEOUT",
        "WorkerInfo",
        "functions",
        "get_rpc_timeout",
        "get_worker_info",
        "init_rpc",
        "is_initialized",
        "remote",
        "rpc_async",
        "rpc_sync",
        "shutdown",
    ]
    for name in telegrad.rpc.__all__:
        assert hasattr(telegrad.rpc, name)


def test_the_public_errors_are_these_and_all_are_runtime_errors():
    assert sorted(telegrad.errors.__all__) == [
        "AuthenticationError",
        "BackwardError",
        "ContextError",
        "LaunchError",
        "NotAllowed",
        "NotInitialized",
        "ProtocolError",
        "RRefError",
        "RemoteError",
        "ReplyLost",
        "RpcTimeout",
        "SerializationError",
        "TelegradError",
        "WorkerLost",
    ]
    for name in telegrad.errors.__all__:
        kind = getattr(telegrad.errors, name)
        assert issubclass(kind, telegrad.errors.TelegradError)
        assert issubclass(kind, RuntimeError)
        assert name in (telegrad.errors.__doc__ or "")
    assert issubclass(telegrad.errors.RpcTimeout, TimeoutError)
    assert issubclass(telegrad.errors.WorkerLost, ConnectionError)
