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

from arraybridge import machine
from arraybridge.cli import monitor as command
from arraybridge.machine import Card, Program
from arraybridge.memory.stats import DeviceMemory, MemoryStats
from tests.cli.programs import PLANTED, environment, run_cli

GIB = 1 << 30


def test_once_prints_one_reading() -> None:
    done = run_cli("monitor", "--once", env=environment(COLUMNS="80", PYTHONIOENCODING="utf-8"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", lines[0])
    assert lines[1].startswith("cpu ")
    assert "free of" in lines[1]
    assert "everything else" in done.stdout
    assert "history" not in done.stdout


def test_several_readings_as_text_json_lines_and_csv(tmp_path: Path) -> None:
    file = tmp_path / "memory.csv"
    piped = run_cli("monitor", "--count", "2", "--interval", "0.1")
    assert len(re.findall(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d$", piped.stdout, re.MULTILINE)) == 2
    done = run_cli("monitor", "--count", "2", "--interval", "0.1", "--json", "--csv", str(file))
    assert done.returncode == 0, done.stderr
    readings = [json.loads(line) for line in done.stdout.splitlines()]
    assert readings[1]["time"] > readings[0]["time"]
    host = readings[0]["devices"][0]
    assert host["device"] == "cpu"
    assert 0 < host["free"] <= host["total"]
    with file.open(newline="") as opened:
        lines = list(csv.DictReader(opened))
    holdings = [h for reading in readings for device in reading["devices"] for h in device["holdings"]]
    assert [(line["holder"], int(line["used"])) for line in lines] == [
        (h["holder"], h["used"]) for h in holdings
    ]
    # A second run goes on in the same file, without a second heading.
    assert run_cli("monitor", "--once", "--csv", str(file)).returncode == 0
    assert file.read_text().count("time,device") == 1
    assert len(file.read_text().splitlines()) > len(lines) + 1


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS does not say what a process has mapped")
def test_a_process_is_shown_with_its_id_and_the_frameworks_that_it_has_imported() -> None:
    pytest.importorskip("torch")
    with subprocess.Popen(
        [sys.executable, str(PLANTED / "holds_torch.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (host, *_) = command.take_reading().devices
        libraries = {"torch": ("/torch/lib/",)}
        (program,) = [one for one in machine.programs(libraries) if one.pid == process.pid]
        process.communicate("")
    assert program.nbytes > 64 << 20  # what the script holds, at least
    assert any(
        row.holder.startswith("torch, process") and (row.used or 0) > 64 << 20 for row in host.holdings
    )


@pytest.fixture
def beside_a_card(monkeypatch: pytest.MonkeyPatch) -> MemoryStats:
    """A reading beside a card, of which the processes 11 and 14 hold something."""
    devices = (
        DeviceMemory("cpu", "", "", 8 * GIB, 2 * GIB, ()),
        DeviceMemory("gpu:0", "Fake RTX 9000", "GPU-1", 24 * GIB, 18 * GIB, (), 87, 61),
    )
    card = Card(0, "Fake RTX 9000", "GPU-1", "", 24 * GIB, None)
    programs = (
        Program(11, ("jax", "torch"), GIB),
        Program(12, ("torch",), GIB),
        Program(13, ("torch",), 2 * GIB),
    )
    reading = machine.Reading(24 * GIB, 18 * GIB, 87, 61, {11: GIB, 14: GIB})
    monkeypatch.setattr(command, "memory_stats", lambda: MemoryStats(devices))
    monkeypatch.setattr(machine, "cards", lambda: (card,))
    monkeypatch.setattr(machine, "reading", {card: reading}.__getitem__)
    monkeypatch.setattr(machine, "programs", lambda libraries: programs)
    return command.take_reading()


def test_what_is_held_adds_up_to_what_is_used(beside_a_card: MemoryStats) -> None:
    assert [(row.device, row.holder, row.used) for row in beside_a_card.rows] == [
        ("cpu", "jax + torch, process 11", GIB),
        ("cpu", "torch, processes 12, 13", 3 * GIB),
        ("cpu", "everything else", 2 * GIB),
        ("gpu:0", "jax + torch, process 11", GIB),
        ("gpu:0", "no framework, process 14", GIB),
        ("gpu:0", "everything else", 4 * GIB),
    ]


@pytest.mark.parametrize("width", [40, 100])
def test_the_live_picture_fits(beside_a_card: MemoryStats, width: int) -> None:
    history = {(row.device, row.holder): deque([row.used or 0] * 24) for row in beside_a_card.rows}
    console = Console(width=width, color_system=None, record=True, file=StringIO())
    console.print(command._picture(console, beside_a_card, history))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    for words in ("load 87 %", "61 °C", "processes 12, 13"):
        assert words in " ".join(text.split())
    assert "█" * 24 in text


@pytest.mark.parametrize(
    ("ids", "words"),
    [([11], "process 11"), ([11, 12], "processes 11, 12"), ([*range(5)], "0, 1, 2 and 2 more")],
)
def test_many_processes_are_counted(ids: list[int], words: str) -> None:
    assert words in command._ids(ids)
