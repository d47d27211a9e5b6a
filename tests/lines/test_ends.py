"""How threads end: with the program while they are at work, and by an error that Python takes for an end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import arraybridge
from arraybridge import Pipeline, device_map
from tests.helpers import require

SCRIPT = Path(__file__).with_name("half_read.py")


# With the threads left to themselves each run aborted, of torch and of JAX.
@pytest.mark.parametrize("runs", [1, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["torch", "jax"])
@pytest.mark.parametrize("what", ["device_map", "Pipeline"])
def test_a_program_ends_in_peace_with_a_half_read_iterator(what: str, name: str, runs: int) -> None:
    require(name)
    env = {**os.environ, "PYTHONPATH": str(Path(arraybridge.__file__).parent.parent)}
    for _ in range(runs):
        done = subprocess.run(
            [sys.executable, str(SCRIPT), what, name],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=env,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_a_stage_that_raises_stop_iteration_is_named() -> None:
    def stop(x: int) -> int:
        if x == 3:
            raise StopIteration("three")
        return x

    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        list(Pipeline(abs, stop).map(range(9)))
    assert "in stage 1 (stop), item 3" in caught.value.__notes__
    assert isinstance(caught.value.__cause__, StopIteration)
    with pytest.raises(RuntimeError, match="item 3, on cpu: StopIteration") as caught:
        list(device_map(stop, range(9), "cpu"))
    assert "item 3, on cpu" in caught.value.__notes__


def test_a_line_that_is_ended_from_outside_does_not_hang() -> None:
    """As the end of the program does it to one that a thread reads."""
    from arraybridge.lines import threads

    release = threading.Event()

    def wait(x: Any) -> Any:
        release.wait(20)
        return x

    results = Pipeline(wait).map(range(3))
    failed: list[BaseException] = []

    def read() -> None:
        try:
            list(results)
        except RuntimeError as error:
            failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    while not threads._runs:
        pass
    for one in list(threads._runs):
        one.stop()
    release.set()
    reader.join(20)
    assert not reader.is_alive()
    assert "the program ends" in str(failed[0])


def test_a_framework_that_is_merely_imported_is_not_opened() -> None:
    require("jax")
    env = {**os.environ, "PYTHONPATH": str(Path(arraybridge.__file__).parent.parent)}
    script = str(SCRIPT.with_name("opens_nothing.py"))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, check=False, env=env
    )
    assert (done.stdout, done.stderr) == ("left alone\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_is_told_that_its_iterators_have_no_threads() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "tests.lines.forked"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = run.stdout.splitlines()
    assert len(lines) == 6, run.stdout + run.stderr
    assert all("refused: this iterator was begun before its process was forked" in line for line in lines[:3])
    assert lines[3:] == ["anew: [1, 2] [3]", "child: 5", "goes on: [1, 1, 1]"]
