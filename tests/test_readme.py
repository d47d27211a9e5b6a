"""The README keeps its word: the table is current, and its examples run as they stand."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers import require, run_python

CHECKOUT = Path(__file__).parent.parent
README = CHECKOUT / "README.md"
TOOL = CHECKOUT / "tools" / "conversion_table.py"
# Of GitHub's page, on a screen of ordinary height.
FIRST_SCREEN = 30


def text() -> str:
    return README.read_text(encoding="utf-8")


def examples() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text(), flags=re.MULTILINE | re.DOTALL)


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("conversion_table", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_pairs_is_current() -> None:
    assert tool().updated(text()) == text(), "run python tools/conversion_table.py"


def test_the_tool_sees_a_table_that_is_not() -> None:
    stale = text().replace("| **numpy** |", "| **numpie** |")
    assert stale != text()
    assert tool().updated(stale) == text()
    with pytest.raises(ValueError, match="substring not found"):
        tool().updated("no marks")


def test_the_tool_checks_from_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, str(TOOL), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PYTHONPATH": str(CHECKOUT), "PYTHONIOENCODING": "utf-8"},
    )
    assert (done.returncode, done.stdout.strip()) == (0, "README.md is current.")


def test_the_table_has_each_pair_once() -> None:
    rows = [line for line in text().splitlines() if line.startswith("| **")]
    names = ["numpy", "cupy", "torch", "jax", "tensorflow", "pyclesperanto"]
    assert [re.findall(r"\*\*(\w+)\*\*", row) for row in rows] == [[name] for name in names]
    for i, row in enumerate(rows):
        cells = [cell.strip() for cell in row.strip("|").split("|")][1:]
        assert len(cells) == 6
        assert [j for j, cell in enumerate(cells) if cell == "–"] == [i]
    # The promise of section "Sharing": these pairs share on the host.
    for i in (0, 2, 3, 4):
        cells = [cell.strip() for cell in rows[i].strip("|").split("|")][1:]
        for j in {0, 2, 3, 4} - {i}:
            assert cells[j].startswith("shared")
            assert "card" not in cells[j]


def test_the_first_screen_shows_the_first_conversion() -> None:
    lines = text().splitlines()
    first = next(n for n, line in enumerate(lines, 1) if "convert_memory(" in line)
    assert first < FIRST_SCREEN
    assert "```python" in lines[: first - 1]


def test_the_order_is_conversion_table_promises() -> None:
    conversion, table = text().index("convert_memory("), text().index("conversion table: begin")
    promises = text().index("What you can rely on")
    assert conversion < table < promises


def test_the_other_examples_run_as_they_are_written(tmp_path: Path) -> None:
    """One after the other, each with names of its own alone."""
    for name in ("torch", "jax", "tensorflow"):
        require(name)
    scripts = [tmp_path / f"example_{number}.py" for number in range(1, len(examples()))]
    assert len(scripts) >= 3
    for script, example in zip(scripts, examples()[1:], strict=True):
        script.write_text(example, encoding="utf-8")
    code = "import runpy, sys\nfor script in sys.argv[1:]: runpy.run_path(script, run_name='__main__')"
    done = run_python("-c", code, *map(str, scripts))
    assert done.returncode == 0, done.stderr


def test_the_first_examples_run_share_and_print_what_they_say(tmp_path: Path) -> None:
    """Those of the README and of the documentation's front page, the second in the process of the first."""
    for name in ("torch", "jax", "tensorflow"):
        require(name)
    checks = (
        "assert tensor.data_ptr() == image.__array_interface__['data'][0]",
        "assert array.dtype == 'float64'",
        "assert array.unsafe_buffer_pointer() == tensor.data_ptr()",
        "del image, tensor, array",
    )
    code, said = "", ""
    for page in filter(Path.is_file, (README, CHECKOUT / "docs" / "index.md")):
        front = page.read_text(encoding="utf-8")
        block = re.search(
            r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", front, flags=re.MULTILINE | re.DOTALL
        )
        assert block is not None
        code += "\n".join([block[1], *checks, ""])
        said += block[2]
    script = tmp_path / "example.py"
    script.write_text(code, encoding="utf-8")
    # As a reader runs it, whom nobody has told how to silence TensorFlow.
    done = run_python(str(script), env={"TF_CPP_MIN_LOG_LEVEL": ""})
    assert done.returncode == 0, done.stderr
    assert done.stdout == said
    # What TensorFlow itself says of some processors when it is imported.
    of_tensorflow = r"^(WARNING: All log messages before|I\d{4} .*\.cc:\d+\] |To enable the following).*\n"
    assert re.sub(of_tensorflow, "", done.stderr, flags=re.MULTILINE) == ""


def test_what_the_alternatives_do_is_what_they_did() -> None:
    """The rows of the table that are answers of code are those that benchmarks/alternatives.py had."""
    results = CHECKOUT / "benchmarks" / "results" / "alternatives.json"
    if not results.is_file():
        pytest.skip("the benchmarks are not beside these tests")
    answers = json.loads(results.read_text(encoding="utf-8"))["answers"]
    names = {
        "narrowed": "float64 from PyTorch to JAX",
        "backwards": "reversed NumPy view to PyTorch",
        "masked": "masked array to PyTorch",
        "read_only": "read-only array to PyTorch",
        "tensorflow_to_numpy": "TensorFlow to NumPy",
    }
    assert set(answers) == set(names)
    for question, title in names.items():
        assert f"| {title} | {' | '.join([*answers[question].values(), '–', '–'])} |" in text()
