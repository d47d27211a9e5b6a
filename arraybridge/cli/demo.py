"""``arraybridge demo``: a real picture through every installed framework, with a little work in each."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.markup import escape

import arraybridge
from arraybridge.cli import output
from arraybridge.errors import first_line
from arraybridge.formatting import format_bytes, format_seconds
from arraybridge.frameworks import registry
from arraybridge.testing import inject_oom

Json = dict[str, Any]
ORDER = ("torch", "jax", "tensorflow", "cupy", "pyclesperanto")


def demo(
    image: Annotated[
        Path | None,
        typer.Option(
            help="Your own picture: .npy, or what Pillow reads.", exists=True, dir_okay=False, readable=True
        ),
    ] = None,
    as_json: output.AsJson = False,
) -> None:
    """Send a picture through every installed framework, do a little work in each, and show the routes.

    Each framework inverts the picture twice; the result has to be the original, bit for bit. Then a decorated
    function, a rehearsed lack of memory with its recovery, and a pipeline of two stages.

    Examples:
    [bold]arraybridge demo[/bold]

    [bold]arraybridge demo --image cell.png[/bold]
    """
    name, picture = _load(image)
    with output.stdout_is_for_json(as_json):
        steps, missing = _tour(picture)
        more = _more(picture, [step["target"] for step in steps if step["target"] in _ANY])
    report: Json = {
        "image": name,
        "shape": list(picture.shape),
        "dtype": picture.dtype.name,
        "nbytes": picture.nbytes,
        "steps": steps,
        "missing": missing,
        "gpu": arraybridge.gpu_available(),
        **more,
        "exact": all(part["exact"] for part in (*steps, *more.values())),
    }
    if as_json:
        output.print_json(report)
    else:
        _print(report)
    raise typer.Exit(0 if report["exact"] else 1)


def _load(image: Path | None) -> tuple[str, np.ndarray]:
    """A picture as a C-contiguous uint8 array of two axes, and what to call it."""
    if image is None:
        try:
            data = importlib.import_module("skimage.data")
        except ImportError:
            # No picture is at hand: rings, computed.
            y, x = np.mgrid[-1:1:384j, -1:1:384j]
            rings = (127 + 127 * np.cos(40 * (x * x + y * y))).astype(np.uint8)
            return "rings (install scikit-image for a photograph)", rings
        return "coins.png of scikit-image", np.asarray(data.coins())
    try:
        if image.suffix == ".npy":
            picture = np.load(image, allow_pickle=False)
        else:
            picture = np.asarray(importlib.import_module("PIL.Image").open(image).convert("L"))
    except (ImportError, OSError, ValueError, EOFError) as error:
        words = f"{image} can't be read as a picture: {error}"
        raise typer.BadParameter(words, param_hint="--image") from None
    if picture.dtype != np.uint8 or picture.ndim not in (2, 3) or not picture.size:
        raise typer.BadParameter(
            f"{image} holds {picture.dtype} of shape {picture.shape}; give uint8 of two or three axes",
            param_hint="--image",
        )
    return image.name, np.ascontiguousarray(picture)


def _invert(framework: str, array: Any) -> Any:
    """255 − array, computed in the array's own framework, in its dtype."""
    invert = _INVERSIONS.get(framework, _negative)
    return invert(array)


def _invert_in_opencl(array: Any) -> Any:
    # The kernels compute in float32, in which 0 … 255 are exact; the result goes back into uint8.
    cle = output.module_of("pyclesperanto")
    inverted = cle.create(array.shape, dtype=np.uint8)
    cle.add_image_and_scalar(cle.multiply_image_and_scalar(array, scalar=-1), inverted, scalar=255)
    return inverted


#: Framework → its inversion, if operators do not compute in the dtype of their operands.
_INVERSIONS = {"pyclesperanto": _invert_in_opencl}


