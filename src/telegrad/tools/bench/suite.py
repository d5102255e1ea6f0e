"""Runs the cases that are wanted, and gives each result when it is there."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch

from telegrad.tools.bench import calls, passes, plain, processes, scripts
from telegrad.tools.bench.harness import Case, Result, arenas, measure

__all__ = ["all_cases", "names", "run"]

_PROCESSES = "start shutdown idle memory"  # measured together
_LOCAL_GRAPH = "local graph"
_ONE_PROCESS = "transformer optimizer"  # beside the same in one process


def all_cases() -> list[Case]:
    """All that are timed in rounds."""
    return [*calls.CASES, *scripts.CASES, *passes.CASES, *plain.CASES]


def names() -> list[str]:
    """What words are looked for in."""
    return [_PROCESSES, *(case.name for case in all_cases()), _LOCAL_GRAPH, _ONE_PROCESS]


def run(words: Sequence[str] = ()) -> Iterator[Result]:
    """
    Args:
        words: runs the cases whose names hold one of them; all if there are none.
    """
    warnings.simplefilter("ignore")  # torch's own, about its own

    def wanted(name: str) -> bool:
        return not words or any(word in name for word in words)

    if wanted(_PROCESSES):
        yield from processes.run()
    torch.set_num_threads(1)
    cases = [case for case in all_cases() if wanted(case.name)]
    for size, apart in dict.fromkeys((case.workers, case.apart) for case in cases):
        with arenas(size, apart=apart) as sides:
            for case in cases:
                if (case.workers, case.apart) == (size, apart):
                    yield measure(case, sides)
    if wanted(_LOCAL_GRAPH):
        with arenas(2, ("telegrad",)) as sides:
            sides["telegrad"].resume()
            for nodes in (1000, 10000):
                yield sides["telegrad"].ask(passes.local_graph, nodes)
    if wanted(_ONE_PROCESS):
        with arenas(2, ("telegrad",)) as sides:
            sides["telegrad"].resume()
            yield from sides["telegrad"].ask(plain.beside_one_process)
