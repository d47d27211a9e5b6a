"""Tests of the documentation's tables and lists. (`tox -e docs` builds it.)"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import arraybridge
from tests.helpers import run_python

CHECKOUT = Path(__file__).parent.parent
DOCS = CHECKOUT / "docs"

if not DOCS.is_dir():
    pytest.skip("there are no docs next to these tests", allow_module_level=True)


def test_the_table_of_pairs_on_its_page_is_that_of_the_readme() -> None:
    pages = [CHECKOUT / "README.md", DOCS / "conversion-table.md"]
    tables = [re.findall(r"^\| (?:from|\*\*).*$", page.read_text("utf-8"), re.MULTILINE) for page in pages]
    assert len(tables[0]) == 7
    assert tables[0] == tables[1]


def test_the_cheat_sheet_is_current_and_its_calls_are_those_of_the_library() -> None:
    done = run_python(str(CHECKOUT / "tools" / "cheat_sheet.py"), "--check")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    text = (DOCS / "cheat-sheet.md").read_text(encoding="utf-8")
    library, _, commands = text.partition("## Command line")
    calls = re.findall(r"^\| (`.*?) \| ", library, flags=re.MULTILINE)
    names = re.findall(r"`(?:@|with )?ab\.([A-Za-z_]+)", " ".join(calls))
    assert len(names) > 40
    assert [name for name in names if not hasattr(arraybridge, name)] == []
    assert [call for call in calls if not re.match(r"`(?:@|with )?ab\.", call)] == []
    for command in re.findall(r"`arraybridge (\w+)", commands):
        assert (Path(arraybridge.__file__).parent / "cli" / f"{command}.py").is_file()


def test_the_drawing_of_the_layers_names_each_layer() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    names = {name for layer in layers[1:] for name in layer.split(" : ")}
    drawing = (DOCS / "_static" / "layers.svg").read_text(encoding="utf-8")
    (text,) = re.findall(
        r"!\[(Layers .*?)\]\(_static/layers\.svg\)", (DOCS / "how-it-works.md").read_text("utf-8")
    )
    drawn = " ".join(re.findall(r"<text[^>]*>(.*?)</text>", drawing))
    assert {name for name in names if not re.search(rf"\b{name}\b", drawn)} == set()
    assert {name for name in names if not re.search(rf"\b{name}\b", text)} == set()


def test_pages_are_ordinary_markdown() -> None:
    """Directives show as text on a code host. Those of the home page are only for the built site."""
    directives = {
        (page.stem, name)
        for page in DOCS.glob("*.md")
        for name in re.findall(
            r"^[`:]{3,}\{([\w-]+)\}|\{\w+\}`", page.read_text(encoding="utf-8"), re.MULTILINE
        )
    }
    assert directives == {("index", "toctree"), ("changelog", "include")}


def test_the_comparison_has_the_measured_answers() -> None:
    results = CHECKOUT / "benchmarks" / "results" / "alternatives.json"
    if not results.is_file():
        pytest.skip("no benchmarks in this distribution")
    answers = json.loads(results.read_text(encoding="utf-8"))["answers"].values()
    page = (DOCS / "coming-from.md").read_text(encoding="utf-8").partition("## Compare behavior")[2]
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("|")
    ]
    assert [dict(zip(head[1:], row[1:], strict=True)) for row in rows] == list(answers)


def test_the_changelog_has_one_section_of_at_most_120_lines() -> None:
    lines = (CHECKOUT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if line.startswith("## ")] == ["## 1.0.0, unreleased: first release"]
    assert [line for line in lines if line.startswith("### ")] == ["### Added", "### Known limits"]


def test_every_page_is_in_the_table_of_contents_and_in_llms_txt() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    trees = "\n".join(re.findall(r"```\{toctree\}(.*?)```", index, flags=re.DOTALL))
    entries = set(re.findall(r"^([a-z/-]+)$", trees, flags=re.MULTILINE))
    pages = {page.stem for page in DOCS.glob("*.md")} - {"index"}
    assert pages <= entries
    links = set(re.findall(r"\]\(([a-z/-]+)\.html\)", (DOCS / "llms.txt").read_text(encoding="utf-8")))
    assert links == entries


def _targets(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the targets of a report and of its sections."""
    sections = [report, *(part for part in report.values() if isinstance(part, dict))]
    return [target for part in sections for target in part.get("targets", ())]


def test_benchmarks_page_lists_missed_targets() -> None:
    results = CHECKOUT / "benchmarks" / "results"
    if not results.is_dir():
        pytest.skip("no benchmarks in this distribution")

    def read(name: str) -> Any:
        return json.loads((results / name).read_text(encoding="utf-8"))

    for name, least in (
        ("conversion", 10),
        ("call_overhead", 10),
        ("tables", 10),
        ("sparse", 1),
        ("safetensors_files", 2),
    ):
        targets = _targets(read(f"{name}.json"))
        assert len(targets) >= least
        assert all(target["met"] for target in targets)
    assert any(row["ratio"] > row["target"] for row in read("gradients.json")["rows"])
