"""`arraybridge monitor`: readings with and without a card, as a table, as JSON and as CSV."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections import defaultdict, deque
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from arraybridge.cli import monitor as command
from arraybridge.cli.monitor import DeviceRow, HolderRow, Process, Reading
from arraybridge.memory.stats import DeviceMemory, GpuLoad, MemoryStats
from tests.cli.programs import PLANTED, environment, run_cli

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked at through /proc")


def test_once_prints_one_reading() -> None:
    done = run_cli("monitor", "--once", env=environment(COLUMNS="80", PYTHONIOENCODING="utf-8"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("cpu ")
    assert "free of" in done.stdout
    assert "everything else" in done.stdout
    assert "history" not in done.stdout


def test_once_in_json_is_one_line() -> None:
    done = run_cli("monitor", "--once", "--json")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["devices"][0]["device"] == "cpu"


def test_json_lines_and_csv(tmp_path: Path) -> None:
    file = tmp_path / "memory.csv"
    done = run_cli("monitor", "--count", "2", "--interval", "0.1", "--json", "--csv", str(file))
    assert done.returncode == 0, done.stderr
    readings = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(readings) == 2
    assert readings[1]["time"] - readings[0]["time"] > 0
    host = readings[0]["devices"][0]
    assert host["device"] == "cpu"
    assert 0 < host["free"] <= host["total"]
    with file.open(newline="") as opened:
        lines = list(csv.DictReader(opened))
    assert len(lines) == sum(len(reading["rows"]) for reading in readings)
    assert [float(line["time"]) for line in lines] == [r["time"] for r in readings for _ in r["rows"]]
    assert {line["device"] for line in lines} >= {"cpu"}
    # A second run goes on in the same file, without a second heading.
    assert run_cli("monitor", "--once", "--csv", str(file)).returncode == 0
    assert file.read_text().count("time,device") == 1
    assert len(file.read_text().splitlines()) > len(lines) + 1


@LINUX
def test_a_process_counts_under_the_frameworks_that_it_has_imported() -> None:
    pytest.importorskip("torch")
    with subprocess.Popen(
        [sys.executable, str(PLANTED / "holds_torch.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        seen = command.python_processes()[process.pid]
        process.communicate("")
    assert seen.frameworks == ("torch",)
    assert seen.resident > 64 << 20  # what the script holds, at least
    assert process.pid not in command.python_processes()


@LINUX
def test_what_is_held_adds_up_to_what_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two processes that share 2 of their 3 GiB each, and have mapped 4 GiB of libraries, use 4 GiB."""
    mib = 1 << 10
    for pid in ("11", "12"):
        folder = tmp_path / pid
        folder.mkdir()
        (folder / "exe").symlink_to(sys.executable)
        (folder / "maps").write_text("7f00-7f01 r-xp 0 0:0 1 /lib/site-packages/torch/lib/libtorch.so\n")
        (folder / "statm").write_text(f"9999999 {7 * (1 << 18)} 0 0 0 0 0\n")  # pages
        (folder / "smaps_rollup").write_text(
            f"Rss: {7 << 20} kB\nPss: {6 << 20} kB\nPss_Anon: {1 << 20} kB\nPss_File: {4 << 20} kB\n"
            f"Pss_Shmem: {1 << 20} kB\n"
        )
    (tmp_path / "12" / "smaps_rollup").unlink()  # as where the kernel hides it
    (tmp_path / "12" / "status").write_text(f"RssAnon: {1 << 20} kB\nRssFile: 9 kB\nRssShmem: {mib} kB\n")
    monkeypatch.setattr(command, "_PROC", tmp_path)
    gib = 1 << 30
    host = DeviceMemory("cpu", "", "", 8 * gib, 4 * gib, ())
    monkeypatch.setattr(command, "memory_stats", lambda: MemoryStats((host,)))
    monkeypatch.setattr(command, "gpu_utilization", tuple)
    reading = command.take_reading()
    assert command.python_processes()[11].resident == 2 * gib
    assert command.python_processes()[12].resident == gib + (1 << 20)
    assert [row.framework for row in reading.rows] == ["torch", "everything else"]
    assert sum(row.used or 0 for row in reading.rows) == 4 * gib


def with_a_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Reading:
    """A reading beside a card, which the answers of NVML and of nvidia-smi describe."""
    gib = 1 << 30
    stats = MemoryStats(
        (
            DeviceMemory("cpu", "", "", 8 * gib, 2 * gib, ()),
            DeviceMemory("gpu:0", "Fake RTX 9000", "GPU-1234", 24 * gib, 18 * gib, ()),
        )
    )
    monkeypatch.setattr(command, "memory_stats", lambda: stats)
    load = GpuLoad("gpu:0", "Fake RTX 9000", 87, 6 * gib, 24 * gib, 61)
    monkeypatch.setattr(command, "gpu_utilization", lambda: (load,))
    processes = {
        11: Process(("jax", "torch"), gib),
        12: Process(("torch",), gib),
        13: Process(("torch",), 2 * gib),
    }
    monkeypatch.setattr(command, "python_processes", lambda: processes)
    fake = tmp_path / "nvidia-smi"
    fake.write_bytes((PLANTED / "nvidia-smi").read_bytes())
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_PID", "11")
    return command.take_reading()


@LINUX
def test_memory_is_summed_by_device_and_framework(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gib = 1 << 30
    reading = with_a_card(monkeypatch, tmp_path)
    assert reading.rows == (
        HolderRow("cpu", "jax + torch", gib, 1),
        HolderRow("cpu", "torch", 3 * gib, 2),
        HolderRow("cpu", "everything else", 2 * gib, None),
        HolderRow("gpu:0", "jax + torch", gib, 1),
        HolderRow("gpu:0", "everything else", 5 * gib, None),
    )
    assert reading.devices[1] == DeviceRow("gpu:0", "Fake RTX 9000", 24 * gib, 18 * gib, 87, 61)


@LINUX
@pytest.mark.parametrize("width", [40, 100])
def test_the_live_picture_fits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, width: int) -> None:
    reading = with_a_card(monkeypatch, tmp_path)
    history: defaultdict[tuple[str, str], deque[int]] = defaultdict(lambda: deque(maxlen=24))
    for _ in range(30):
        command._remember(history, reading)
    console = Console(width=width, color_system=None, record=True, file=SimpleNamespace(write=len, flush=int))  # type: ignore[arg-type]
    console.print(command._picture(console, reading, history))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "load 87 %" in " ".join(text.split())
    assert "61 °C" in " ".join(text.split())
    assert "█" * (24 if width == 100 else 8) in text
    assert ("processes" in text) is (width == 100)


@pytest.mark.parametrize(
    ("values", "expected"), [([], ""), ([0, 0], "▁▁"), ([5], "█"), ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█")]
)
def test_sparklines(values: list[int], expected: str) -> None:
    assert command.sparkline(values) == expected


def test_readings_are_taken_at_even_times(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [100.0], []

    def sleep(seconds: float) -> None:
        slept.append(round(seconds, 6))
        now[0] += seconds

    def read() -> Reading:
        now[0] += 0.3  # what a reading takes
        return Reading(now[0], (), ())

    monkeypatch.setattr(command.time, "sleep", sleep)
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(command, "take_reading", read)
    assert len(list(command._readings(3, 1.0))) == 3
    assert slept == [0.7, 0.7]
