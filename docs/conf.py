"""How the documentation is built: `tox -e docs`, or `sphinx-build -W -b html docs docs/_build`.

Nothing is fetched while building: no inventories of other projects, no fonts.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import warnings
from pathlib import Path

# The programs of the gallery run in this process, with two OpenCL devices of the PoCL wheel.
os.environ.setdefault("POCL_DEVICES", "pthread pthread")
# A dependency of the theme would set the level to INFO, which prints every step of a recovery.
logging.basicConfig(level=logging.WARNING)

from sphinx.application import Sphinx  # noqa: E402

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

import matplotlib as mpl  # noqa: E402

import arraybridge  # noqa: E402
from arraybridge import plots  # noqa: E402

# sphinx-autodoc-typehints uses a name of Sphinx that is deprecated, and warns a hundred times.
warnings.filterwarnings("ignore", category=PendingDeprecationWarning, module=r"sphinx_autodoc_typehints\.")
warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"sphinx_autodoc_typehints\.")

RESULTS = CHECKOUT / "benchmarks" / "results"

project = "arraybridge"
author = "arraybridge contributors"
version = release = arraybridge.__version__
copyright = author  # noqa: A001  # the name is Sphinx's

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_autodoc_typehints",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "gallery/*.ipynb", "gallery/*.py"]
myst_enable_extensions = ["colon_fence", "deflist", "substitution"]
myst_substitutions = {"version": version}
myst_heading_anchors = 3

# Docstrings name functions in single backquotes.
default_role = "py:obj"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Class attributes", "params_style")]
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
always_use_bars_union = True
typehints_use_signature = True
typehints_use_signature_return = True
typehints_document_rtype = False  # it is in the signature
suppress_warnings = [
    # Annotations name types of PyTorch, JAX and other frameworks that may not be installed here.
    "sphinx_autodoc_typehints.forward_reference",
    "sphinx_autodoc_typehints.guarded_import",
]

html_theme = "furo"
html_title = f"arraybridge {version}"
html_static_path = ["_static"]
html_extra_path = ["llms.txt"]  # an index for programs
html_css_files = ["arraybridge.css"]
html_logo = html_favicon = "_static/logo.svg"
html_copy_source = False
toc_object_entries = False  # the reference lists its names at the top, by task
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


# -- the gallery ---------------------------------------------------------------------------------------

# Plots in the gallery use the style of all other plots.
mpl.rcParams.update(plots.PLOT_SETTINGS)

# A program runs again when its text has changed. To run all of them, delete docs/gallery/; to run none, pass
# `-D sphinx_gallery_conf.plot_gallery=0`. The title of a plot is its alternative text.
sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": re.escape(os.sep) + r"\d\d_",
    "within_subsection_order": "FileNameSortKey",
    "capture_repr": (),  # show printed output only
    "abort_on_example_error": True,
    "write_computation_times": False,
    "show_signature": False,
    "image_srcset": ["2x"],
    "reset_modules": (),  # a reset would remove the plot settings
}


# -- generated parts of pages --------------------------------------------------------------------------


def _names_left(page: str) -> str:
    """Return a directive for each public name that the page lacks."""
    there = set(re.findall(r"(?:auto\w+|py:\w+):: ([\w.]+)", page))
    lines = []
    for name in arraybridge.__all__:
        if name in there:
            continue
        thing = getattr(arraybridge, name)
        kind = "class" if isinstance(thing, type) else "function" if callable(thing) else "data"
        if isinstance(thing, type) and issubclass(thing, BaseException):
            kind = "exception"
        lines.append(f".. auto{kind}:: {name}")
    return "\n".join(lines)


def _numbers(value: float) -> str:
    return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _targets(file: str) -> str:
    """Return a table of the targets and measurements of a file of results."""
    rows = ["| claim | target | measured | verdict |", "|---|---|---|---|"]
    for section in json.loads((RESULTS / file).read_text(encoding="utf-8")).values():
        for one in section.get("targets", ()) if isinstance(section, dict) else ():
            unit = one.get("unit", "").replace("x", "×")
            target = f"{one['target']} {unit}".replace("<=", "≤").replace(">=", "≥")
            cells = (target, f"{_numbers(one['measured'])} {unit}", "met" if one["met"] else "**missed**")
            kept = " | ".join(cell.replace(" ", "\N{NO-BREAK SPACE}") for cell in cells)
            rows.append(f"| {one['claim']} | {kept} |")
    return "\n".join(rows)


def _verdicts(file: str) -> str:
    """Return the same table for a file of results that has its targets by claim."""
    results = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    rows = [
        f"| {claim} | {_numbers(one['measured'])} | {'met' if one['met'] else '**missed**'} |"
        for claim, one in results["targets"].items()
    ]
    return "\n".join(["| target | measured | verdict |", "|---|---|---|", *rows])


def _times(file: str) -> str:
    """Return a table of the medians in the first section of a file of results."""
    section = next(iter(json.loads((RESULTS / file).read_text(encoding="utf-8")).values()))
    rows = [f"| {name} | {_numbers(row['median_ns'])} |" for name, row in section["results"].items()]
    return "\n".join(["| call | ns over the plain call, median |", "|---|---|", *rows])


def _ratios(file: str) -> str:
    """Return a table of gradients compared with bridges written by hand: minima of alternating batches."""
    rows = [
        "| direction | µs, ours / lean / native | ours ÷ lean | target | verdict |",
        "|---|---|---|---|---|",
    ]
    for row in json.loads((RESULTS / file).read_text(encoding="utf-8"))["rows"]:
        step = {"forward": "forward", "both": "and backward"}[row["step"]]
        name = f"{row['caller']} → {row['callee']}{' under jit' if row['jit'] else ''}, {row['size']}, {step}"
        times = " / ".join(_numbers(row[who]["min_ns"] / 1e3) for who in ("ours", "lean", "native"))
        verdict = "met" if row["ratio"] <= row["target"] else "**missed**"
        rows.append(f"| {name} | {times} | {row['ratio']:.2f} | {row['target']} | {verdict} |")
    return "\n".join(rows)


def _own_memory(file: str) -> str:
    """Return a table that compares NumPy's own arrays with aligned ones."""
    rows = []
    for row in json.loads((RESULTS / file).read_text(encoding="utf-8"))["own"]["rows"]:
        cells = [
            f"{row[kind]['median_ns'] / 1e3:,.1f} µs, {'shared' if row[kind]['shares_memory'] else 'copied'}"
            for kind in ("aligned", "own")
        ]
        rows.append(f"| {row['target']} | {' | '.join(cells)} |")
    return "\n".join(
        ["| 4 MiB from NumPy to | aligned to 64 bytes | as NumPy allocates |", "|---|---|---|", *rows]
    )


