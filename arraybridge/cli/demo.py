"""``arraybridge demo``: convert an image through every installed framework and compute in each."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import typer
from rich.markup import escape

import arraybridge
from arraybridge.cli import output
from arraybridge.conversion.table import FRAMEWORKS
from arraybridge.errors import first_line
from arraybridge.formatting import format_bytes, format_seconds
from arraybridge.interface import registry
from arraybridge.testing import inject_oom

Json = dict[str, Any]
ORDER = tuple(name for name in FRAMEWORKS if name != "numpy")


def demo(as_json: output.AsJson = False) -> None:
    """Convert an image through every installed framework, compute in each, and show each conversion.

    Each framework inverts the image twice, and the result must equal the original exactly.
    The demo then runs a decorated function, recovers from a simulated out-of-memory error, and runs a
    pipeline of two stages.
    The exit code is 1 if a result is wrong.

    Example:
    [bold]arraybridge demo[/bold]
    """
    name, pixels = load_image()
    with output.reserve_stdout(as_json):
        steps, missing = _convert_through_all(pixels)
        targets = [step["target"] for step in steps]
        # The functions use operators, which do not preserve the dtype in pyclesperanto.
        features = _run_features(pixels, [name for name in targets if name not in ("numpy", "pyclesperanto")])
    report: Json = {
        "image": name,
        "shape": list(pixels.shape),
        "dtype": pixels.dtype.name,
        "nbytes": pixels.nbytes,
        "steps": steps,
        "missing": missing,
        "gpu": arraybridge.gpu_available(),
        **features,
        "exact": all(part["exact"] for part in (*steps, *features.values())),
    }
    if as_json:
        output.print_json(report)
    else:
        print_report(report)
    raise typer.Exit(0 if report["exact"] else 1)


def load_image() -> tuple[str, np.ndarray]:
    """Return the image's name, and its pixels as a uint8 array (height, width)."""
    try:
        data = importlib.import_module("skimage.data")
    except ImportError:
        # Without scikit-image, compute an image of rings.
        y, x = np.mgrid[-1:1:384j, -1:1:384j]
        rings = (127 + 127 * np.cos(40 * (x * x + y * y))).astype(np.uint8)
        return "computed rings (install scikit-image for a photograph)", rings
    return "coins.png from scikit-image", np.asarray(data.coins())


def _invert(framework: str, array: Any) -> Any:
    """Compute 255 − array in the framework and dtype of the array."""
    if framework != "pyclesperanto":
        return _negative(array)
    # The kernels compute in float32, which represents 0 to 255 exactly, and write the result as uint8.
    cle = output.module_of_framework(framework)
    inverted = cle.create(array.shape, dtype=np.uint8)
    cle.add_image_and_scalar(cle.multiply_image_and_scalar(array, scalar=-1), inverted, scalar=255)
    return inverted


def _convert_through_all(image: np.ndarray) -> tuple[list[Json], dict[str, str]]:
    """Convert the image from each framework to the next and back to NumPy.

    Returns:
        One dictionary per conversion, and the reason why each other framework does not work.
    """
    steps: list[Json] = []
    available, missing = output.usable_frameworks(ORDER)
    current: Any = image
    for framework in (*available, "numpy"):
        try:
            # Warm up: OpenCL and XLA compile on first use, which is not part of the conversion.
            _invert(framework, arraybridge.convert_memory(image, framework))
        except RuntimeError as error:
            # For example, the OpenCL driver cannot compile for this CPU (pocl/pocl#1049).
            missing[framework] = (
                f"its functions fail ({first_line(str(error))}). Run arraybridge doctor for details."
            )
            continue
        with arraybridge.trace() as log:
            current = arraybridge.convert_memory(current, framework)
        twice: Any = _invert(framework, _invert(framework, current))
        exact = bool(np.array_equal(arraybridge.to_numpy(twice), image))
        steps.append(log.records[0].to_dict() | {"work": "inverted twice", "exact": exact})
        current = twice
    return steps, missing


def _edges(image: Any) -> Any:
    """Return the edges of an (h, w) uint8 image as an (h - 1, w - 1) image with values from 0 to 2."""
    f = image / 255
    return abs(f[1:, 1:] - f[:-1, 1:]) + abs(f[1:, 1:] - f[1:, :-1])


def _negative(image: Any) -> Any:
    return 255 - image


def _run_features(image: np.ndarray, frameworks: list[str]) -> Json:
    """Run a decorated function, a recovery from a simulated out-of-memory error, and a pipeline."""
    first, second = ([*frameworks, "numpy", "numpy"])[:2]
    decorate_first = registry.framework(first).decorator
    decorate_second = registry.framework(second).decorator

    edges = decorate_first(output_type="input")(_edges)(image)
    rows = max(1, len(image) // 3)
    with inject_oom(first, above_rows=rows) as simulation:
        recovered = decorate_first(output_type="input", oom_recovery="split")(_negative)(image)
    pipeline = arraybridge.Pipeline(decorate_first(_negative), decorate_second(_negative), microbatches=4)
    piped = arraybridge.to_numpy(pipeline(image))
    return {
        "decorated": {"framework": first, "exact": bool(np.allclose(edges, _edges(image), atol=1e-6))},
        "out_of_memory": {
            "framework": first,
            "attempts": simulation.attempts,
            "failed": simulation.raised,
            "exact": bool(np.array_equal(recovered, 255 - image)),
        },
        "pipeline": {"stages": [first, second], "microbatches": 4, "exact": np.array_equal(piped, image)},
    }


def print_report(report: Json) -> None:
    """Print the table of conversions and the results of the other features."""
    console = output.console()
    shape = " × ".join(map(str, report["shape"]))
    size = f"{shape} {report['dtype']}, {format_bytes(report['nbytes'])}"
    console.print(f"[bold]{escape(report['image'])}[/bold], {size}\n")
    rows = []
    for step in report["steps"]:
        copies = "copied" if step["copies"] == 1 else f"{step['copies']} copies"
        memory = "shared" if step["shares_memory"] else copies
        amounts = format_bytes(step["nbytes"]), format_seconds(step["seconds"])
        pair = f"{step['source']} → {step['target']}"
        rows.append((pair, step["device"], step["method"], memory, *amounts, _verdict(step)))
    columns = ("conversion", "device", "method", "memory", "size", "time", "check")
    console.print(output.table_or_list(console, columns, rows, right=("size", "time"), wrap="conversion"))
    output.print_skipped(console, report["missing"])
    if not report["gpu"]:
        console.print(
            "[yellow]No GPU is used:[/yellow] no framework finds one. Run arraybridge doctor for details."
        )
    console.print()
    decorated = report["decorated"]
    recovery = report["out_of_memory"]
    pipeline = report["pipeline"]
    attempts = ", ".join(map(str, recovery["attempts"]))
    stages = " → ".join(pipeline["stages"])
    features: list[tuple[str, ...]] = [
        ("decorator", decorated["framework"], "NumPy image in, NumPy image out", _verdict(decorated)),
        ("simulated out of memory", recovery["framework"], f"tried {attempts} rows", _verdict(recovery)),
        ("pipeline", stages, f"{pipeline['microbatches']} microbatches", _verdict(pipeline)),
    ]
    feature_columns = ("feature", "framework", "details", "check")
    console.print(output.table_or_list(console, feature_columns, features, wrap="details"))
    if not report["exact"]:
        console.print(
            "[red]Some results are wrong.[/red] Please report this with the output of arraybridge doctor."
        )


def _verdict(part: Json) -> str:
    return "[green]ok[/green]" if part["exact"] else "[red]WRONG[/red]"
