"""Matplotlib figures that are saved without a window."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from arraybridge.validation import file_path

#: Kind of event → its color in all plots and HTML pages. Conversions that copy are red (``"copy"``).
COLORS = {
    **dict.fromkeys(("stage", "item"), "#4c78a8"),
    **dict.fromkeys(("conversion", "foreign"), "#9ecae9"),
    **dict.fromkeys(("retry", "split"), "#f58518"),
    "call": "#72b7b2",
    "decision": "#b279a2",
    "copy": "#e45756",
    "clean-up": "#eeca3b",
    "start-up": "#bab0ac",
}
_INK = "#3a4450"
#: Matplotlib settings for all plots: dark text on white, even on dark pages.
PLOT_SETTINGS: dict[Any, Any] = {
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "white"),
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor"), _INK),
    **dict.fromkeys(("xtick.color", "ytick.color", "grid.color"), _INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
}


@contextmanager
def plot_axes(
    width: float, height: float, path: str | os.PathLike[str] | None, *, instead: str = ""
) -> Iterator[tuple[Any, Any]]:
    """Make a matplotlib figure and its axes without opening a window, and save it when the block ends.

    Args:
        width: The width in inches.
        height: The height in inches.
        path: The file, whose suffix sets the format; None to save nothing.
        instead: Additional advice for the error message if the suffix is not that of an image format.

    Yields:
        The figure and the axes.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: The suffix of the file is not that of an image format.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Plots require matplotlib, which is not installed. Run pip install matplotlib."
        ) from error
    with rc_context(PLOT_SETTINGS):
        figure = Figure(figsize=(width, height), layout="constrained")
        file = file_path("path", path or "plot.png")
        if file.suffix and file.suffix[1:].lower() not in figure.canvas.get_supported_filetypes():
            raise ValueError(
                f"Cannot plot to {file.name!r}: {file.suffix} is not an image format. Pass the name of an"
                f" image, such as {file.stem + '.png'!r}.{instead}"
            )
        axes = figure.subplots()
        axes.tick_params(labelsize=8)
        yield figure, axes
        if path is not None:
            figure.savefig(path, dpi=150)
