"""``arraybridge monitor``: the memory of every device, live, by process and framework."""

from __future__ import annotations

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
from arraybridge.cli import output
from arraybridge.formatting import format_bytes
from arraybridge.frameworks import registry
from arraybridge.frameworks.accelerators import Holding
from arraybridge.memory.stats import DeviceMemory, MemoryStats

_HISTORY = 24
_BARS = "▁▂▃▄▅▆▇█"

#: Holder of a device → the bytes that it held in the last readings.
History = dict[tuple[str, str], deque[int]]


def monitor(
    once: Annotated[bool, typer.Option("--once", help="Print one reading and leave.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between two readings.", min=0.1)] = 1.0,
    count: Annotated[int | None, typer.Option(help="Leave after this many readings.", min=1)] = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="Append each reading to this file.", metavar="FILE")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print machine-readable JSON alone, a reading a line.")
    ] = False,
) -> None:
    """Watch the memory of the host and of every card, by process and framework.

    A process counts under the frameworks that it has imported. Leave with Ctrl-C.
    It opens no card and imports no framework, so that it takes no memory from what it watches.

    Examples:
    [bold]arraybridge monitor[/bold]

    [bold]arraybridge monitor --once[/bold]

    [bold]arraybridge monitor --interval 5 --csv memory.csv[/bold]
    """
    output.writable(csv_file, "--csv", ".csv", ".jsonl")
    console = output.console()
    history: History = defaultdict(partial(deque, maxlen=_HISTORY))
    readings = _readings(1 if once else count, interval, csv_file, history)
    try:
        if as_json:
            for reading in readings:
                output.print_json({"time": round(time.time(), 3)} | reading.to_dict(), one_line=True)
        elif once or not console.is_terminal:
            for reading in readings:
                console.print(_picture(console, reading, {} if once else history))
        else:
            with Live(console=console, auto_refresh=False) as live:
                for reading in readings:
                    live.update(_picture(console, reading, history), refresh=True)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None  # the ordinary way to leave


def _readings(
    count: int | None, interval: float, file: Path | None, history: History
) -> Iterator[MemoryStats]:
    """Readings at even times, the first one now; without end if ``count`` is None."""
    started = time.monotonic()
    done = 0
    while True:
        reading = take_reading()
        for row in reading.rows:
            history[row.device, row.holder].append(row.used or 0)
        if file is not None:
            MemoryCollector(file).write(reading)
        yield reading
        done += 1
        if done == count:
            return
        time.sleep(max(0.0, started + done * interval - time.monotonic()))


# -- reading -----------------------------------------------------------------------------------------


def take_reading() -> MemoryStats:
    """Look at every device, and at every process that may be looked at."""
    seen = programs()
    frameworks = {pid: " + ".join(names) for pid, (names, _) in seen.items()}
    holders: dict[str, Mapping[int, int]] = {"cpu": {pid: nbytes for pid, (_, nbytes) in seen.items()}}
    holders |= {f"gpu:{gpu.index}": hardware.read_gpu(gpu).memory_by_process for gpu in hardware.gpus()}
    stats = memory_stats()
    held = ((one, _holdings(one, holders.get(one.device, {}), frameworks)) for one in stats.devices)
    return MemoryStats(tuple(one._replace(holdings=rows) for one, rows in held), stats.note)


def programs() -> dict[int, tuple[list[str], int]]:
    """The Python processes of this user: the frameworks that each has loaded, and bytes that are its own.

    They are told by the paths of what a process has mapped; systems that do not say that (macOS) show none.
    """
    libraries = {name: registry.metadata_of(name).libraries or () for name in registry.framework_names()}
    seen = {}
    for process in psutil.process_iter():
        try:
            if "python" not in Path(process.exe()).name:
                continue
            maps = process.memory_maps() if hasattr(process, "memory_maps") else []
            paths = "\n".join(file.path for file in maps)
            names = sorted(n for n, parts in libraries.items() if any(part in paths for part in parts))
            if names:
                seen[process.pid] = names, int(process.memory_full_info().uss)
        except (psutil.Error, OSError):
            continue  # it has ended meanwhile, or belongs to another user
    return seen


def _holdings(
    device: DeviceMemory, by_process: Mapping[int, int], frameworks: Mapping[int, str]
) -> tuple[Holding, ...]:
    """What the processes hold, those of the same frameworks together, and what is left."""
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
    """``"process 11"``, or ``"processes 11, 12, 13 and 2 more"``."""
    shown = ", ".join(map(str, pids[:3]))
    more = f" and {len(pids) - 3} more" if len(pids) > 3 else ""
    return f"process{'es' if len(pids) > 1 else ''} {shown}{more}"


# -- telling -----------------------------------------------------------------------------------------


def sparkline(values: Sequence[int]) -> str:
    """Values as bars from nothing to the largest of them.

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


def _head(device: DeviceMemory, width: int) -> Text:
    """A line for a device: how full it is as a bar, and its load."""
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


def _picture(console: Console, reading: MemoryStats, history: History) -> RenderableType:
    columns: tuple[str, ...] = ("held by", "used", "history") if history else ("held by", "used")
    remark = reading.note
    if len(reading.devices) == 1:
        remark = remark or "No card is seen here; this is the host's memory."
    return Group(
        Text(time.strftime("%Y-%m-%d %H:%M:%S"), style="dim"),
        *(_head(device, console.width) for device in reading.devices),
        output.table(console, columns, _rows(reading, history), ("used",)),
        *([Text(remark, style="dim")] if remark else []),
    )
