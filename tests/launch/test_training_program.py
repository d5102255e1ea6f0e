"""A whole training program on workers, beside the same program in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import telegrad

DEPTH, WIDTH, TOKENS = 4, 32, 100
STEPS = 20


class Blocks(nn.Module):
    def __init__(self, depth, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def local_model():
    return nn.Sequential(
        nn.Embedding(TOKENS, WIDTH), Blocks(DEPTH, WIDTH), nn.Linear(WIDTH, TOKENS)
    )


def model_on_workers():
    return nn.Sequential(
        telegrad.module("embed", nn.Embedding, TOKENS, WIDTH),
        telegrad.module("blocks", Blocks, depth=DEPTH, width=WIDTH),
        nn.Linear(WIDTH, TOKENS),
    )


class Training:
    """What a program keeps from step to step, and saves."""

    def __init__(self, model, clips_parts, in_bfloat16):
        self.model = model
        self.in_bfloat16 = in_bfloat16
        self.clipped = list(model) if clips_parts else [model]
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 2 * STEPS)

    def run(self):
        """Losses and norms of the gradients, step by step."""
        tokens = torch.arange(TOKENS).reshape(10, 10)
        seen = []
        for _ in range(STEPS):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.in_bfloat16):
                loss = F.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            norms = [nn.utils.clip_grad_norm_(part.parameters(), 0.5) for part in self.clipped]
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            seen.append([loss.item(), *(norm.item() for norm in norms)])
        return seen

    def save(self, path):
        parts = (self.model, self.optimizer, self.schedule)
        torch.save([part.state_dict() for part in parts], path)

    def load(self, path):
        parts = (self.model, self.optimizer, self.schedule)
        for part, state in zip(parts, torch.load(path, weights_only=True), strict=True):
            part.load_state_dict(state)


def weights_of(training):
    return {name: tensor.cpu() for name, tensor in training.model.state_dict().items()}


@pytest.fixture(autouse=True)
def one_thread():
    """As on the workers below, so that sums have the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("clips_parts", "in_bfloat16", "tolerance"),
    [
        (True, True, 0),
        # The norms of several workers are added up in another order, as those of several GPUs are:
        # the last bit may differ. (Rounding to bfloat16 would make much of that.)
        (False, False, 1e-4),
    ],
    ids=["clipped by parts", "clipped as a whole"],
)
def test_a_program_trains_saves_and_goes_on_as_in_one_process(
    tmp_path, clips_parts, in_bfloat16, tolerance
):
    equal = {"rtol": tolerance, "atol": tolerance}
    torch.manual_seed(0)
    alone = Training(local_model(), clips_parts, in_bfloat16)
    alone.save(tmp_path / "start.pt")
    expected = [alone.run()]
    alone.save(tmp_path / "alone.pt")
    expected.append(alone.run())

    with telegrad.workers("embed", "blocks", threads=1):
        spread = Training(model_on_workers(), clips_parts, in_bfloat16)
        spread.load(tmp_path / "start.pt")
        torch.testing.assert_close(spread.run(), expected[0], **equal)
        spread.save(tmp_path / "spread.pt")
        later = Training(model_on_workers(), clips_parts, in_bfloat16)
        later.load(tmp_path / "alone.pt")  # what one process has saved
        torch.testing.assert_close(later.run(), expected[1], **equal)
        torch.testing.assert_close(weights_of(later), weights_of(alone), **equal)

    again = Training(local_model(), clips_parts, in_bfloat16)
    again.load(tmp_path / "spread.pt")  # what workers have trained
    torch.testing.assert_close(again.run(), expected[1], **equal)
    torch.testing.assert_close(weights_of(again), weights_of(alone), **equal)
