"""Torch's suites as they are in the wheel, mixed with torch's own agent fixtures.

Nothing of them is changed but how their processes start: by fork instead of spawn, which takes a
test from ten seconds of imports to the second that it needs.

The processes keep the gloo groups that a test makes until they exit (`_keep_process_groups`),
because DistributedDataParallel can stand still for ever when it is the last to hold one, with or
without any RPC.
"""

from __future__ import annotations

import unittest
from functools import wraps
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
    _keep_process_groups()
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


def _keep_process_groups() -> None:
    """Keeps a test's process groups alive until its process exits.

    A bug of torch, to be seen with DDP and gloo alone: the destructor of DDP's reducer holds the
    interpreter lock; if it frees the last reference to the group, the group's destructor joins
    gloo's thread, and that thread may still wait for the lock, to let go of a tensor that Python
    made (the flag that `DDP.join` reduces). `test_ddp_comparison_uneven_inputs` meets it under load
    on torch's RPC as it does on telegrad.
    """
    import torch.distributed as dist

    kept: list[object] = []
    init_process_group, new_group = dist.init_process_group, dist.new_group

    @wraps(init_process_group)
    def init_and_keep(*args: Any, **kwargs: Any) -> None:
        init_process_group(*args, **kwargs)
        kept.append(dist.group.WORLD)

    @wraps(new_group)
    def make_and_keep(*args: Any, **kwargs: Any) -> Any:
        group = new_group(*args, **kwargs)
        kept.append(group)
        return group

    dist.init_process_group, dist.new_group = init_and_keep, make_and_keep
