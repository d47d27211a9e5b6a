"""Detect an array of an offered framework without ever naming the framework."""

import numpy as np
from tapeworks import Tape

import arraybridge

tape = Tape(bytearray(np.arange(3.0).tobytes()), "float64", (3,))
print(arraybridge.detect_memory_type(tape))
print(arraybridge.to_numpy(tape).tolist())
