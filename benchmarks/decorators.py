"""What a decorated function costs over the plain call when its arguments are where they should be.

Run it from the root of the checkout.

    python -m benchmarks.decorators                  # everything
    python -m benchmarks.decorators --peer FOLDER    # arraybridge==0.5.2 is there
    python -m benchmarks.decorators --without peer

Beside it stand `functools.wraps` around a call, which is the least that a wrapper in Python can do, and the
peer's decorators, which convert nothing but the dtype of the result.
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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a script rather than as a module
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.timing import Summary, batch_ns, calls_per_batch, machine, pyplot, versions  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
FRAMEWORKS = ("numpy", "torch", "jax", "tensorflow", "pyclesperanto")
LEAVES = (1, 3, 10, 30, 100, 300, 1000)
#: Microseconds over the plain call, with one array argument.
TARGET = 3.0
#: Of these options the target is not asked: recovery has one of its own, on top of the bare decorator.
RECOVERY = "torch, oom_recovery=True"
RECOVERY_TARGET = 1.0

Json = dict[str, Any]
console = Console(width=110)


def plain(x: Any) -> Any:
    return x


def wrapped(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The least that a wrapper in Python does."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return wrapper


def arrays() -> dict[str, Any]:
    """A small array of each framework, where its decorator wants it."""
    import jax.numpy as jnp
    import tensorflow as tf
    import torch

    import arraybridge

    x = np.ones((4, 4), np.float32)
    return {
        "numpy": x,
        "torch": torch.ones(4, 4),
        "jax": jnp.ones((4, 4)),
        "tensorflow": tf.ones((4, 4)),
        "pyclesperanto": arraybridge.convert_memory(x, "pyclesperanto"),
    }


def our_cases() -> dict[str, tuple[Callable[..., Any], Any]]:
    """A function and its argument, by what is measured."""
    import arraybridge

    held = arrays()
    cases: dict[str, tuple[Callable[..., Any], Any]] = {
        "plain call": (plain, held["torch"]),
        "functools.wraps": (wrapped(plain), held["torch"]),
    }
    for name in FRAMEWORKS:
        cases[name] = (arraybridge.framework(name).decorator(plain), held[name])
    torch_decorator: Any = arraybridge.torch
    for label, options in (
        ("device='cpu'", {"device": "cpu"}),
        ("output_type='input'", {"output_type": "input"}),
        ("oom_recovery=True", {"oom_recovery": True}),
    ):
        cases[f"torch, {label}"] = (torch_decorator(**options)(plain), held["torch"])
    other = held["torch"].clone()
    gives_back = torch_decorator(output_type="input")
    cases["torch, output_type='input', another array"] = (gives_back(lambda x: other), held["torch"])
    for count in LEAVES:
        cases[f"list of {count}"] = (arraybridge.torch(plain), [held["torch"]] * count)
    return cases


def peer_cases() -> dict[str, tuple[Callable[..., Any], Any]]:
    """The peer's decorators with NumPy and torch, for the others differ in nothing."""
    import torch

    library: Any = importlib.import_module("arraybridge")
    x, tensor = np.ones((4, 4), np.float32), torch.ones(4, 4)
    return {
        "plain call": (plain, tensor),
        "peer, numpy": (library.numpy(plain), x),
        "peer, torch": (library.torch(plain), tensor),
    }


def worker(connection: Connection, peer: str) -> None:
    """Serve timings of one library until told to stop; two packages of one name cannot share a process."""
    if peer:
        sys.path.insert(0, peer)
    cases = peer_cases() if peer else our_cases()
    calls = {}
    for name, (fn, x) in cases.items():
        call = functools.partial(fn, x)
        calls[name] = (call, calls_per_batch(call))
    connection.send(list(cases))
    while (name := connection.recv()) is not None:
        connection.send(batch_ns(*calls[name]))


