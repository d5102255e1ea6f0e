"""`telegrad doctor`: on this machine, and on machines that lack something."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from telegrad.tools.doctor.host import Level, look_at_host

DOCTOR = f"{sys.executable} -m telegrad doctor"


def run(command, **environment):
    return subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_it_works_here_and_two_workers_were_measured():
    ran = run(f"{DOCTOR} --json", TELEGRAD_SECRET="a secret that is long enough")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    findings = {finding["subject"]: finding for finding in json.loads(ran.stdout)}
    assert findings["two workers"]["level"] == "ok"
    assert findings["transport"]["text"].startswith("Unix socket: both workers are on this host")
    assert re.match(r"\d+ µs", findings["a call"]["text"])
    assert re.match(r"[\d.]+ ms", findings["echo of 16 MB"]["text"])
    assert findings["secret"]["text"] == "TELEGRAD_SECRET has 28 characters"
    assert "long enough" not in ran.stdout + ran.stderr


def test_what_fails_is_told_with_what_to_do():
    ran = run(f"ulimit -n 256; {DOCTOR}", TELEGRAD_SECRET="")
    assert ran.returncode == 1
    lines = ran.stdout.splitlines()
    assert lines[-1] == f"1 of {len([x for x in lines if x[0] != ' ']) - 1} checks failed"
    assert "fail  secret         TELEGRAD_SECRET is empty" in lines
    assert " " * 21 + "→ give it a value, or unset it to have one made" in lines
    assert "warn  descriptors    256 open files allowed (up to 256)" in lines
    assert "warn  two workers    not tried, because of what fails above" in lines


def test_a_machine_without_loopback_is_told_so():
    if run("unshare -n true").returncode != 0:
        pytest.skip("network namespaces cannot be made here")
    ran = run(f"unshare -n {DOCTOR} --json")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    failed = [f for f in json.loads(ran.stdout) if f["level"] == "fail"]
    assert [f["subject"] for f in failed] == ["loopback"]
    assert "ip link set lo up" in failed[0]["advice"]


def test_a_reader_that_goes_away_is_no_error():
    ran = run(f"{DOCTOR} | head -n 1; exit ${{PIPESTATUS[0]}}")
    assert ran.returncode in (0, 141)
    assert ran.stderr == ""


@pytest.mark.parametrize(
    ("environment", "subject", "level"),
    [
        ({}, "secret", Level.OK),
        ({"TELEGRAD_SECRET": ""}, "secret", Level.FAIL),
        ({"TELEGRAD_SECRET": "hunter2"}, "secret", Level.WARN),
        ({"TELEGRAD_SECRET": "x" * 64}, "secret", Level.OK),
        ({}, "environment", Level.OK),
        ({"RANK": "0"}, "environment", Level.WARN),
    ],
)
def test_the_environment_is_judged(environment, subject, level):
    (found,) = [f for f in look_at_host(environment) if f.subject == subject]
    assert found.level is level
    assert bool(found.advice) == (level is not Level.OK)
    assert "hunter2" not in found.text + found.advice
