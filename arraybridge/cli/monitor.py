"""``arraybridge monitor``: the memory of every device, live, by framework."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from arraybridge.cli import output
from arraybridge.frameworks import registry
from arraybridge.memory.stats import gpu_utilization, memory_stats
from arraybridge.show import format_bytes

__all__ = ["Reading", "monitor", "sparkline", "take_reading"]

Json = dict[str, Any]
REST = "everything else"
_HISTORY = 24
_PROC = Path("/proc")
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class DeviceRow:
    """A device: bytes in all and free, load in per cent, degrees Celsius; None for what it does not tell."""

    device: str
    name: str
    total: int | None
    free: int | None
    load: int | None = None
    temperature: int | None = None


@dataclass(frozen=True)
class HolderRow:
    """Bytes on a device that processes hold which have imported ``framework``.

    ``framework`` is ``"torch"``, ``"jax + torch"`` for processes that have imported both, or
    ``"everything else"``.
    """

    device: str
    framework: str
    used: int | None
    processes: int | None


@dataclass(frozen=True)
class Reading:
    """What was seen at a time (seconds since 1970)."""

    time: float
    devices: tuple[DeviceRow, ...]
    rows: tuple[HolderRow, ...]
    note: str = ""


def monitor(
    once: Annotated[bool, typer.Option("--once", help="Print one reading and leave.")] = False,
    interval: Annotated[
        float, typer.Option(help="Seconds between two readings.", callback=output.seconds(0.1))
    ] = 1.0,
    count: Annotated[
        int | None, typer.Option(help="Leave after this many readings.", min=1, show_default=False)
    ] = None,
    csv_file: Annotated[
        Path | None,
        typer.Option("--csv", help="Append each reading to this file.", metavar="FILE", show_default=False),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print machine-readable JSON alone, a reading a line.")
    ] = False,
) -> None:
    """Watch the memory of the host and of every card, by framework.

    A process counts under the frameworks that it has imported. Leave with Ctrl-C.
    It opens no card and imports no framework, so that it takes no memory from what it watches.

    Examples:
    [bold]arraybridge monitor[/bold]

    [bold]arraybridge monitor --once[/bold]

    [bold]arraybridge monitor --interval 5 --csv memory.csv[/bold]
    """
    output.writable(csv_file, "--csv")
    console = output.console()
    history: dict[tuple[str, str], deque[int]] = defaultdict(lambda: deque(maxlen=_HISTORY))
    readings = _readings(1 if once else count, interval)
    try:
        if as_json:
            for reading in readings:
                _append(csv_file, reading)
                output.print_json(asdict(reading), one_line=True)
        elif once or not console.is_terminal:
            for reading in readings:
                _append(csv_file, reading)
                _remember(history, reading)
                _print(console, reading, history, once)
        else:
            with Live(console=console, auto_refresh=False) as live:
                for reading in readings:
                    _append(csv_file, reading)
                    _remember(history, reading)
                    live.update(_picture(console, reading, history), refresh=True)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None  # the ordinary way to leave


def _readings(count: int | None, interval: float) -> Iterator[Reading]:
    """Readings at even times, the first one now; without end if ``count`` is None."""
    begun, done = time.monotonic(), 0
    while True:
        yield take_reading()
        done += 1
        if done == count:
            return
        time.sleep(max(0.0, begun + done * interval - time.monotonic()))


# -- reading -----------------------------------------------------------------------------------------


def take_reading() -> Reading:
    """Look at every device, and at every process that may be looked at."""
    stats = memory_stats()
    loads = {load.device: load for load in gpu_utilization()}
    processes = python_processes()
    devices, rows = [], []
    for one in stats.devices:
        load = loads.get(one.device)
        devices.append(
            DeviceRow(
                one.device,
                one.name,
                one.total,
                one.free,
                load.load if load else None,
                load.temperature if load else None,
            )
        )
        held = (
            {pid: p.resident for pid, p in processes.items()} if one.device == "cpu" else _held_on(one.uuid)
        )
        rows += _by_framework(one.device, held, processes, one.total, one.free)
    return Reading(round(time.time(), 3), tuple(devices), tuple(rows), stats.note)


@dataclass(frozen=True)
class Process:
    """A Python process: its frameworks, sorted, and the bytes of the host's memory that it holds."""

    frameworks: tuple[str, ...]
    resident: int = field(default=0)


def python_processes() -> dict[int, Process]:
    """The processes of this user that have imported a framework; none where there is no /proc."""
    found = {}
    libraries = [(name, registry.facts(name).libraries) for name in registry.framework_names()]
    for folder in _PROC.glob("[0-9]*"):
        try:
            if "python" not in (folder / "exe").readlink().name:
                continue
            maps = (folder / "maps").read_text(errors="replace")
            held = _held_by(folder)
        except (OSError, ValueError, IndexError):
            continue  # it has ended meanwhile, or belongs to another user
        frameworks = tuple(sorted(name for name, parts in libraries if any(part in maps for part in parts)))
        if frameworks:
            found[int(folder.name)] = Process(frameworks, held)
    return found