def measure(peer: str, rounds: int) -> Json:
    """Nanoseconds a call, and over the plain call of the same round, by what is measured."""
    context = multiprocessing.get_context("spawn")
    pipe, child = context.Pipe()
    process = context.Process(target=worker, args=(child, peer), daemon=True)
    process.start()
    child.close()  # so that the child's death ends a read here
    try:
        names = pipe.recv()
    except EOFError:
        raise SystemExit("The process that was to be timed ended early; its own message is above.") from None
    samples: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            pipe.send(name)
            samples[name].append(pipe.recv())
    pipe.send(None)
    process.join()
    base = samples["plain call"]
    return {
        name: Summary.of(taken).as_dict()
        | {"over_plain_us": Summary.of(t - b for t, b in zip(taken, base, strict=True)).median / 1e3}
        for name, taken in samples.items()
    }


def targets(rows: Json) -> list[tuple[str, float, float]]:
    """What is asked, what was measured, and the most that it may be, in microseconds."""
    one = [name for name in rows if name in FRAMEWORKS or (name.startswith("torch,") and name != RECOVERY)]
    found = [(f"{name}, over the plain call", rows[name]["over_plain_us"], TARGET) for name in one]
    recovery = rows[RECOVERY]["over_plain_us"] - rows["torch"]["over_plain_us"]
    found.append((f"{RECOVERY}, over the bare decorator", recovery, RECOVERY_TARGET))
    few, many = (rows[f"list of {n}"]["over_plain_us"] / n for n in (100, 1000))
    found.append(("list of 1000 arrays, a leaf", many, 1.5 * few))
    return found


def show(rows: Json) -> None:
    table = Table(title="A function that returns its argument, arrays in place")
    for column in ("", "median, µs", "over the plain call, µs"):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in rows.items():
        table.add_row(name, f"{row['median_ns'] / 1e3:.2f}", f"{row['over_plain_us']:.2f}")
    console.print(table)
    for what, measured, most in targets(rows):
        verdict = "met" if measured <= most else "MISSED"
        console.print(f"{verdict:>6}  {what}: {measured:.2f} µs (at most {most:.2f})")


def plot(rows: Json, path: Path) -> None:
    """One bar for each decorator, and the growth with the number of leaves."""
    plt = pyplot()

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 9), layout="constrained")
    names = [name for name in rows if name != "plain call" and not name.startswith("list")]
    colours = ["#e08a2e" if n.startswith("peer") else "#9aa5b1" if "." in n else "#1f77b4" for n in names]
    top.barh(names, [rows[name]["over_plain_us"] for name in names], color=colours)
    top.axvline(TARGET, color="0.5", linewidth=1, linestyle=":")
    top.invert_yaxis()
    top.set_xlabel("µs over the plain call, one array in place (dotted: the limit)")
    bottom.loglog(LEAVES, [rows[f"list of {n}"]["over_plain_us"] for n in LEAVES], "o-", color="#1f77b4")
    bottom.set_xlabel("arrays in a list")
    bottom.set_ylabel("µs over the plain call")
    for panel in (top, bottom):
        panel.grid(axis="x", alpha=0.35)
        panel.set_axisbelow(True)
    bottom.grid(axis="y", alpha=0.35)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a decorated function costs.")
    parser.add_argument("--rounds", type=int, default=25, help="rounds (at least 15 to publish)")
    default_peer = Path(tempfile.gettempdir()) / "arraybridge-peer"
    parser.add_argument("--peer", type=Path, default=default_peer, help="folder that has arraybridge==0.5.2")
    parser.add_argument("--without", choices=("peer",), help="leave this one out")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the results are written")
    arguments = parser.parse_args()

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    rows = measure("", arguments.rounds)
    if arguments.without != "peer":
        if not (arguments.peer / "arraybridge").is_dir():
            parser.error(
                f"{arguments.peer} has no arraybridge; see --peer, or leave it out by --without peer"
            )
        theirs = measure(str(arguments.peer), arguments.rounds)
        rows |= {name: row for name, row in theirs.items() if name != "plain call"}
    show(rows)
    arguments.out.mkdir(parents=True, exist_ok=True)
    plot(rows, arguments.out / "decorators.png")
    about = {"machine": machine(), "versions": versions("numpy", "torch", "jax", "tensorflow-cpu", "optree")}
    met = [{"what": w, "us": round(m, 3), "at_most": round(a, 3)} for w, m, a in targets(rows)]
    report = about | {"rows": rows, "targets": met}
    (arguments.out / "decorators.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
