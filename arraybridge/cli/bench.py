"""``arraybridge bench``: conversions against the native calls, decorators against the plain call."""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.markup import escape
from rich.progress import Progress

import arraybridge
from arraybridge.cli import output
from arraybridge.cli.bench_sizes import bench_sizes
from arraybridge.errors import MemoryConversionError
from arraybridge.show import format_bytes, format_seconds

__all__ = ["RAW", "bench", "in_turn"]

Json = dict[str, Any]
Call = Callable[[], object]
FORMAT = "arraybridge-bench-1"
_BATCH_NS = 2_000_000  # long enough for the clock, short enough to miss most interruptions


def _capsule_to_tensorflow(_: Any, tensorflow: Any) -> Callable[[Any], Any]:
    take = tensorflow.experimental.dlpack.from_dlpack
    return lambda x: take(x.__dlpack__())


def _torch_to_tensorflow(torch: Any, tensorflow: Any) -> Callable[[Any], Any]:
    give, take = torch.utils.dlpack.to_dlpack, tensorflow.experimental.dlpack.from_dlpack
    return lambda x: take(give(x))


def _tensorflow_to_torch(tensorflow: Any, torch: Any) -> Callable[[Any], Any]:
    give, take = tensorflow.experimental.dlpack.to_dlpack, torch.from_dlpack
    return lambda x: take(give(x))


def _buffer_to_numpy(_: Any, numpy: Any) -> Callable[[Any], Any]:
    return lambda x: numpy.asarray(memoryview(x))


def _torch_to_numpy(_: Any, __: Any) -> Callable[[Any], Any]:
    return lambda x: x.numpy()


Make = Callable[[Any, Any], Callable[[Any], Any]]

#: The fastest public calls that do the same by hand: (source, target) → the call in words, and a function
#: from the two frameworks' modules to that call. The modules are handed in: frameworks stay in their rooms.
RAW: dict[tuple[str, str], tuple[str, Make]] = {
    ("numpy", "torch"): ("torch.from_numpy(x)", lambda _, torch: torch.from_numpy),
    ("numpy", "jax"): ("jax.dlpack.from_dlpack(x)", lambda _, jax: jax.dlpack.from_dlpack),
    ("numpy", "tensorflow"): ("tf…from_dlpack(x.__dlpack__())", _capsule_to_tensorflow),
    ("numpy", "cupy"): ("cupy.asarray(x)", lambda _, cupy: cupy.asarray),
    ("numpy", "pyclesperanto"): ("pyclesperanto.push(x)", lambda _, cle: cle.push),
    ("torch", "numpy"): ("x.numpy()", _torch_to_numpy),
    ("torch", "jax"): ("jax.dlpack.from_dlpack(x)", lambda _, jax: jax.dlpack.from_dlpack),
    ("torch", "tensorflow"): ("tf…from_dlpack(to_dlpack(x))", _torch_to_tensorflow),
    ("torch", "cupy"): ("cupy.from_dlpack(x)", lambda _, cupy: cupy.from_dlpack),
    ("jax", "numpy"): ("np.asarray(x)", lambda _, numpy: numpy.asarray),
    ("jax", "torch"): ("torch.from_dlpack(x)", lambda _, torch: torch.from_dlpack),
    ("jax", "tensorflow"): ("tf…from_dlpack(x.__dlpack__())", _capsule_to_tensorflow),
    ("jax", "cupy"): ("cupy.from_dlpack(x)", lambda _, cupy: cupy.from_dlpack),
    ("tensorflow", "numpy"): ("np.asarray(memoryview(x))", _buffer_to_numpy),
    ("tensorflow", "torch"): ("torch.from_dlpack(to_dlpack(x))", _tensorflow_to_torch),
    ("tensorflow", "jax"): ("jax.dlpack.from_dlpack(x)", lambda _, jax: jax.dlpack.from_dlpack),
    ("cupy", "numpy"): ("cupy.asnumpy(x)", lambda cupy, _: cupy.asnumpy),
    ("cupy", "torch"): ("torch.from_dlpack(x)", lambda _, torch: torch.from_dlpack),
    ("cupy", "jax"): ("jax.dlpack.from_dlpack(x)", lambda _, jax: jax.dlpack.from_dlpack),
    ("pyclesperanto", "numpy"): ("pyclesperanto.pull(x)", lambda cle, _: cle.pull),
}


#: The same for an array as NumPy allocates it, aligned to 16 bytes, which these frameworks have to copy.
RAW_OWN: dict[str, tuple[str, Make]] = {
    "jax": ("jnp.array(x)", lambda _, jax: lambda x: jax.numpy.array(x).block_until_ready()),
    "tensorflow": ("tf.constant(x)", lambda _, tensorflow: tensorflow.constant),
}


