"""The demo's command: what it does, in order, and what it says."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

import telegrad
from telegrad.errors import TelegradError
from telegrad.observe import Traffic, TrafficCount, draw, traffic
from telegrad.tools import plots
from telegrad.tools.cli.command import Command, Parser
from telegrad.tools.demo.documents import TOPICS, make_documents
from telegrad.tools.demo.progress import Progress
from telegrad.tools.demo.timing import seconds_on_telegrad, seconds_on_torchs_rpc, torch_has_rpc
from telegrad.tools.demo.training import local_model, model_on_workers, train

__all__ = ["COMMAND"]

_WORKERS = ("table", "encoder")
_DOCUMENTS = 20_000
_COMPARED = 10  # steps whose gradients are compared


@dataclasses.dataclass
class Numbers:
    """What the demo measures; also written to `numbers.json`."""

    steps: int = 0
    first_loss: float = 0.0
    last_loss: float = 0.0
    accuracy: float = 0.0
    compared_gradients: int = 0
    largest_loss_difference: float = 0.0
    largest_gradient_difference: float = 0.0
    largest_weight_difference: float = 0.0
    telegrad_step_seconds: float | None = None
    torch_step_seconds: float | None = None
    traffic: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    losses: list[float] = dataclasses.field(default_factory=list)


def _configure(parser: Parser) -> None:
    parser.add_argument("--out", type=Path, default=Path("telegrad-demo"), help="where files go")
    parser.add_argument(
        "--steps", type=partial(_whole_number, 1), default=800, help="training steps"
    )
    parser.add_argument(
        "--timed-steps",
        type=partial(_whole_number, 0),
        default=200,
        help="of each library; 0 times nothing",
    )


def _run(options: argparse.Namespace) -> int:
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
        _demonstrate(options.out, options.steps, options.timed_steps)
    except KeyboardInterrupt:
        print("\ninterrupted; all workers are ended", file=sys.stderr)
        return 130
    except (TelegradError, RuntimeError, OSError) as error:
        print(f"telegrad demo: {error}", file=sys.stderr)
        return 1
    return 0


def _demonstrate(out: Path, steps: int, timed_steps: int) -> None:
    begun = time.monotonic()
    numbers = Numbers(steps=steps)
    documents = make_documents(_DOCUMENTS, seed=5)
    torch.manual_seed(0)
    start = local_model()
    distributed, local = Record(steps), Record(steps)
    print(
        'A classifier of documents over three processes: an embedding table on worker "table", an\n'
        'encoder on worker "encoder", the head in this one, the driver.',
        flush=True,
    )
    torch.set_num_threads(1)  # as on the workers: the same sums in the same order
    with telegrad.workers(*_WORKERS, threads=1, wrap_transport=Traffic()):
        model = model_on_workers()
        model.load_state_dict(start.state_dict())
        progress = Progress(sys.stdout, steps, _traffic_of_all)

        def look(loss: float) -> None:
            distributed.look(model, loss)
            progress.step_done(len(distributed.losses), loss)

        train(model, documents, steps, look)
        distributed.keep_weights(model)
        numbers.traffic = {name: vars(count) for name, count in _traffic_of_all().items()}
        unseen = make_documents(2000, seed=6)
        scores = model(unseen.words)
        numbers.accuracy = float((scores.argmax(1) == unseen.topics).float().mean())
        words, topics = documents.batch(0)
        loss = nn.functional.cross_entropy(model(words), topics)
        draw(loss, title="one training step").save(out / "graph.svg")
        if timed_steps:
            print(f"{timed_steps} steps on telegrad ...", flush=True)
            numbers.telegrad_step_seconds = seconds_on_telegrad(timed_steps)
    if timed_steps and torch_has_rpc():  # apart: its workers keep processors busy when idle
        print(f"{timed_steps} steps on torch's RPC ...", flush=True)
        numbers.torch_step_seconds = seconds_on_torchs_rpc(timed_steps)
    if plots.are_available():
        plots.save_losses(out / "loss.svg", distributed.losses, f"loss over {steps} steps")
    print("The same model in one process ...", flush=True)
    train(start, documents, steps, lambda loss: local.look(start, loss))
    local.keep_weights(start)
    _compare(distributed, local, numbers)
    (out / "numbers.json").write_text(
        json.dumps(dataclasses.asdict(numbers), indent=1), encoding="utf-8"
    )
    _report(numbers, out, time.monotonic() - begun)


def _traffic_of_all() -> dict[str, TrafficCount]:
    return {name: telegrad.call(name, traffic) for name in ("driver", *_WORKERS)}


class Record:
    """What a training run leaves to compare: all losses, the gradients of some steps, and the
    weights at the end. Tensors are copied to this process."""

    def __init__(self, steps: int) -> None:
        self._every = max(1, steps // _COMPARED)
        self.losses: list[float] = []
        self.gradients: dict[str, torch.Tensor] = {}
        self.weights: dict[str, torch.Tensor] = {}

    def look(self, model: nn.Module, loss: float) -> None:
        if len(self.losses) % self._every == 0:
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    self.gradients[f"{name} in step {len(self.losses)}"] = _copy(parameter.grad)
        self.losses.append(loss)

    def keep_weights(self, model: nn.Module) -> None:
        self.weights = {name: _copy(tensor) for name, tensor in model.state_dict().items()}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().clone()


def _compare(distributed: Record, local: Record, numbers: Numbers) -> None:
    numbers.losses = distributed.losses
    numbers.first_loss = distributed.losses[0]
    numbers.last_loss = statistics.fmean(distributed.losses[-max(1, numbers.steps // 10) :])
    numbers.compared_gradients = len(local.gradients)
    numbers.largest_gradient_difference = _difference(distributed.gradients, local.gradients)
    numbers.largest_weight_difference = _difference(distributed.weights, local.weights)
    numbers.largest_loss_difference = max(
        abs(a - b) for a, b in zip(distributed.losses, local.losses, strict=True)
    )


def _difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    if found.keys() != expected.keys():
        raise RuntimeError(f"missing: {sorted(found.keys() ^ expected.keys())}")
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def _report(n: Numbers, out: Path, seconds: float) -> None:
    lines = [
        "",
        f"loss       {n.first_loss:.3f} at first, {n.last_loss:.3f} over the last tenth of "
        f"{n.steps} steps",
        f"accuracy   {n.accuracy:.1%} of 2000 documents it has not seen "
        f"({1 / TOPICS:.1%} by chance)",
        "largest difference from the same model in one process:",
        f"           {n.largest_loss_difference:g} in {n.steps} losses, "
        f"{n.largest_gradient_difference:g} in {n.compared_gradients} gradients, "
        f"{n.largest_weight_difference:g} in the final weights",
    ]
    if n.telegrad_step_seconds is not None:
        own = f"step       {n.telegrad_step_seconds * 1e3:.2f} ms on telegrad"
        if n.torch_step_seconds is not None:
            ratio = n.torch_step_seconds / n.telegrad_step_seconds
            own += f", {n.torch_step_seconds * 1e3:.2f} ms on torch's RPC (ratio {ratio:.1f})"
        lines += [own, "           (medians, without clipping and schedule)"]
    lines += [
        f"pictures   {out / 'graph.svg'}, "
        + (f"{out / 'loss.svg'}" if plots.are_available() else "loss.svg needs telegrad[plots]"),
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


def _whole_number(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number from {least} on, got {text!r}")
    return int(text)


COMMAND = Command(
    name="demo",
    summary="train a small model over three processes and check its gradients",
    description="Trains a small model over three processes and in one, and times a step.",
    configure=_configure,
    run=_run,
)
