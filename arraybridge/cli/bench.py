"""``arraybridge bench``: conversions against the native calls, decorators against the plain call."""

from __future__ import annotations

import os
import pkgutil
import platform
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
import typer
from rich.markup import escape

import arraybridge
from arraybridge import compare
from arraybridge.benchmarking.standard_functions import STANDARD
from arraybridge.cli import output
from arraybridge.errors import MemoryConversionError
from arraybridge.formatting import format_bytes, format_seconds

Json = dict[str, Any]
Call = Callable[[], object]

_ITEMSIZE = 4  # float32


# -- calls by hand -------------------------------------------------------------------------------------


def _dlpack(x: Any) -> Any:
    return x.__dlpack__()


@dataclass(frozen=True, slots=True)
class ByHand:
    """The fastest public call that converts by hand.

    Attributes:
        text: The call as a user writes it.
        take: The path of a function in the module of the target, or ``""``.
        give: The path of a function in the module of the source that is called before ``take``, ``""``, or a
            function of no framework.
    """

    text: str
    take: str = ""
    give: str | Callable[[Any], Any] = ""

    def call(self, source: Any, target: Any) -> Callable[[Any], Any]:
        """Return the call, from the modules of the two frameworks. Only their layer may import them."""
        give: Any = self.give
        if isinstance(give, str) and give:
            give = attrgetter(give)(source)
        take: Any = attrgetter(self.take)(target) if self.take else None
        if not give or not take:
            return cast("Callable[[Any], Any]", give or take)

        def call(x: Any) -> Any:
            return take(give(x))

        return call


# Sources, target, and the call.
_BY_HAND = (
    ("numpy", "torch", ByHand("torch.from_numpy(x)", "from_numpy")),
    ("jax cupy", "torch", ByHand("torch.from_dlpack(x)", "from_dlpack")),
    (
        "tensorflow",
        "torch",
        ByHand("from_dlpack(to_dlpack(x))", "from_dlpack", "experimental.dlpack.to_dlpack"),
    ),
    ("numpy torch tensorflow cupy", "jax", ByHand("jax.dlpack.from_dlpack(x)", "dlpack.from_dlpack")),
    (
        "numpy jax",
        "tensorflow",
        ByHand("from_dlpack(x.__dlpack__())", "experimental.dlpack.from_dlpack", _dlpack),
    ),
    (
        "torch",
        "tensorflow",
        ByHand("from_dlpack(to_dlpack(x))", "experimental.dlpack.from_dlpack", "utils.dlpack.to_dlpack"),
    ),
    ("numpy", "cupy", ByHand("cupy.asarray(x)", "asarray")),
    ("torch jax", "cupy", ByHand("cupy.from_dlpack(x)", "from_dlpack")),
    ("numpy", "pyclesperanto", ByHand("pyclesperanto.push(x)", "push")),
    ("torch", "numpy", ByHand("x.numpy()", give="Tensor.numpy")),
    ("jax", "numpy", ByHand("np.asarray(x)", "asarray")),
    ("tensorflow", "numpy", ByHand("np.asarray(memoryview(x))", "asarray", memoryview)),
    ("cupy", "numpy", ByHand("cupy.asnumpy(x)", give="asnumpy")),
    ("pyclesperanto", "numpy", ByHand("pyclesperanto.pull(x)", give="pull")),
)
_ORDER = ("numpy", "torch", "jax", "tensorflow", "cupy", "pyclesperanto")
_CALLS = {(source, target): call for sources, target, call in _BY_HAND for source in sources.split()}
#: (source, target) → the call by hand, in the order in which they are shown.
RAW = {(x, y): _CALLS[x, y] for x in _ORDER for y in _ORDER if (x, y) in _CALLS}


class Case(NamedTuple):
    """Two calls that are timed against each other.

    Attributes:
        name: What they do.
        text: The call by hand, as a user writes it.
        by_hand: That call.
        ours: The same with arraybridge.
    """

    name: str
    text: str
    by_hand: Call
    ours: Call


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
        return _compare_sizes(elements(sizes), named_functions(functions), result, as_json)
    nbytes = output.size_in_bytes(size)
    names = output.chosen_frameworks(frameworks)
    with output.stdout_is_for_json(as_json):
        cases, left_out = make_cases(names, nbytes)
        with output.progress() as bar:
            result["rows"] = [_row(case, rounds) for case in bar.track(cases, description="timing")]
    result |= {"nbytes": nbytes, "left_out": left_out}
    return output.print_json(result) if as_json else _print(result)


def _compare_sizes(
    counts: list[int], functions: dict[str, Callable[[Any], Any]], result: Json, as_json: bool
) -> None:
    """Time functions on the CPU and on the GPU, and print the result."""
    with output.stdout_is_for_json(as_json):
        comparison = compare(functions, sizes=counts, runs=result["rounds"])
    result["rows"] = comparison.as_dicts()
    result["note"] = comparison.note
    result["crossover"] = {name: comparison.crossover(name) for name in comparison.names()}
    if as_json:
        output.print_json(result)
        return
    text = f"float32, medians of {result['rounds']} rounds\n\n{comparison}"
    output.console().print(escape(text), soft_wrap=True)


# -- conversions and decorators ----------------------------------------------------------------------


def make_cases(names: list[str], nbytes: int) -> tuple[list[Case], dict[str, str]]:
    """What can be timed here, and what is left out with its reason."""
    host = np.arange(max(1, nbytes // _ITEMSIZE), dtype=np.float32)
    available, left_out = output.usable(names)
    arrays = {name: arraybridge.convert_memory(host, name, copy=True) for name in available}
    cases = []
    for source, target in RAW:
        if source in arrays and target in arrays:
            cases += _conversion(source, target, arrays)
    for name in available:
        # A function that does nothing: what remains is what the decorator costs.
        decorated = arraybridge.framework(name).decorator(_nothing)
        calls = (partial(_nothing, arrays[name]), partial(decorated, arrays[name]))
        cases.append(Case(f"@{name}", "f(x)", *calls))
    return cases, left_out


def _conversion(source: str, target: str, arrays: Mapping[str, Any]) -> list[Case]:
    """Return the case of a pair; none if it needs a GPU array that the source cannot make."""
    x = arrays[source]
    has_host = arraybridge.framework(target).has_host
    if not has_host and not arraybridge.framework(source).devices.has_only_host:
        try:
            x = arraybridge.convert_memory(x, source, gpu_id=0)  # CuPy imports only GPU memory through DLPack
        except MemoryConversionError:
            return []
    by_hand = RAW[source, target]
    raw = by_hand.call(output.module_of(source), output.module_of(target))
    ours = partial(arraybridge.convert_memory, x, target)
    return [Case(f"{source} → {target}", by_hand.text, partial(raw, x), ours)]


def _nothing(x: Any) -> Any:
    return x


def _row(case: Case, rounds: int) -> Json:
    """Both calls, by the medians of three turns, in which each has a third of its rounds."""
    timers = [output.timer(call) for call in (case.by_hand, case.ours)]
    turns = [[timer(-(-rounds // 3)) for timer in timers] for _ in range(3)]
    raw, ours = (statistics.median(column) for column in zip(*turns, strict=True))
    return {"name": case.name, "raw_call": case.text, "raw": raw, "ours": ours, "difference": ours - raw}


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
