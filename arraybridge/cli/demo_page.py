"""The report that ``arraybridge demo --html`` writes: one file with its pictures inside, no network."""

from __future__ import annotations

import base64
import importlib
import io
from html import escape
from typing import Any

import numpy as np

from arraybridge.show import Cell, format_bytes, format_seconds, html_table

__all__ = ["page"]

_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; font: 16px/1.45 system-ui, sans-serif; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .95rem; }
th, td { padding: .35rem .8rem .35rem 0; text-align: left; white-space: nowrap; }
thead th { border-bottom: 1px solid; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
figure { display: inline-block; margin: 0 1rem 1rem 0; vertical-align: top; }
img { max-width: min(26rem, 100%); border-radius: .4rem; }
figcaption { font-size: .9rem; }
"""


_COLUMNS = ("conversion", "device", "method", "memory", "bytes", "time", "bits")


def page(report: dict[str, Any], pictures: dict[str, np.ndarray]) -> str:
    """The report of a demo as a page of HTML.

    Args:
        report: what ``demo --json`` prints.
        pictures: caption → ``(h, w)`` or ``(h, w, 3)``; what is not uint8 is stretched from 0 to its maximum.
    """
    figures = "".join(
        f'<figure><img alt="{escape(caption)}" src="{_data_url(picture)}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
        for caption, picture in pictures.items()
    )
    missing = "".join(
        f"<li><b>{escape(name)}</b>: {escape(why)}</li>" for name, why in report["missing"].items()
    )
    oom, line = report["out_of_memory"], report["pipeline"]
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>arraybridge demo</title><style>{_STYLE}</style></head>
<body>
<h1>arraybridge demo</h1>
{figures}
<h2>Through every framework</h2>
<p>Each framework inverted the picture twice; “equal” means bit for bit.</p>
<div class="wide">{html_table(_COLUMNS, [_row(step) for step in report["steps"]])}</div>
{f"<h2>Left out</h2><ul>{missing}</ul>" if missing else ""}
<h2>Decorated</h2>
<p>A NumPy picture went into a function written in {escape(report["decorated"]["framework"])}, and its
edges came back as NumPy: {_verdict(report["decorated"])}.</p>
<h2>Out of memory</h2>
<p>A lack of memory was rehearsed in {escape(oom["framework"])}; rows tried:
{" → ".join(map(str, oom["attempts"]))}. Result: {_verdict(oom)}.</p>
<h2>Pipeline</h2>
<p>{" → ".join(map(escape, line["stages"]))}, {line["microbatches"]} microbatches: {_verdict(line)}.</p>
</body>
</html>
"""


def _row(step: dict[str, Any]) -> list[str | Cell]:
    return [
        f"{step['source']} → {step['target']}",
        step["device"],
        step["method"],
        "shared" if step["shares_memory"] else "copied",
        Cell(format_bytes(step["nbytes"]), "class=number"),
        Cell(format_seconds(step["seconds"]), "class=number"),
        Cell(_verdict(step)),
    ]


def _verdict(part: dict[str, Any]) -> str:
    return "equal" if part["exact"] else "<b>DIFFERENT</b>"


def _data_url(picture: np.ndarray) -> str:
    if picture.dtype != np.uint8:
        picture = (picture * (255 / max(float(picture.max()), 1e-9))).astype(np.uint8)
    file = io.BytesIO()
    importlib.import_module("PIL.Image").fromarray(picture).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")