def _held_by(folder: Path) -> int:
    """Bytes of the host's memory that a process takes from the others, by its folder in /proc.

    Pages of files count for nobody, since the system takes them back at need; a page that processes share
    counts in parts. So what the processes hold, and everything else, add up to what is used.
    """
    for file, fields in (
        ("smaps_rollup", ("Pss_Anon:", "Pss_Shmem:")),
        ("status", ("RssAnon:", "RssShmem:")),  # shared pages in full, where the kernel hides the former
    ):
        try:
            lines = (folder / file).read_text().splitlines()
        except OSError:
            continue
        kib = [int(line.split()[1]) for line in lines if line.startswith(fields)]
        if kib:
            return sum(kib) << 10
    return int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _held_on(uuid: str) -> dict[int, int]:
    """Bytes that each process holds on a card, as the driver counts; empty where it does not tell."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return {}
    question = ["--query-compute-apps=pid,gpu_uuid,used_memory", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run([command, *question], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    held: dict[int, int] = {}
    for row in csv.reader(done.stdout.splitlines(), skipinitialspace=True):
        if len(row) == 3 and row[0].isdigit() and row[2].isdigit() and row[1] == uuid:
            held[int(row[0])] = held.get(int(row[0]), 0) + int(row[2]) * (1 << 20)
    return held


def _by_framework(
    device: str, held: dict[int, int], processes: dict[int, Process], total: int | None, free: int | None
) -> list[HolderRow]:
    used: dict[str, list[int]] = defaultdict(list)
    for pid, nbytes in held.items():
        if pid in processes:
            used[" + ".join(processes[pid].frameworks)].append(nbytes)
    rows = [HolderRow(device, name, sum(sizes), len(sizes)) for name, sizes in sorted(used.items())]
    if total is not None and free is not None:
        known = sum(row.used or 0 for row in rows)
        rows.append(HolderRow(device, REST, max(0, total - free - known), None))
    return rows


# -- telling -----------------------------------------------------------------------------------------

_COLUMNS = ("time", "device", "framework", "used", "processes", "free", "total", "load", "temperature")


def _append(path: Path | None, reading: Reading) -> None:
    if path is None:
        return
    devices = {device.device: device for device in reading.devices}
    with output.rewrite(path, "--csv"), path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not file.tell():
            writer.writerow(_COLUMNS)
        for row in reading.rows:
            on = devices[row.device]
            writer.writerow(
                (
                    *(reading.time, row.device, row.framework, row.used, row.processes),
                    *(on.free, on.total, on.load, on.temperature),
                )
            )


def _remember(history: dict[tuple[str, str], deque[int]], reading: Reading) -> None:
    for row in reading.rows:
        history[row.device, row.framework].append(row.used or 0)


def sparkline(values: Sequence[int]) -> str:
    """Values as bars from nothing to the largest of them.

    >>> sparkline([0, 1, 2, 4])
    '▁▃▅█'
    """
    most = max(values, default=0)
    if not most:
        return _BARS[0] * len(values)
    return "".join(_BARS[round(value / most * (len(_BARS) - 1))] for value in values)


def _table(reading: Reading, history: dict[tuple[str, str], deque[int]], once: bool) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for row in reading.rows:
        processes = "" if row.processes is None else str(row.processes)
        cells = (f"{row.device}  {row.framework}", format_bytes(row.used), processes)
        bars = sparkline(history[row.device, row.framework])
        rows.append(cells if once else (*cells, output.coloured(bars, "cyan")))
    return rows


def _head(device: DeviceRow, width: int) -> Text:
    """A line for a device: how full it is as a bar, and its load."""
    text = Text(device.device, style="bold")
    if device.name:
        text.append(f" {device.name}", style="")
    if device.total and device.free is not None:
        share = 1 - device.free / device.total
        cells = min(20, max(5, width // 6))
        style = "red" if share > 0.9 else "yellow" if share > 0.7 else "green"
        text.append("  ").append("█" * round(share * cells), style=style)
        text.append("░" * (cells - round(share * cells)), style="dim")
        text.append(
            f" {share:.0%}, {format_bytes(device.free)} free of {format_bytes(device.total)}",
            style="not bold",
        )
    if device.load is not None:
        text.append(f"  load {device.load} %", style="not bold")
    if device.temperature is not None:
        text.append(f"  {device.temperature} °C", style="not bold")
    return text


def _remarks(reading: Reading) -> list[str]:
    remarks = [reading.note] if reading.note else []
    if not any(device.device != "cpu" for device in reading.devices) and not reading.note:
        remarks.append("No card is seen here; this is the host's memory.")
    return remarks


def _print(
    console: Console, reading: Reading, history: dict[tuple[str, str], deque[int]], once: bool
) -> None:
    for device in reading.devices:
        console.print(_head(device, console.width))
    columns = ("held by", "used", "processes") + (() if once else ("history",))
    output.show(console, columns, _table(reading, history, once), ("used", "processes"))
    for remark in _remarks(reading):
        console.print(remark, style="dim")


def _picture(
    console: Console, reading: Reading, history: dict[tuple[str, str], deque[int]]
) -> RenderableType:
    parts: list[RenderableType] = [_head(device, console.width) for device in reading.devices]
    rows = _table(reading, history, once=False)
    columns: tuple[str, ...] = ("held by", "used", "processes", "history")
    if console.width < 70:  # room for the bars
        columns = ("held by", "used", "history")
        rows = [(held_by.replace("  ", "\n"), used, bars) for held_by, used, _, bars in rows]
    table = Text.from_markup(output.table(columns, rows, ("used", "processes"), None))
    table.no_wrap, table.overflow = True, "crop"
    parts += [table, *(Text(remark, style="dim") for remark in _remarks(reading))]
    parts.append(Text("Ctrl-C ends it.", style="dim"))
    return Group(*parts)
