"""Compare gradients through another framework with a minimal bridge and with native gradients.

Run it from the root of the checkout.

    python -m benchmarks.gradients             # everything, written to benchmarks/results/gradients.json
    python -m benchmarks.gradients --rounds 5  # faster

The contenders are arraybridge, a minimal bridge and the native function. The bridge uses DLPack in both
directions without checks; for JAX it jits the forward pass and the pullback. Contenders take turns in the
forward pass and in both passes, with 16 float32 elements and with 4 MiB. The ratio is the median of the
ratios per round. The function is sin(x) y + x x of two arrays.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a script rather than as a module
    sys.path.insert(0, str(ROOT))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import arraybridge  # noqa: E402
from benchmarks.timing import Summary, batch_ns, calls_per_batch, machine, versions  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
SIZES = {"16 elements": 16, "4 MiB": 1 << 20}
#: Maximum allowed ratio to the minimal bridge, and under jax.jit to the callback.
TARGETS = {"16 elements": 1.6, "4 MiB": 1.15}
TARGET_UNDER_JIT = 1.5
#: Long enough for several calls per batch at 4 MiB, because the first one depends on earlier use of the
#: caches and the heap.
BATCH_NS = 30_000_000

BODIES: dict[str, Callable[..., Any]] = {
    "torch": lambda x, y: torch.sin(x) * y + x * x,
    "jax": jax.jit(lambda x, y: jnp.sin(x) * y + x * x),
    "tensorflow": lambda x, y: tf.sin(x) * y + x * x,
}
from_dlpack = {
    "torch": torch.from_dlpack,
    "jax": jax.dlpack.from_dlpack,
    "tensorflow": lambda x: tf.experimental.dlpack.from_dlpack(x.__dlpack__()),
}


# -- minimal bridges -------------------------------------------------------------------------------------

_forward = jax.jit(lambda *xs: jax.vjp(BODIES["jax"], *xs))
_pull = jax.jit(lambda pullback, cotangent: pullback(cotangent))


def linearize(callee: str, xs: list[Any]) -> tuple[Any, Callable[[Any], Any]]:
    if callee == "jax":
        y, pullback = _forward(*xs)
        return y, lambda c: _pull(pullback, c)
    if callee == "torch":
        with torch.enable_grad():
            xs = [x.detach().requires_grad_() for x in xs]
            y = BODIES["torch"](*xs)
        return y.detach(), lambda c: torch.autograd.grad(y, xs, c)
    with tf.GradientTape() as tape:
        tape.watch(xs)
        y = BODIES["tensorflow"](*xs)
    return y, lambda c: tape.gradient(y, xs, c)


def lean(caller: str, callee: str) -> Callable[..., Any]:
    there, back = from_dlpack[callee], from_dlpack[caller]
    if caller == "torch":

        class Lean(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *xs: Any) -> Any:
                y, ctx.pull = linearize(callee, [there(x.detach()) for x in xs])
                return back(y)

            @staticmethod
            def backward(ctx: Any, c: Any) -> Any:
                return tuple(back(g) for g in ctx.pull(there(c)))

        return Lean.apply
    if caller == "tensorflow":

        @tf.custom_gradient
        def through(*xs: Any) -> Any:
            y, pull = linearize(callee, [there(x) for x in xs])
            return back(y), lambda c: [back(g) for g in pull(there(c))]

        return through

    pullbacks: dict[int, Any] = {}

    @jax.custom_vjp
    def call(*xs: Any) -> Any:
        return forward(*xs)[0]

    def forward(*xs: Any) -> Any:
        y, pull = linearize(callee, [there(x) for x in xs])
        pullbacks[0] = pull
        return back(y), None

    call.defvjp(forward, lambda _, c: tuple(back(g) for g in pullbacks.pop(0)(there(c))))
    return call


def lean_under_jit(callee: str) -> Callable[..., Any]:
    """Return a bridge with one pure_callback for the value and one for the gradients."""

    def tensors(xs: Any) -> list[Any]:
        if callee == "torch":
            return [torch.from_numpy(np.array(x)) for x in xs]
        return [tf.constant(np.asarray(x)) for x in xs]

    def value(*xs: Any) -> Any:
        return np.asarray(BODIES[callee](*tensors(xs)))

    def gradients(*xs: Any) -> Any:
        *arrays, c = tensors(xs)
        return tuple(np.asarray(g) for g in linearize(callee, arrays)[1](c))

    @jax.custom_vjp
    def call(x: Any, y: Any) -> Any:
        return jax.pure_callback(value, jax.ShapeDtypeStruct(x.shape, x.dtype), x, y)

    def backward(xs: Any, c: Any) -> Any:
        like = jax.ShapeDtypeStruct(c.shape, c.dtype)
        return jax.pure_callback(gradients, (like, like), *xs, c)

    call.defvjp(lambda x, y: (call(x, y), (x, y)), backward)
    return call


# -- measurement -----------------------------------------------------------------------------------


def steps(caller: str, fn: Callable[..., Any], count: int, jitted: bool) -> dict[str, Callable[[], Any]]:
    """Return the forward pass and both passes, as calls of the caller's framework."""
    x, y, one = (arraybridge.aligned((count,), np.float32) for _ in range(3))
    x[:], y[:], one[:] = np.linspace(0, 1, count), np.linspace(1, 2, count), 1
    if caller == "torch":
        xs = [torch.from_numpy(a).requires_grad_() for a in (x, y)]
        c = torch.from_numpy(one)
        return {"forward": lambda: fn(*xs), "both": lambda: torch.autograd.grad(fn(*xs), xs, c)}
    if caller == "tensorflow":
        xs = [from_dlpack["tensorflow"](a) for a in (x, y)]

        def forward() -> Any:
            with tf.GradientTape() as tape:
                tape.watch(xs)
                return fn(*xs), tape

        def both() -> Any:
            result, tape = forward()
            return tape.gradient(result, xs)

        return {"forward": forward, "both": both}
    xs = [from_dlpack["jax"](a) for a in (x, y)]
    c = from_dlpack["jax"](one)

    def pulled(x: Any, y: Any) -> Any:
        return jax.vjp(fn, x, y)[1](c)

    forward_step: Any = jax.jit(fn) if jitted else lambda *xs: jax.vjp(fn, *xs)[0]
    both_step: Any = jax.jit(pulled) if jitted else pulled
    return {
        "forward": lambda: jax.block_until_ready(forward_step(*xs)),
        "both": lambda: jax.block_until_ready(both_step(*xs)),
    }


