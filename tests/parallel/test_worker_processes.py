"""Values that are sent to and from `device_map` processes, and errors for values that cannot be sent."""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import GradientError, MemoryConversionError, device_map
from tests.helpers import require
from tests.memory.test_serialization import LARGE
from tests.parallel import functions
from tests.parallel.functions import UnpicklableElsewhere


def run(fn: Any, *items: Any, **options: Any) -> list[Any]:
    return list(device_map(fn, items, ["cpu"], processes=True, **options))


# -- processes and devices ---------------------------------------------------------------------------


def test_each_worker_thread_has_one_process_and_model() -> None:
    results = run(functions.apply_model, *range(5), setup=functions.make_model)
    assert [(device, x, here) for _, device, x, here in results] == [("cpu", i, "cpu") for i in range(5)]
    pids = {process for process, *_ in results}
    assert len(pids) == 1
    assert os.getpid() not in pids
    results = run(functions.with_process, *range(40), per_device=2)
    assert [x for x, _ in results] == list(range(40))


def test_processes_run_on_their_devices() -> None:
    require("jax")
    items = [np.zeros(1, np.int32)] * 6
    results = device_map(functions.device_number, items, ["cpu:1", "cpu:2"], processes=True)
    assert {int(r[0]) for r in results} <= {1, 2}


# -- arrays ------------------------------------------------------------------------------------------


def test_arrays_of_every_framework_travel_unchanged() -> None:
    """Use one process that imports all frameworks. JAX's own pickle would narrow 64-bit values there."""
    torch, jax, tf = map(require, ("torch", "jax", "tensorflow"))
    batch = torch.arange(10_000, dtype=torch.float32).reshape(1000, 10)
    large = np.arange(LARGE // 4, dtype=np.float32)
    first = {
        name: arraybridge.convert_memory(large, name) for name in ("numpy", "torch", "jax", "tensorflow")
    }
    odd = [
        *(batch[7], batch[5:7].detach().requires_grad_(), jax.numpy.asarray(2.0)),
        *(arraybridge.to_jax(np.array([1 + 2.0**-40])), tf.constant(["a"]), tf.constant([0.5], tf.bfloat16)),
    ]
    back, rest = run(functions.same, first, odd)
    for name, x in back.items():
        assert arraybridge.detect_memory_type(x) == name
        np.testing.assert_array_equal(arraybridge.to_numpy(x), large)
    row, leaf, weak, wide, words, halves = rest
    assert (row.tolist(), row.untyped_storage().nbytes()) == ([*range(70, 80)], 40)  # not the whole batch
    assert (leaf.requires_grad, leaf.tolist()) == (True, [[*range(50, 60)], [*range(60, 70)]])
    assert (str(weak.dtype), weak.weak_type) == ("float32", True)
    assert (str(wide.dtype), float(np.asarray(wide)[0])) == ("float64", 1 + 2.0**-40)
    assert words.numpy().tolist() == [b"a"]
    assert (halves.dtype, float(halves[0])) == (tf.bfloat16, 0.5)


def test_tensors_with_a_graph_raise_as_in_torch() -> None:
    torch = require("torch")
    leaf = torch.ones(2, requires_grad=True)
    for fn, item in ((functions.same, partial(abs, leaf * 2)), (functions.with_graph_inside, leaf)):
        with pytest.raises(GradientError, match="its graph stays in the process"):
            run(fn, item)


# -- values that cannot be sent ----------------------------------------------------------------------

# fmt: off
WRONG: list[tuple[Any, Any, type[Exception], str, str]] = [
    (functions.die, 1, MemoryConversionError, "of cpu ended with exit code 7", ""),
    (functions.same, UnpicklableElsewhere(), FileNotFoundError, "not made here", "the item cannot be"),
    (functions.make_unpicklable_elsewhere, 1, FileNotFoundError, "not made here", "the result of the"),
    (functions.same, threading.Lock(), TypeError, "lock", "the item cannot be pickled for the process of"),
    (functions.make_function, 1, Exception, "lambda", "the result cannot be pickled in the process"),
    (functions.be_stubborn, 1, RuntimeError, "StubbornError: stubborn", "the original exception cannot"),
]
# fmt: on


@pytest.mark.parametrize(("fn", "item", "error", "words", "note"), WRONG)
def test_transfer_errors_name_the_item(
    fn: Any, item: Any, error: type[Exception], words: str, note: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        run(fn, item)
    assert note in "\n".join(caught.value.__notes__)
    assert "item 0, on cpu" in "\n".join(caught.value.__notes__)


def test_settings_apply_and_a_missing_gpu_raises(capfd: pytest.CaptureFixture[str]) -> None:
    """Check the settings in the process; test_device_map.py checks threads."""
    require("jax")
    with arraybridge.settings(missing_gpu="host"):
        (result,) = run(functions.on_a_missing_gpu, np.zeros(2, np.float32))
    assert result.tolist() == [1, 1]
    assert capfd.readouterr().err.count("MissingGpuWarning") == 1
    with pytest.raises(arraybridge.DeviceNotFoundError, match="gpu:97"):
        run(functions.on_a_missing_gpu, np.zeros(2, np.float32))
