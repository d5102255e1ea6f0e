"""Starts two workers, as `telegrad run` does, and looks at what lies between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from telegrad.tools.doctor.finding import Finding, Level
from telegrad.tools.doctor.probe import MEGABYTES

__all__ = ["try_two_workers"]

_PATIENCE = 100.0  # seconds; importing torch twice can take long on a machine that does more

_TRANSPORTS = {
    "unix": "Unix socket: both workers are on this host",
    "tcp": "encrypted TCP: the workers have no Unix sockets in common",
    "tls": "TLS with certificates",
    "plain": "TCP without encryption: the workers have no Unix sockets in common",
}


def try_two_workers() -> Iterator[Finding]:
    with tempfile.TemporaryDirectory(prefix="telegrad-doctor-") as directory:
        path = os.path.join(directory, "seen.json")
        begun = time.monotonic()
        try:
            ran = subprocess.run(
                [
                    *(sys.executable, "-m", "telegrad", "run", "-n", "2"),
                    *("-m", "telegrad.tools.doctor.probe", path),
                ],
                capture_output=True,
                text=True,
                timeout=_PATIENCE,
                check=False,
            )
        except subprocess.TimeoutExpired:
            yield _failed(f"two workers did not come to an end within {_PATIENCE:g} s", "")
            return
        if ran.returncode != 0:
            yield _failed("two workers could not be started", ran.stderr)
            return
        taken = time.monotonic() - begun
        with open(path, encoding="utf-8") as file:
            seen = json.load(file)
    scheme = seen["address"].partition(":")[0]
    how = _TRANSPORTS.get(scheme, scheme)
    if seen["shares_memory"]:
        how += ", large tensors go through shared memory"
    yield _ok("two workers", f"started, called each other and ended in {taken:.1f} s")
    yield _ok("transport", how)
    yield _ok("a call", f"{seen['call'] * 1e6:.0f} µs, with two small tensors")
    rate = 2 * MEGABYTES / seen["echo"] / 1024
    yield _ok(f"echo of {MEGABYTES} MB", f"{seen['echo'] * 1e3:.1f} ms, {rate:.1f} GB/s")


def _ok(subject: str, text: str) -> Finding:
    return Finding(level=Level.OK, subject=subject, text=text)


def _failed(what: str, said: str) -> Finding:
    lines = [line for line in said.splitlines() if line.strip()]
    last = f": {lines[-1]}" if lines else ""
    return Finding(
        level=Level.FAIL,
        subject="two workers",
        text=what + last,
        advice="telegrad run -n 2 -m telegrad.tools.doctor.probe /dev/null shows all they said",
    )
