"""What this machine and this environment offer."""

from __future__ import annotations

import enum
import os
import platform
import resource
import shutil
import socket
import ssl
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

import telegrad
from telegrad import compat
from telegrad.transport.same_host import shm
from telegrad.wire.frames import PROTOCOL_VERSION

__all__ = ["Finding", "Level", "fail", "look_at_host", "ok", "warn"]

_FEW_DESCRIPTORS = 1024
_SHORT_SECRET = 16
_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Level(str, enum.Enum):
    OK = "ok"
    WARN = "warn"  # it works, but not as well as it could
    FAIL = "fail"  # it does not work


@dataclass(frozen=True, kw_only=True)
class Finding:
    """
    Args:
        subject: what was looked at.
        text: what was found.
        advice: what to do about it; empty if nothing need be done.
    """

    level: Level
    subject: str
    text: str
    advice: str = ""


def ok(subject: str, text: str) -> Finding:
    return Finding(level=Level.OK, subject=subject, text=text)


def warn(subject: str, text: str, advice: str) -> Finding:
    return Finding(level=Level.WARN, subject=subject, text=text, advice=advice)


def fail(subject: str, text: str, advice: str) -> Finding:
    return Finding(level=Level.FAIL, subject=subject, text=text, advice=advice)


def look_at_host(environment: Mapping[str, str]) -> Iterator[Finding]:
    yield from _versions()
    yield _cores()
    yield _loopback()
    yield _unix_sockets()
    yield _shared_memory()
    yield _shm_directory()
    yield _descriptors()
    yield _replacement()
    yield _secret(environment)
    yield ok("tls", f"{ssl.OPENSSL_VERSION}; encrypts connections over TCP")
    yield _rendezvous(environment)


def _versions() -> Iterator[Finding]:
    yield ok("telegrad", f"{telegrad.__version__}, protocol {PROTOCOL_VERSION}")
    yield ok("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    version = str(torch.__version__)
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < (2, 13):
        yield fail("torch", version, "telegrad needs 2.13 or newer: pip install 'torch>=2.13'")
    else:
        yield ok("torch", version)


def _cores() -> Finding:
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    text = f"{usable} of {there} usable" if usable < there else f"{usable}"
    if usable == 1:
        return warn("cores", text, "workers on this machine take turns: give it a second core")
    return ok("cores", text)


def _loopback() -> Finding:
    try:
        _talk(socket.create_server(("127.0.0.1", 0)))
    except OSError as error:
        return fail(
            "loopback",
            f"no connection to 127.0.0.1: {error}",
            "workers meet there: bring it up (ip link set lo up), or let connections to it through",
        )
    return ok("loopback", "a port can be opened at 127.0.0.1 and reached")


def _unix_sockets() -> Finding:
    server = socket.socket(socket.AF_UNIX)
    try:
        server.bind("")  # Linux gives it a name in the abstract namespace
        server.listen()
        _talk(server)
    except OSError as error:
        server.close()
        return warn(
            "unix sockets",
            f"unusable: {error}",
            "RpcOptions(transport='tcp') works without them, slower",
        )
    return ok("unix sockets", "usable, in the abstract namespace")


def _talk(server: socket.socket) -> None:
    with server, socket.socket(server.family) as client:
        client.settimeout(2.0)
        client.connect(server.getsockname())
        accepted, _ = server.accept()
        with accepted:
            accepted.sendall(b"x")
            client.recv(1)


def _shared_memory() -> Finding:
    advice = "large tensors go through sockets instead, slower"
    if not shm.is_available():
        return warn("shared memory", "this system has no memfd with seals", advice)
    memory = shm.SharedMemory()
    try:
        if memory.lend(memoryview(bytes(1 << 22))) is None:
            return warn("shared memory", "none to be had: out of memory, or forbidden", advice)
    finally:
        memory.close()
    return ok("shared memory", "memfd works; it needs no space in /dev/shm")


def _shm_directory() -> Finding:
    try:
        size = shutil.disk_usage("/dev/shm")
    except OSError as error:
        text = f"not there ({error.strerror})"
        return warn("/dev/shm", text, "telegrad does not use it, torch's DataLoader workers do")
    text = f"{size.free >> 20} of {size.total >> 20} MB free"
    if size.free < 64 << 20:
        return warn("/dev/shm", text, "telegrad does not use it, torch's DataLoader workers do")
    return ok("/dev/shm", text)


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} open files allowed (up to {hard})"
    if soft < _FEW_DESCRIPTORS:
        return warn("descriptors", text, f"large groups need more: ulimit -n {_FEW_DESCRIPTORS}")
    return ok("descriptors", text)


def _replacement() -> Finding:
    if compat.is_installed():
        return ok("torch's RPC", "telegrad stands in its place in this process")
    loaded = "loaded by torch" if "torch.distributed.rpc" in sys.modules else "not loaded"
    return ok("torch's RPC", f"{loaded}, not replaced; telegrad run --drop-in replaces it")


def _secret(environment: Mapping[str, str]) -> Finding:
    secret = environment.get("TELEGRAD_SECRET")  # its length is all that is ever told of it
    if secret is None:
        text = "TELEGRAD_SECRET is not set: needed only by groups on several machines"
        return ok("secret", text)
    if not secret:
        return fail(
            "secret", "TELEGRAD_SECRET is empty", "give it a value, or unset it to have one made"
        )
    if len(secret) < _SHORT_SECRET:
        return warn(
            "secret",
            f"TELEGRAD_SECRET has {len(secret)} characters",
            "use a longer one, such as the output of: openssl rand -hex 32",
        )
    return ok("secret", f"TELEGRAD_SECRET has {len(secret)} characters")


def _rendezvous(environment: Mapping[str, str]) -> Finding:
    given = [name for name in _RENDEZVOUS if name in environment]
    missing = [name for name in _RENDEZVOUS if name not in environment]
    if given and missing:
        return warn(
            "environment",
            f"{', '.join(given)} set, but not {', '.join(missing)}",
            "a program started without a launcher would not find its group: set all, or none",
        )
    if given:
        return ok("environment", "this is worker " + environment["RANK"] + " of a group already")
    return ok("environment", "none of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set")
