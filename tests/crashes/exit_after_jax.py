"""Exit right after JAX imported misaligned memory: its client must not hang in its destructor."""

from __future__ import annotations

import numpy as np

from arraybridge import convert_memory
from tests.matrix_data import aligned_bytes

kept = []
for offset in (1, 4, 20, 32):
    memory = aligned_bytes(16 * 2**20, offset).view(np.float32)
    kept.append(convert_memory(memory, "jax"))
