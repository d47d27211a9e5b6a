"""Write to tensors converted from read-only maps: they are copies, because the maps' pages are read-only."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from arraybridge import aligned, convert_memory, explain
from tests.matrix_data import bits

VALUES = np.arange(4096, dtype=np.float32)


def frozen_array() -> np.ndarray:
    array = aligned(VALUES.shape, "float32")
    array[:] = VALUES
    array.flags.writeable = False
    return array


def frozen_bytes() -> np.ndarray:
    """Return a part of a bytes object that starts at an address that JAX and TensorFlow share."""
    array = np.frombuffer(b"\x00\x00\x80\x3f" * 4096, np.float32)
    start = -array.ctypes.data % 64 // 4
    return array[start:]


with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "data.bin")
    path.write_bytes(VALUES.tobytes())

    mapped = np.memmap(path, dtype=np.float32, mode="r")
    tensor = convert_memory(mapped, "torch")
    tensor.add_(1.0)
    assert float(tensor[0]) == 1.0

    window = np.asarray(mapped)[10:20]  # a plain view of the map: no longer a memmap, but still read-only
    tensor = convert_memory(window, "torch")
    tensor.zero_()
    assert float(tensor.sum()) == 0.0

    frozen = np.frombuffer(b"\x00\x00\x80\x3f" * 8, np.float32)
    tensor = convert_memory(frozen, "torch")
    tensor.mul_(2.0)
    assert (float(tensor.sum()), float(frozen.sum())) == (16.0, 8.0)

    # JAX and TensorFlow share such memory, and converting it from there to PyTorch copies it.
    for name, source in (("memmap", mapped), ("array", frozen_array()), ("bytes", frozen_bytes())):
        before = bits(source)
        for frameworks in (["jax"], ["tensorflow"], ["jax", "tensorflow"], ["tensorflow", "jax"]):
            array = source
            for framework in frameworks:
                assert explain(array, framework).shares_memory
                array = convert_memory(array, framework)
            for _ in range(3):  # the first call makes the plan that the next ones use
                assert not explain(array, "torch").shares_memory, f"{name} through {frameworks}"
                convert_memory(array, "torch").add_(1.0)
            assert bits(source) == before, f"{name} through {frameworks}"
    assert path.read_bytes() == VALUES.tobytes()

    own = convert_memory(aligned((64,), "float32"), "jax")
    assert explain(own, "torch").shares_memory, "writable memory must be shared"
    del mapped, window
