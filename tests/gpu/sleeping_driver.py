"""Queries that must not initialize CUDA's driver: ``python -m tests.gpu.sleeping_driver FRAMEWORK``.

The result of each query is whether the driver is initialized afterwards. `test_sleeping_driver.py` runs
this.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import arraybridge as ab
from arraybridge import cuda_driver, hardware
from tests.gpu.forked import print_results_of_each

LAST = ab.Device("gpu", max(0, len(hardware.gpus()) - 1))
HOST = np.ones((4, 4), np.float32)


def queries_of_framework(own: ab.Framework) -> dict[str, Callable[[], Any]]:
    """Return the framework's methods that only query."""
    return {
        "accelerators": own.devices.accelerators,
        "device_details": lambda: own.memory.device_details(LAST),
        "default_device": own.devices.default_device,
        "devices": own.devices.available,
        "find_device": lambda: own.devices.find_device(LAST),
        "free_cache": lambda: own.memory.free_cache(None),
        "free_memory_of": lambda: own.memory.free_memory_of(LAST),
        "is_started": own.devices.is_started,
        "missing_device_reason": own.devices.missing_device_reason,
        "native_device": lambda: own.devices.native_device(LAST),
        "read_device": lambda: own.devices.read_device(native_device_without_number(own.name)),
        "reset_peak": own.memory.reset_peak,
        "synchronize": own.memory.synchronize,
        "thread_settings": own.runtime.thread_settings,
        "usage": own.memory.usage,
        "visible_devices": own.devices.visible_devices,
    }


def public_queries(own: ab.Framework) -> dict[str, Callable[[], Any]]:
    """Return public calls that only query, prepare or work on the host."""
    name = own.name
    return {
        "devices(name)": lambda: ab.devices(name),
        "devices()": ab.devices,
        "device_info()": ab.device_info,
        "gpu_available()": ab.gpu_available,
        "least_used_gpu()": ab.least_used_gpu,
        "get_device()": ab.get_device,
        "set_device()": lambda: ab.set_device(f"cuda:{LAST.index}"),
        "use_device()": in_use_device,
        "array_namespace()": lambda: ab.array_namespace(HOST),
        "memory_stats()": ab.memory_stats,
        "gpu_utilization()": ab.gpu_utilization,
        "memory_peak()": in_memory_peak,
        "free_memory()": ab.free_memory,
        "free_memory(name)": lambda: ab.free_memory(name),
        "explain(name)": lambda: str(ab.explain(HOST, name)),
        "explain(gpu_id=…)": lambda: str(ab.explain(HOST, name, gpu_id=LAST.index)),
        "explain(gpu_id='auto')": lambda: str(ab.explain(HOST, name, gpu_id="auto")),
        "explain(missing)": lambda: explain_missing_device(name),
        "decorator": lambda: repr(own.decorator(gpu_id=LAST.index)(np.sum)),
        "gpu": lambda: repr(ab.gpu(np.sum)),
        "Pipeline": lambda: str(ab.Pipeline(own.decorator(gpu_id=LAST.index)(np.sum))),
        "prefetch": lambda: ab.prefetch([HOST], name, LAST.index),
        "device_map": lambda: ab.device_map(own.decorator(np.sum), [HOST]),
        "BufferPool": ab.BufferPool,
        "to_numpy()": lambda: ab.to_numpy(HOST),
        "is_oom_error()": lambda: ab.is_oom_error(MemoryError()),
        "run_with_oom_recovery()": lambda: ab.run_with_oom_recovery(np.ones, 3),
    }


def native_device_without_number(name: str) -> Any:
    """Return PyTorch's device without a number, which means the current one."""
    return importlib.import_module(name).device("cuda") if name == "torch" else None


def in_use_device() -> None:
    with ab.use_device(LAST):
        ab.get_device()


def in_memory_peak() -> None:
    with ab.memory_peak():
        HOST.copy()


def explain_missing_device(name: str) -> None:
    try:
        ab.explain(HOST, name, gpu_id=LAST.index + 1)
    except ab.DeviceNotFoundError:
        return
    raise AssertionError("it has no such device")


def wakes(query: Callable[[], Any]) -> Callable[[], bool]:
    """Return a function that calls the query and returns whether the driver is initialized afterwards."""

    def is_awake_afterwards() -> bool:
        query()
        return cuda_driver.is_driver_initialized()

    return is_awake_afterwards


def uses_the_gpu(own: ab.Framework) -> None:
    """Initialize the driver, which proves that the other results are meaningful."""
    own.from_host(HOST, LAST)


def main() -> None:
    own = ab.framework(sys.argv[1])
    queries = queries_of_framework(own) | public_queries(own) | {"from_host": lambda: uses_the_gpu(own)}
    print_results_of_each({name: wakes(query) for name, query in queries.items()})


if __name__ == "__main__":
    main()
