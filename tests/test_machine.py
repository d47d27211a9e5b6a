"""What the machine tells of its cards, through a fake of NVIDIA's library, and of its memory."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from arraybridge import machine
from tests.helpers import run_python


class FakeNvml:
    """The calls of pynvml that are used; a test says which cards there are.

    Args:
        cards: name, UUID and bus of each, and the UUIDs of its slices.
        holders: bytes by process id; None: the driver does not tell.
    """

    class NVMLError(Exception):
        """What NVML raises."""

    def __init__(self, *cards: tuple[Any, ...], holders: dict[int, int] | None = None) -> None:
        self.cards = cards or (("Card A", "GPU-aaaa-1", 0x1A, ()), ("Card B", "GPU-bbbb-2", 0x3B, ()))
        self.holders = holders
        self.free = {"GPU-aaaa-1": 400, "GPU-bbbb-2": 900}

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return self.cards[index][1]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return uuid

    def card(self, uuid: str) -> tuple[Any, ...]:
        return next(card for card in self.cards if uuid in (card[1], *card[3]))

    def nvmlDeviceGetUUID(self, handle: str) -> str:  # noqa: N802
        return handle

    def nvmlDeviceGetName(self, handle: str) -> str:  # noqa: N802
        return self.card(handle)[0]

    def nvmlDeviceGetPciInfo(self, handle: str) -> Any:  # noqa: N802
        return SimpleNamespace(domain=0, bus=self.card(handle)[2], device=0)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802
        return SimpleNamespace(total=1000, free=self.free.get(handle, 100))

    def nvmlDeviceGetCudaComputeCapability(self, handle: str) -> tuple[int, int]:  # noqa: N802
        return (9, 0)

    def nvmlDeviceGetNumGpuCores(self, handle: str) -> int:  # noqa: N802
        return self.card(handle)[2]

    def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:  # noqa: N802
        return 1000

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> Any:  # noqa: N802
        if self.holders is None:
            raise self.NVMLError
        return [SimpleNamespace(pid=pid, usedGpuMemory=n) for pid, n in self.holders.items()]

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=80, memory=3)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:  # noqa: N802
        raise self.NVMLError

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:  # noqa: N802
        return [bool(self.card(handle)[3]), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:  # noqa: N802
        slices = self.card(handle)[3]
        if index >= len(slices):
            raise self.NVMLError
        return slices[index]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:  # noqa: N802
        if not handle.startswith("MIG-"):
            raise self.NVMLError
        return self.card(handle)[1]

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.95"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:  # noqa: N802
        return 13020


def plant(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml | None, reason: str = "") -> None:
    """As on a machine with this library, or with none, and no variables set."""
    monkeypatch.setattr(machine, "_nvml", lambda: (nvml, reason))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.setattr(machine, "_counted", COUNTED)


COUNTED = machine._counted.__wrapped__  # without its cache
SLOW, FAST = ("Card A", "GPU-aaaa-1", 0x1A, ()), ("Card B", "GPU-bbbb-2", 0x3B, ())
DIVIDED = ("Card C", "GPU-cccc-3", 0x5E, ("MIG-1111", "MIG-2222"))


@pytest.mark.parametrize(
    ("cards", "visible", "order", "uuids"),
    [
        ((SLOW, FAST), None, "", ["GPU-bbbb-2", "GPU-aaaa-1"]),  # CUDA counts the fastest first
        ((SLOW, FAST), None, "PCI_BUS_ID", ["GPU-aaaa-1", "GPU-bbbb-2"]),
        ((SLOW, FAST), "1", "PCI_BUS_ID", ["GPU-bbbb-2"]),
        ((SLOW, FAST), "1,0", "PCI_BUS_ID", ["GPU-bbbb-2", "GPU-aaaa-1"]),
        ((SLOW, FAST), "GPU-bb, 0", "PCI_BUS_ID", ["GPU-bbbb-2", "GPU-aaaa-1"]),
        ((SLOW, FAST), "0,7,1", "PCI_BUS_ID", ["GPU-aaaa-1"]),  # up to the first that is not there
        ((SLOW, FAST), "0,0", "PCI_BUS_ID", []),
        ((SLOW, FAST), "GPU-", "PCI_BUS_ID", []),
        ((SLOW, FAST), "", "PCI_BUS_ID", []),
        ((SLOW, FAST), "-1", "PCI_BUS_ID", []),
        ((DIVIDED,), None, "", ["MIG-1111"]),
        ((DIVIDED,), "MIG-2222", "", ["MIG-2222"]),
        ((DIVIDED,), "MIG-2222,MIG-1111", "", ["MIG-2222"]),
    ],
)
def test_the_cards_are_those_of_cuda(
    monkeypatch: pytest.MonkeyPatch, cards: Any, visible: str | None, order: str, uuids: list[str]
) -> None:
    plant(monkeypatch, FakeNvml(*cards))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    assert [card.uuid for card in machine.cards()] == uuids
    assert [card.index for card in machine.cards()] == list(range(len(uuids)))
    assert bool(machine.no_cards()) == (not uuids)


def test_a_card_and_a_slice_describe_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, FakeNvml(SLOW))
    assert machine.cards() == (machine.Card(0, "Card A", "GPU-aaaa-1", "0000:1a:00.0", 1000, (9, 0)),)
    plant(monkeypatch, FakeNvml(DIVIDED))
    (part,) = machine.cards()
    assert (part.uuid, part.pci, machine.free_memory(0)) == ("MIG-1111", "0000:5e:00.0", 100)


def test_variables_that_change_are_minded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_nvml", lambda: (FakeNvml(SLOW, FAST), ""))
    machine._counted.cache_clear()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    try:
        assert len(machine.cards()) == 2
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        assert len(machine.cards()) == 1
    finally:
        machine._counted.cache_clear()


def test_a_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, FakeNvml(SLOW, holders={7: 350, 8: 9}))
    now = machine.reading(machine.cards()[0])
    assert now == (1000, 400, 80, None, {7: 350, 8: 9})
    assert now.used == 600
    assert machine.free_memory(1) is None


def test_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, FakeNvml())
    assert machine.driver() == ("580.95", (13, 2), "")
    plant(monkeypatch, None, "there is no NVIDIA driver")
    assert machine.driver() == ("", None, "there is no NVIDIA driver")
    assert machine.cards() == ()
    assert machine.no_cards() == "there is no NVIDIA driver"


def test_a_driver_that_does_not_answer_is_a_reason() -> None:
    code = (
        "import pynvml\n"
        "def refuse(): raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)\n"
        "pynvml.nvmlInit = refuse\n"
        "from arraybridge import machine\n"
        "print(machine.cards(), machine.no_cards())\n"
    )
    done = run_python("-c", code)
    assert (
        done.stdout.strip()
        == "() the NVIDIA driver does not answer: RM has detected an NVML/RM version mismatch."
    )


def test_the_memory_of_the_host() -> None:
    total, available = machine.host_memory()
    assert total == psutil.virtual_memory().total
    assert 0 < available < total
    now, most = machine.own_memory()
    assert 0 < now <= most


def test_programs_are_told_by_the_libraries_that_they_have_loaded() -> None:
    import numpy as np

    found = {
        one.pid: one for one in machine.programs({"numpy": ("_multiarray_umath",), "none": ("no such",)})
    }
    assert found[os.getpid()].libraries == ("numpy",)
    assert found[os.getpid()].held > 1 << 20
    assert np.__name__ == "numpy"