def directions() -> list[tuple[str, str, bool]]:
    names = ("torch", "jax", "tensorflow")
    found = [(a, b, False) for a in names for b in names if a != b]
    return [*found, ("jax", "torch", True), ("jax", "tensorflow", True)]


def measure(rounds: int) -> list[dict[str, Any]]:
    rows = []
    for caller, callee, jitted in directions():
        decorate = getattr(arraybridge, callee)(grad="flow")
        contenders = {
            "ours": decorate(BODIES[callee]),
            "lean": lean_under_jit(callee) if jitted else lean(caller, callee),
            "native": BODIES[caller],
        }
        for size, count in SIZES.items():
            made = {name: steps(caller, fn, count, jitted) for name, fn in contenders.items()}
            for step in ("forward", "both"):
                calls = {name: parts[step] for name, parts in made.items()}
                for call in calls.values():
                    call()
                counts = {name: calls_per_batch(call, BATCH_NS) for name, call in calls.items()}
                samples: dict[str, list[float]] = {name: [] for name in calls}
                for turn in range(rounds):
                    # Every other round is reversed, so that none always follows the same contender.
                    for name in list(calls)[:: 1 if turn % 2 else -1]:
                        samples[name].append(batch_ns(calls[name], counts[name]))
                row: dict[str, Any] = {
                    "caller": caller,
                    "callee": callee,
                    "jit": jitted,
                    "size": size,
                    "step": step,
                }
                row |= {name: Summary.of(values).as_dict() for name, values in samples.items()}
                ratios = [a / b for a, b in zip(samples["ours"], samples["lean"], strict=True)]
                row["ratio"] = round(statistics.median(ratios), 2)
                row["target"] = TARGET_UNDER_JIT if jitted else TARGETS[size]
                rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    rows = measure(arguments.rounds)
    found = {
        "machine": machine(),
        "versions": versions("torch", "jax", "tensorflow", "tensorflow-cpu"),
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "gradients.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    table = Table("direction", "size", "step", "ours µs", "lean µs", "native µs", "ours/lean", "target")
    for row in rows:
        name = f"{row['caller']} → {row['callee']}{' (jit)' if row['jit'] else ''}"
        times = [f"{row[who]['median_ns'] / 1000:.0f}" for who in ("ours", "lean", "native")]
        table.add_row(name, row["size"], row["step"], *times, f"{row['ratio']:.2f}", f"{row['target']}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
