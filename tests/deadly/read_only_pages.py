"""The page of a read-only map cannot be written: the tensor made of it can, because it is a copy."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from arraybridge import convert_memory
from tests.deadly._common import report
from tests.matrix_data import bits

VALUES = np.arange(4096, dtype=np.float32)

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "data.bin")
    path.write_bytes(VALUES.tobytes())

    mapped = np.memmap(path, dtype=np.float32, mode="r")
    tensor = convert_memory(mapped, "torch")
    tensor.add_(1.0)
    report("memmap -> torch, written", float(tensor[0]))

    window = np.asarray(mapped)[10:20]  # a plain view of the map: no memmap any more, and still read-only
    tensor = convert_memory(window, "torch")
    tensor.zero_()
    report("window -> torch, written", float(tensor.sum()))

    frozen = np.frombuffer(b"\x00\x00\x80\x3f" * 8, np.float32)
    tensor = convert_memory(frozen, "torch")
    tensor.mul_(2.0)
    report("bytes -> torch, written", float(tensor.sum()))
    report("bytes themselves", float(frozen.sum()))

    through_jax = convert_memory(convert_memory(mapped, "jax"), "torch")
    through_tensorflow = convert_memory(convert_memory(mapped, "tensorflow"), "torch")
    report("memmap -> jax -> torch", "right" if bits(through_jax) == VALUES.tobytes() else "WRONG")
    report(
        "memmap -> tensorflow -> torch", "right" if bits(through_tensorflow) == VALUES.tobytes() else "WRONG"
    )

    report("file", "unchanged" if path.read_bytes() == VALUES.tobytes() else "CHANGED")
    del mapped, window
