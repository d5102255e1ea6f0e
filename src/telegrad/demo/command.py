"""The demo's command: what it does, in order, and what it says."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from telegrad.demo.loss_plot import plot_losses
from telegrad.demo.model import TOPICS, Documents, make_documents
from telegrad.demo.processes import NAMES, joined_group, run_apart
from telegrad.demo.progress import Progress
from telegrad.demo.sides import side_named, torch_has_rpc
from telegrad.demo.training import DOCUMENTS, DistributedModel, Record, time_steps, train_whole
from telegrad.errors import TelegradError
from telegrad.observe import Traffic, TrafficCount, draw, traffic

__all__ = ["DESCRIPTION", "configure", "main", "run"]

DESCRIPTION = "Trains a small model over three processes, checks its gradients and times it."

_COMPARED = 10
_ROUNDS = 2


@dataclasses.dataclass
class Numbers:
    """What the demo measures; also written to `numbers.json`."""

    steps: int = 0
    first_loss: float = 0.0
    last_loss: float = 0.0
    accuracy: float = 0.0
    compared_steps: int = 0
    compared_gradients: int = 0
    largest_gradient_difference: float = 0.0
    largest_loss_difference: float = 0.0
    telegrad_step_seconds: float | None = None
    torch_step_seconds: float | None = None
    traffic: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    losses: list[float] = dataclasses.field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo; returns the status of its process.

    Args:
        arguments: of the command line; by default those of this process.
    """
    parser = argparse.ArgumentParser(prog="telegrad demo", description=DESCRIPTION)
    configure(parser)
    return run(parser.parse_args(arguments))


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the demo's arguments to a parser."""
    parser.add_argument("--out", type=Path, default=Path("telegrad-demo"), help="where files go")
    parser.add_argument("--steps", type=_positive, default=1500, help="training steps")
    parser.add_argument(
        "--timed-steps", type=_not_negative, default=200, help="of each library; 0 times nothing"
    )


def run(options: argparse.Namespace) -> int:
    """Runs the demo as its arguments say; returns the status of its process."""
    try:
        _make_writable(options.out)
    except OSError as error:
        print(
            f"telegrad demo: cannot write to {options.out}: {error.strerror or error}; choose "
            "another directory with --out",
            file=sys.stderr,
        )
        return 2
    try:
        _run(options.out, options.steps, options.timed_steps)
    except KeyboardInterrupt:
        print("\ninterrupted; all workers are ended", file=sys.stderr)
        return 130
    except (TelegradError, RuntimeError, OSError) as error:
        print(f"telegrad demo: {error}", file=sys.stderr)
        return 1
    return 0


