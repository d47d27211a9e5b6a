"""``arraybridge bench``: conversions against the native calls, decorators against the plain call."""

from __future__ import annotations

import os
import pkgutil
import platform
import statistics
import sys
from collections.abc import Callable, Mapping
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.markup import escape

import arraybridge
from arraybridge import compare
from arraybridge.cli import output
from arraybridge.errors import MemoryConversionError
from arraybridge.measure.standard import STANDARD
from arraybridge.show import format_bytes, format_seconds

Json = dict[str, Any]
Call = Callable[[], object]
Make = Callable[[Any, Any], Callable[[Any], Any]]

_ITEMSIZE = 4  # float32


_give = methodcaller("__dlpack__")


def _chain(give: Callable[[Any], Any], take: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: take(give(x))


# The fastest public calls that do the same by hand: sources, target, the call in words, and a function from
# the two frameworks' modules to that call. The modules are handed in: frameworks stay in their rooms.
_BY_HAND: tuple[tuple[str, str, str, Make], ...] = (
    ("numpy", "torch", "torch.from_numpy(x)", lambda _, torch: torch.from_numpy),
    ("jax cupy", "torch", "torch.from_dlpack(x)", lambda _, torch: torch.from_dlpack),
    ("tensorflow", "torch", "from_dlpack(to_dlpack(x))",
        lambda tf, torch: _chain(tf.experimental.dlpack.to_dlpack, torch.from_dlpack)),
    ("numpy torch tensorflow cupy", "jax", "jax.dlpack.from_dlpack(x)",
        lambda _, jax: jax.dlpack.from_dlpack),
    ("numpy jax", "tensorflow", "from_dlpack(x.__dlpack__())",
        lambda _, tf: _chain(_give, tf.experimental.dlpack.from_dlpack)),
    ("torch", "tensorflow", "from_dlpack(to_dlpack(x))",
        lambda torch, tf: _chain(torch.utils.dlpack.to_dlpack, tf.experimental.dlpack.from_dlpack)),
    ("numpy", "cupy", "cupy.asarray(x)", lambda _, cupy: cupy.asarray),
    ("torch jax", "cupy", "cupy.from_dlpack(x)", lambda _, cupy: cupy.from_dlpack),
    ("numpy", "pyclesperanto", "pyclesperanto.push(x)", lambda _, cle: cle.push),
    ("torch", "numpy", "x.numpy()", lambda torch, _: torch.Tensor.numpy),
    ("jax", "numpy", "np.asarray(x)", lambda _, numpy: numpy.asarray),
    ("tensorflow", "numpy", "np.asarray(memoryview(x))", lambda _, np: _chain(memoryview, np.asarray)),
    ("cupy", "numpy", "cupy.asnumpy(x)", lambda cupy, _: cupy.asnumpy),
    ("pyclesperanto", "numpy", "pyclesperanto.pull(x)", lambda cle, _: cle.pull),
)  # fmt: skip
_ORDER = ("numpy", "torch", "jax", "tensorflow", "cupy", "pyclesperanto")
_CALLS = {(source, row[1]): row[2:] for row in _BY_HAND for source in row[0].split()}
#: (source, target) → the call by hand in words, and the function to it, in the order in which they are shown.
RAW = {(x, y): _CALLS[x, y] for x in _ORDER for y in _ORDER if (x, y) in _CALLS}

#: What is timed: its name, the call by hand in words, that call, and the same with arraybridge.
Case = tuple[str, str, Call, Call]


def bench(
    frameworks: output.Frameworks = None,
    size: Annotated[str, typer.Option(help="Bytes of an array of float32: 4MiB, 64KiB.")] = "4MiB",
    rounds: Annotated[int, typer.Option(help="How often each call is timed, in turn.", min=3, max=1000)] = 15,
    as_json: output.AsJson = False,
    sizes: Annotated[str | None, typer.Option(help="CPU against GPU, at sizes like 1000,1e6,64MiB.")] = None,
    functions: Annotated[str | None, typer.Option(help="With --sizes: fft,matmul, or MODULE:NAME.")] = None,
) -> None:
    """Time arraybridge against the frameworks' own calls.

    Conversions are compared with the fastest public call that does the same.
    Decorators are compared with the plain call of the function.
    All are timed in turn, so that what else the machine does hits all alike.

    With --sizes functions run on the CPU and on the GPU, their transfers not counted.
    A table shows from which size on the GPU is the faster.

    Examples:
    [bold]arraybridge bench --frameworks torch,jax[/bold]

    [bold]arraybridge bench --sizes 1e3,1e5,1e7 --functions fft,matmul[/bold]
    """
    result: Json = {
        "arraybridge": arraybridge.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "rounds": rounds,
    }
    if sizes is not None:
        counts, chosen = elements(sizes), named_functions(functions)
        with output.stdout_is_for_json(as_json):
            comparison = compare(chosen, sizes=counts, runs=rounds)
        result["rows"] = comparison.as_dicts()
        result["note"] = comparison.note
        result["crossover"] = {name: comparison.crossover(name) for name in comparison.names()}
        if as_json:
            return output.print_json(result)
        text = f"float32, medians of {rounds} rounds\n\n{comparison}"
        return output.console().print(escape(text), soft_wrap=True)
    nbytes = output.size_in_bytes(size)
    names = output.chosen_frameworks(frameworks)
    with output.stdout_is_for_json(as_json):
        cases, left_out = make_cases(names, nbytes)
        with output.progress() as bar:
            result["rows"] = [_row(case, rounds) for case in bar.track(cases, description="timing")]
    result |= {"nbytes": nbytes, "left_out": left_out}
    return output.print_json(result) if as_json else _print(result)


# -- conversions and decorators ----------------------------------------------------------------------


def make_cases(names: list[str], nbytes: int) -> tuple[list[Case], dict[str, str]]:
    """What can be timed here, and what is left out with its reason."""
    host = np.arange(max(1, nbytes // _ITEMSIZE), dtype=np.float32)
    available, left_out = output.usable(names)
    arrays = {name: arraybridge.convert_memory(host, name, copy=True) for name in available}
    cases = []
    for (source, target), (words, make) in RAW.items():
        if source in arrays and target in arrays:
            cases += _conversion(f"{source} → {target}", source, target, words, make, arrays)
    for name in available:
        # A function that does nothing: what remains is what the decorator costs.
        decorated = arraybridge.framework(name).decorator(_nothing)
        calls = (partial(_nothing, arrays[name]), partial(decorated, arrays[name]))
        cases.append((f"@{name}", "f(x)", *calls))
    return cases, left_out


def _conversion(
    name: str, source: str, target: str, words: str, make: Make, arrays: Mapping[str, Any]
) -> list[Case]:
    x = arrays[source]
    if target == "cupy" and source != "numpy":
        try:
            x = arraybridge.convert_memory(x, source, gpu_id=0)  # what CuPy takes by DLPack lies on a card
        except MemoryConversionError:
            return []
    raw, convert = make(output.module_of(source), output.module_of(target)), arraybridge.convert_memory
    return [(name, words, partial(raw, x), partial(convert, x, target))]


def _nothing(x: Any) -> Any:
    return x


def _row(case: Case, rounds: int) -> Json:
    """Both calls, by the medians of three turns, in which each has a third of its rounds."""
    name, words, *calls = case
    timers = [output.timer(call) for call in calls]
    turns = [[timer(-(-rounds // 3)) for timer in timers] for _ in range(3)]
    raw, ours = (statistics.median(column) for column in zip(*turns, strict=True))
    return {"name": name, "raw_call": words, "raw": raw, "ours": ours, "difference": ours - raw}


def _print(result: Json) -> None:
    console = output.console()
    columns = ("what", "by hand", "raw", "arraybridge", "difference")
    keys = ("raw", "ours", "difference")
    rows = [
        (row["name"], escape(row["raw_call"]), *(format_seconds(row[key]) for key in keys))
        for row in result["rows"]
    ]
    console.print(f"float32, {format_bytes(result['nbytes'])}; medians of {result['rounds']} rounds\n")
    output.show(console, columns, rows, columns[2:])
    if any(row["difference"] < 0 for row in result["rows"]):
        console.print("Below zero: arraybridge leaves out steps that the public call takes each time.")
    output.print_left_out(console, result["left_out"])


def elements(words: str) -> list[int]:
    """``"1000,1e6,4MiB"`` as numbers of elements, each once and in order; a size in bytes is of float32."""
    counts = set()
    for word in filter(None, (word.strip() for word in words.split(","))):
        try:
            count = float(word)
        except ValueError:
            count = output.size_in_bytes(word) / _ITEMSIZE
        if not 1 <= count < 1e15:  # also refuses nan
            raise typer.BadParameter(f"{word!r} is no number of elements", param_hint="--sizes")
        counts.add(int(count))
    if not counts:
        raise typer.BadParameter("names no size; write it like 1000,100000,4MiB", param_hint="--sizes")
    return sorted(counts)


def named_functions(words: str | None) -> dict[str, Callable[[Any], Any]]:
    """The functions of ``--functions fft,numpy:sort``: of the standard set, or ``MODULE:NAME``."""
    names = ",".join(STANDARD) if words is None else words
    chosen: dict[str, Callable[[Any], Any]] = {}
    for name in filter(None, (word.strip() for word in names.split(","))):
        chosen[name] = STANDARD[name] if name in STANDARD else _imported(name)
    return chosen


def _imported(word: str) -> Callable[[Any], Any]:
    sys.path.insert(0, str(Path.cwd()))  # a module beside the user
    try:
        function: Callable[[Any], Any] = pkgutil.resolve_name(word)
    except (ImportError, AttributeError, ValueError) as error:
        choices = f"there are {', '.join(STANDARD)}, or one of your own as MODULE:NAME"
        raise typer.BadParameter(f"{word!r}: {error}; {choices}", param_hint="--functions") from None
    if not callable(function):
        raise typer.BadParameter(f"{word!r} is no function", param_hint="--functions")
    return function
