"""Compare conversions with native calls, with the peer, and with plain copies.

Run it from the root of the checkout, as described in `benchmarks/README.md`.

    python -m benchmarks.conversion                      # everything
    python -m benchmarks.conversion --section pairs      # one section; repeatable
    python -m benchmarks.conversion --peer FOLDER        # arraybridge==0.5.2, installed there if missing

Sections: `pairs` (twelve host pairs, 4 MiB and 16 elements), `copies` (layouts that require a copy),
`pyclesperanto` (64 MiB to and from an OpenCL device), `own` (arrays in memory as NumPy allocates it),
`import` (the time of `import arraybridge`).
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a script rather than as a module
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.timing import (  # noqa: E402
    Summary,
    aligned,
    batch_ns,
    calls_per_batch,
    in_turn,
    machine,
    pyplot,
    versions,
)

PEER = "arraybridge==0.5.2"
PEER_NEEDS = ("metaclass-registry", "python-introspect")
HOST_FRAMEWORKS = ("numpy", "torch", "jax", "tensorflow")
PAIRS = [(source, target) for source in HOST_FRAMEWORKS for target in HOST_FRAMEWORKS if source != target]
SIZES = {"4 MiB": 1 << 20, "16 elements": 16}  # elements of float32
MIB_64 = 64 << 20
RESULTS = ROOT / "benchmarks" / "results"
DISTRIBUTIONS = ("numpy", "torch", "jax", "tensorflow", "tensorflow-cpu", "pyclesperanto", "pyopencl")

Json = dict[str, Any]
Case = tuple[str, str, str, str]  # size, source, target, and the native call or the contender
Timed = Callable[[], object]
Prepare = Callable[[Any], Timed]
console = Console(width=132)


# --- pairs: code that runs in a separate process --------------------------------------------------


def raw_calls() -> dict[tuple[str, str], dict[str, Prepare]]:
    """Return for each pair the native calls that share memory, by label. The fastest one is the reference.

    Each entry takes the array and returns the function to time. Every contender is wrapped in one plain
    function, so the cost of that call is equal.
    """
    import jax
    import jax.numpy as jnp
    import tensorflow as tf
    import torch

    from_numpy, torch_from = torch.from_numpy, torch.from_dlpack
    tf_from = tf.experimental.dlpack.from_dlpack
    tf_to = tf.experimental.dlpack.to_dlpack
    torch_to = torch.utils.dlpack.to_dlpack
    jax_from = jax.dlpack.from_dlpack
    return {
        ("numpy", "torch"): {"torch.from_numpy(x)": lambda x: lambda: from_numpy(x)},
        ("numpy", "jax"): {
            "jax.dlpack.from_dlpack(x)": lambda x: lambda: jax_from(x),
            "jnp.from_dlpack(x)": lambda x: lambda: jnp.from_dlpack(x),
        },
        ("numpy", "tensorflow"): {
            "tf from_dlpack(x.__dlpack__())": lambda x: lambda: tf_from(x.__dlpack__())
        },
        ("torch", "numpy"): {"x.numpy()": lambda x: lambda: x.numpy()},
        ("torch", "jax"): {
            "jax.dlpack.from_dlpack(x)": lambda x: lambda: jax_from(x),
            "jax.dlpack.from_dlpack(x.numpy())": lambda x: lambda: jax_from(x.numpy()),
        },
        ("torch", "tensorflow"): {
            "tf from_dlpack(torch to_dlpack(x))": lambda x: lambda: tf_from(torch_to(x))
        },
        ("jax", "numpy"): {"np.asarray(x)": lambda x: lambda: np.asarray(x)},
        ("jax", "torch"): {
            "torch.from_dlpack(x)": lambda x: lambda: torch_from(x),
            "torch.from_dlpack(x.__dlpack__())": lambda x: lambda: torch_from(x.__dlpack__()),
        },
        ("jax", "tensorflow"): {"tf from_dlpack(x.__dlpack__())": lambda x: lambda: tf_from(x.__dlpack__())},
        ("tensorflow", "numpy"): {"np.asarray(memoryview(x))": lambda x: lambda: np.asarray(memoryview(x))},
        ("tensorflow", "torch"): {
            "torch.from_dlpack(tf to_dlpack(x))": lambda x: lambda: torch_from(tf_to(x)),
        },
        ("tensorflow", "jax"): {
            "jax.dlpack.from_dlpack(x)": lambda x: lambda: jax_from(x),
            "jnp.from_dlpack(x)": lambda x: lambda: jnp.from_dlpack(x),
        },
    }


def host_arrays(elements: int) -> dict[str, Any]:
    """Return a float32 array of each host framework, in separate memory aligned to 64 bytes."""
    import jax
    import jax.numpy as jnp
    import tensorflow as tf
    import torch

    return {
        "numpy": aligned((elements,)),
        "torch": torch.arange(elements, dtype=torch.float32),
        "jax": jax.block_until_ready(jnp.arange(elements, dtype=jnp.float32)),
        "tensorflow": tf.range(elements, dtype=tf.float32),
    }


def address(array: Any) -> int:
    """Return the address of the first element of a host array."""
    framework = type(array).__module__.partition(".")[0]
    if framework == "torch":
        return int(array.data_ptr())
    if framework.startswith("jax"):
        return int(array.unsafe_buffer_pointer())
    return int(np.asarray(memoryview(array)).ctypes.data)


def worker(connection: Connection, contender: str, peer: str) -> None:
    """Time batches of one library and of the native calls, on request.

    Both libraries have the same import name, so each runs in a separate process. Both time the native calls,
    so that every comparison is within one process.
    """
    if contender == "peer":
        sys.path.insert(0, peer)
    library: Any = importlib.import_module("arraybridge")
    convert = library.convert_memory
    raw = raw_calls()

    def library_call(source: str, target: str, x: Any) -> Timed:
        if contender == "peer":
            host = library.HOST
            return lambda: convert(x, source, target, host)
        return lambda: convert(x, target)

    cases: dict[Case, tuple[Timed, int]] = {}
    shares: dict[Case, bool] = {}
    for size, elements in SIZES.items():
        arrays = host_arrays(elements)
        for source, target in PAIRS:
            x = arrays[source]
            calls = {name: prepare(x) for name, prepare in raw[source, target].items()}
            calls[contender] = library_call(source, target, x)
            for name, call in calls.items():
                case = (size, source, target, name)
                shares[case] = address(call()) == address(x)
                cases[case] = (call, calls_per_batch(call))
    connection.send((library.__version__, shares))

    while (case := connection.recv()) is not None:
        connection.send(batch_ns(*cases[case]))


def answer(pipe: Connection) -> Any:
    """Return the next message of a child process, or exit if it crashed."""
    try:
        return pipe.recv()
    except EOFError:
        raise SystemExit("A measured process ended early. See its error message above.") from None


class Contender:
    """A library in a separate process, which times one batch per request through a pipe."""

    def __init__(self, name: str, peer: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=worker, args=(child, name, peer), daemon=True)
        self._process.start()
        child.close()  # so that a read here ends if the child crashes
        self.version: str
        self.shares: dict[Case, bool]
        self.version, self.shares = answer(self._pipe)
        self.samples: dict[Case, list[float]] = {case: [] for case in self.shares}

    def time(self, case: Case) -> None:
        """Time one batch of one case."""
        self._pipe.send(case)
        self.samples[case].append(answer(self._pipe))

    def raw(self, size: str, source: str, target: str) -> Case:
        """Return the native call of a pair with the fastest batch in this process."""
        pair = (size, source, target)
        raws = [case for case in self.samples if case[:3] == pair and case[3] != self.name]
        return min(raws, key=lambda case: min(self.samples[case]))

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(30)


def peer_folder(folder: Path) -> str:
    """Install `PEER` into a folder, unless it is there already, and return the folder."""
    if not (folder / "arraybridge").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*command, PEER, *PEER_NEEDS], check=True)
    return str(folder)


def pairs(rounds: int, peer: Path | None, ours: bool) -> Json:
    """Time native calls, this library and the peer on every host pair, in turn."""
    names = (["ours"] if ours else []) + (["peer"] if peer else [])
    folder = peer_folder(peer) if peer else ""
    contenders = [Contender(name, folder) for name in names]
    for _ in range(rounds):
        for size in SIZES:
            for pair in PAIRS:
                for contender in contenders:
                    for case in contender.samples:
                        if case[:3] == (size, *pair):
                            contender.time(case)
    rows = []
    for size in SIZES:
        for source, target in PAIRS:
            row: Json = {"source": source, "target": target, "size": size}
            for contender in contenders:
                raw_case = contender.raw(size, source, target)
                own_case = (size, source, target, contender.name)
                raw, own = contender.samples[raw_case], contender.samples[own_case]
                row[f"raw_beside_{contender.name}"] = Summary.of(raw).as_dict() | {
                    "call": raw_case[3],
                    "shares_memory": contender.shares[raw_case],
                }
                row[contender.name] = Summary.of(own).as_dict() | {
                    "shares_memory": contender.shares[own_case],
                    "over_raw_ns": round(statistics.median(b - a for a, b in zip(raw, own, strict=True)), 1),
                    "over_raw_of_minima_ns": round(min(own) - min(raw), 1),
                }
            if len(contenders) == 2:
                mine, theirs = (one.samples[size, source, target, one.name] for one in contenders)
                ratio = statistics.median(b / a for a, b in zip(mine, theirs, strict=True))
                row["peer_over_ours"] = round(ratio, 2)
            rows.append(row)
    packages = {contender.name: contender.version for contender in contenders}
    for contender in contenders:
        contender.close()
    return {"rounds": rounds, "arraybridge": packages, "rows": rows, "targets": pair_targets(rows)}


def pair_targets(rows: list[Json]) -> list[Json]:
    """Return the claims about the pairs, each with its measurement."""
    targets = []
    for size in SIZES:
        of_size = [row for row in rows if row["size"] == size]
        if all("ours" in row for row in of_size):
            over = [row["ours"]["over_raw_ns"] for row in of_size]
            shared = sum(row["ours"]["shares_memory"] for row in of_size)
            targets += [
                target(f"{size}: pairs that share memory", shared, ">=", len(of_size), "pairs"),
                target(
                    f"{size}: over the native call, median pair", statistics.median(over), "<=", 400, "ns"
                ),
                target(f"{size}: over the native call, worst pair", max(over), "<=", 1500, "ns"),
            ]
        if all("peer_over_ours" in row for row in of_size):
            ratios = [row["peer_over_ours"] for row in of_size]
            targets += [
                target(f"{size}: peer / ours, smallest ratio", min(ratios), ">=", 2, "x"),
                target(f"{size}: peer / ours, median pair", statistics.median(ratios), ">=", 5, "x"),
            ]
    return targets


def show_pairs(result: Json) -> None:
    for size in SIZES:
        table = Table(title=f"float32, {size}: microseconds per call, median of {result['rounds']} rounds")
        table.add_column("pair")
        table.add_column("fastest native call", no_wrap=True)
        for column in ("native", "ours", "over, ns", "peer", "peer/ours"):
            table.add_column(column, justify="right")
        table.add_column("shared")
        for row in result["rows"]:
            if row["size"] != size:
                continue
            raw = row.get("raw_beside_ours") or row["raw_beside_peer"]
            ours, peer = row.get("ours"), row.get("peer")
            table.add_row(
                f"{row['source']} -> {row['target']}",
                raw["call"],
                f"{raw['median_ns'] / 1e3:.2f}",
                f"{ours['median_ns'] / 1e3:.2f}" if ours else "",
                f"{ours['over_raw_ns']:.0f}" if ours else "",
                f"{peer['median_ns'] / 1e3:.2f}" if peer else "",
                f"{row['peer_over_ours']:.1f}" if "peer_over_ours" in row else "",
                ", ".join("yes" if one["shares_memory"] else "no" for one in (ours, peer) if one),
            )
        console.print(table)


# --- copies: layouts that the target cannot view, or copy=True -----------------------------------


def counting(*shape: int) -> np.ndarray[Any, Any]:
    """Return 0, 1, 2, ... as float32, in memory that NumPy allocates."""
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def layouts() -> dict[str, np.ndarray[Any, Any]]:
    """Return 64 MiB of float32 in each layout."""
    cube = counting(256, 256, 256)
    plane = counting(4096, 4096)
    return {
        "contiguous": plane,
        "transposed": plane.T,
        "inner stride 2": counting(4096, 8192)[:, ::2],
        "row pitch": counting(4096, 4160)[:, :4096],
        "permuted (1, 2, 0)": cube.transpose(1, 2, 0),
        "permuted (2, 1, 0)": cube.transpose(2, 1, 0),
        "big-endian": plane.astype(">f4"),
    }


def copy_with_numpy(source: np.ndarray[Any, Any]) -> object:
    """Copy an array into new C-contiguous memory, in native byte order."""
    fresh = np.empty(source.shape, source.dtype.newbyteorder("="))
    np.copyto(fresh, source)
    return fresh


def copy_with_torch(source: Any) -> object:
    """Copy a PyTorch tensor into new C-contiguous memory."""
    import torch

    return torch.empty(source.shape, dtype=source.dtype).copy_(source)


def copies(rounds: int, ours: bool) -> Json:
    """Compare conversions with `copy=True` with the faster plain copy of NumPy and PyTorch."""
    import torch

    library: Any = importlib.import_module("arraybridge") if ours else None
    frameworks = ("torch", "jax") if ours else ()
    rows = []
    for name, source in layouts().items():
        assert source.nbytes == MIB_64
        calls: dict[str, Timed] = {"np.copyto": partial(copy_with_numpy, source)}
        if source.dtype.isnative:
            calls["torch copy_"] = partial(copy_with_torch, torch.from_numpy(source))
        plain = list(calls)
        for framework in frameworks:
            calls[framework] = partial(library.convert_memory, source, framework, copy=True)
            result = np.asarray(calls[framework]())
            assert np.array_equal(result, source), f"{name} to {framework}: wrong values"
            assert not np.shares_memory(result, source), f"{name} to {framework}: not a copy"
            del result
        taken = {key: Summary.of(values) for key, values in in_turn(calls, rounds).items()}
        best = min(plain, key=lambda key: taken[key].median)
        row: Json = {"layout": name, "best_plain": best}
        row |= {key: summary.as_dict() for key, summary in taken.items()}
        for framework in frameworks:
            row[f"{framework}_over_best_speed"] = round(taken[best].median / taken[framework].median, 3)
        rows.append(row)
    claims = [
        target(
            f"64 MiB copied to {framework}: speed over the faster plain copy, slowest layout",
            min(row[f"{framework}_over_best_speed"] for row in rows),
            ">=",
            0.9,
            "x",
        )
        for framework in frameworks
    ]
    return {"rounds": rounds, "bytes": MIB_64, "rows": rows, "targets": claims}


def show_copies(result: Json) -> None:
    table = Table(
        title=f"copies of 64 MiB, GB/s, median of {result['rounds']} rounds (numpy source, copy=True)"
    )
    table.add_column("layout")
    for column in ("np.copyto", "torch copy_", "ours to torch", "ours to jax", "torch / best", "jax / best"):
        table.add_column(column, justify="right")
    for row in result["rows"]:
        speeds = [
            f"{result['bytes'] / row[key]['median_ns']:.2f}" if key in row else ""
            for key in ("np.copyto", "torch copy_", "torch", "jax")
        ]
        ratios = [f"{row.get(f'{framework}_over_best_speed', '')}" for framework in ("torch", "jax")]
        table.add_row(row["layout"], *speeds, *ratios)
    console.print(table)


# --- pyclesperanto -------------------------------------------------------------------------------


def opencl(connection: Connection, rounds: int, ours: bool) -> None:
    """Time transfers of 64 MiB to and from pyclesperanto in a new process, and send the results."""
    source = counting(4096, 4096)
    calls: dict[str, Timed] = {"plain copy": lambda: copy_with_numpy(source)}
    if ours:
        convert: Any = importlib.import_module("arraybridge").convert_memory
        # This conversion runs before the import of pyclesperanto, so that arraybridge can find an OpenCL
        # driver if none is configured.
        array = convert(source, "pyclesperanto")
        assert np.array_equal(convert(array, "numpy"), source), "wrong values"
        calls["ours to"] = lambda: convert(source, "pyclesperanto", copy=True)
        calls["ours from"] = lambda: convert(array, "numpy", copy=True)
    import pyclesperanto

    pushed = pyclesperanto.push(source)
    calls["push"] = lambda: pyclesperanto.push(source)
    calls["pull"] = lambda: pyclesperanto.pull(pushed)
    taken = in_turn(calls, rounds)
    connection.send({name: Summary.of(values).as_dict() for name, values in taken.items()})


def pyclesperanto(rounds: int, ours: bool) -> Json:
    """Compare transfers of 64 MiB to and from an OpenCL device with a plain copy into new memory."""
    context = multiprocessing.get_context("spawn")
    pipe, child = context.Pipe()
    process = context.Process(target=opencl, args=(child, rounds, ours), daemon=True)
    process.start()
    child.close()
    taken: Json = answer(pipe)
    process.join(60)
    plain = taken["plain copy"]["median_ns"]
    for summary in taken.values():
        summary["over_plain_copy"] = round(summary["median_ns"] / plain, 3)
    claims = [
        target(
            f"pyclesperanto, 64 MiB {way}: over a plain copy", taken[name]["over_plain_copy"], "<=", 1.3, "x"
        )
        for way, name in (("to", "ours to"), ("from", "ours from"))
        if name in taken
    ]
    return {"rounds": rounds, "bytes": MIB_64, "rows": taken, "targets": claims}


def show_pyclesperanto(result: Json) -> None:
    table = Table(title=f"pyclesperanto, 64 MiB float32, milliseconds, median of {result['rounds']} rounds")
    for column in ("call", "ms", "minimum", "over a plain copy"):
        table.add_column(column, justify="left" if column == "call" else "right")
    for name, row in result["rows"].items():
        cells = (
            f"{row['median_ns'] / 1e6:.2f}",
            f"{row['min_ns'] / 1e6:.2f}",
            f"{row['over_plain_copy']:.2f}",
        )
        table.add_row(name, *cells)
    console.print(table)


# --- NumPy's own memory --------------------------------------------------------------------------


def own_memory(rounds: int) -> Json:
    """Time conversions of 4 MiB from NumPy, aligned to 64 bytes and in memory as NumPy allocates it."""
    convert: Any = importlib.import_module("arraybridge").convert_memory
    explain: Any = importlib.import_module("arraybridge").explain
    memory = aligned((1024 * 1024 + 16,))
    # NumPy allocates most arrays of this size with mmap, so they start 16 bytes past a page.
    arrays = {"aligned": aligned((1024, 1024)), "own": memory[4:-12].reshape(1024, 1024)}
    assert arrays["own"].ctypes.data % 64 == 16
    rows = []
    for name in ("torch", "jax", "tensorflow"):
        calls = {kind: partial(convert, array, name) for kind, array in arrays.items()}
        counts = {kind: calls_per_batch(call) for kind, call in calls.items()}
        taken: dict[str, list[float]] = {kind: [] for kind in calls}
        for _ in range(rounds):
            for kind, call in calls.items():
                taken[kind].append(batch_ns(call, counts[kind]))
        row: Json = {"target": name}
        for kind, array in arrays.items():
            shares = explain(array, name).shares_memory
            row[kind] = Summary.of(taken[kind]).as_dict() | {"shares_memory": shares}
        rows.append(row)
    return {"rounds": rounds, "bytes": 4 << 20, "rows": rows, "targets": []}


def show_own_memory(result: Json) -> None:
    table = Table(title=f"4 MiB from NumPy, microseconds, median of {result['rounds']} rounds")
    for column in ("to", "aligned to 64 bytes", "as NumPy allocates"):
        table.add_column(column, justify="left" if column == "to" else "right")
    for row in result["rows"]:
        cells = [f"{row[kind]['median_ns'] / 1e3:.1f}" for kind in ("aligned", "own")]
        table.add_row(row["target"], *cells)
    console.print(table)


# --- import --------------------------------------------------------------------------------------


_TWO_IMPORTS = """
from time import perf_counter_ns as now
start = now()
import numpy
between = now()
import arraybridge
print(between - start, now() - between)
"""


def two_imports() -> tuple[float, float]:
    """Return the nanoseconds of `import numpy` and then `import arraybridge` in a new interpreter."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages have bytecode
    done = subprocess.run(
        [sys.executable, "-c", _TWO_IMPORTS], check=True, env=environment, capture_output=True, text=True
    )
    numpy_ns, ours_ns = map(float, done.stdout.split())
    return numpy_ns, ours_ns


