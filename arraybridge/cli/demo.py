"""``arraybridge demo``: a real picture through every installed framework, with a little work in each."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import arraybridge
from arraybridge.conversion.routes import Route, format_bytes, format_seconds
from arraybridge.errors import DeviceNotFoundError, FrameworkNotInstalledError
from arraybridge.frameworks import registry

ORDER = ("torch", "jax", "tensorflow", "cupy", "pyclesperanto")


def demo(
    image: Annotated[
        Path | None,
        typer.Option(
            help="A picture to use instead of scikit-image's coins: .npy, or what Pillow reads.",
            exists=True,
            dir_okay=False,
            readable=True,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print machine-readable JSON alone.")] = False,
) -> None:
    """Send a picture through every installed framework, do a little work in each, and show the routes.

    Each framework inverts the picture twice; the result has to be the original, bit for bit.

    Examples: [bold]arraybridge demo[/bold], [bold]arraybridge demo --image cell.png --json[/bold]
    """
    name, picture = _load(image)
    steps, missing = _tour(picture)
    wrong = [step for step in steps if not step["exact"]]
    if as_json:
        typer.echo(json.dumps(_as_json(name, picture, steps, missing), indent=2))
    else:
        _print(name, picture, steps, missing)
    raise typer.Exit(1 if wrong else 0)


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
    except ImportError:
        raise typer.BadParameter(
            f"to read {image} install Pillow, pip install pillow", param_hint="--image"
        ) from None
    except (OSError, ValueError, EOFError) as error:
        raise typer.BadParameter(
            f"{image} can't be read as a picture: {error}", param_hint="--image"
        ) from None
    if picture.dtype != np.uint8 or picture.ndim not in (2, 3) or not picture.size:
        raise typer.BadParameter(
            f"{image} holds {picture.dtype} of shape {picture.shape}; give uint8 of two or three axes",
            param_hint="--image",
        )
    return image.name, np.ascontiguousarray(picture)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what C++ writes to the error stream while TensorFlow is imported; no setting stops it (2.21)."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _invert(framework: str, array: Any) -> Any:
    """255 − array, computed in the array's own framework, in its dtype."""
    if framework == "pyclesperanto":
        # Its kernels compute in float32, in which 0 … 255 are exact; the result goes back into uint8.
        cle = importlib.import_module(type(array).__module__.partition(".")[0].removesuffix("_opencl"))
        output = cle.create(array.shape, dtype=np.uint8)
        cle.add_image_and_scalar(cle.multiply_image_and_scalar(array, scalar=-1), output, scalar=255)
        return output
    return 255 - array


def _tour(picture: np.ndarray) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Convert the picture from each framework to the next and back to NumPy; what is missing, and why."""
    steps: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    current: Any = picture
    for framework in (*ORDER, "numpy"):
        try:
            # The first conversion imports the framework, which takes seconds and is no conversion.
            with _quiet():
                arraybridge.convert_memory(picture[:1, :1], framework)
        except (FrameworkNotInstalledError, DeviceNotFoundError) as error:
            missing[framework] = str(error)
            continue
        with arraybridge.trace() as log:
            current = arraybridge.convert_memory(current, framework)
        twice: Any = _invert(framework, _invert(framework, current))
        exact = bool(np.array_equal(arraybridge.to_numpy(twice), picture))
        steps.append({"route": log.records[0], "work": "inverted twice", "exact": exact})
        current = twice
    return steps, missing


_NO_GPU = (
    "none of these frameworks finds one. With an NVIDIA card and its driver, cupy-cuda13x (or -cuda12x), a"
    " CUDA build of torch, jax[cuda13] or tensorflow[and-cuda] would use it."
)


def _has_gpu(names: list[str]) -> bool:
    """Whether one of the frameworks has a GPU; an OpenCL device may be a GPU or not, and counts for none."""
    return any(d.kind == "gpu" for name in names for d in registry.framework(name).devices())


def _as_json(
    name: str, picture: np.ndarray, steps: list[dict[str, Any]], missing: dict[str, str]
) -> dict[str, Any]:
    def route(r: Route) -> dict[str, Any]:
        return {
            "source": r.source,
            "target": r.target,
            "method": r.method,
            "device": str(r.device),
            "shares_memory": r.shares_memory,
            "copies": r.copies,
            "nbytes": r.nbytes,
            "seconds": r.seconds,
            "reason": r.reason,
        }

    return {
        "image": name,
        "shape": list(picture.shape),
        "dtype": picture.dtype.name,
        "steps": [{**route(s["route"]), "work": s["work"], "exact": s["exact"]} for s in steps],
        "missing": missing,
        "gpu": _has_gpu([s["route"].target for s in steps]),
    }


def _print(name: str, picture: np.ndarray, steps: list[dict[str, Any]], missing: dict[str, str]) -> None:
    console = Console()
    shape = " × ".join(map(str, picture.shape))
    console.print(f"[bold]{name}[/bold], {shape} {picture.dtype}, {format_bytes(picture.nbytes)}")
    table = Table("from", "to", "method", "memory", "bytes", "time", "bits", box=None, pad_edge=False)
    for step in steps:
        route: Route = step["route"]
        memory = (
            "shared" if route.shares_memory else "copied" if route.copies == 1 else f"{route.copies} copies"
        )
        bits = "[green]equal[/green]" if step["exact"] else "[red]DIFFERENT[/red]"
        table.add_row(
            route.source,
            f"{route.target} on {route.device}",
            route.method,
            memory,
            format_bytes(route.nbytes),
            format_seconds(route.seconds or 0.0),
            bits,
        )
    console.print(table)
    for framework, reason in missing.items():
        console.print(f"[yellow]{framework} left out:[/yellow] {escape(reason)}", highlight=False)
    if not _has_gpu([step["route"].target for step in steps]):
        console.print(f"[yellow]no GPU is used:[/yellow] {escape(_NO_GPU)}", highlight=False)
    unused = [
        n for n in registry.framework_names() if n not in ("numpy", *ORDER) and registry.is_installed(n)
    ]
    if unused:
        console.print(f"Also known: {', '.join(unused)}")
    if all(step["exact"] for step in steps):
        console.print(f"Each framework inverted the picture twice; all {len(steps)} results are exact.")
    else:
        console.print("[red]Some results differ from the original; please report this.[/red]")
