"""``arraybridge monitor``: show the memory of every device live, by process and framework."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from arraybridge import MemoryCollector, hardware, memory_stats
from arraybridge.cli import option_parsing, output
from arraybridge.formatting import format_bytes
from arraybridge.interface import registry
from arraybridge.interface.memory import Holding
from arraybridge.memory.stats import DeviceMemory, MemoryStats

_HISTORY = 24
_BARS = "▁▂▃▄▅▆▇█"

#: Device and name of a framework or process → the bytes that it used in the last readings.
History = dict[tuple[str, str], deque[int]]


def monitor(
    once: Annotated[bool, typer.Option("--once", help="Print one reading and exit.")] = False,
    interval: Annotated[
        float, typer.Option(help="Seconds between two readings.", min=0.1, metavar="SECONDS")
    ] = 1.0,
    count: Annotated[int | None, typer.Option(help="Exit after N readings.", min=1, metavar="N")] = None,
    csv_file: Annotated[
        Path | None,
        typer.Option("--csv", help="Append readings to a .csv or .jsonl file.", metavar="FILE"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON, one reading per line.")] = False,
) -> None:
    """Show the memory of the host and of every GPU live, by process and framework.

    Each process is listed with the frameworks that it has imported. Press Ctrl-C to exit.
    The monitor imports no framework and creates no CUDA context, so it uses no GPU memory.

    Examples:
    [bold]arraybridge monitor[/bold]

    [bold]arraybridge monitor --once[/bold]

    [bold]arraybridge monitor --interval 5 --csv memory.csv[/bold]
    """
    option_parsing.check_writable(csv_file, "--csv", ".csv", ".jsonl")
    console = output.console()
    history: History = defaultdict(partial(deque, maxlen=_HISTORY))
    readings = _take_readings(1 if once else count, interval, csv_file, history)
    try:
        if as_json:
            for reading in readings:
                output.print_json({"time": round(time.time(), 3)} | reading.to_dict(), one_line=True)
        elif once or not console.is_terminal:
            for reading in readings:
                console.print(render(console, reading, {} if once else history))
        else:
            with Live(console=console, auto_refresh=False) as live:
                for reading in readings:
                    live.update(render(console, reading, history), refresh=True)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None  # Ctrl-C is the usual way to exit


def _take_readings(
    count: int | None, interval: float, file: Path | None, history: History
) -> Iterator[MemoryStats]:
    """Yield ``count`` readings at regular intervals, the first one now; endlessly if ``count`` is None."""
    started = time.monotonic()
    for number in itertools.count(1):
        reading = take_reading()
        for row in reading.rows:
            history[row.device, row.holder].append(row.used or 0)
        if file is not None:
            MemoryCollector(file).write(reading)
        yield reading
        if number == count:
            return
        time.sleep(max(0.0, started + number * interval - time.monotonic()))


# -- reading -----------------------------------------------------------------------------------------


def take_reading() -> MemoryStats:
    """Return the memory use of every device, and of every process that this user may inspect."""
    processes = framework_processes()
    frameworks = {pid: " + ".join(names) for pid, (names, _) in processes.items()}
    used: dict[str, Mapping[int, int]] = {"cpu": {pid: nbytes for pid, (_, nbytes) in processes.items()}}
    for gpu in hardware.gpus():
        used[f"gpu:{gpu.index}"] = hardware.read_gpu(gpu).memory_by_process
    stats = memory_stats()
    devices = []
    for device in stats.devices:
        holdings = _holdings(device, used.get(device.device, {}), frameworks)
        devices.append(device._replace(holdings=holdings))
    return MemoryStats(tuple(devices), stats.note)


def framework_processes() -> dict[int, tuple[list[str], int]]:
    """Return the frameworks and the unshared bytes of each Python process of this user, by process id.

    Frameworks are recognized by the libraries that a process has mapped into memory. The result is empty on
    systems that do not report mapped libraries (macOS).
    """
    libraries = {name: registry.metadata_of(name).libraries or () for name in registry.framework_names()}
    processes = {}
    for process in psutil.process_iter():
        try:
            if "python" not in Path(process.exe()).name:
                continue
            maps = process.memory_maps() if hasattr(process, "memory_maps") else []
            paths = "\n".join(file.path for file in maps)
            names = sorted(n for n, parts in libraries.items() if any(part in paths for part in parts))
            if names:
                processes[process.pid] = names, int(process.memory_full_info().uss)
        except (psutil.Error, OSError):
            continue  # the process has ended, or belongs to another user
    return processes


def _holdings(
    device: DeviceMemory, by_process: Mapping[int, int], frameworks: Mapping[int, str]
) -> tuple[Holding, ...]:
    """Return the memory of the processes, grouped by frameworks, and the memory of everything else."""
    groups: dict[str, list[int]] = defaultdict(list)
    for pid in sorted(by_process):
        groups[frameworks.get(pid, "no framework")].append(pid)
    rows = [
        Holding(device.device, f"{name}, {_ids(pids)}", sum(by_process[pid] for pid in pids))
        for name, pids in sorted(groups.items())
    ]
    if device.total is not None and device.free is not None:
        unknown = max(0, device.total - device.free - sum(by_process.values()))
        rows.append(Holding(device.device, "everything else", unknown))
    return tuple(rows)


def _ids(pids: Sequence[int]) -> str:
    """Return ``"process 11"``, or ``"processes 11, 12, 13 and 2 more"``."""
    shown = ", ".join(map(str, pids[:3]))
    more = f" and {len(pids) - 3} more" if len(pids) > 3 else ""
    return f"process{'es' if len(pids) > 1 else ''} {shown}{more}"


# -- rendering ---------------------------------------------------------------------------------------


def sparkline(values: Sequence[int]) -> str:
    """Draw values as bars, scaled to the largest value.

    >>> sparkline([0, 1, 2, 4])
    '▁▃▅█'
    """
    most = max(values, default=0) or 1
    return "".join(_BARS[round(value / most * (len(_BARS) - 1))] for value in values)


def _rows(reading: MemoryStats, history: History) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for row in reading.rows:
        bars = sparkline(history.get((row.device, row.holder), ()))
        rows.append((f"{row.device}  {row.holder}", format_bytes(row.used), f"[cyan]{bars}[/]"))
    return rows if history else [row[:2] for row in rows]


def _device_line(device: DeviceMemory, width: int) -> Text:
    """Return the line of a device: its memory as a bar, its load and its temperature."""
    text = Text(device.device, style="bold")
    text.append(f" {device.name}" if device.name else "", style="not bold")
    if device.total and device.free is not None:
        share = 1 - device.free / device.total
        cells = min(20, max(5, width // 6))
        text.append("  ").append("█" * round(share * cells), style=_color(share))
        text.append("░" * (cells - round(share * cells)), style="dim")
        free = f" {share:.0%}, {format_bytes(device.free)} free of {format_bytes(device.total)}"
        text.append(free, style="not bold")
    if device.load is not None:
        text.append(f"  load {device.load} %", style="not bold")
    if device.temperature is not None:
        text.append(f"  {device.temperature} °C", style="not bold")
    return text


def _color(share: float) -> str:
    """Return the color of a bar, by the share of memory that is in use."""
    if share > 0.9:
        return "red"
    return "yellow" if share > 0.7 else "green"


def render(console: Console, reading: MemoryStats, history: History) -> RenderableType:
    """Render a reading for the console; the table has a history column if there is a history."""
    columns: tuple[str, ...] = ("used by", "used", "history") if history else ("used by", "used")
    remark = reading.note
    if len(reading.devices) == 1:
        remark = remark or "No NVIDIA GPU found. Only host memory is shown."
    table = output.table_or_list(console, columns, _rows(reading, history), right=("used",), wrap="used by")
    return Group(
        Text(time.strftime("%Y-%m-%d %H:%M:%S"), style="dim"),
        *(_device_line(device, console.width) for device in reading.devices),
        table,
        *([Text(remark, style="dim")] if remark else []),
    )
