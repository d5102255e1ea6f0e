"""Every Python snippet in the documentation runs.

A snippet that begins with a file's name (`# model.py`) is a module, which the others import.
"""

from __future__ import annotations

import contextlib
import pathlib
import re
import subprocess
import sys

import pytest
import torch

import telegrad
from telegrad import autograd, nn, observe, optim, rpc
from telegrad.testing.cluster import cluster
from telegrad.wire.frames import Kind

OWN_GROUPS = "<!-- The snippets start groups of their own. -->"
"""Begins a page whose snippets are not to be run on a worker of a group that is there."""
ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def snippets(page):
    return [code for language, code in BLOCK.findall(page.read_text()) if language == "python"]


def outputs(page):
    return [code for language, code in BLOCK.findall(page.read_text()) if language == "text"]


PAGES_WITH_SNIPPETS = [p for p in PAGES if snippets(p) and p.name != "README.md"]


MODULE = re.compile(r"# (\w+)\.py\b.*\n")


@pytest.mark.parametrize("page", PAGES_WITH_SNIPPETS, ids=lambda page: page.name)
def test_snippets_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    names = {"__name__": "snippets"}
    written = []
    is_alone = page.read_text().startswith(OWN_GROUPS)
    with contextlib.nullcontext() if is_alone else cluster(3):
        for number, code in enumerate(snippets(page)):
            module = MODULE.match(code)
            # Some look at their own source.
            path = tmp_path / (f"{module[1]}.py" if module else f"snippet{number}.py")
            path.write_text(code)
            if module:
                written.append(module[1])
            else:
                exec(compile(code, str(path), "exec", dont_inherit=True), names)
        names.clear()
    for module in written:
        sys.modules.pop(module, None)


def programs(page):
    """Those that are complete, and begin with a file's name, in order."""
    return [code for language, code in BLOCK.findall(page.read_text()) if language == "py"]


def run_program(directory, program):
    name = f"{MODULE.match(program)[1]}.py"
    (directory / name).write_text(program)
    done = subprocess.run(
        [sys.executable, name],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_the_program_in_the_readme_prints_what_it_says(tmp_path):
    (program,) = snippets(ROOT / "README.md")
    done = run_program(tmp_path, program)
    assert done.stdout == outputs(ROOT / "README.md")[0]
    state = torch.load(tmp_path / "model.pt", weights_only=True)["model"]
    assert {type(tensor) for tensor in state.values()} == {torch.Tensor}
    assert list(state)[:3] == ["0.weight", "1.layers.0.weight", "1.layers.0.bias"]


TUTORIALS = ROOT / "docs" / "tutorials"


@pytest.mark.parametrize("name", ["first-steps", "split-a-model", "parameter-server", "pipeline"])
def test_the_programs_of_a_tutorial_print_what_it_says(name, tmp_path):
    page = TUTORIALS / f"{name}.md"
    printed = [run_program(tmp_path, program).stdout for program in programs(page)]
    assert [text for text in printed if text] == outputs(page)


def test_a_split_model_has_the_losses_of_one_process():
    one, split, go_on = outputs(TUTORIALS / "split-a-model.md")
    assert split + go_on == one


ONE_PROCESS = """
alone = make_model()
optimizer = torch.optim.Adam(alone.parameters(), lr=0.01)
for _ in range(150):
    F.cross_entropy(alone(words), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
assert all(map(torch.equal, model.state_dict().values(), alone.state_dict().values()))
"""


def test_a_parameter_server_with_one_trainer_is_training_in_one_process(tmp_path):
    (program,) = programs(TUTORIALS / "parameter-server.md")
    begin = program.index("with telegrad.workers")
    single = "trainers = trainers[:1]\ntorch.set_num_threads(1)\n" + program[begin:]
    single = single.replace(
        'workers("server", *trainers)', 'workers("server", *trainers, threads=1)'
    )
    run_program(tmp_path, program[:begin] + single + ONE_PROCESS)


def test_the_parameter_server_with_contexts_prints_what_it_says(tmp_path):
    page = TUTORIALS / "parameter-server-contexts.md"
    (program,) = programs(page)
    (tmp_path / "ps.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "telegrad", "run", "-n", "2", "ps.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == outputs(page)[0]
    assert "Warning" not in done.stderr


def test_the_test_file_of_the_cookbook_passes(tmp_path):
    page = ROOT / "docs" / "cookbook" / "failures-and-tests.md"
    (program,) = [code for language, code in BLOCK.findall(page.read_text()) if language == "py"]
    (tmp_path / "test_encoder.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "test_encoder.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    links = re.compile(r"(?:\]\(|{image} |src=\")([^)#\s\"]+)")
    for target in links.findall(page.read_text()):
        if ":" in target:
            continue  # beyond these pages
        assert (page.parent / target).exists(), target


def reference(name):
    return (ROOT / "docs" / "reference" / name).read_text()


def test_every_public_name_has_its_place_in_the_reference():
    modules = (telegrad, rpc, autograd, optim, nn, observe)
    listed = reference("api.md") + reference("options.md")
    others = {
        *("TelegradError", "__version__", "autograd", "rpc", "functions"),  # modules, errors
        *("UNSET_RPC_TIMEOUT", "DistAutogradContext"),
        *("AutogradEngine", "engine_without_agent", "set_engine_lookup"),  # for other layers
    }
    for module in modules:
        for name in set(module.__all__) - others:
            assert re.search(rf"\b{name}\b", listed), f"{module.__name__}.{name}"


def test_every_kind_of_message_is_in_the_wire_format():
    rows = re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", reference("wire-format.md"), re.MULTILINE)
    assert {(int(number), name) for number, name in rows} == {(k.value, k.name) for k in Kind}


def test_every_environment_variable_is_listed():
    source = pathlib.Path(telegrad.__file__).parent
    read = set()
    for path in source.rglob("*.py"):
        pattern = r"environ(?:\.get\(|\[)[\"'](\w+)[\"']"
        read.update(re.findall(pattern, path.read_text(encoding="utf-8")))
    listed = set(re.findall(r"`([A-Z_]+)`", reference("environment.md")))
    assert read == listed


def test_the_table_of_speed_in_the_readme_is_that_of_the_benchmarks():
    row = re.compile(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([\d.]+×) \|", re.MULTILINE)
    measured = set(row.findall(reference("benchmarks.md")))
    shown = set(row.findall((ROOT / "README.md").read_text()))
    assert shown
    assert shown <= measured
