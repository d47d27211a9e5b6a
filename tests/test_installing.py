"""Installation: consistent names in pages and messages, and available requirements."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from arraybridge.interface.installation import how_to_install
from arraybridge.interface.registry import BUILT_IN

TOP = Path(__file__).parent.parent
PROJECT = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# The package index has another library called arraybridge, which has none of these extras.
WRONG = re.compile(r"\barraybridge\[(?!\.)|pip install (?:--?\w\S* )*[\"']?arraybridge\b")


def test_messages_do_not_install_the_other_library() -> None:
    assert WRONG.search('pip install "arraybridge[torch,jax]"')
    assert WRONG.search("pip install --force-reinstall arraybridge")
    assert not WRONG.search('pip install ".[torch]" in a checkout of arraybridge')
    pages = [*TOP.glob("*.md"), *(TOP / "docs").glob("*.md"), *(TOP / "benchmarks").rglob("*.md")]
    for path in [*pages, *(TOP / "arraybridge").rglob("*.py")]:
        text = path.read_text(encoding="utf-8").replace("`pip install arraybridge`\nbrings that one", "")
        assert not WRONG.search(text), path


def test_the_extras_are_those_of_the_project() -> None:
    for name in BUILT_IN.keys() - {"numpy"}:
        words = how_to_install(BUILT_IN[name])
        assert words.startswith(f'pip install "{name}')
        extra = re.search(rf'pip install "\.\[({name}[\w-]*)\]" in a checkout of arraybridge$', words)
        assert extra is not None
        first = PROJECT["optional-dependencies"][extra[1]][0]
        assert Requirement(first).name == BUILT_IN[name].distributions[0]


# ---- Python 3.14 -----------------------------------------------------------------------------------------

# Packages that have no wheels for it so far, and packages that install gigabytes of CUDA.
LEFT_OUT = {"tensorflow", "paddle", "dask-cuda12x", "dask-cuda13x", "cupy-cuda12x", "pyclesperanto-prototype"}


def requirements(extra: str, python: str) -> list[str]:
    """Return the requirements of an extra on that Python, including nested extras."""
    lines = []
    for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
        if requirement.marker and not requirement.marker.evaluate({"python_version": python, "extra": extra}):
            continue
        requirement.marker = None
        inner = sorted(requirement.extras) if requirement.name == "arraybridge" else ()
        lines += [line for name in inner for line in requirements(name, python)] or [str(requirement)]
    return lines


def test_packages_without_a_release_for_a_python_are_omitted() -> None:
    assert "Programming Language :: Python :: 3.14" in PROJECT["classifiers"]
    assert any(line.startswith("tensorflow-cpu") for line in requirements("cpu", "3.13"))
    assert not any(line.startswith("tensorflow") for line in requirements("cpu", "3.14"))


@pytest.mark.slow
@pytest.mark.parametrize("extra", sorted({"", *PROJECT["optional-dependencies"]} - LEFT_OUT))
def test_each_extra_resolves_on_python_3_14(extra: str) -> None:
    """Resolve wheels only, from the package index, without installing them."""
    wanted = PROJECT["dependencies"] + (requirements(extra, "3.14") if extra else [])
    command = [
        *(sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"),
        *("--python-version", "3.14", "--only-binary=:all:", "--target", "unused", *wanted),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
