"""A worker that is shut down inside of a context."""

from __future__ import annotations

import pytest

from telegrad import autograd, rpc
from telegrad.autograd.contexts.context import thread_context
from telegrad.rpc.seams import NO_CONTEXT
from telegrad.testing.cluster import cluster


def test_what_the_program_raises_is_raised():
    with cluster(1), pytest.raises(ValueError, match="the real reason"), autograd.context():
        rpc.shutdown()
        raise ValueError("the real reason")
    assert thread_context() == NO_CONTEXT


def test_leaving_the_context_is_no_error():
    with cluster(1):
        with autograd.context():
            rpc.shutdown()
        assert thread_context() == NO_CONTEXT