def _taken_on(file: str) -> str:
    """Return the machine and the versions of a file of results as a sentence."""
    results = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    part = results if "machine" in results else next(iter(results.values()))
    machine, versions = part["machine"], part["versions"]
    packages = ", ".join(f"{name} {number}" for name, number in versions.items())
    return (
        f"Measured on {machine['cpu']}, {machine['cores']} cores, {machine['system']},"
        f" Python {machine['python']}, with {packages}."
    )


def _fill_in(app: Sphinx, page: str, source: list[str]) -> None:
    if page == "api":
        source[0] = source[0].replace(".. names-left", _names_left(source[0]))
    if page == "benchmarks":
        source[0] = re.sub(r"<!-- targets: (\S+) -->", lambda m: _targets(m[1]), source[0])
        source[0] = re.sub(r"<!-- verdicts: (\S+) -->", lambda m: _verdicts(m[1]), source[0])
        source[0] = re.sub(r"<!-- ratios: (\S+) -->", lambda m: _ratios(m[1]), source[0])
        source[0] = re.sub(r"<!-- times: (\S+) -->", lambda m: _times(m[1]), source[0])
        source[0] = re.sub(r"<!-- own: (\S+) -->", lambda m: _own_memory(m[1]), source[0])
        source[0] = re.sub(r"<!-- machine: (\S+) -->", lambda m: _taken_on(m[1]), source[0])


# `convert_memory` has several call signatures; the reference shows the most common one.
_OPTIONS = (
    "copy: bool | None = None, dtype: Any = None, grad: Grad = 'error', device: DeviceLike | None = None"
)
_FORM = f"(data: Any, target: FrameworkLike, gpu_id: GpuId = None, *, {_OPTIONS})"
_FORMS = {"arraybridge.convert_memory": (_FORM, "Any"), "arraybridge.explain": (_FORM, "Route")}


def _first_form(app: Sphinx, what: str, name: str, *_: object) -> tuple[str, str] | None:
    return _FORMS.get(name)


def setup(app: Sphinx) -> None:
    """Connect `_fill_in` to each page that Sphinx reads, and `_first_form` to each signature."""
    app.connect("source-read", _fill_in)
    app.connect("autodoc-process-signature", _first_form, priority=100)  # the first result counts
