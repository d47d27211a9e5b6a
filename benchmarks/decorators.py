"""Compare decorated functions whose arguments need no conversion with plain calls.

Run it from the root of the checkout.

    python -m benchmarks.decorators                  # everything
    python -m benchmarks.decorators --peer FOLDER    # the folder of arraybridge==0.5.2
    python -m benchmarks.decorators --without peer

The other contenders are a function wrapped with `functools.wraps`, which is the minimal wrapper in Python,
and the peer's decorators, which convert only the dtype of the result.
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
#: Maximum allowed difference from the plain call with one array argument, in microseconds.
TARGET = 3.0
#: Recovery has a separate target, relative to the decorator without options.
RECOVERY = "torch, oom_recovery=True"
RECOVERY_TARGET = 1.0

Json = dict[str, Any]
console = Console(width=110)


def plain(x: Any) -> Any:
    return x


def wrapped(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function in a minimal wrapper made with `functools.wraps`."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return wrapper


def arrays() -> dict[str, Any]:
    """Return a small array of each framework, on the device of its decorator."""
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
    """Return the function and argument of each case, by name."""
    import arraybridge

    samples = arrays()
    cases: dict[str, tuple[Callable[..., Any], Any]] = {
        "plain call": (plain, samples["torch"]),
        "functools.wraps": (wrapped(plain), samples["torch"]),
    }
    for name in FRAMEWORKS:
        cases[name] = (arraybridge.framework(name).decorator(plain), samples[name])
    torch_decorator: Any = arraybridge.torch
    for label, options in (
        ("device='cpu'", {"device": "cpu"}),
        ("output_type='input'", {"output_type": "input"}),
        ("oom_recovery=True", {"oom_recovery": True}),
    ):
        cases[f"torch, {label}"] = (torch_decorator(**options)(plain), samples["torch"])
    other = samples["torch"].clone()
    restores_input_type = torch_decorator(output_type="input")
    cases["torch, output_type='input', another array"] = (
        restores_input_type(lambda x: other),
        samples["torch"],
    )
    for count in LEAVES:
        cases[f"list of {count}"] = (arraybridge.torch(plain), [samples["torch"]] * count)
    return cases


def peer_cases() -> dict[str, tuple[Callable[..., Any], Any]]:
    """Return the cases of the peer for NumPy and PyTorch; its other decorators do the same work."""
    import torch

    library: Any = importlib.import_module("arraybridge")
    x, tensor = np.ones((4, 4), np.float32), torch.ones(4, 4)
    return {
        "plain call": (plain, tensor),
        "peer, numpy": (library.numpy(plain), x),
        "peer, torch": (library.torch(plain), tensor),
    }


def worker(connection: Connection, peer: str) -> None:
    """Time cases of one library on request, in a separate process, because both have the same import name."""
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
    """Return the time of each case, and its difference from the plain call of the same round."""
    context = multiprocessing.get_context("spawn")
    pipe, child = context.Pipe()
    process = context.Process(target=worker, args=(child, peer), daemon=True)
    process.start()
    child.close()  # so that a read here ends if the child crashes
    try:
        names = pipe.recv()
    except EOFError:
        raise SystemExit("The measured process ended early. See its error message above.") from None
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
    """Return the claims, each with its measurement and its limit in microseconds."""
    one = [name for name in rows if name in FRAMEWORKS or (name.startswith("torch,") and name != RECOVERY)]
    found = [(f"{name}, over the plain call", rows[name]["over_plain_us"], TARGET) for name in one]
    recovery = rows[RECOVERY]["over_plain_us"] - rows["torch"]["over_plain_us"]
    found.append((f"{RECOVERY}, over the bare decorator", recovery, RECOVERY_TARGET))
    few, many = (rows[f"list of {n}"]["over_plain_us"] / n for n in (100, 1000))
    found.append(("list of 1000 arrays, per array", many, 1.5 * few))
    return found


def show(rows: Json) -> None:
    table = Table(title="A function that returns its argument, without conversions")
    for column in ("", "median, µs", "difference from the plain call, µs"):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in rows.items():
        table.add_row(name, f"{row['median_ns'] / 1e3:.2f}", f"{row['over_plain_us']:.2f}")
    console.print(table)
    for what, measured, most in targets(rows):
        verdict = "met" if measured <= most else "MISSED"
        console.print(f"{verdict:>6}  {what}: {measured:.2f} µs (at most {most:.2f})")


def plot(rows: Json, path: Path) -> None:
    """Draw a bar for each decorator, and the time by number of arrays."""
    plt = pyplot()

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 9), layout="constrained")
    names = [name for name in rows if name != "plain call" and not name.startswith("list")]
    colors = ["#e08a2e" if n.startswith("peer") else "#9aa5b1" if "." in n else "#1f77b4" for n in names]
    top.barh(names, [rows[name]["over_plain_us"] for name in names], color=colors)
    top.axvline(TARGET, color="0.5", linewidth=1, linestyle=":")
    top.invert_yaxis()
    top.set_xlabel("µs over the plain call, one array without conversion (dotted: the limit)")
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
    parser = argparse.ArgumentParser(description="Measure the overhead of decorated functions.")
    parser.add_argument("--rounds", type=int, default=25, help="rounds (at least 15 to publish)")
    default_peer = Path(tempfile.gettempdir()) / "arraybridge-peer"
    parser.add_argument("--peer", type=Path, default=default_peer, help="folder of arraybridge==0.5.2")
    parser.add_argument("--without", choices=("peer",), help="skip this contender")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    rows = measure("", arguments.rounds)
    if arguments.without != "peer":
        if not (arguments.peer / "arraybridge").is_dir():
            parser.error(
                f"{arguments.peer} does not contain arraybridge. Pass --peer FOLDER or --without peer."
            )
        peer_rows = measure(str(arguments.peer), arguments.rounds)
        rows |= {name: row for name, row in peer_rows.items() if name != "plain call"}
    show(rows)
    arguments.out.mkdir(parents=True, exist_ok=True)
    plot(rows, arguments.out / "decorators.png")
    about = {"machine": machine(), "versions": versions("numpy", "torch", "jax", "tensorflow-cpu", "optree")}
    met = [{"what": w, "us": round(m, 3), "at_most": round(a, 3)} for w, m, a in targets(rows)]
    report = about | {"rows": rows, "targets": met}
    (arguments.out / "decorators.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
