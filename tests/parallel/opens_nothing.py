"""Print whether work that does not use JAX initializes JAX's devices after `import jax`."""

from __future__ import annotations

from contextlib import suppress

import jax  # noqa: F401
import numpy as np
from jax._src import xla_bridge

import arraybridge
from arraybridge import Pipeline, device_map, gpu_context

items = [np.ones(3), np.ones(3)]
list(device_map(np.sum, items))
list(device_map(np.sum, items, ["cpu"]))
list(device_map(arraybridge.numpy(np.sum), items))
Pipeline(np.negative, np.abs)(np.ones(8))
with gpu_context(None):
    pass
with suppress(arraybridge.DeviceNotFoundError), gpu_context(0):
    pass
with suppress(arraybridge.DeviceNotFoundError):
    arraybridge.free_memory(gpu_id=0)
arraybridge.devices("jax")
arraybridge.gpu_available()
arraybridge.least_used_gpu()
arraybridge.memory_stats()
arraybridge.free_memory(compiled=True)
print("opened" if xla_bridge.backends_are_initialized() else "left alone")
