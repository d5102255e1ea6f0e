"""Runs the cases that are wanted, and gives each result when it is there."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch

from telegrad.tools.bench import passes, plain, processes
from telegrad.tools.bench.cases import all_cases
from telegrad.tools.bench.harness import Case, Result, arenas, measure

__all__ = ["names", "run"]

_PROCESSES = "start shutdown idle memory"  # measured together
_LOCAL_GRAPH = "local graph"
_ONE_PROCESS = "transformer optimizer"  # beside the same in one process


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
        yield from processes.run()  # first: they fork, so nothing else may run yet
    torch.set_num_threads(1)
    cases = [case for case in all_cases() if wanted(case.name)]
    for (size, apart), group in _by_arena(cases).items():
        with arenas(size, apart=apart) as sides:
            for case in group:
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


def _by_arena(cases: list[Case]) -> dict[tuple[int, bool], list[Case]]:
    """By what processes they need."""
    found: dict[tuple[int, bool], list[Case]] = {}
    for case in cases:
        found.setdefault((case.workers, case.apart), []).append(case)
    return found
