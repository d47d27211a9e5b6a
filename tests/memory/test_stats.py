"""Memory readings without a GPU, with a fake framework, and with a fake NVML."""

from __future__ import annotations

import csv
import json
import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import arraybridge
from arraybridge import MemoryCollector, gpu_utilization, memory_peak, memory_stats
from tests.helpers import output_of
from tests.memory.fake_framework import FakeFramework
from tests.test_hardware import FAST, SLOW, FakeNvml, install_nvml


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine without a driver."""
    install_nvml(monkeypatch, None)


def test_host_memory_is_reported() -> None:
    host = memory_stats()["cpu"]
    memory = psutil.virtual_memory()
    assert host.total == memory.total
    assert host.free == pytest.approx(memory.available, rel=0.2)
    mine = host.holdings[0]
    assert mine.holder == "this process"
    assert mine.used == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert mine.peak is not None
    assert mine.used is not None
    assert mine.peak >= mine.used


@pytest.mark.usefixtures("no_nvml")
def test_a_framework_without_nvml(fake: FakeFramework) -> None:
    reading = memory_stats()
    gpu = reading["gpu:0"]
    assert (gpu.total, gpu.free) == (1000, 700)
    assert [tuple(h) for h in gpu.holdings] == [
        ("gpu:0", "fake", 100, 50, 500),
        ("gpu:0", "everything else", 150, None, None),
    ]
    row = next(line for line in str(reading).splitlines() if line.split()[0] == "fake")
    assert row.split()[1:] == ["100", "B", "50", "B", "500", "B", "33%"], row
    assert fake.freed == []


@pytest.mark.parametrize("mine", [None, 350])
def test_holdings_and_free_memory_add_up(
    fake: FakeFramework, monkeypatch: pytest.MonkeyPatch, mine: int | None
) -> None:
    install_nvml(
        monkeypatch,
        FakeNvml(SLOW, SLOW, memory_by_process=None if mine is None else {os.getpid(): mine, 1: 9}),
    )
    gpu = memory_stats()["gpu:0"]
    assert (gpu.name, gpu.total, gpu.free, gpu.load) == ("GPU A", 1000, 400, 80)
    held = {h.holder: (h.used, h.cached) for h in gpu.holdings}
    if mine is None:
        assert held == {"fake": (100, 50), "everything else": (450, None)}
    else:
        assert held == {
            "fake": (100, 50),
            "this process, otherwise": (200, None),
            "other processes": (250, None),
        }
    assert gpu.free is not None
    assert sum((used or 0) + (cached or 0) for used, cached in held.values()) + gpu.free == gpu.total


def test_devices_and_readings_number_gpus_alike(monkeypatch: pytest.MonkeyPatch, fake: FakeFramework) -> None:
    """CUDA numbers the faster GPU first."""
    install_nvml(monkeypatch, FakeNvml(SLOW, FAST))
    there = {str(device): (device.identity, device.free) for device in arraybridge.devices("fake")}
    read = {d.device: (d.uuid, d.free) for d in memory_stats().devices if d.device != "cpu"}
    assert there == read == {"gpu:0": ("GPU-bbbb-2", 900), "gpu:1": ("GPU-aaaa-1", 400)}


def test_utilization(monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch, None)
    assert gpu_utilization() == ()
    install_nvml(monkeypatch, FakeNvml(SLOW, FAST))
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    first, second = gpu_utilization()
    assert tuple(first) == ("gpu:0", "GPU A", 80, 600, 1000, None)
    assert second.memory_used == 100


@pytest.mark.usefixtures("no_nvml", "fake")
def test_readings_as_text_table_and_json() -> None:
    reading = memory_stats()
    assert json.loads(json.dumps(reading.to_dict()))["devices"][1]["holdings"][0]["holder"] == "fake"
    head = ["device", "holder", "used", "cached", "peak", "fragmentation"]
    assert str(reading).splitlines()[0].split() == head
    assert "<td>fake</td>" in reading._repr_html_()
    assert {row.device for row in reading.rows} == {"cpu", "gpu:0", "gpu:1"}
    with pytest.raises(KeyError, match="gpu:9"):
        reading["gpu:9"]


# -- peak memory of a block --------------------------------------------------------------------------


def test_the_peak_of_the_host() -> None:
    """Run in a separate process, since memory of other tests might be freed in the meantime."""
    words = output_of(
        "import numpy as np",
        "from arraybridge import memory_peak",
        "with memory_peak() as m:",
        "    large = np.ones(1 << 25)",  # 256 MiB
        "    del large",
        "row = m['this process']",
        "print(row.device, row.growth, 'this process' in str(m), '<table>' in m._repr_html_())",
    ).split()
    assert words[::2] == ["cpu", "True"]
    assert words[3] == "True"
    # During the block, a free-threaded Python may free up to 64 MiB that its start allocated.
    assert (1 << 28) * 0.7 < int(words[1]) < (1 << 28) * 1.5


@pytest.mark.usefixtures("no_nvml")
def test_the_peak_of_a_framework(fake: FakeFramework) -> None:
    fake.used[1] = 40
    with memory_peak() as m:
        fake.peak[0] = 900
    assert (m["fake"].before, m["fake"].peak, m["fake"].growth) == (100, 900, 800)
    assert [(r.device, r.growth) for r in m.rows if r.holder == "fake"] == [("gpu:0", 800), ("gpu:1", 0)]


@pytest.mark.usefixtures("no_nvml")
def test_an_inner_block_takes_nothing_from_the_outer(fake: FakeFramework) -> None:
    with memory_peak() as outer:
        fake.peak[0] = 900
        with memory_peak() as inner:
            fake.peak[0] = 300
    assert outer["fake"].peak == 900
    assert inner["fake"].peak == 300


# -- recording over time -----------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_recording_over_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    file = tmp_path / f"memory{suffix}"
    with MemoryCollector(file, interval=0.001):
        deadline = time.monotonic() + 60
        while file.read_text().count("this process,") + file.read_text().count('"this process"') < 5:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    install_nvml(monkeypatch, FakeNvml())
    with MemoryCollector(file, interval=60):
        pass
    text = file.read_text()
    if suffix == ".csv":
        records: list[dict[str, Any]] = list(csv.DictReader(text.splitlines()))
    else:
        records = [json.loads(line) for line in text.splitlines()]
    assert {str(r["load"]) for r in records if r["device"] == "gpu:0"} == {"80"}
    mine = [r for r in records if r["holder"] == "this process"]
    assert len(mine) >= 5
    assert all(int(r["used"]) > 0 and r["device"] == "cpu" for r in mine)
    assert [float(r["time"]) for r in mine] == sorted(float(r["time"]) for r in mine)


def test_invalid_recordings_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="csv"):
        MemoryCollector(tmp_path / "memory.txt")
    with pytest.raises(ValueError, match="interval"):
        MemoryCollector(tmp_path / "memory.csv", interval=0)
    with pytest.raises(TypeError, match=r"^interval='1' must be a positive number of seconds\.$"):
        MemoryCollector(tmp_path / "memory.csv", interval="1")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError), MemoryCollector(tmp_path / "missing" / "memory.csv"):
        pass


def test_a_misspelled_device_or_holder_gets_a_suggestion() -> None:
    with pytest.raises(KeyError, match=r"no device 'cpo'\. Pass (one of )?'cpu'"):
        memory_stats()["cpo"]
    with (
        memory_peak() as peak,
        pytest.raises(KeyError, match=r"no row for 'tochr': .* \(did you mean 'torch'\?\)"),
    ):
        peak["tochr"]
    with pytest.raises(KeyError, match=r"'pyclesperanto': pyclesperanto has not initialized a device"):
        peak["pyclesperanto"]
