"""Arrays on a real GPU that are sent to another process and back through PyTorch's CUDA IPC."""

from __future__ import annotations

import numpy as np
import pytest

import arraybridge
from arraybridge import device_map
from tests.helpers import EMULATED, require, require_two_gpus
from tests.parallel import functions

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["torch", "cupy", "jax"])
def test_arrays_sent_to_a_process_stay_on_their_gpu(name: str) -> None:
    """Check that results are available after their process has ended."""
    require("torch")
    require(name)
    x = arraybridge.convert_memory(np.zeros(1 << 20, np.float32), name, 0)
    fn = functions.same if name == "jax" else functions.filled
    results = [y for _ in range(3) for y in device_map(fn, [x, x[5:]], ["gpu:0"], processes=True)]
    for y in results:
        assert (arraybridge.detect_memory_type(y), str(arraybridge.device_of(y))) == (name, "gpu:0")
        np.testing.assert_array_equal(arraybridge.to_numpy(y), float(name != "jax"))
    if name != "torch":
        assert arraybridge.to_numpy(x).max() == 0


@pytest.mark.parametrize("gpu", [0, 1])
def test_processes_without_torch_get_and_return_arrays_of_a_gpu(gpu: int) -> None:
    """Check that the processes are not forked, since CUDA is initialized, and that both ends use one GPU."""
    require("cupy")
    if gpu:
        require_two_gpus()
    x = arraybridge.convert_memory(np.arange(6.0), "cupy", gpu)
    (y,) = device_map(functions.same, [x], [f"gpu:{gpu}"], processes=True)
    assert (str(arraybridge.device_of(y)), y.get().tolist()) == (f"gpu:{gpu}", list(range(6)))


def test_tensors_share_memory_with_the_process() -> None:
    require("torch")
    if EMULATED:
        pytest.skip("the emulated GPU has no CUDA IPC, so tensors are copied through the host")
    x = arraybridge.convert_memory(np.zeros(1 << 20, np.float32), "torch", 0)
    list(device_map(functions.filled, [x], ["gpu:0"], processes=True))
    assert arraybridge.to_numpy(x).max() == 1
