"""Memory for received tensors: lent, given back by the death of what stands on it, used again."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from telegrad.wire.tensor_table.memory import BufferPool, lend, size_class

MB = 1 << 20


def address(buffer) -> int:
    return torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()


def test_a_buffer_is_used_again_when_it_has_died():
    pool = BufferPool()
    first = pool.take(MB)
    where = address(first)
    del first
    assert pool.idle_bytes() == size_class(MB)
    second = pool.take(MB)
    assert address(second) == where
    assert pool.idle_bytes() == 0


def test_a_tensor_on_a_buffer_keeps_it():
    pool = BufferPool()
    tensor = torch.frombuffer(pool.take(MB), dtype=torch.float32)
    view = tensor[10:20]
    view.fill_(3.0)
    del tensor
    assert pool.idle_bytes() == 0
    other = torch.frombuffer(pool.take(MB), dtype=torch.float32)
    other.fill_(9.0)
    assert bool((view == 3.0).all())
    del view
    gc.collect()
    assert pool.idle_bytes() == size_class(MB)
    assert other.sum() == 9.0 * MB / 4


def test_buffers_at_the_same_time_do_not_overlap():
    pool = BufferPool()
    buffers = [pool.take(100_000) for _ in range(8)]
    for number, buffer in enumerate(buffers):
        memoryview(buffer).cast("B")[:] = bytes([number]) * 100_000
    assert all(bytes(buffer) == bytes([n]) * 100_000 for n, buffer in enumerate(buffers))


@given(st.integers(1, 1 << 40))
def test_size_classes_waste_at_most_a_quarter(length):
    size = size_class(length)
    assert size >= length
    assert size % 4096 == 0
    assert size <= max(4096, length * 5 // 4 + 4096)
    assert size_class(size) == size


def test_sizes_that_are_close_meet_again():
    pool = BufferPool()
    where = address(pool.take(MB))
    gc.collect()
    assert address(pool.take(MB - 3000)) == where


def test_trimming_frees_what_is_old():
    pool = BufferPool(max_age=2.0)
    pool.take(MB)
    now = time.monotonic()
    pool.trim(now)
    assert pool.idle_bytes() == size_class(MB)
    pool.trim(now + 3)
    assert pool.idle_bytes() == 0


def test_trimming_keeps_within_the_limit():
    pool = BufferPool(max_idle=3 * MB)
    held = [pool.take(MB) for _ in range(8)]
    pool.trim(time.monotonic())
    assert all(len(buffer) == MB for buffer in held)
    held.clear()
    assert pool.idle_bytes() == 8 * MB
    pool.trim(time.monotonic())
    assert pool.idle_bytes() == 3 * MB


def test_buffers_may_die_on_any_thread():
    pool = BufferPool()

    def work():
        for _ in range(200):
            buffer = pool.take(70_000)
            memoryview(buffer).cast("B")[0] = 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 < pool.idle_bytes() <= 4 * size_class(70_000)


def test_a_buffer_in_a_cycle_comes_back_by_the_garbage_collector():
    pool = BufferPool()
    cycle = [pool.take(MB)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert pool.idle_bytes() == size_class(MB)


def test_the_end_of_a_loan_is_told_once():
    import mmap

    returned = []
    mapping = mmap.mmap(-1, 8192)
    buffer = lend(mapping, 4096, 100, lambda: returned.append(1))
    assert len(buffer) == 100
    view = memoryview(buffer)
    del buffer
    assert not returned
    view.release()
    assert returned == [1]


def test_a_loan_beyond_its_mapping_is_refused():
    import mmap

    with pytest.raises(ValueError, match="too small"):
        lend(mmap.mmap(-1, 4096), 0, 5000, lambda: None)
