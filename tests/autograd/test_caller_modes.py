"""Grad mode and autocast of a caller hold for what it calls."""

from __future__ import annotations

import pickle

import torch

from telegrad.autograd.caller_modes import capture, entered


def modes():
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return torch.is_grad_enabled(), dtype, torch.is_autocast_cache_enabled()


def test_nothing_is_said_of_the_usual_modes():
    assert capture() is None
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert capture() is None
    with entered(None):
        assert modes() == (True, None, True)


def test_modes_are_entered_elsewhere_and_left():
    with torch.no_grad(), torch.autocast("cpu", torch.float16, cache_enabled=False):
        captured = pickle.loads(pickle.dumps(capture()))
    assert modes() == (True, None, True)
    with entered(captured):
        assert modes() == (False, torch.float16, False)
    assert modes() == (True, None, True)
    with torch.no_grad():
        captured = capture()
    with entered(captured):
        assert modes() == (False, None, True)


def test_autocast_for_a_device_that_is_not_there_is_left_out():
    with torch.autocast("cpu", torch.bfloat16):
        captured = capture()
    assert captured is not None
    elsewhere = captured._replace(autocast=(("cuda", torch.float16), ("cpu", torch.bfloat16)))
    with entered(elsewhere):
        assert modes()[1] == torch.bfloat16
