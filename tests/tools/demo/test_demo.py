"""The demo, run as a user runs it, in shorter settings."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from telegrad.tools.cli import main

COMMAND = [sys.executable, "-m", "telegrad", "demo"]
PATIENCE = 100


def processes_of(group):
    """The processes of a process group that still run."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", encoding="utf-8") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] not in "ZX":
                found.append(int(entry))
    return found


def left_after_a_moment(group):
    """Those that have not ended within ten seconds: the fork server ends after its master."""
    for pid in processes_of(group):
        try:
            end = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        poller = select.poll()
        poller.register(end, select.POLLIN)
        poller.poll(10_000)
        os.close(end)
    return processes_of(group)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        [*COMMAND, "--steps", "150", "--timed-steps", "10", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done, out, json.loads((out / "numbers.json").read_text())


def test_the_model_learns(run):
    _, _, numbers = run
    assert len(numbers["losses"]) == numbers["steps"] == 150
    assert numbers["first_loss"] == pytest.approx(2.08, abs=0.1)  # ln 8
    assert numbers["last_loss"] < 1.6
    assert numbers["accuracy"] > 0.5


def test_losses_gradients_and_weights_are_those_of_one_process(run):
    _, _, numbers = run
    assert numbers["compared_gradients"] == 70  # seven parameters, ten steps
    assert numbers["largest_loss_difference"] == 0
    assert numbers["largest_gradient_difference"] == 0
    assert numbers["largest_weight_difference"] == 0


def test_both_libraries_are_timed(run):
    _, _, numbers = run
    assert numbers["telegrad_step_seconds"] > 0
    assert numbers["torch_step_seconds"] > 0


def test_each_workers_traffic_is_counted(run):
    _, _, numbers = run
    traffic = numbers["traffic"]
    assert set(traffic) == {"driver", "table", "encoder"}
    assert traffic["driver"]["calls_made"] > 150
    assert traffic["table"]["calls_served"] > 150
    assert traffic["encoder"]["bytes_sent"] > 150 * 64 * 64 * 4  # what it encodes, at least


def test_pictures_are_written_and_said(run):
    done, out, _ = run
    for name in ("loss.svg", "graph.svg"):
        assert ElementTree.parse(out / name).getroot().tag.endswith("svg")
        assert str(out / name) in done.stdout
    graph = (out / "graph.svg").read_text()
    for word in ("driver", "table", "encoder", "EmbeddingBag", "(root)"):
        assert word in graph


def test_what_it_says_is_plain_lines_without_a_terminal(run):
    done, _, numbers = run
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
    assert "step 150/150  loss" in done.stdout
    assert "0 in 150 losses, 0 in 70 gradients, 0 in the final weights" in done.stdout
    assert f"{numbers['torch_step_seconds'] * 1e3:.2f} ms on torch's RPC" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("moment", ["step ", "steps on torch", "steps on telegrad"])
def test_ctrl_c_leaves_nothing_behind(tmp_path, moment):
    settings = ["--steps", "30", "--timed-steps", "100000"]
    if moment == "step ":
        settings = ["--steps", "100000"]
    elif moment == "steps on torch":
        settings = ["--steps", "30", "--timed-steps", "100"]
    process = subprocess.Popen(
        [*COMMAND, *settings, "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        if moment == "step ":
            process.stdout.readline()
            process.stdout.readline()  # it is about to train
        else:
            while moment not in process.stdout.readline():
                assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 130, errors
        assert errors.strip() == "interrupted; all workers are ended"
        assert left_after_a_moment(process.pid) == []
    finally:
        for pid in processes_of(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def test_a_directory_that_cannot_be_written_to_is_said_at_once(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["demo", "--out", str(tmp_path / "file" / "out")]) == 2
    said = capsys.readouterr()
    assert "cannot write to" in said.err
    assert "--out" in said.err
    assert said.out == ""


@pytest.mark.parametrize(
    ("setting", "text"),
    [("--steps", "0"), ("--steps", "many"), ("--steps", "1.5"), ("--timed-steps", "-1")],
)
def test_settings_that_cannot_be_are_refused(capsys, setting, text):
    assert main(["demo", setting, text]) == 2
    said = capsys.readouterr().err
    assert f"{setting}: must be a whole number from " in said
    assert f"got '{text}'" in said
