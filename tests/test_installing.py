"""Installing: what pages and messages say of it, and that there is what the project asks for."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from arraybridge.frameworks.facts import BUILT_IN, how_to_install
from tests.helpers import run_python

TOP = Path(__file__).parent.parent
PROJECT = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]
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
    extras = {"": [line for line in PROJECT["dependencies"] if line.startswith("numpy")]}
    for extra, lines in PROJECT["optional-dependencies"].items():
        extras[extra] = [line.partition(";")[0] for line in lines]
    for facts in BUILT_IN.values():
        assert list(facts.requirements) == extras[facts.extra][: len(facts.requirements)]


@pytest.mark.parametrize("name", ["cupy", "torch", "jax", "tensorflow", "pyclesperanto"])
def test_a_missing_framework_is_installed_by_its_own_name_or_from_the_checkout(name: str) -> None:
    words = how_to_install(BUILT_IN[name])
    assert words.startswith(f'pip install "{name}')
    assert re.search(rf'pip install "\.\[{name}[\w-]*\]" in a checkout of arraybridge$', words)


def test_the_command_line_says_what_it_misses() -> None:
    for package in ("typer", "rich"):
        code = f"import sys; sys.modules[{package!r}] = None; from arraybridge.cli import main; main()"
        done = run_python("-c", code)
        assert done.returncode == 1
        assert done.stderr.startswith(f"arraybridge: the command line needs {package}; run pip install")
        assert '".[cli]" in a checkout' in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_progress_bar_says_what_it_misses() -> None:
    code = (
        "import sys; sys.modules['rich'] = None; import arraybridge as ab\n"
        "try: list(ab.device_map(abs, [-1], ['cpu'], progress=True))\n"
        "except ab.FrameworkNotInstalledError as error: print(error)"
    )
    done = run_python("-c", code)
    assert '".[cli]" in a checkout' in done.stdout, done.stderr


# ---- Python 3.14 -----------------------------------------------------------------------------------------

# What has no wheels for it so far, and what brings gigabytes of CUDA.
LEFT_OUT = {"tensorflow", "paddle", "dask-cuda12x", "dask-cuda13x", "cupy-cuda12x", "pyclesperanto-prototype"}


def requirements(extra: str, python: str) -> list[str]:
    """What an extra asks for on that Python, those of the extras in it included."""
    environment = {"python_version": python, "extra": extra}
    lines = []
    for line in PROJECT["optional-dependencies"][extra]:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate(environment):
            continue
        if requirement.name == "arraybridge":
            lines += [more for inner in sorted(requirement.extras) for more in requirements(inner, python)]
        else:
            requirement.marker = None
            lines.append(str(requirement))
    return lines


def test_what_has_no_release_for_a_python_is_left_out_there() -> None:
    assert "Programming Language :: Python :: 3.14" in PROJECT["classifiers"]
    assert any(line.startswith("tensorflow-cpu") for line in requirements("cpu", "3.13"))
    assert not any(line.startswith("tensorflow") for line in requirements("cpu", "3.14"))


@pytest.mark.slow
@pytest.mark.parametrize("extra", sorted({"", *PROJECT["optional-dependencies"]} - LEFT_OUT))
def test_each_extra_resolves_on_python_3_14(extra: str) -> None:
    """Of wheels alone, by the package index; nothing is installed."""
    wanted = PROJECT["dependencies"] + (requirements(extra, "3.14") if extra else [])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"),
            *("--python-version", "3.14", "--only-binary=:all:", "--target", "unused", *wanted),
        ],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
