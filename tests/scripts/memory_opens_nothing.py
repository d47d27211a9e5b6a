"""Look at the memory and free it with the frameworks imported but unused: none may open the card."""

import os

import cupy  # noqa: F401
import pynvml
import torch

import arraybridge

arraybridge.memory_stats()
arraybridge.gpu_utilization()
arraybridge.free_memory()
with arraybridge.memory_peak():
    pass
assert not torch.cuda.is_initialized()
pynvml.nvmlInit()
processes = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))
assert os.getpid() not in [process.pid for process in processes]