def _run(out: Path, steps: int, timed_steps: int) -> None:
    begun = time.monotonic()
    numbers = Numbers(steps=steps)
    documents = make_documents(DOCUMENTS, seed=5)
    kept = set(range(0, steps, max(1, steps // _COMPARED)))
    print(
        "A classifier of documents on three workers: the head on the driver, the encoder on a "
        "second\nworker, the embedding table (sparse gradients) on a parameter server."
    )
    record = _train(documents, out, steps, kept, numbers)
    (out / "loss.svg").write_text(
        plot_losses(record.losses, f"loss over {steps} steps"), encoding="utf-8"
    )
    print("The same model in one process ...", flush=True)
    _compare(record, train_whole(documents, steps, kept), numbers)
    if timed_steps:
        _time(timed_steps, numbers)
    (out / "numbers.json").write_text(
        json.dumps(dataclasses.asdict(numbers), indent=1), encoding="utf-8"
    )
    _report(numbers, out, time.monotonic() - begun)


def _train(documents: Documents, out: Path, steps: int, kept: set[int], numbers: Numbers) -> Record:
    with joined_group("telegrad", Traffic()):
        record = _train_as_driver(documents, out, steps, kept, numbers)
    numbers.losses = record.losses
    numbers.first_loss = record.losses[0]
    numbers.last_loss = statistics.fmean(record.losses[-max(1, steps // 10) :])
    return record


def _train_as_driver(
    documents: Documents, out: Path, steps: int, kept: set[int], numbers: Numbers
) -> Record:
    record = Record()
    model = DistributedModel(side_named("telegrad"))
    progress = Progress(sys.stdout, steps, _traffic_of_all)

    def look(context_id: int, loss: torch.Tensor) -> None:
        step = len(record.losses)
        if step in kept:
            record.gradients[step] = model.gradients(context_id)
        if step == steps - 1:
            draw(context_id, title="one training step").save(out / "graph.svg")

    for step in range(steps):
        is_watched = step in kept or step == steps - 1
        loss = model.step(documents.batch(step), look if is_watched else None)
        record.losses.append(loss)
        progress.step_done(step + 1, loss)
    test = make_documents(2000, seed=6)
    with torch.no_grad():
        found = model(test.words).argmax(1)
    numbers.accuracy = float((found == test.topics).float().mean())
    numbers.traffic = {name: dataclasses.asdict(count) for name, count in _traffic_of_all().items()}
    return record


def _traffic_of_all() -> dict[str, TrafficCount]:
    rpc = side_named("telegrad").rpc
    return {name: rpc.rpc_sync(name, traffic) for name in NAMES}


def _compare(distributed: Record, whole: Record, numbers: Numbers) -> None:
    for step, gradients in whole.gradients.items():
        there = distributed.gradients[step]
        if there.keys() != gradients.keys():
            raise RuntimeError(
                f"gradients of {sorted(there.keys() ^ gradients.keys())} are missing"
            )
        for name, gradient in gradients.items():
            difference = float((there[name] - gradient).abs().max())
            numbers.compared_gradients += 1
            numbers.largest_gradient_difference = max(
                numbers.largest_gradient_difference, difference
            )
    numbers.compared_steps = len(whole.gradients)
    numbers.largest_loss_difference = max(
        abs(a - b) for a, b in zip(distributed.losses, whole.losses, strict=True)
    )


def _time(steps: int, numbers: Numbers) -> None:
    """Each library alone, in processes of its own: torch's RPC keeps processors busy when idle."""
    times: dict[str, list[float]] = {"torch": [], "telegrad": []}
    if not torch_has_rpc():
        print("This torch has no RPC to compare with.")
        del times["torch"]
    for number in range(_ROUNDS):
        for side in times:
            print(f"{steps} steps on {side} alone, round {number + 1} of {_ROUNDS} ...", flush=True)
            times[side].append(run_apart(side, time_steps, side, steps))
    numbers.telegrad_step_seconds = min(times["telegrad"])
    if "torch" in times:
        numbers.torch_step_seconds = min(times["torch"])


def _report(n: Numbers, out: Path, seconds: float) -> None:
    lines = [
        "",
        f"loss       {n.first_loss:.3f} at first, {n.last_loss:.3f} over the last tenth of "
        f"{n.steps} steps",
        f"accuracy   {n.accuracy:.1%} of 2000 documents it has not seen "
        f"({1 / TOPICS:.1%} by chance)",
        "gradients  largest difference from the same model in one process: "
        f"{n.largest_gradient_difference:g}",
        f"           ({n.compared_gradients} gradients of {n.compared_steps} steps compared; the "
        f"losses differ by at most {n.largest_loss_difference:g})",
    ]
    if n.telegrad_step_seconds is not None:
        own = f"step       {n.telegrad_step_seconds * 1e3:.2f} ms on telegrad"
        if n.torch_step_seconds is not None:
            ratio = n.torch_step_seconds / n.telegrad_step_seconds
            own += f", {n.torch_step_seconds * 1e3:.2f} ms on torch's RPC (ratio {ratio:.1f})"
        lines += [own, f"           (medians, each library alone; the better of {_ROUNDS} rounds)"]
    lines += [
        f"pictures   {out / 'loss.svg'}, {out / 'graph.svg'}",
        f"numbers    {out / 'numbers.json'}",
        f"took       {seconds:.0f} s",
    ]
    print("\n".join(lines))


def _make_writable(directory: Path) -> None:
    """Raises OSError if files cannot be written there: better now than after the training."""
    directory.mkdir(parents=True, exist_ok=True)
    probe = directory / ".telegrad-demo"
    probe.touch()
    probe.unlink()


def _positive(text: str) -> int:
    return _whole_number(text, least=1)


def _not_negative(text: str) -> int:
    return _whole_number(text, least=0)


def _whole_number(text: str, *, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number from {least} on, got {text!r}")
    return int(text)
