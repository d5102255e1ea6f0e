"""Every Python snippet in the documentation runs.

A snippet that begins with a file's name (`# model.py`) is a module, which the others import.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

from telegrad.testing.cluster import cluster

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def snippets(page):
    return [code for language, code in BLOCK.findall(page.read_text()) if language == "python"]


def outputs(page):
    return [code for language, code in BLOCK.findall(page.read_text()) if language == "text"]


PAGES_WITH_SNIPPETS = [p for p in PAGES if snippets(p) and p.name != "README.md"]


MODULE = re.compile(r"# (\w+)\.py\n")


@pytest.mark.parametrize("page", PAGES_WITH_SNIPPETS, ids=lambda page: page.name)
def test_snippets_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    names = {"__name__": "snippets"}
    written = []
    with cluster(3):
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


def test_the_program_in_the_readme_prints_what_it_says(tmp_path):
    (program,) = snippets(ROOT / "README.md")
    script = tmp_path / "train.py"
    script.write_text(program)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == outputs(ROOT / "README.md")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
