"""Two ends of a connection that share memory, for the tests of it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource

from telegrad.testing.transport_contract import joined
from telegrad.transport.same_host import shm
from telegrad.transport.same_host.shm import SharedMemory
from telegrad.transport.sockets import UnixTransport
from telegrad.wire.frames import Kind, Limits
from telegrad.wire.tensor_table.memory import BufferPool

LARGE = 1 << 20


class Pair:
    """Two ends of a Unix connection that share memory."""

    def __init__(self, ends):
        self.ends = ends
        self.memories = SharedMemory(), SharedMemory()
        for end, memory in zip(self.ends, self.memories, strict=True):
            end.share_memory(memory)

    @property
    def lender(self):
        return self.memories[0]

    @property
    def borrower(self):
        return self.memories[1]

    def send(self, content, copies=1):
        self.ends[0].send(Kind.CALL, buffers=[memoryview(content)] * copies)
        return self.ends[1].receive().buffers


@contextlib.contextmanager
def sharing():
    with joined(UnixTransport(BufferPool(), Limits())) as ends:
        made = Pair(ends)
        yield made
        for memory in made.memories:
            memory.close()


def descriptors():
    return set(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def few_descriptors(left=0):
    """While this runs, the process gets only so many more of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, descriptors())) + 50, hard))
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(left):
            os.close(held.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)


def segment_descriptor(size=LARGE, seals=shm._SEALS):
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    if seals:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@contextlib.contextmanager
def borrowing():
    memory = SharedMemory()
    before = descriptors()
    yield memory
    memory.close()
    assert descriptors() == before
