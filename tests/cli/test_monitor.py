"""`arraybridge monitor`: readings with and without a card, as a table, as JSON and as CSV."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections import deque
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from arraybridge import hardware
from arraybridge.cli import monitor
from arraybridge.hardware import Gpu
from arraybridge.memory.stats import DeviceMemory, MemoryStats
from tests.cli.programs import call_cli

GIB = 1 << 30


def test_readings_as_text_json_lines_and_csv(tmp_path: Path) -> None:
    done = call_cli("monitor", "--once", COLUMNS="80")
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", lines[0])
    assert lines[1].startswith("cpu ")
    assert "free of" in lines[1]
    assert "everything else" in done.stdout
    assert "history" not in done.stdout
    two, file = ("monitor", "--count", "2", "--interval", "0.1"), tmp_path / "memory.csv"
    assert len(re.findall(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d$", call_cli(*two).stdout, re.MULTILINE)) == 2
    done = call_cli(*two, "--json", "--csv", str(file))
    readings = [json.loads(line) for line in done.stdout.splitlines()]
    assert readings[1]["time"] > readings[0]["time"]
    host = readings[0]["devices"][0]
    assert host["device"] == "cpu"
    assert 0 < host["free"] <= host["total"]
    with file.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    holdings = [h for reading in readings for device in reading["devices"] for h in device["holdings"]]
    assert [(row["holder"], int(row["used"])) for row in rows] == [(h["holder"], h["used"]) for h in holdings]
    # A second run goes on in the same file, without a second heading.
    assert call_cli("monitor", "--once", "--csv", str(file)).exit_code == 0
    assert file.read_text().count("time,device") == 1
    assert len(file.read_text().splitlines()) > len(rows) + 1


HOLDS = """
import mmap, sys
file = open(sys.argv[1], "rb")
library, held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), bytearray(b"x" * (65 << 20))
print("ready", flush=True); sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS does not say what a process has mapped")
def test_a_process_is_shown_with_its_id_and_the_frameworks_that_it_has_imported(tmp_path: Path) -> None:
    library = tmp_path / "torch" / "lib" / "libtorch.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"a library, as it seems")
    command = [sys.executable, "-c", HOLDS, str(library)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (host, *_) = monitor.take_reading().devices
        names, nbytes = monitor.programs()[process.pid]
        process.communicate("")
    assert names == ["torch"]
    assert nbytes > 64 << 20  # what the script holds, at least
    shown = [row for row in host.holdings if row.holder.startswith("torch, process")]
    assert any((row.used or 0) > 64 << 20 for row in shown)


@pytest.fixture
def beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> MemoryStats:
    """A reading beside a card, of which the processes 11 and 14 hold something."""
    devices = (
        DeviceMemory("cpu", "", "", 8 * GIB, 2 * GIB, ()),
        DeviceMemory("gpu:0", "Fake RTX 9000", "GPU-1", 24 * GIB, 18 * GIB, (), 87, 61),
    )
    gpu = Gpu(0, "Fake RTX 9000", "GPU-1", "", 24 * GIB)
    programs = {11: (["jax", "torch"], GIB), 12: (["torch"], GIB), 13: (["torch"], 2 * GIB)}
    reading = hardware.GpuReading(24 * GIB, 18 * GIB, 87, 61, {11: GIB, 14: GIB})
    monkeypatch.setattr(monitor, "memory_stats", lambda: MemoryStats(devices))
    monkeypatch.setattr(hardware, "gpus", lambda: (gpu,))
    monkeypatch.setattr(hardware, "read_gpu", {gpu: reading}.__getitem__)
    monkeypatch.setattr(monitor, "programs", lambda: programs)
    return monitor.take_reading()


def test_what_is_held_adds_up_to_what_is_used(beside_a_gpu: MemoryStats) -> None:
    assert [(row.device, row.holder, row.used) for row in beside_a_gpu.rows] == [
        ("cpu", "jax + torch, process 11", GIB),
        ("cpu", "torch, processes 12, 13", 3 * GIB),
        ("cpu", "everything else", 2 * GIB),
        ("gpu:0", "jax + torch, process 11", GIB),
        ("gpu:0", "no framework, process 14", GIB),
        ("gpu:0", "everything else", 4 * GIB),
    ]


@pytest.mark.parametrize("width", [40, 100])
def test_the_live_picture_fits(beside_a_gpu: MemoryStats, width: int) -> None:
    history = {(row.device, row.holder): deque([row.used or 0] * 24) for row in beside_a_gpu.rows}
    console = Console(width=width, color_system=None, record=True, file=StringIO())
    console.print(monitor._picture(console, beside_a_gpu, history))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    for words in ("load 87 %", "61 °C", "processes 12, 13"):
        assert words in " ".join(text.split())
    assert "█" * 24 in text