def _tour(picture: np.ndarray) -> tuple[list[Json], dict[str, str]]:
    """Convert the picture from each framework to the next and back to NumPy; what is missing, and why."""
    steps: list[Json] = []
    available, missing = output.usable(ORDER)
    current: Any = picture
    for framework in (*available, "numpy"):
        try:
            # Once beforehand: OpenCL compiles kernels, and XLA programs, which is no conversion.
            _invert(framework, arraybridge.convert_memory(picture, framework))
        except RuntimeError as error:  # an OpenCL driver that cannot compile for this CPU
            missing[framework] = (
                f"its functions do not run ({first_line(str(error))}); see arraybridge doctor."
            )
            continue
        with arraybridge.trace() as log:
            current = arraybridge.convert_memory(current, framework)
        twice: Any = _invert(framework, _invert(framework, current))
        exact = bool(np.array_equal(arraybridge.to_numpy(twice), picture))
        steps.append(log.records[0].to_dict() | {"work": "inverted twice", "exact": exact})
        current = twice
    return steps, missing


# Frameworks in which slices and operators are written as in NumPy; NumPy itself is always among them.
_ANY = ("torch", "jax", "tensorflow", "cupy")


def _edges(image: Any) -> Any:
    """Differences to the neighbours above and to the left: (h, w) uint8 → (h - 1, w - 1) in 0 … 2."""
    f = image / 255
    return abs(f[1:, 1:] - f[:-1, 1:]) + abs(f[1:, 1:] - f[1:, :-1])


def _negative(image: Any) -> Any:
    return 255 - image


def _more(picture: np.ndarray, frameworks: list[str]) -> Json:
    """A decorated function, a rehearsed OOM and a pipeline, in the frameworks at hand."""
    first, second = ([*frameworks, "numpy", "numpy"])[:2]
    one = registry.framework(first).decorator
    two = registry.framework(second).decorator

    edges = one(output_type="input")(_edges)(picture)
    rows = max(1, len(picture) // 3)
    with inject_oom(first, above_rows=rows) as simulation:
        recovered = one(output_type="input", oom_recovery="split")(_negative)(picture)
    pipeline = arraybridge.Pipeline(one(_negative), two(_negative), microbatches=4)
    piped = arraybridge.to_numpy(pipeline(picture))
    return {
        "decorated": {"framework": first, "exact": bool(np.allclose(edges, _edges(picture), atol=1e-6))},
        "out_of_memory": {
            "framework": first,
            "attempts": simulation.attempts,
            "failed": simulation.raised,
            "exact": bool(np.array_equal(recovered, 255 - picture)),
        },
        "pipeline": {"stages": [first, second], "microbatches": 4, "exact": np.array_equal(piped, picture)},
    }


def _print(report: Json) -> None:
    to = output.console()
    shape = " × ".join(map(str, report["shape"]))
    head = f"{shape} {report['dtype']}, {format_bytes(report['nbytes'])}"
    to.print(f"[bold]{escape(report['image'])}[/bold], {head}\n")
    rows = []
    for step in report["steps"]:
        copies = "copied" if step["copies"] == 1 else f"{step['copies']} copies"
        memory = "shared" if step["shares_memory"] else copies
        amounts = format_bytes(step["nbytes"]), format_seconds(step["seconds"])
        pair = f"{step['source']} → {step['target']}"
        rows.append((pair, step["device"], step["method"], memory, *amounts, _verdict(step)))
    columns = ("conversion", "device", "method", "memory", "bytes", "time", "bits")
    output.show(to, columns, rows, right=("bytes", "time"))
    output.print_left_out(to, report["missing"])
    if not report["gpu"]:
        to.print("[yellow]no GPU is used:[/yellow] no framework finds one; arraybridge doctor says more.")
    decorated = report["decorated"]
    oom = report["out_of_memory"]
    line = report["pipeline"]
    attempts = " → ".join(map(str, oom["attempts"]))
    to.print(
        f"\nDecorated: a NumPy picture into a {decorated['framework']} function, its edges back as"
        f" NumPy: {_verdict(decorated)}."
    )
    to.print(
        f"Out of memory, rehearsed in {oom['framework']} and recovered in parts (rows tried: {attempts}):"
        f" {_verdict(oom)}."
    )
    to.print(f"Pipeline {' → '.join(line['stages'])}, {line['microbatches']} microbatches: {_verdict(line)}.")
    if not report["exact"]:
        to.print("[red]Some results differ from the expected ones; please report this.[/red]")


def _verdict(part: Json) -> str:
    return "[green]equal[/green]" if part["exact"] else "[red]DIFFERENT[/red]"