def imports(rounds: int) -> Json:
    """Return the time of `import arraybridge` as a fraction of that of `import numpy` before it."""
    two_imports()  # warms the file cache and writes the bytecode
    pairs = [two_imports() for _ in range(rounds)]
    share = statistics.median(ours / numpy for numpy, ours in pairs)
    rows = {"numpy": Summary.of([numpy for numpy, _ in pairs]).as_dict()}
    rows["arraybridge"] = Summary.of([ours for _, ours in pairs]).as_dict()
    claim = target("import arraybridge, as a fraction of import numpy", round(share, 3), "<=", 0.25, "")
    return {"rounds": rounds, "rows": rows, "share_of_numpy": round(share, 3), "targets": [claim]}


def show_imports(result: Json) -> None:
    table = Table(title=f"in a new interpreter, milliseconds, median of {result['rounds']} pairs")
    for column in ("import", "ms", "minimum"):
        table.add_column(column, justify="left" if column == "import" else "right")
    for name, row in result["rows"].items():
        table.add_row(name, f"{row['median_ns'] / 1e6:.1f}", f"{row['min_ns'] / 1e6:.1f}")
    console.print(table)


# --- the report ----------------------------------------------------------------------------------


def target(claim: str, measured: float, relation: str, limit: float, unit: str) -> Json:
    """Return a claim with its measurement, its target and whether it is met."""
    met = measured <= limit if relation == "<=" else measured >= limit
    return {
        "claim": claim,
        "measured": round(measured, 3),
        "target": f"{relation} {limit}",
        "unit": unit,
        "met": bool(met),
    }


