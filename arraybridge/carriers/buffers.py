"""The carrier for objects with the buffer protocol."""

from __future__ import annotations

from typing import Any

import numpy as np

from arraybridge.carriers.carrier import Carrier


class Buffers(Carrier):
    """A carrier for objects with the buffer protocol, such as memoryview, array.array, mmap and bytes."""

    expression = "np.asarray({x})"

    _NUMBERS = frozenset("?bBhHiIlLqQnNefdg")

    def carries(self, x: Any) -> bool:
        try:
            view = memoryview(x)
        except (TypeError, ValueError, BufferError):
            return False
        return view.ndim > 0 and view.format.lstrip("@=<>!").removeprefix("Z") in self._NUMBERS

    def array(self, x: Any) -> Any:
        return np.asarray(memoryview(x))
