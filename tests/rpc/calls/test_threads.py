"""Served functions compute with as many threads as the program has asked for."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

from telegrad import rpc
from telegrad.autograd.local.boundary import call_elsewhere
from telegrad.testing.cluster import cluster


def openmp():
    """The OpenMP that torch computes with, as this process has loaded it."""
    found = re.search(r"\S*/lib(gomp|iomp5|omp)\S*\.so\S*", Path("/proc/self/maps").read_text())
    return None if found is None else ctypes.CDLL(found.group())


def threads_of_this_thread():
    """Asks OpenMP itself: `torch.get_num_threads` would set what it is asked for."""
    return openmp().omp_get_max_threads()


def sync_back():
    return rpc.rpc_sync("worker0", threads_of_this_thread)


def async_back():
    return rpc.rpc_async("worker0", threads_of_this_thread).wait()


def remote_back():
    return rpc.remote("worker0", threads_of_this_thread).to_here()


@pytest.fixture
def seven_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(7)  # what no machine has by itself
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(openmp() is None, reason="this torch does not compute with OpenMP")
def test_a_served_function_heeds_set_num_threads(seven_threads):
    with cluster(2):
        for back in (sync_back, async_back, remote_back):
            assert rpc.rpc_sync("worker1", back) == 7, back
        assert rpc.rpc_async("worker0", threads_of_this_thread).wait() == 7


@pytest.mark.skipif(openmp() is None, reason="this torch does not compute with OpenMP")
def test_so_does_a_node_that_is_called_on_a_thread_of_its_own(seven_threads):
    assert call_elsewhere(lambda: (threads_of_this_thread(),), (), False) == (7,)