@dataclass(frozen=True)
class Case:
    """Two calls that do the same: by hand, and with arraybridge."""

    kind: str  # "conversion" or "decorator"
    name: str
    raw_call: str
    nbytes: int
    raw: Call
    ours: Call

    @property
    def key(self) -> str:
        return f"{self.kind} {self.name} {self.nbytes}"


def bench(
    frameworks: Annotated[
        str | None,
        typer.Option(
            help="Only these, e.g. torch,jax; otherwise all that are installed.", show_default=False
        ),
    ] = None,
    size: Annotated[str, typer.Option(help="Bytes of an array of float32: 4MiB, 64KiB.")] = "4MiB",
    rounds: Annotated[int, typer.Option(help="How often each call is timed, in turn.", min=3, max=1000)] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="Print machine-readable JSON alone.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the results there, for --compare.", show_default=False)
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(
            help="Compare with the results of an earlier run (--out or --json).", show_default=False
        ),
    ] = None,
    threshold: Annotated[
        float, typer.Option(help="With --compare: a call that takes this many times as long has regressed.")
    ] = 1.5,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the results: a .png, .svg or .pdf. Needs matplotlib.", show_default=False),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            help="CPU against GPU instead, at these numbers of elements (or bytes): 1000,1e6,64MiB.",
            show_default=False,
        ),
    ] = None,
    functions: Annotated[
        str | None,
        typer.Option(
            help="With --sizes: of elementwise, reduction, matmul, fft, filter, or your own MODULE:NAME.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Time arraybridge against the frameworks' own calls.

    Conversions are compared with the fastest public call that does the same.
    Decorators are compared with the plain call of the function.
    All are timed in turn, so that what else the machine does hits all alike.
    With --compare the exit code is 1 when a call has regressed.

    With --sizes functions run on the CPU and on the GPU, their transfers not counted.
    A table, and with --plot a picture, show from which size on the GPU is the faster.

    Examples:
    [bold]arraybridge bench --frameworks torch,jax[/bold]

    [bold]arraybridge bench --out before.json[/bold]

    [bold]arraybridge bench --compare before.json --threshold 1.3[/bold]

    [bold]arraybridge bench --sizes 1e3,1e5,1e7 --functions fft,matmul --plot sizes.png[/bold]
    """
    if sizes is not None:
        if frameworks is not None or compare is not None:
            raise typer.BadParameter("goes without --frameworks and --compare", param_hint="--sizes")
        bench_sizes(sizes, functions, rounds, as_json, out, plot)
        return
    if functions is not None:
        raise typer.BadParameter("goes with --sizes", param_hint="--functions")
    nbytes = output.size_in_bytes(size)
    if not 1 < threshold < 1e6:
        raise typer.BadParameter(f"{threshold} must be over 1", param_hint="--threshold")
    output.writable(out, "--out")
    output.plot_file(plot, "--plot")
    # Before the measuring, which takes a while: a damaged file is known at once.
    before = None if compare is None else load_results(compare)
    names = output.chosen_frameworks(frameworks)
    output.check_fits(nbytes, len(names) + 3)
    with output.stdout_is_for_json(as_json):
        cases, left_out = make_cases(names, nbytes)
        with output.progress() as bar:
            result = measure(cases, rounds, bar)
    result["left_out"] = left_out
    if before is not None:
        result["compared"] = compare_results(result, before, threshold)
    if out is not None:
        with output.rewrite(out, "--out"):
            out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if plot is not None:
        with output.rewrite(plot, "--plot"):
            _plot(result, plot)
    if as_json:
        output.print_json(result)
    else:
        _print(result)
    raise typer.Exit(1 if result.get("compared", {}).get("regressions") else 0)


# -- cases -------------------------------------------------------------------------------------------


def make_cases(names: list[str], nbytes: int) -> tuple[list[Case], dict[str, str]]:
    """What can be timed here, and what is left out with its reason."""
    host = np.arange(max(1, nbytes // 4), dtype=np.float32)
    arrays: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name in output.safest_first(names):
        try:
            with output.quiet():
                arrays[name] = arraybridge.convert_memory(host, name, copy=True)
        except MemoryConversionError as error:
            left_out[name] = str(error)
    cases = []
    for (source, target), (words, make) in RAW.items():
        if source in arrays and target in arrays:
            case = _conversion(source, target, words, make, arrays)
            if case is not None:
                cases.append(case)
    if "numpy" in arrays:
        own = arrays | {"numpy": output.as_numpy_allocates(host)}
        for target, (words, make) in RAW_OWN.items():
            if target in arrays:
                case = _conversion("numpy", target, words, make, own)
                cases += [] if case is None else [replace(case, name=f"numpy's own → {target}")]
    cases += [_decorator(name, arrays[name], host) for name in names if name in arrays]
    return cases, left_out


def _module(name: str, array: Any) -> Any:
    """The module of a framework, which its array has already loaded."""
    if name != "pyclesperanto":
        return importlib.import_module(name)
    chosen = type(array).__module__.partition(".")[0]
    return sys.modules.get(chosen.removesuffix("_opencl").removesuffix("_cuda").removesuffix("_metal"))


def _conversion(
    source: str,
    target: str,
    words: str,
    make: Callable[[Any, Any], Callable[[Any], Any]],
    arrays: Mapping[str, Any],
) -> Case | None:
    x = arrays[source]
    if target == "cupy" and source != "numpy":
        try:
            x = arraybridge.convert_memory(x, source, gpu_id=0)  # what CuPy takes by DLPack lies on a card
        except MemoryConversionError:
            return None
    raw = make(_module(source, arrays[source]), _module(target, arrays[target]))
    convert = arraybridge.convert_memory
    return Case(
        "conversion",
        f"{source} → {target}",
        words,
        arrays["numpy"].nbytes if "numpy" in arrays else x.nbytes,
        lambda: raw(x),
        lambda: convert(x, target),
    )


def _nothing(x: Any) -> Any:
    return x


def _decorator(name: str, x: Any, host: np.ndarray) -> Case:
    # A function that does nothing: what remains is what the decorator costs.
    decorated = arraybridge.framework(name).decorator(_nothing)
    return Case("decorator", f"@{name}", "f(x)", host.nbytes, lambda: _nothing(x), lambda: decorated(x))


# -- timing ------------------------------------------------------------------------------------------


def _batch_ns(call: Call, count: int) -> float:
    """Nanoseconds a call over ``count`` calls, with the garbage collector held off."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        started = time.perf_counter_ns()
        for _ in range(count):
            call()
        return (time.perf_counter_ns() - started) / count
    finally:
        if collecting:
            gc.enable()


def in_turn(calls: list[Call], rounds: int, step: Callable[[], None] = lambda: None) -> list[list[float]]:
    """Nanoseconds a call, a list of ``rounds`` samples for each, timed one after the other in every round."""
    counts = []
    for call in calls:
        call()  # the first call of a pair builds its plan
        call()
        counts.append(max(1, min(100_000, int(_BATCH_NS / max(1.0, _batch_ns(call, 3))))))
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, count, own in zip(calls, counts, samples, strict=True):
            own.append(_batch_ns(call, count))
        step()
    return samples


def measure(cases: list[Case], rounds: int, bar: Progress) -> Json:
    """Time every case; nanoseconds a call."""
    task = bar.add_task("timing", total=len(cases) * rounds)
    rows = []
    for case in cases:
        bar.update(task, description=case.name)
        raw, ours = in_turn([case.raw, case.ours], rounds, lambda: bar.advance(task))
        rows.append(
            {
                "kind": case.kind,
                "name": case.name,
                "raw_call": case.raw_call,
                "nbytes": case.nbytes,
                "raw_ns": round(statistics.median(raw), 1),
                "raw_min_ns": round(min(raw), 1),
                "ours_ns": round(statistics.median(ours), 1),
                "ours_min_ns": round(min(ours), 1),
                "over_ns": round(statistics.median(b - a for a, b in zip(raw, ours, strict=True)), 1),
            }
        )
    machine = {"system": f"{platform.system()} {platform.machine()}", "cores": os.cpu_count()}
    return {
        "format": FORMAT,
        "arraybridge": arraybridge.__version__,
        "python": platform.python_version(),
        "machine": machine,
        "rounds": rounds,
        "rows": rows,
    }


# -- comparing ---------------------------------------------------------------------------------------


def load_results(path: Path) -> Json:
    """The results of an earlier run.

    Raises:
        typer.BadParameter: the file can't be read, or holds something else.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise typer.BadParameter(
            f"{path} can't be read: {error.strerror or error}", param_hint="--compare"
        ) from None
    except ValueError as error:
        raise typer.BadParameter(
            f"{path} is damaged, or no JSON: {error}. Write a new one with --out.", param_hint="--compare"
        ) from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise typer.BadParameter(
            f"{path} holds no results of arraybridge bench ({FORMAT}). Write them with --out.",
            param_hint="--compare",
        )
    rows = document.get("rows")
    whole = isinstance(rows, list) and all(
        isinstance(row, dict)
        and all(isinstance(row.get(key), str) for key in ("kind", "name"))
        and _positive(row.get("ours_min_ns"))
        and _positive(row.get("nbytes"))
        for row in rows
    )
    if not whole:
        raise typer.BadParameter(
            f"{path} is damaged: it has no complete list of rows. Write a new one with --out.",
            param_hint="--compare",
        )
    return document


def _positive(value: object) -> bool:
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    )


def _key(row: Json) -> str:
    return f"{row['kind']} {row['name']} {row['nbytes']}"


def compare_results(now: Json, before: Json, threshold: float) -> Json:
    """Each row's time over that of the earlier run, by their quickest rounds.

    The quickest round is the one that the machine disturbed least.
    """
    old = {_key(row): row for row in before["rows"]}
    ratios: dict[str, float] = {}
    for row in now["rows"]:
        if _key(row) in old:
            row["before_min_ns"] = old[_key(row)]["ours_min_ns"]
            row["ratio"] = ratios[_key(row)] = round(row["ours_min_ns"] / row["before_min_ns"], 3)
    return {
        "threshold": threshold,
        "regressions": [key for key, ratio in ratios.items() if ratio > threshold],
        "new": [_key(row) for row in now["rows"] if _key(row) not in old],
        "gone": [key for key in old if key not in ratios],
        "other_machine": before.get("machine") != now["machine"],
    }


# -- telling -----------------------------------------------------------------------------------------


def _print(result: Json) -> None:
    console = output.console()
    compared = result.get("compared")
    columns = ["what", "by hand", "raw", "arraybridge", "over"]
    if compared:
        columns += ["before", "ratio"]
    rows = []
    for row in result["rows"]:
        raw, ours, over = (format_seconds(row[key] / 1e9) for key in ("raw_ns", "ours_ns", "over_ns"))
        cells = [row["name"], escape(row["raw_call"]), raw, ours, over]
        if compared and "ratio" in row:
            regressed = _key(row) in compared["regressions"]
            colour = "red" if regressed else "green"
            cells += [format_seconds(row["before_min_ns"] / 1e9), f"[{colour}]{row['ratio']:.2f}[/{colour}]"]
        elif compared:
            cells += ["", "new"]
        rows.append(cells)
    if not rows:
        console.print("Nothing to time: pick two frameworks or more, e.g. --frameworks numpy,torch.")
        return
    sizes = ", ".join(sorted({format_bytes(row["nbytes"]) for row in result["rows"]}))
    console.print(f"float32, {sizes}; medians of {result['rounds']} rounds\n")
    output.show(console, columns, rows, tuple(columns[2:]))
    if any("numpy's own" in row["name"] for row in result["rows"]):
        console.print("numpy's own: as NumPy allocates arrays, aligned to 16 bytes; the others are to 64.")
    for name, reason in result["left_out"].items():
        console.print(f"[yellow]{name} left out:[/yellow] {escape(reason)}")
    if not compared:
        return
    if compared["other_machine"]:
        console.print("[yellow]The earlier run was made on another machine; the ratios tell little.[/yellow]")
    if compared["gone"]:
        console.print(f"{len(compared['gone'])} calls of the earlier run were not timed now.", style="dim")
    worse = compared["regressions"]
    if worse:
        console.print(
            f"[red]{len(worse)} past the threshold of {compared['threshold']:g}: {', '.join(worse)}[/red]"
        )
    else:
        console.print(
            f"[green]No call takes more than {compared['threshold']:g} times as long as before.[/green]"
        )


def _plot(result: Json, path: Path) -> None:
    """Two bars for each row, by hand and with arraybridge, on a logarithmic axis."""
    figures = importlib.import_module("matplotlib.figure")
    rows = result["rows"]
    figure = figures.Figure(figsize=(8, 1.2 + 0.42 * max(1, len(rows))), layout="constrained")
    panel = figure.subplots()
    for place, key, label, colour in (
        (-0.2, "raw_ns", "by hand", "#9aa5b1"),
        (0.2, "ours_ns", "arraybridge", "#1f77b4"),
    ):
        bars = panel.barh(
            [i + place for i in range(len(rows))],
            [row[key] / 1e3 for row in rows],
            0.38,
            label=label,
            color=colour,
        )
        panel.bar_label(bars, [format_seconds(row[key] / 1e9) for row in rows], fontsize=7, padding=2)
    panel.set_yticks(range(len(rows)), [row["name"] for row in rows])
    panel.invert_yaxis()
    panel.set_xscale("log")
    low, high = panel.get_xlim()
    panel.set_xlim(low, high * 3)  # room for the labels
    ticks = importlib.import_module("matplotlib.ticker")
    panel.xaxis.set_major_formatter(ticks.FuncFormatter(lambda us, _: format_seconds(us / 1e6)))
    panel.xaxis.set_minor_formatter(ticks.NullFormatter())
    panel.set_xlabel("time a call")
    panel.margins(y=0.01)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="x", alpha=0.3)
    panel.set_axisbelow(True)
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    figure.savefig(path, dpi=140)
