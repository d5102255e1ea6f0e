"""Two network namespaces with a cable between them: as good as two hosts."""

from __future__ import annotations

import contextlib
import os
import subprocess

import pytest


@contextlib.contextmanager
def two_hosts(network="10.99.7"):
    """Gives their names; the first has address 1 of the network, the second address 2."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    tag = f"tg{os.getpid() % 10000}"
    a, b = f"{tag}a", f"{tag}b"

    def run(*command):
        subprocess.run(command, check=True, capture_output=True)

    try:
        run("ip", "netns", "add", a)
        run("ip", "netns", "add", b)
        run("ip", "link", "add", a, "netns", a, "type", "veth", "peer", "name", b, "netns", b)
        for space, address in ((a, f"{network}.1/24"), (b, f"{network}.2/24")):
            run("ip", "-n", space, "addr", "add", address, "dev", space)
            run("ip", "-n", space, "link", "set", space, "up")
            run("ip", "-n", space, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        for space in (a, b):
            with contextlib.suppress(OSError):
                subprocess.run(("ip", "netns", "del", space), capture_output=True, check=False)
        pytest.skip(f"network namespaces cannot be made here: {error}")
    try:
        yield a, b
    finally:
        for space in (a, b):
            run("ip", "netns", "del", space)
