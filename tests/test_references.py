"""Paths, tox environments and members that texts name exist."""

from __future__ import annotations

import configparser
import re
from pathlib import Path
from typing import Any

import pytest

import arraybridge
from arraybridge.interface.component import component

CHECKOUT = Path(__file__).parent.parent
if not (CHECKOUT / "CONTRIBUTING.md").exists():
    pytest.skip("the texts are not installed", allow_module_level=True)

_TEXTS = sorted(
    [
        *CHECKOUT.glob("*.md"),
        *CHECKOUT.glob("docs/*.md"),
        *CHECKOUT.glob("tests/*/README.md"),
        *CHECKOUT.glob(".github/**/*.yml"),
        *CHECKOUT.glob(".github/**/*.md"),
        CHECKOUT / "tox.ini",
        CHECKOUT / "pyproject.toml",
        CHECKOUT / ".pre-commit-config.yaml",
    ]
)
#: Files that users or programs create, and placeholders.
_NOT_OURS = re.compile(
    r"^arraybridge/torch\.py$|<|\*|…|^/|^https?:|^docs/(_build|gallery)|^\.?(venv|tox)|^/?tmp|^dist/|^~|^path/|^\.git/"
)
#: A path with a suffix of the files in the checkout, or a folder below the checkout.
_PATH = re.compile(
    r"(?<![\w/.-])((?:[\w.-]+/)+[\w.-]+\.(?:py|md|sh|toml|ini|json|svg|yml)|[\w-]+\.(?:md|toml|ini))\b"
)
#: Folders to which a path in a text may be relative.
_FOLDERS = ("", "arraybridge", "docs", "tests", "benchmarks")


def _exists(path: str, text: Path) -> bool:
    return any((folder / path).exists() for folder in (text.parent, *(CHECKOUT / name for name in _FOLDERS)))


@pytest.mark.parametrize("text", _TEXTS, ids=lambda path: str(path.relative_to(CHECKOUT)))
def test_paths_exist(text: Path) -> None:
    content = text.read_text(encoding="utf-8")
    if text.suffix == ".md":
        prose = re.sub(r"^```.*?^```", "", content, flags=re.MULTILINE | re.DOTALL)
        content = " ".join(re.findall(r"`[^`\n]+`|\]\([^)]+\)", prose))
    paths = {match[1] for match in _PATH.finditer(content) if not _NOT_OURS.search(match[1])}
    assert [path for path in sorted(paths) if not _exists(path, text)] == []


def test_tox_environments_exist() -> None:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read_string((CHECKOUT / "tox.ini").read_text(encoding="utf-8"))
    environments = {name.partition(":")[2] for name in tox.sections()}
    labels = {line.partition("=")[0].strip() for line in tox["tox"]["labels"].splitlines()}
    for text in _TEXTS:
        content = text.read_text(encoding="utf-8")
        named = set(re.findall(r"tox(?: run)? -e ([\w-]+)", content))
        if text.suffix == ".yml":
            named |= set(re.findall(r"\{system: [\w-]+, environment: ([\w-]+)", content))
            for listed in re.findall(r"^ +environment: \[(.*)\]$", content, re.MULTILINE):
                named |= set(listed.split(", "))
        labeled = set(re.findall(r"tox(?: run)? -m ([\w-]+)", content))
        assert named <= environments, text
        assert labeled <= labels, text


def test_members_of_components_exist() -> None:
    """Check names such as `batching.part` in texts: a component of a framework, and its member."""
    framework: Any = arraybridge.Framework
    components = {name: thing.cls for name, thing in vars(framework).items() if isinstance(thing, component)}
    components |= {name: type(getattr(framework, name)) for name in ("streams", "autodiff", "sparse")}
    for text in _TEXTS:
        code = re.findall(r"`([^`\n]+)`", text.read_text(encoding="utf-8"))
        for owner, member in (
            match for one in code for match in re.findall(r"^(\w+)\.(\w{2,})\b(?!\.)", one)
        ):
            if owner in components and not _is_module(f"{owner}/{member}"):
                assert hasattr(components[owner], member), f"{text}: {owner}.{member}"


def _is_module(path: str) -> bool:
    return (CHECKOUT / "arraybridge" / path).exists()
