"""Test the queries of GPUs, through a fake of NVIDIA's library, and of host memory."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest

from arraybridge import hardware
from arraybridge.hardware import Driver


class FakeNvml:
    """A fake of the pynvml functions that the package calls, for GPUs that a test defines.

    Args:
        gpus: The name, the UUID and the bus number of each GPU, and the UUIDs of its slices.
        memory_by_process: Bytes by process id, or None if the driver does not report them.
    """

    class NVMLError(Exception):
        """The exception that NVML raises."""

    def __init__(self, *gpus: tuple[Any, ...], memory_by_process: dict[int, int] | None = None) -> None:
        self.gpus = gpus or (("GPU A", "GPU-aaaa-1", 0x1A, ()), ("GPU B", "GPU-bbbb-2", 0x3B, ()))
        self.memory_by_process = memory_by_process
        self.free = {"GPU-aaaa-1": 400, "GPU-bbbb-2": 900, "GPU-cccc-3": 700}
        self._results: dict[str, Callable[..., Any]] = {
            "nvmlDeviceGetCount": lambda: len(self.gpus),
            "nvmlDeviceGetHandleByIndex": lambda index: self.gpus[index][1],
            "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
            "nvmlDeviceGetUUID": lambda uuid: uuid,
            "nvmlDeviceGetName": lambda uuid: self._gpu(uuid)[0],
            "nvmlDeviceGetPciInfo": lambda uuid: SimpleNamespace(
                busIdLegacy=f"0000:{self._gpu(uuid)[2]:02X}:00.0"
            ),
            "nvmlDeviceGetMemoryInfo": lambda uuid: SimpleNamespace(
                total=1000, free=self.free.get(uuid, 100)
            ),
            "nvmlDeviceGetNumGpuCores": lambda uuid: self._gpu(uuid)[2],
            "nvmlDeviceGetMaxClockInfo": lambda uuid, kind: 1000,
            "nvmlDeviceGetComputeRunningProcesses": lambda uuid: [
                SimpleNamespace(pid=pid, usedGpuMemory=n)
                for pid, n in self._given(self.memory_by_process).items()
            ],
            "nvmlDeviceGetUtilizationRates": lambda uuid: SimpleNamespace(gpu=80, memory=3),
            "nvmlDeviceGetTemperature": lambda uuid, sensor: self._given(None),
            "nvmlDeviceGetMigMode": lambda uuid: [bool(self._gpu(uuid)[3]), 0],
            "nvmlDeviceGetMaxMigDeviceCount": lambda uuid: 7,
            "nvmlDeviceGetMigDeviceHandleByIndex": lambda uuid, i: self._given(
                next(iter(self._gpu(uuid)[3][i : i + 1]), None)
            ),
            "nvmlSystemGetDriverVersion": lambda: "580.95",
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 13020,
        }

    def __getattr__(self, function: str) -> Any:
        return self._results[function]

    def _gpu(self, uuid: str) -> tuple[Any, ...]:
        return next(gpu for gpu in self.gpus if uuid in (gpu[1], *gpu[3]))

    def _given(self, result: Any) -> Any:
        if result is None:
            raise self.NVMLError
        return result


def _no_uuids() -> None:
    """Simulate a CUDA driver that is not initialized."""


def install_nvml(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml | None, reason: str = "") -> None:
    """Simulate a machine with this library, or without one, and with no variables set."""
    monkeypatch.setattr(hardware, "_nvml", lambda: Driver(reason=reason) if nvml is None else nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.setattr(hardware, "_visible_gpus", COUNTED)
    monkeypatch.setattr(hardware.cuda_driver, "visible_uuids", _no_uuids)


COUNTED = hardware._visible_gpus.__wrapped__  # without its cache
SLOW, FAST = ("GPU A", "GPU-aaaa-1", 0x1A, ()), ("GPU B", "GPU-bbbb-2", 0x3B, ())
DIVIDED = ("GPU C", "GPU-cccc-3", 0x5E, ("MIG-1111", "MIG-2222"))


@pytest.mark.parametrize(
    ("gpus", "visible", "order", "uuids"),
    [
        ((SLOW, FAST), None, "", ["GPU-bbbb-2", "GPU-aaaa-1"]),  # CUDA numbers the fastest GPU first
        ((SLOW, FAST), None, "PCI_BUS_ID", ["GPU-aaaa-1", "GPU-bbbb-2"]),
        ((SLOW, FAST), "1", "PCI_BUS_ID", ["GPU-bbbb-2"]),
        ((SLOW, FAST), "1,0", "PCI_BUS_ID", ["GPU-bbbb-2", "GPU-aaaa-1"]),
        ((SLOW, FAST), "GPU-bb, 0", "PCI_BUS_ID", ["GPU-bbbb-2", "GPU-aaaa-1"]),
        ((SLOW, FAST), "0,7,1", "PCI_BUS_ID", ["GPU-aaaa-1"]),  # up to the first that does not exist
        ((SLOW, FAST), "0,0", "PCI_BUS_ID", []),
        ((SLOW, FAST), "GPU-", "PCI_BUS_ID", []),
        ((SLOW, FAST), "", "PCI_BUS_ID", []),
        ((DIVIDED,), None, "", ["MIG-1111"]),
        ((DIVIDED,), "MIG-2222", "", ["MIG-2222"]),
        ((DIVIDED,), "MIG-2222,MIG-1111", "", ["MIG-2222"]),
    ],
)
def test_gpus_are_numbered_as_in_cuda(
    monkeypatch: pytest.MonkeyPatch, gpus: Any, visible: str | None, order: str, uuids: list[str]
) -> None:
    install_nvml(monkeypatch, FakeNvml(*gpus))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    assert [gpu.uuid for gpu in hardware.gpus()] == uuids
    assert [gpu.index for gpu in hardware.gpus()] == list(range(len(uuids)))


def test_gpus_slices_and_the_driver_are_queried(monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch, FakeNvml(SLOW, memory_by_process={7: 350, 8: 9}))
    assert hardware.gpus() == (hardware.Gpu(0, "GPU A", "GPU-aaaa-1", "0000:1a:00.0", 1000),)
    now = hardware.read_gpu(hardware.gpus()[0])
    expected = hardware.GpuReading(
        total=1000, free=400, load=80, temperature=None, memory_by_process={7: 350, 8: 9}
    )
    assert now == expected
    assert now.used == 600
    assert hardware.free_memory(1) is None
    assert hardware.driver() == Driver("580.95", (13, 2))
    install_nvml(monkeypatch, FakeNvml(DIVIDED))
    (part,) = hardware.gpus()
    assert (part.uuid, part.pci, hardware.free_memory(0)) == ("MIG-1111", "0000:5e:00.0", 100)
    install_nvml(monkeypatch, None, "no NVIDIA driver is installed")
    assert hardware.driver() == Driver(reason="no NVIDIA driver is installed")
    assert hardware.gpus() == ()


def test_a_missing_driver_version_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(SLOW)

    def fail() -> None:
        raise nvml.NVMLError

    monkeypatch.setattr(nvml, "nvmlSystemGetDriverVersion", fail, raising=False)
    install_nvml(monkeypatch, nvml)
    assert hardware.driver() == Driver("", (13, 2), reason="the NVIDIA driver does not report its version")


def test_a_driver_that_does_not_respond_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    reason = "the NVIDIA driver does not respond: RM has detected an NVML/RM version mismatch."
    assert hardware._nvml.__wrapped__() == Driver(reason=reason, is_silent=True)


def test_host_memory_matches_psutil() -> None:
    host = hardware.host_memory()
    assert host.total == psutil.virtual_memory().total
    assert 0 < host.available < host.total
    used, peak = hardware.process_memory()
    assert 0 < used <= peak


@pytest.mark.parametrize(
    ("uuids", "expected"),
    [
        (("bbbb2", "aaaa1"), ["GPU-bbbb-2", "GPU-aaaa-1"]),
        (("2222",), ["MIG-2222"]),
        (("bbbb2", "eeee5"), ["GPU-aaaa-1"]),  # NVML does not list all of them, so the variable counts
    ],
)
def test_an_initialized_driver_determines_the_numbers(
    uuids: tuple[str, ...], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a variable that has changed since CUDA read it."""
    install_nvml(monkeypatch, FakeNvml(SLOW, FAST, DIVIDED))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aaaa-1")
    monkeypatch.setattr(hardware.cuda_driver, "visible_uuids", lambda: uuids)
    monkeypatch.setattr(hardware, "_gpus_by_uuid", hardware._gpus_by_uuid.__wrapped__)
    found = hardware.gpus()
    assert [gpu.uuid for gpu in found] == expected
    assert [gpu.index for gpu in found] == [*range(len(expected))]
