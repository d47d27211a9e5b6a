"""What is said about installing: no page and no message names an extra of the other library of this name."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from arraybridge.frameworks import registry
from arraybridge.frameworks.facts import BUILT_IN, how_to_install

TOP = Path(__file__).parent.parent
# The package index has another library called arraybridge, which has none of these extras.
WRONG = re.compile(r"\barraybridge\[(?!\.)|pip install (?:--?\w\S* )*[\"']?arraybridge\b")


def test_the_check_can_fail() -> None:
    assert WRONG.search('pip install "arraybridge[torch,jax]"')
    assert WRONG.search("pip install --force-reinstall arraybridge")
    assert not WRONG.search('pip install ".[torch]" in a checkout of arraybridge')


@pytest.mark.parametrize(
    "path",
    [
        *sorted(TOP.glob("*.md")),
        *sorted((TOP / "docs").glob("*.md")),
        *sorted((TOP / "arraybridge").rglob("*.py")),
        *sorted((TOP / "benchmarks").rglob("*.md")),
    ],
    ids=lambda path: str(path.relative_to(TOP)),
)
def test_nobody_is_sent_to_the_other_library(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace("`pip install arraybridge`\nbrings that one", "")
    assert not WRONG.search(text)


def test_the_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {"": [line for line in project["dependencies"] if line.startswith("numpy")]}
    for extra, lines in project["optional-dependencies"].items():
        extras[extra] = [line.partition(";")[0] for line in lines]
    for facts in BUILT_IN.values():
        assert list(facts.requirements) == extras[facts.extra][: len(facts.requirements)]


@pytest.mark.parametrize("name", ["cupy", "torch", "jax", "tensorflow", "pyclesperanto"])
def test_a_missing_framework_is_installed_by_its_own_name_or_from_the_checkout(name: str) -> None:
    words = how_to_install(registry.facts(name))
    assert words.startswith(f'{name} is not installed; run pip install "{name}')
    assert re.search(rf'pip install "\.\[{name}[\w-]*\]" in a checkout of arraybridge\.$', words)
    assert "arraybridge[" not in words
