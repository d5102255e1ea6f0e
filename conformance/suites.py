"""Torch's suites as they are in the wheel, mixed with torch's own agent fixtures.

Nothing of them is changed but how their processes start: by fork instead of spawn, which takes a
test from ten seconds of imports to the second that it needs.
"""

from __future__ import annotations

import unittest
from typing import Any, NamedTuple

__all__ = ["TestId", "load", "make_case"]

_classes: dict[str, type[unittest.TestCase]] = {}


class TestId(NamedTuple):
    """A test: the suite as torch names it, and the method."""

    suite: str
    method: str

    def __str__(self) -> str:
        return f"{self.suite}.{self.method}"


def load(*, on_torch: bool) -> list[TestId]:
    """Imports the suites and lists their tests.

    Args:
        on_torch: leaves torch's own RPC in its place: the yardstick.
    """
    if not on_torch:
        import telegrad

        telegrad.install()
    import torch.multiprocessing
    from torch.testing._internal.distributed import rpc_utils
    from torch.testing._internal.distributed.rpc.faulty_rpc_agent_test_fixture import (
        FaultyRpcAgentTestFixture,
    )
    from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (
        TensorPipeRpcAgentTestFixture,
    )

    def fork_processes(self: Any) -> None:
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    rpc_utils.SpawnHelper._spawn_processes = fork_processes  # type: ignore[method-assign]
    tests: list[TestId] = []
    for fixture, suites in (
        (
            TensorPipeRpcAgentTestFixture,
            rpc_utils.GENERIC_TESTS + rpc_utils.TENSORPIPE_TESTS,
        ),
        (FaultyRpcAgentTestFixture, rpc_utils.FAULTY_AGENT_TESTS),
    ):
        generated: dict[str, Any] = rpc_utils.generate_tests("", fixture, suites, __name__)
        _classes.update(generated)
        globals().update(generated)  # tests pickle themselves by this module's name
        for name, class_ in generated.items():
            methods = unittest.TestLoader().getTestCaseNames(class_)
            tests += [TestId(name, method) for method in methods]
    return tests


def make_case(test: TestId) -> unittest.TestCase:
    """The test, ready to run."""
    return _classes[test.suite](test.method)
