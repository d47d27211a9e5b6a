"""The scripts in `benchmarks/`: the list of them, and the jobs of `benchmarks.jobs`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.helpers import require, run_python

CHECKOUT = Path(__file__).resolve().parents[1]
BENCHMARKS = CHECKOUT / "benchmarks"
NEEDS = {
    "frameworks": ("torch", "jax", "xarray"),
    "loss": ("torch", "jax"),
    "loader": ("torch",),
    "threads": (),
    "processes": (),
    "stages": ("torch", "jax"),
    "large-table": ("torch", "pandas"),
    "small-table": ("torch", "pandas"),
    "sparse": ("jax", "scipy"),
    "recovery": (),
}
pytestmark = pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="no benchmarks in this distribution")


def import_jobs() -> ModuleType:
    import benchmarks.jobs

    return benchmarks.jobs


def test_the_readme_lists_every_script() -> None:
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    scripts = {path.name for path in BENCHMARKS.glob("*.py")} - {"__init__.py", "peer.py", "timing.py"}
    assert [name for name in sorted(scripts) if f"## `{name}`" not in text] == []


def test_every_job_is_tested() -> None:
    assert import_jobs().JOBS.keys() == NEEDS.keys()


@pytest.mark.parametrize("job", NEEDS)
def test_both_sides_of_a_job_return_the_same(job: str) -> None:
    for name in NEEDS[job]:
        require(name)
    ours, by_hand = import_jobs().JOBS[job][1](True)
    first, second = ours(), by_hand()
    assert type(first) is type(second)
    np.testing.assert_allclose(np.asarray(first), np.asarray(second), rtol=1e-4, atol=1e-5)


def test_jobs_are_measured_in_separate_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.jobs", "--quick", "--job", "recovery", "--out", tmp_path]
    done = subprocess.run(command, cwd=CHECKOUT, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "jobs.json").read_text(encoding="utf-8"))["results"].values()
    assert min(row["ratio"], row["cpu_ratio"]) > 0
    assert row.keys() == {"ours", "by_hand", "ratio", "cpu_ratio"}


COUNTS = """
from benchmarks import entered_functions as counting

for name, run in counting.operations().items():
    for _ in range(counting.WARM_UP):
        run()
    # During any call, garbage collection may run other functions.
    count = min(counting.entered(run).total() for _ in range(3))
    if count > counting.TARGETS[name]:
        print(name, count)
"""


def test_operations_enter_no_more_functions_than_their_targets() -> None:
    """The targets of `benchmarks.entered_functions`, except pipelines, whose threads may wake up in vain."""
    if require("torch").version.cuda:
        pytest.skip("builds of PyTorch for CUDA enter more functions, to select the device and its stream")
    done = run_python("-c", COUNTS)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
