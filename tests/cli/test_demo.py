"""Test `arraybridge demo`: all installed frameworks and missing ones."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arraybridge.cli import demo
from tests.cli.programs import Site, call_cli
from tests.helpers import require

FRAMEWORKS = ("torch", "jax", "tensorflow", "pyclesperanto")
Json = dict[str, Any]


def installed() -> list[str]:
    return [name for name in FRAMEWORKS if importlib.util.find_spec(name) is not None]


def test_demo_converts_through_every_framework_in_json_and_text(monkeypatch: pytest.MonkeyPatch) -> None:
    image = np.random.default_rng(1).integers(0, 256, (40, 30), dtype=np.uint8)
    monkeypatch.setattr(demo, "load_image", lambda: ("noise", image))
    done = call_cli("demo", "--json")
    assert done.exit_code == 0, done.stderr
    report: Json = json.loads(done.stdout)
    assert (report["image"], report["shape"], report["dtype"]) == ("noise", [40, 30], "uint8")
    steps = report["steps"]
    targets = [step["target"] for step in steps if step["target"] != "cupy"]
    assert targets == [*installed(), "numpy"]
    assert steps[0]["source"] == "numpy"
    for earlier, later in itertools.pairwise(steps):
        assert later["source"] == earlier["target"]
    for step in steps:
        assert step["exact"] is True
        assert step["nbytes"] == image.nbytes
        assert step["shares_memory"] == (step["copies"] == 0)
        assert step["reason"]
    assert report["exact"] is report["decorated"]["exact"] is report["pipeline"]["exact"] is True
    oom = report["out_of_memory"]
    assert oom["exact"] is True
    assert oom["failed"] >= 1
    assert oom["attempts"][0] == 40, "the first attempt must use the whole image"
    assert min(oom["attempts"]) <= 13, "later attempts must use as many rows as fit"
    assert len(report["pipeline"]["stages"]) == 2
    text = call_cli("demo")
    assert (text.exit_code, text.stderr) == (0, "")
    assert all(f"→ {name} " in text.stdout for name in targets), "the table lists every conversion"
    assert len(re.findall(r" ok *$", text.stdout, re.MULTILINE)) == len(steps) + 3
    assert "WRONG" not in text.stdout


def test_demo_without_frameworks_prints_install_commands(tmp_path: Path) -> None:
    done = Site(tmp_path).run("demo", COLUMNS="300")
    assert done.returncode == 0, done.stderr
    for extra in ("cupy-cuda13x", "torch", "jax", "tensorflow", "pyclesperanto"):
        assert f'pip install ".[{extra}]"' in done.stdout
    assert "No GPU is used: no framework finds one." in done.stdout
    assert "WRONG" not in done.stdout


def test_demo_skips_frameworks_whose_functions_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    require("jax")
    invert = demo._invert

    def invert_but_not_in_jax(framework: str, array: Any) -> Any:
        if framework == "jax":
            raise RuntimeError("Error: Failed to build OpenCL program.\nBuild log: …")
        return invert(framework, array)

    monkeypatch.setattr(demo, "_invert", invert_but_not_in_jax)
    done = call_cli("demo")
    assert done.exit_code == 0, done.stderr
    assert "Skipped jax: its functions fail (Error: Failed to build OpenCL program.)." in done.stdout
