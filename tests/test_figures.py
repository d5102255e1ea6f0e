"""The figures of the documentation are what the code draws today."""

from __future__ import annotations

import pathlib
import sys

import pytest

DOCS = pathlib.Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def figures():
    sys.path.insert(0, str(DOCS))  # workers import what is drawn from there, too
    try:
        import figures

        yield figures.all_figures()
    finally:
        sys.path.remove(str(DOCS))


def test_every_figure_is_fresh(figures):
    for name, picture in figures.items():
        committed = (DOCS / "images" / name).read_text(encoding="utf-8")
        assert committed == picture, f"{name} is stale: run `python docs/figures.py`"


def test_every_picture_is_made_by_the_program(figures):
    assert {path.name for path in (DOCS / "images").iterdir()} == set(figures)


def test_the_ways_of_calls_are_those_of_a_run(figures):
    import call_paths

    page = call_paths.PAGE.read_text(encoding="utf-8")
    shown = page.partition(call_paths.BEGIN)[2].partition(call_paths.END)[0]
    assert shown == call_paths.drawn(call_paths.all_traces()), "run `python docs/call_paths.py`"
