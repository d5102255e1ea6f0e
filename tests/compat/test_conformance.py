"""What a run of torch's suites is held to. The runs themselves are `make conformance`."""

from __future__ import annotations

import json

from conformance.expected_failures import EXPECTED_FAILURES
from conformance.report import YARDSTICK, brief, table, verdicts
from conformance.runner import Outcome
from conformance.suites import TestId as Id


def outcome(status, method="test_it", reason=""):
    return Outcome(test=Id("RpcTest", method), status=status, reason=reason, seconds=1.0, output="")


def test_a_run_is_good_if_only_listed_tests_fail():
    run = [outcome("passed"), outcome("failed", "test_listed"), outcome("skipped", "test_gpu")]
    assert verdicts(run, {"RpcTest.test_listed": "why"}) == []


def test_an_unlisted_failure_is_told():
    (told,) = verdicts([outcome("failed", reason="ValueError: no")], {})
    assert told == "RpcTest.test_it failed: ValueError: no"


def test_a_listed_test_that_passes_is_told():
    (told,) = verdicts([outcome("passed")], {"RpcTest.test_it": "why"})
    assert "take it off the list" in told


def test_the_reason_is_that_of_the_process_which_failed_first():
    reason = (
        "Traceback\nRuntimeError: Process 2 exited with error code 10 and exception:\n"
        "telegrad.errors.WorkerLost: worker 'worker0' was lost\n"
        "Process 0 exited with error code 10 and exception:\n"
        "Traceback\n  File x\nKeyError: 'the culprit'\n"
    )
    assert brief(reason) == "KeyError: 'the culprit'"


def test_the_yardstick_is_torchs_own_run():
    suites = json.loads(YARDSTICK.read_text())["suites"]
    assert sum(sum(counts.values()) for counts in suites.values()) == 464
    assert sum(counts["passed"] for counts in suites.values()) == 460
    assert "214 of 215" in table([outcome("passed")])


def test_every_listed_test_has_a_reason():
    assert all(reason for reason in EXPECTED_FAILURES.values())
    suites = json.loads(YARDSTICK.read_text())["suites"]
    assert {name.partition(".")[0] for name in EXPECTED_FAILURES} <= set(suites)
