"""`telegrad.join`: one program, started once per process by torchrun."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

import telegrad
from telegrad import rpc


def torchrun(directory, text, processes=3):
    (directory / "train.py").write_text(textwrap.dedent(text))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*launcher, "--nproc-per-node", str(processes), "train.py"],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_workers_serve_the_driver_until_its_block_ends(tmp_path):
    done = torchrun(
        tmp_path,
        """
        import telegrad
        from telegrad import rpc

        class Found:
            pass

        def name_and_class():
            return telegrad.name(), Found

        with telegrad.join() as group:
            if telegrad.name() == "driver":
                assert group.names == ("driver", "worker1", "worker2")
                for worker in group.names[1:]:
                    name, found = rpc.rpc_sync(worker, name_and_class)
                    print(name, found is Found)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "worker1 True\nworker2 True\n"


def test_processes_choose_their_names(tmp_path):
    done = torchrun(
        tmp_path,
        """
        import os, telegrad
        from telegrad import rpc

        group = telegrad.join(["trainer", "server"][int(os.environ["RANK"])])
        if group.name == "trainer":
            print(rpc.rpc_sync("server", telegrad.name), group)
        group.close()
        """,
        processes=2,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "server <'trainer' of 'trainer', 'server'>\n"


def test_workers_end_when_the_driver_fails(tmp_path):
    done = torchrun(
        tmp_path,
        """
        import telegrad

        with telegrad.join():
            if telegrad.name() == "driver":
                raise ValueError("the cause")
        """,
    )
    assert done.returncode == 1
    assert "ValueError: the cause" in done.stderr


def test_a_group_of_one(tmp_path):
    with telegrad.join(rank=0, world_size=1, init_method=f"file://{tmp_path}/store") as group:
        assert group.names == ("driver",)
        assert telegrad.name() == "driver"
    assert not rpc.is_initialized()
    group.close()


def test_a_program_without_a_launcher_is_told_so(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="RANK is not set: start the program by"):
        telegrad.join()


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"timeout": -1}, ValueError, "timeout must be positive"),
        ({"colour": "red"}, TypeError, r"join\(\) has no option 'colour'"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank 2 is not within a group of 2"),
        ({"name": "a b", "rank": 0, "world_size": 1}, ValueError, "Worker name must match"),
    ],
)
def test_invalid_options_are_refused(options, kind, message):
    with pytest.raises(kind, match=message):
        telegrad.join(**options)


def test_the_program_of_the_guide_runs(tmp_path):
    page = pathlib.Path(__file__).parents[2] / "docs" / "guides" / "workers.md"
    (program,) = re.findall(r"^```py\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    done = torchrun(tmp_path, program, processes=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "tensor([2., 2.])\n"
