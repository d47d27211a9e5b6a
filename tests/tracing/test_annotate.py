"""Annotations in third-party profilers, and memory over time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import FrameworkNotInstalledError, settings
from arraybridge.tracing import trace_log as trace_module
from tests.helpers import require, run_python


@arraybridge.numpy
def increment(x: Any) -> Any:
    return x + 1


def test_annotations_appear_in_torch_and_jax_profiles() -> None:
    torch, jax = require("torch"), require("jax")
    with torch.profiler.profile() as profile, settings(annotate="torch"):
        increment(torch.ones(3))
        arraybridge.Pipeline(increment, abs, microbatches=2)(np.ones(4))
    names = {event.key: event.count for event in profile.key_averages()}
    assert names["torch → numpy"] == 1
    assert names["increment"] >= 1
    with settings(annotate="jax"):
        assert increment(jax.numpy.ones(2)).tolist() == [2, 2]
    assert not trace_module.open_logs


def test_annotations_appear_in_nvtx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check with a replacement for the nvtx package that has the functions used here."""
    error_text: list[tuple[str, str]] = []

    @contextmanager
    def annotate(message: str, domain: str) -> Iterator[None]:
        error_text.append(("begin", message))
        assert domain == "arraybridge"
        yield
        error_text.append(("end", message))

    stand_in = ModuleType("nvtx")
    stand_in.annotate = annotate  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nvtx", stand_in)
    with settings(annotate="nvtx"):
        increment(np.ones(1))
    increment(np.ones(1))
    name = "numpy → numpy"
    inner = [("begin", name), ("end", name)]
    assert error_text == [("begin", "increment"), *inner, *inner, ("end", "increment")]


def test_missing_package_and_unknown_profiler_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with (
        pytest.raises(FrameworkNotInstalledError, match=r"pip install nvtx.*\[nvtx\]"),
        settings(annotate="nvtx"),
    ):
        pass
    with pytest.raises(ValueError, match="annotate"), settings(annotate="vtune"):  # type: ignore[arg-type]
        pass
    assert not trace_module.open_logs


NEEDS_NO_TRITON = """
import tensorflow as tf
import numpy as np
import torch
import arraybridge as ab

with ab.settings(annotate="torch"), ab.trace(foreign=True) as log:
    x = ab.to_torch(tf.ones(3))
    torch.tensor(np.ones(3)).numpy()
    ab.torch(oom_recovery="split")(abs)(np.ones((4, 3)))
    ab.free_memory()
assert log.hotspots()
assert "triton" not in sys.modules
print("done")
"""


def test_traces_and_annotations_do_not_import_triton(tmp_path: Path) -> None:
    """Importing Triton after TensorFlow crashes the process; a fake Triton does the same."""
    require("torch")
    require("tensorflow")
    planted = tmp_path / "triton"
    planted.mkdir()
    (planted / "__init__.py").write_text("import os\nos.abort()\n", encoding="utf-8")
    # If the real Triton is installed, it was imported before TensorFlow.
    lines = ("import sys", f"sys.path.insert(0, {str(tmp_path)!r})", "sys.modules.pop('triton', None)")
    done = run_python("-c", "\n".join([*lines, NEEDS_NO_TRITON]), imported=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")
