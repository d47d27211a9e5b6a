"""Prints how many cards have a CUDA context in this process after asking what is there."""

from __future__ import annotations

import ctypes

import arraybridge

arraybridge.gpu_available()
arraybridge.device_info()
arraybridge.least_used_gpu()
for name in ("numpy", "torch", "cupy", "jax"):
    try:
        arraybridge.devices(name)
    except arraybridge.FrameworkNotInstalledError:
        continue
driver = ctypes.CDLL("libcuda.so.1")
driver.cuInit(0)
count = ctypes.c_int()
driver.cuDeviceGetCount(ctypes.byref(count))
open_cards = 0
for i in range(count.value):
    flags, active = ctypes.c_uint(), ctypes.c_int()
    driver.cuDevicePrimaryCtxGetState(i, ctypes.byref(flags), ctypes.byref(active))
    open_cards += active.value
print(open_cards)