def show_targets(report: Json) -> None:
    table = Table(title="targets")
    for column in ("claim", "measured", "target", "verdict"):
        table.add_column(column, justify="left" if column in ("claim", "verdict") else "right")
    for section in report.values():
        for one in section["targets"]:
            met = "[green]met[/]" if one["met"] else "[red]missed[/]"
            table.add_row(one["claim"], f"{one['measured']:g} {one['unit']}", one["target"], met)
    if table.row_count:
        console.print(table)


def plot(result: Json, path: Path) -> None:
    """Plot the time per call of each pair at the larger size, on a logarithmic axis."""
    plt = pyplot()

    styles = {
        "raw": ("fastest native call", "#9aa5b1"),
        "ours": ("arraybridge, this library", "#1f77b4"),
        "peer": (PEER.replace("==", " "), "#e08a2e"),
    }
    size = next(iter(SIZES))
    rows = [row for row in result["rows"] if row["size"] == size]
    names = ["raw"] + [name for name in ("ours", "peer") if name in rows[0]]
    height = 0.84 / len(names)
    figure, axis = plt.subplots(figsize=(8, 8), layout="constrained")
    for place, name in enumerate(names):
        label, color = styles[name]
        timings = [
            row[name] if name != "raw" else row.get("raw_beside_ours") or row["raw_beside_peer"]
            for row in rows
        ]
        values = [timing["median_ns"] / 1e3 for timing in timings]
        positions = [line - 0.42 + (place + 0.5) * height for line in range(len(rows))]
        bars = axis.barh(positions, values, height * 0.92, color=color, label=label)
        notes = [
            f"{value:.3g} µs" + (", copies" if timing.get("shares_memory") is False else "")
            for value, timing in zip(values, timings, strict=True)
        ]
        axis.bar_label(bars, notes, fontsize=8, padding=3)
    axis.set_xscale("log")
    axis.set_title(f"Time per conversion of a float32 array of {size}")
    axis.grid(axis="x", which="major", alpha=0.25)
    axis.set_axisbelow(True)
    axis.set_xlabel("time per call, logarithmic")
    axis.set_yticks(range(len(PAIRS)), [f"{source} \N{RIGHTWARDS ARROW} {to}" for source, to in PAIRS])
    axis.set_ylim(len(PAIRS) - 0.45, -0.55)
    axis.set_xlim(0.1, axis.get_xlim()[1] * 6)  # space for the notes
    ticks = {0.1: "0.1 µs", 1: "1 µs", 10: "10 µs", 100: "100 µs", 1000: "1 ms"}
    axis.set_xticks(list(ticks), list(ticks.values()))
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the cost of conversions.")
    sections = ("pairs", "copies", "pyclesperanto", "own", "import")
    parser.add_argument(
        "--section", action="append", choices=sections, help="run only this section; repeatable"
    )
    parser.add_argument("--rounds", type=int, default=25, help="rounds of the pairs (at least 15 to publish)")
    default_peer = Path(tempfile.gettempdir()) / "arraybridge-peer"
    parser.add_argument(
        "--peer", type=Path, default=default_peer, help=f"folder of {PEER}; installed there if missing"
    )
    parser.add_argument(
        "--without",
        action="append",
        choices=("ours", "peer"),
        default=[],
        help="skip this contender; repeatable",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    ours = "ours" not in arguments.without
    peer = None if "peer" in arguments.without else arguments.peer
    if not ours and peer is None:
        parser.error("Nothing to measure. Omit one of the --without options.")
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "conversion.json"
    report: Json = json.loads(file.read_text()) if file.exists() else {}
    about = {"machine": machine(), "versions": versions(*DISTRIBUTIONS)}
    for section in arguments.section or sections:
        if section == "pairs":
            result = pairs(arguments.rounds, peer, ours)
            show_pairs(result)
            plot(result, arguments.out / "conversion.png")
        elif section == "copies":
            result = copies(9, ours)
            show_copies(result)
        elif section == "pyclesperanto":
            result = pyclesperanto(15, ours)
            show_pyclesperanto(result)
        elif section == "own":
            result = own_memory(arguments.rounds)
            show_own_memory(result)
        else:
            result = imports(25)
            show_imports(result)
        report[section] = about | result
    show_targets({name: report[name] for name in arguments.section or sections})
    file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
