"""Tests of README.md and of the example on the documentation's front page."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from statistics import median

import pytest

from tests.helpers import require, run_python, tool

CHECKOUT = Path(__file__).parent.parent
README = (CHECKOUT / "README.md").read_text(encoding="utf-8")
TABLE = tool("conversion_table")
EXAMPLE = re.compile(r"^```python\n(.*?)^```$\n\n^```text\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
SECTIONS = [
    "Installation",
    "When not to use it",
    "Quick start",
    "Find hidden copies",
    "Features",
    "What is shared",
    "Guarantees",
    "GPU status",
    "Comparison",
    "Benchmarks",
    "Tests",
    "Getting help, contributing, license",
]


def words(text: str) -> int:
    return len(re.sub(r"<[^>]*>|\]\([^)]*\)", " ", text).split())


def test_the_table_of_pairs_is_current() -> None:
    assert TABLE.updated(README) == README, "run python tools/conversion_table.py"


def test_length_and_order_of_sections() -> None:
    prose = re.sub(r"^\|.*$", "", BLOCK.sub("", README), flags=re.MULTILINE)
    assert words(prose) <= 950
    assert words(README) <= 1500
    assert re.findall(r"^## (.*)$", README, flags=re.MULTILINE) == SECTIONS


@pytest.mark.parametrize("page", sorted(CHECKOUT.glob("*.md")), ids=lambda page: page.stem)
def test_relative_links_lead_to_files(page: Path) -> None:
    """`docs/check_links.py` checks those of the documentation."""
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    files = {link.partition("#")[0] for link in links if not re.match(r"https?:|mailto:|#", link)}
    assert files or page.name != "README.md"
    if not (CHECKOUT / "benchmarks").is_dir() or not (CHECKOUT / "docs").is_dir():
        pytest.skip("this distribution does not have all files")
    assert sorted(file for file in files if not (page.parent / file).exists()) == []


def test_the_benchmark_is_the_measured_one() -> None:
    results = CHECKOUT / "benchmarks" / "results" / "conversion.json"
    if not results.is_file():
        pytest.skip("no benchmarks in this distribution")
    rows = json.loads(results.read_text(encoding="utf-8"))["pairs"]["rows"]
    over = [row["ours"]["over_raw_ns"] for row in rows if row["size"] == "4 MiB"]
    assert len(over) == 12
    assert f"takes {median(over) / 1000:.2f} µs longer than the fastest native call" in README


def test_the_two_commands_have_a_block_each() -> None:
    """The first command converts a photograph. The second one is also the first command of .ci/run."""
    commands = [
        code.strip() for kind, code in BLOCK.findall(README) if kind == "sh" and "python3 -m venv" in code
    ]
    assert len(commands) == 2
    assert commands[0].endswith(".venv/bin/arraybridge demo")
    assert commands[1].endswith(".venv-tox/bin/tox")
    ci = CHECKOUT / ".ci" / "run"
    if ci.is_file():  # a source distribution does not have it
        assert f"{{ {commands[1]}; }}" in ci.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_the_first_example_prints_what_the_page_shows(name: str, tmp_path: Path) -> None:
    for framework in ("torch", "jax"):  # the extras that both pages install
        require(framework)
    page = CHECKOUT / name
    if not page.is_file():
        pytest.skip(f"no {name} in this distribution")
    (example,) = EXAMPLE.findall(page.read_text(encoding="utf-8"))
    checks = [
        "assert tensor.data_ptr() == image.__array_interface__['data'][0]",
        "assert array.dtype == 'float64'",
    ]
    if "ab.aligned" in example[0]:
        checks.append("assert array.unsafe_buffer_pointer() == tensor.data_ptr()")
    script = tmp_path / "example.py"
    script.write_text("\n".join([example[0], *checks, ""]), encoding="utf-8")
    done = run_python(str(script), imported=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, example[1], "")


def test_the_trace_shows_the_lines_and_bytes_of_its_script(tmp_path: Path) -> None:
    for framework in ("torch", "jax"):
        require(framework)
    pytest.importorskip("typer")
    (loop,) = [code for kind, code in BLOCK.findall(README) if kind == "py"]
    head = ["import jax.numpy as jnp", "import numpy as np", "import torch", ""]
    head += ["net = torch.nn.Conv2d(1, 8, 3, padding=1)"]
    shown = next(code for kind, code in BLOCK.findall(README) if kind == "text" and "copied" in code)
    # Times differ from run to run.
    row = re.compile(r"^\S*?(features\.py:\d+) +([\d.]+ MiB) .*? (\d+)  (\S.*)$", flags=re.MULTILINE)
    script = tmp_path / "features.py"
    script.write_text("\n".join([*head, loop]), encoding="utf-8")
    done = _trace(script)
    assert len(row.findall(shown)) == 2
    assert sorted(row.findall(shown)) == sorted(row.findall(done.stdout))
    shared = loop.replace("torch.tensor(image)", "ab.to_torch(image)")
    shared = shared.replace("jnp.asarray(maps.cpu().numpy())", "ab.to_jax(maps)")
    # JAX may abort the interpreter if its work is pending at exit, even without arraybridge.
    lines = ["import arraybridge as ab", *head, shared, "edges.block_until_ready()"]
    script.write_text("\n".join(lines), encoding="utf-8")
    assert _trace(script).stdout.strip() == "no copies"


def _trace(script: Path) -> subprocess.CompletedProcess[str]:
    done = run_python("-m", "arraybridge", "trace", str(script), imported=True)
    assert done.returncode == 0, done.stderr
    return done
