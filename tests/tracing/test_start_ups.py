"""Imports of frameworks and starts of their devices, which do not count as conversion time."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import trace
from arraybridge.hooks import hooks
from tests.helpers import require, run_python

SCRIPTS = Path(__file__).parent / "scripts"


def output(script: str, *arguments: str, **options: Any) -> list[str]:
    done = run_python(str(SCRIPTS / script), *arguments, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_first_conversion_does_not_include_the_start_up() -> None:
    starts = {"torch": [100.0], "jax": [100.0, 10.0], "tensorflow": [100.0, 10.0]}
    for name in starts:
        require(name)
    rows = [json.loads(line) for line in output("first_conversions.py", *starts)]
    assert rows == [
        [
            name,
            parts,
            [1.0, 1.0],
            2.0,
            ["2 conversions, 0 B copied, 2.00 s", f"start-up of {name}: {sum(parts):.2f} s"],
        ]
        for name, parts in starts.items()
    ]


def test_native_calls_in_graphs_do_not_start_devices() -> None:
    require("jax")
    require("tensorflow")
    lines = output("native_calls_in_graphs.py", env={"XLA_FLAGS": ""}, imported=True)
    assert lines == ["['jax', 'tensorflow'] ['jnp.asarray', 'jnp.asarray', 'tf.constant', 'tf.constant']"]


@pytest.fixture
def log() -> arraybridge.TraceLog:
    """Return the log of a trace with the start-up of a framework, and of another one that raised."""
    with trace() as log:
        with hooks.start_up("abacus"), hooks.start_up("part of abacus"):
            arraybridge.convert_memory(np.zeros(3)[::-1], "numpy", copy=True)
        with pytest.raises(ImportError), hooks.start_up("broken"):
            raise ImportError
    return log


def test_nested_and_failed_start_ups_are_not_recorded(log: arraybridge.TraceLog) -> None:
    ((kind, name, file),) = [(event.kind, event.name, event.file) for event in log.start_ups]
    assert (kind, name, file) == ("start-up", "abacus", __file__)
    assert [event.kind for event in log.events] == ["conversion"]


def test_start_ups_are_in_tables_and_files(log: arraybridge.TraceLog, tmp_path: Path) -> None:
    pattern = r"copied, [\d.]+ \w+\nstart-up of abacus: [\d.]+ \w+$"
    assert re.search(pattern, str(log))
    assert re.search(pattern, str(log.hotspots()))
    assert "<br>start-up of abacus" in log._repr_html_()
    assert list(log.hotspots().to_dict()["start_ups"]) == ["abacus"]
    log.save(tmp_path / "run.json")
    saved: list[dict[str, Any]] = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    (bar,) = [event for event in saved if event.get("cat") == "start-up"]
    assert (bar["name"], bar["ph"]) == ("start-up of abacus", "X")
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert "start-up" in [text.get_text() for text in log.plot().legends[0].get_texts()]


def test_concurrent_start_ups_of_a_framework_are_recorded_once() -> None:
    def start() -> None:
        with hooks.start_up("abacus"), hooks.start_up("another"):
            pass

    with trace() as log, hooks.start_up("abacus"):
        # A trace includes the worker threads of arraybridge.
        list(arraybridge.device_map(lambda x: start() or x, [np.zeros(2)], ["cpu"]))
    assert sorted(event.name for event in log.start_ups) == ["abacus", "another"]
    assert len({event.thread for event in log.start_ups}) == 2
