"""How output is cut into lines, and whose last words count."""

from __future__ import annotations

import os
import pty

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telegrad.launch.output import LONGEST_LINE, ErrorOutput, Lines, Screen, wants_colour


@given(st.lists(st.binary(max_size=20)))
def test_lines_are_those_of_the_whole_however_it_arrives(pieces):
    lines = Lines()
    found = [line for piece in pieces for line in lines.feed(piece)] + lines.rest()
    whole = b"".join(pieces).split(b"\n")
    assert found == (whole if whole[-1] else whole[:-1])


def test_a_line_that_does_not_end_is_broken():
    lines = Lines()
    assert lines.feed(b"x" * (LONGEST_LINE - 1)) == []
    assert lines.feed(b"yz") == [b"x" * (LONGEST_LINE - 1) + b"y"]
    assert lines.feed(b"\n") == [b"z"]


def shown(lines, **options):
    reader, writer = os.pipe()
    Screen(writer, **{"is_terminal": False, "colour": False, "marks": True, **options}).show(
        3, lines
    )
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        return file.read()


def test_lines_are_marked_with_their_worker():
    assert shown([b"a", b"\xff\x00"]) == b"[3] a\n[3] \xff\x00\n"
    assert shown([b"a"], marks=False) == b"a\n"
    assert shown([b"a"], colour=True) == b"\x1b[32m[3]\x1b[0m a\n"


def test_of_a_progress_bar_the_terminal_gets_what_stays():
    assert shown([b" 10%\r100%\r"], is_terminal=True) == b"[3] 100%\n"
    assert shown([b" 10%\r100%\r"]) == b"[3]  10%\r100%\r\n"


def test_a_stream_that_is_left_non_blocking_is_waited_for():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    process = os.fork()
    if process == 0:
        os.close(writer)
        with os.fdopen(reader, "rb") as file:
            os._exit(0 if len(file.read()) == (1 << 22) + 1 else 1)
    os.close(reader)
    Screen(writer, is_terminal=False, colour=False, marks=False).show(0, [b"x" * (1 << 22)])
    os.close(writer)
    assert os.waitpid(process, 0)[1] == 0


def test_colours_are_for_terminals_and_for_who_wants_them():
    reader, writer = os.pipe()
    master, slave = pty.openpty()
    assert not wants_colour(writer, {})
    assert wants_colour(slave, {})
    assert wants_colour(slave, {"NO_COLOR": ""})
    assert not wants_colour(slave, {"NO_COLOR": "1"})
    assert not wants_colour(slave, {"TERM": "dumb"})
    for descriptor in (reader, writer, master, slave):
        os.close(descriptor)


CHAIN = [
    b"Traceback (most recent call last):",
    b"KeyError: 'inner'",
    b"",
    b"During handling of the above exception, another exception occurred:",
    b"",
    b"Traceback (most recent call last):",
    b"ValueError: outer",
]
OLD = [b"Traceback (most recent call last):", b"OSError: survived", b"going on"]


@pytest.mark.parametrize(
    ("heard", "words"),
    [
        ([], []),
        ([b"line %d" % i for i in range(30)], [b"line %d" % i for i in range(20, 30)]),
        (OLD, OLD),
        (OLD + CHAIN, CHAIN),
        ([*CHAIN, b"atexit says"], [*CHAIN, b"atexit says"]),
    ],
)
def test_last_words_are_the_last_traceback_with_its_causes(heard, words):
    last = ErrorOutput()
    last.add(heard, 0.0)
    assert last.lines() == words


def test_a_worker_complains_when_its_traceback_begins():
    last = ErrorOutput()
    assert last.traceback_at(100.0) is None
    last.add(OLD, 100.0)
    last.add(CHAIN[:1], 200.0)
    last.add(CHAIN[1:], 201.0)
    assert last.traceback_at(201.5) == 200.0
    assert last.traceback_at(300.0) is None
