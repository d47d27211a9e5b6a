"""What arraybridge must know of tapes: one class in one file."""

from __future__ import annotations

from typing import Any

import numpy as np

import arraybridge
from tapeworks import SIZES, Tape


class TapeFramework(arraybridge.Framework):
    name = "tapeworks"
    modules = ("tapeworks",)
    dtypes = frozenset(SIZES)

    def owns(self, x: Any) -> bool:
        return isinstance(x, Tape)

    def dtype_name(self, x: Tape) -> str:
        return x.dtype

    def nbytes(self, x: Tape) -> int:
        return len(x.memory)

    def host_view(self, x: Tape) -> np.ndarray:
        return np.frombuffer(x.memory, x.dtype).reshape(x.shape)

    def cannot_view(self, view: np.ndarray) -> str:
        return "a tape owns its bytes"

    def from_host(self, view: np.ndarray, device: arraybridge.Device) -> Tape:
        return Tape(bytearray(view.tobytes()), view.dtype.name, view.shape)
