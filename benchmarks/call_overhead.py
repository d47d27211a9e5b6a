"""Compare each call signature with equivalent plain calls of the frameworks, at 16 elements.

Run it from the root of the checkout, as described in `benchmarks/README.md`.

    python -m benchmarks.call_overhead                       # everything
    python -m benchmarks.call_overhead --peer FOLDER         # arraybridge==0.5.2, installed there if missing
    python -m benchmarks.call_overhead --without peer
    python -m benchmarks.call_overhead --section producers   # only unknown DLPack producers

The unit is the call of an empty Python function with one argument, measured in the same run, which makes the
results of two machines comparable. Cases that do not name a pair convert from NumPy to PyTorch.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a script rather than as a module
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.conversion import DISTRIBUTIONS, peer_folder  # noqa: E402
from benchmarks.timing import aligned, batch_ns, calls_per_batch, machine, pyplot, versions  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
ELEMENTS = 16
#: Nanoseconds per batch. Short batches are rarely interrupted.
BATCH = 500_000
#: How many times as long as ``from_dlpack`` a conversion of an unknown producer may take.
PRODUCER_RATIO = 1.5
#: Sizes in bytes of the unaligned arrays that are converted to JAX.
INTO_JAX = (64, 1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 26)

Json = dict[str, Any]
Timed = Callable[[], object]
console = Console(width=110)


@dataclass(frozen=True)
class Case:
    """A call of arraybridge, the equivalent plain calls, and the largest allowed difference in units."""

    ours: Timed
    plain: Timed
    most: float


def unaligned(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a copy that starts 16 bytes past a multiple of 64, as memory from NumPy often does."""
    memory = aligned((x.size + 16,), x.dtype.name)[16 // x.itemsize :][: x.size].reshape(x.shape)
    memory[...] = x
    return memory


def empty(x: object) -> None:
    """Do nothing; the time of this call is the unit."""


def conversions(ab: Any) -> dict[str, Case]:
    """Return the cases of `convert_memory`, by name."""
    import jax
    import jax.numpy as jnp
    import tensorflow as tf
    import torch

    convert, from_numpy, tensor = ab.convert_memory, torch.from_numpy, tf.convert_to_tensor
    x, double = aligned((ELEMENTS,)), aligned((ELEMENTS,), "float64")
    reverse, big, odd = x[::-1], x.astype(">f4"), unaligned(x)
    square, turned = unaligned(x.reshape(4, 4)).T, x.reshape(4, 4).T
    locked = aligned((ELEMENTS,))
    locked.flags.writeable = False
    graph = torch.ones(ELEMENTS, requires_grad=True)
    brain = torch.ones(ELEMENTS, dtype=torch.bfloat16)
    tree = {"a": x, "b": [aligned((ELEMENTS,)), aligned((ELEMENTS,))]}
    small = torch.float32
    ones, constant = jax.block_until_ready(jnp.ones(ELEMENTS)), tf.ones(ELEMENTS)
    return {
        "plain call": Case(lambda: convert(x, "torch"), lambda: from_numpy(x), 20),
        "short form to_torch": Case(lambda: ab.to_torch(x), lambda: from_numpy(x), 25),
        "source declared": Case(lambda: convert(x, "numpy", "torch"), lambda: from_numpy(x), 40),
        "source declared by keyword": Case(
            lambda: convert(x, source_type="numpy", target_type="torch"), lambda: from_numpy(x), 40
        ),
        'device="cpu"': Case(lambda: convert(x, "torch", device="cpu"), lambda: from_numpy(x), 40),
        "dtype= of the source": Case(lambda: convert(x, "torch", dtype="float32"), lambda: from_numpy(x), 40),
        "copy=False": Case(lambda: convert(x, "torch", copy=False), lambda: from_numpy(x), 40),
        'grad="detach", torch to NumPy': Case(
            lambda: convert(graph, "numpy", grad="detach"), lambda: graph.detach().numpy(), 40
        ),
        "bfloat16, torch to JAX": Case(lambda: convert(brain, "jax"), lambda: jnp.from_dlpack(brain), 40),
        "copy=True": Case(lambda: convert(x, "torch", copy=True), lambda: from_numpy(x.copy()), 80),
        "a cast": Case(
            lambda: convert(double, "torch", dtype="float32"), lambda: from_numpy(double).to(small), 80
        ),
        "reversed": Case(lambda: convert(reverse, "torch"), lambda: from_numpy(reverse.copy()), 80),
        "read-only": Case(lambda: convert(locked, "torch"), lambda: from_numpy(locked.copy()), 80),
        "big-endian": Case(lambda: convert(big, "torch"), lambda: from_numpy(big.astype("<f4")), 80),
        "transposed": Case(lambda: convert(turned, "torch"), lambda: from_numpy(turned), 40),
        "copy=True, JAX to torch": Case(
            lambda: convert(ones, "torch", copy=True), lambda: torch.from_dlpack(ones).clone(), 80
        ),
        "copy=True, TensorFlow to NumPy": Case(
            lambda: convert(constant, "numpy", copy=True), lambda: np.array(memoryview(constant)), 80
        ),
        "unaligned into JAX": Case(
            lambda: convert(odd, "jax"), lambda: jnp.asarray(odd).block_until_ready(), 0
        ),
        "unaligned into TensorFlow": Case(lambda: convert(odd, "tensorflow"), lambda: tensor(odd), 20),
        "transposed into TensorFlow": Case(lambda: convert(square, "tensorflow"), lambda: tensor(square), 20),
        "convert_tree of three": Case(
            lambda: ab.convert_tree(tree, "torch"),
            lambda: {"a": from_numpy(tree["a"]), "b": [from_numpy(one) for one in tree["b"]]},
            150,
        ),
    }


def decorated(ab: Any) -> dict[str, Case]:
    """Return the cases of a decorated function that returns its argument, by name."""
    import torch

    from_numpy = torch.from_numpy
    x, y, z = aligned((ELEMENTS,)), aligned((ELEMENTS,)), aligned((ELEMENTS,))
    tree = {"a": x, "b": [y, z]}

    def body(value: Any) -> Any:
        return value

    def plain() -> Any:
        return body(from_numpy(x)).numpy()

    def plain_tree() -> Any:
        result = body({"a": from_numpy(x), "b": [from_numpy(y), from_numpy(z)]})
        return {"a": result["a"].numpy(), "b": [one.numpy() for one in result["b"]]}

    def case(most: float, **options: Any) -> Case:
        fn = ab.torch(**{"output_type": "numpy", **options})(body)
        return Case(lambda: fn(x), plain, most)

    decorated_tree = ab.torch(output_type="numpy")(body)
    return {
        "decorated, NumPy in and out": case(50),
        'decorated, output_type="input"': case(50, output_type="input"),
        "decorated, strict": case(70, strict=True, input_type="numpy"),
        "decorated, recovery": case(70, oom_recovery=True),
        "decorated, split": case(100, oom_recovery="split"),
        'decorated, device="cpu"': case(100, device="cpu"),
        "decorated, a tree of three": Case(lambda: decorated_tree(tree), plain_tree, 200),
    }


def peers(library: Any) -> dict[str, Timed]:
    """Return the peer's calls for some of the cases, always with a declared source. Some may raise."""
    import jax  # noqa: F401  # also imported in the other process
    import torch

    convert, host = library.convert_memory, library.HOST
    x, odd = aligned((ELEMENTS,)), unaligned(aligned((ELEMENTS,)))
    brain = torch.ones(ELEMENTS, dtype=torch.bfloat16)

    def body(value: Any) -> Any:
        return value

    fn = library.torch(body)
    return {
        "source declared": lambda: convert(x, "numpy", "torch", host),
        "reversed": lambda: convert(x[::-1], "numpy", "torch", host),
        "bfloat16, torch to JAX": lambda: convert(brain, "torch", "jax", host),
        "unaligned into JAX": lambda: convert(odd, "numpy", "jax", host),
        "unaligned into TensorFlow": lambda: convert(odd, "numpy", "tensorflow", host),
        "decorated, NumPy in and out": lambda: fn(torch.from_numpy(x)),
    }


def into_jax(ab: Any, rounds: int) -> Json:
    """Compare conversions of unaligned NumPy arrays to JAX with ``jnp.asarray``, by size in bytes."""
    import jax.numpy as jnp

    found = {}
    for size in INTO_JAX:
        x = unaligned(np.arange(size // 4, dtype=np.float32))
        calls: dict[str, Timed] = {
            "ours": lambda x=x: ab.convert_memory(x, "jax"),  # type: ignore[misc]
            "jnp.asarray": lambda x=x: jnp.asarray(x).block_until_ready(),  # type: ignore[misc]
        }
        counts = {name: calls_per_batch(call, BATCH) for name, call in calls.items()}
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(rounds):
            for name in list(calls)[:: 1 if turn % 2 else -1]:
                taken[name].append(batch_ns(calls[name], counts[name]))
        found[str(size)] = {name: round(min(values), 1) for name, values in taken.items()}
    return found


class Producer:
    """An array of a library that arraybridge does not know, which exports another array with DLPack."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.array.__dlpack_device__()
        return device

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


def producers(ab: Any, rounds: int) -> Json:
    """Compare conversions of unknown DLPack producers with the target's own ``from_dlpack``."""
    import jax.numpy as jnp
    import torch

    x, brain = aligned((ELEMENTS,)), torch.ones(ELEMENTS, dtype=torch.bfloat16)
    cases = {
        "over NumPy, to PyTorch": (x, "torch", torch.from_dlpack),
        "over PyTorch, to PyTorch": (torch.ones(ELEMENTS), "torch", torch.from_dlpack),
        "over PyTorch, bfloat16, to PyTorch": (brain, "torch", torch.from_dlpack),
        "over NumPy, transposed, to PyTorch": (x.reshape(4, 4).T, "torch", torch.from_dlpack),
        "over NumPy, to JAX": (x, "jax", jnp.from_dlpack),
    }
    results, targets = {}, []
    for name, (array, target, from_dlpack) in cases.items():
        cls = type("Library", (Producer,), {})  # plans are cached per class
        calls: dict[str, Timed] = {
            "raw": functools.partial(from_dlpack, cls(array)),
            "ours": functools.partial(ab.convert_memory, cls(array), target),
        }
        counts = {who: calls_per_batch(call, BATCH) for who, call in calls.items()}
        taken: dict[str, list[float]] = {who: [] for who in calls}
        for turn in range(rounds):
            for who in list(calls)[:: 1 if turn % 2 else -1]:
                taken[who].append(batch_ns(calls[who], counts[who]))
        raw, ours = min(taken["raw"]), min(taken["ours"])
        ratio = round(ours / raw, 2)
        results[name] = {"raw_ns": round(raw, 1), "ours_ns": round(ours, 1), "ratio": ratio}
        claim = f"unknown DLPack producer {name}, against from_dlpack"
        row = {"claim": claim, "target": f"<= {PRODUCER_RATIO}", "measured": ratio, "unit": "x"}
        targets.append({**row, "met": ratio <= PRODUCER_RATIO})
    about = {"machine": machine(), "versions": versions("arraybridge", *DISTRIBUTIONS)}
    return {"results": results, "targets": targets, **about}


def worker(connection: Connection, peer: str, rounds: int) -> None:
    """Measure one library in a separate process, because both have the same import name."""
    if peer:
        sys.path.insert(0, peer)
    library: Any = importlib.import_module("arraybridge")
    if peer:
        calls: dict[str, dict[str, Timed]] = {}
        for name, call in peers(library).items():
            try:
                call()
            except Exception as error:  # noqa: BLE001  # an unsupported case is a result
                connection.send((name, f"{type(error).__name__}"))
            else:
                calls[name] = {"ours": call}
    else:
        cases = {**conversions(library), **decorated(library)}
        calls = {name: {"ours": case.ours, "plain": case.plain} for name, case in cases.items()}
    unit_call = functools.partial(empty, None)
    unit_calls = calls_per_batch(unit_call, BATCH)
    counts = {
        name: {who: calls_per_batch(call, BATCH) for who, call in of.items()} for name, of in calls.items()
    }
    # Each round times all cases, so that other work affects a few rounds of each case, not all rounds of one.
    # Every other pair of rounds is reversed, because Python specializes code for the previous case.
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name, of in list(calls.items())[:: 1 if turn % 4 < 2 else -1]:
            whos = list(of)[:: 1 if turn % 2 else -1]
            taken = {who: batch_ns(of[who], counts[name][who]) for who in whos}
            rows[name].append({"unit": batch_ns(unit_call, unit_calls), **taken})
    for name, found in rows.items():
        connection.send((name, found))
    connection.send((None, None if peer else into_jax(library, rounds)))


def measure(peer: str, rounds: int) -> tuple[dict[str, Any], Json | None]:
    """Return the batch times of each case or the name of its exception, and the times to JAX by size."""
    context = multiprocessing.get_context("spawn")
    pipe, child = context.Pipe()
    process = context.Process(target=worker, args=(child, peer, rounds), daemon=True)
    process.start()
    child.close()
    found: dict[str, Any] = {}
    try:
        while (answer := pipe.recv())[0] is not None:
            found[answer[0]] = answer[1]
    except EOFError:
        raise SystemExit("The measured process ended early. See its error message above.") from None
    process.join(30)
    return found, answer[1]


def limits() -> dict[str, float]:
    """Return the largest allowed difference of each case from the plain calls, in units."""
    library: Any = importlib.import_module("arraybridge")
    return {name: case.most for name, case in {**conversions(library), **decorated(library)}.items()}


def summarize(ours: dict[str, Any], peer: dict[str, Any], most: dict[str, float]) -> Json:
    """Return the fastest batch of each case, its difference from the plain calls, and the targets."""
    unit = min(one["unit"] for rows in ours.values() for one in rows)
    results = {}
    for name, rows in ours.items():
        call, plain = (min(one[who] for one in rows) for who in ("ours", "plain"))
        results[name] = {
            "plain_ns": round(plain, 1),
            "ours_ns": round(call, 1),
            "over_plain_units": round((call - plain) / unit, 1),
            "at_most_units": most[name],
        }
        peer_rows = peer.get(name)
        if isinstance(peer_rows, str):
            results[name]["peer"] = peer_rows
        elif peer_rows is not None:
            results[name]["peer_ns"] = round(min(one["ours"] for one in peer_rows), 1)
    targets = [
        {
            "claim": name,
            "target": f"<= {row['at_most_units']:.0f}",
            "measured": row["over_plain_units"],
            "unit": "units",
            "met": row["over_plain_units"] <= row["at_most_units"],
        }
        for name, row in results.items()
    ]
    return {"unit_ns": round(unit, 1), "results": results, "targets": targets}


def show(cases: Json, sizes: Json) -> None:
    table = Table(title=f"Difference from the plain calls, in empty calls of {cases['unit_ns']:.0f} ns")
    for column in ("", "plain, µs", "ours, µs", "over, units", "at most", "verdict", "peer, µs"):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in cases["results"].items():
        met = "met" if row["over_plain_units"] <= row["at_most_units"] else "MISSED"
        peer = f"{row['peer_ns'] / 1e3:.2f}" if "peer_ns" in row else row.get("peer", "")
        cells = (
            f"{row['plain_ns'] / 1e3:.2f}",
            f"{row['ours_ns'] / 1e3:.2f}",
            f"{row['over_plain_units']:.1f}",
        )
        table.add_row(name, *cells, f"{row['at_most_units']:.0f}", met, peer)
    console.print(table)
    for size, row in sizes.items():
        ratio = row["ours"] / row["jnp.asarray"]
        console.print(f"unaligned to JAX, {int(size):>9} bytes: {ratio:.2f} of jnp.asarray")


def plot(cases: Json, path: Path) -> None:
    """Draw a bar for each case, with its target."""
    plt = pyplot()

    results = cases["results"]
    names = list(results)
    over = [results[name]["over_plain_units"] for name in names]
    most = [results[name]["at_most_units"] for name in names]
    figure, axis = plt.subplots(figsize=(10, 8), layout="constrained")
    axis.barh(
        names, over, color=["#1f77b4" if a <= b else "#c44e52" for a, b in zip(over, most, strict=True)]
    )
    axis.plot(most, range(len(names)), "|", color="0.5", markersize=16, label="at most")
    axis.invert_yaxis()
    axis.tick_params(labelsize=11)
    axis.set_xlabel(
        f"difference from the plain calls, in empty Python calls of {cases['unit_ns']:.0f} ns", fontsize=12
    )
    axis.grid(axis="x", alpha=0.35)
    axis.set_axisbelow(True)
    axis.legend(fontsize=11)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the overhead of each call signature.")
    parser.add_argument("--rounds", type=int, default=50, help="rounds (at least 25 to publish)")
    default_peer = Path(tempfile.gettempdir()) / "arraybridge-peer"
    parser.add_argument("--peer", type=Path, default=default_peer, help="folder of arraybridge==0.5.2")
    parser.add_argument("--section", choices=("calls", "producers"), help="measure only this section")
    parser.add_argument("--without", choices=("peer",), help="skip this contender")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "call_overhead.json"
    report = json.loads(file.read_text()) if file.exists() else {}
    if arguments.section != "producers":
        ours, sizes = measure("", arguments.rounds)
        theirs = {}
        if arguments.without != "peer":
            theirs, _ = measure(peer_folder(arguments.peer), arguments.rounds)
        cases = summarize(ours, theirs, limits())
        show(cases, sizes or {})
        plot(cases, arguments.out / "call_overhead.png")
        about = {"machine": machine(), "versions": versions("arraybridge", *DISTRIBUTIONS)}
        report |= about | {"calls": cases, "into_jax_ns": sizes}
    if arguments.section != "calls":
        report["producers"] = producers(importlib.import_module("arraybridge"), arguments.rounds)
        for name, row in report["producers"]["results"].items():
            times = f"{row['raw_ns'] / 1e3:.2f} µs raw, {row['ours_ns'] / 1e3:.2f} µs ours"
            console.print(f"unknown producer {name}: {times}, {row['ratio']:.2f}×")
    file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
