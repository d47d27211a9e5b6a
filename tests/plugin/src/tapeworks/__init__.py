"""A small array library: numbers on a tape of bytes. It knows neither NumPy nor arraybridge."""

from __future__ import annotations

__all__ = ["Tape"]

SIZES = {"uint8": 1, "int32": 4, "int64": 8, "float32": 4, "float64": 8, "complex128": 16}


class Tape:
    """An array of one to three axes, packed in a bytearray.

    >>> Tape(bytearray(8), "float32", (2, 1)).shape
    (2, 1)
    """

    def __init__(self, memory: bytearray, dtype: str, shape: tuple[int, ...]) -> None:
        count = 1
        for extent in shape:
            count *= extent
        if len(memory) != count * SIZES[dtype]:
            raise ValueError(f"{len(memory)} bytes do not make {shape} of {dtype}")
        self.memory = memory
        self.dtype = dtype
        self.shape = shape

    def __len__(self) -> int:
        return self.shape[0]
