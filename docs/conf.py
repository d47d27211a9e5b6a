"""How the documentation is built: `tox -e docs`, or `sphinx-build -W -b html docs docs/_build`.

Nothing is fetched while building: no inventories of other projects, no fonts.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from enum import EnumType
from pathlib import Path

# The programs of the gallery run in this process, with two OpenCL devices of the PoCL wheel.
os.environ.setdefault("POCL_DEVICES", "pthread pthread")
# A dependency of the theme would set the level to INFO, which prints every step of a recovery.
logging.basicConfig(level=logging.WARNING)

from docutils import nodes  # noqa: E402
from sphinx import addnodes  # noqa: E402
from sphinx.application import Sphinx  # noqa: E402
from sphinx.pycode import ModuleAnalyzer  # noqa: E402

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

import matplotlib as mpl  # noqa: E402

import arraybridge  # noqa: E402
from arraybridge import plots  # noqa: E402

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
autodoc_typehints = "signature"
# Signatures show these names instead of their values. Frameworks are not imported.
autodoc_type_aliases = {
    name: name
    for name in (
        "FoundDevice",
        "FrameworkLike",
        "DeviceLike",
        "GpuId",
        "Grad",
        "cupy.ndarray",
        "jax.Array",
        "tensorflow.Tensor",
        "torch.Tensor",
    )
}

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

# Plots in the gallery use the style of all other plots, but no background, and a gray that is readable on
# light and dark pages.
for name, value in plots.PLOT_SETTINGS.items():
    if isinstance(value, str):
        plots.PLOT_SETTINGS[name] = "none" if value == "white" else "#777777"
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
        f"| {claim.replace(' us ', ' µs ')} | {_numbers(one['measured'])} |"
        f" {'met' if one['met'] else '**missed**'} |"
        for claim, one in results["targets"].items()
    ]
    return "\n".join(["| target | measured | verdict |", "|---|---|---|", *rows])


def _by_hand(file: str) -> str:
    """Return a table of the shortest times of conversions and of the same by hand, in microseconds."""
    results = json.loads((RESULTS / file).read_text(encoding="utf-8"))["results"]
    groups = results.items() if "ratio" not in next(iter(results.values())) else [("", results)]
    rows = ["| conversion | µs | µs by hand | ratio |", "|---|---|---|---|"]
    for group, conversions in groups:
        for name, one in conversions.items():
            ours, by_hand = (_numbers(one[key]["min_ns"] / 1000) for key in ("ours", "by_hand"))
            title = f"{name}, {group}" if group else name
            rows.append(f"| {title} | {ours} | {by_hand} | {one['ratio']} |")
    return "\n".join(rows)


def _jobs(file: str) -> str:
    """Return a table of the shortest times and the added memory of jobs and of the same by hand."""
    head = "| job | ms | ms by hand | ratio | ratio of CPU times | MiB | MiB by hand |"
    rows = [head, "|---|---|---|---|---|---|---|"]
    for name, one in json.loads((RESULTS / file).read_text(encoding="utf-8"))["results"].items():
        sides = one["ours"], one["by_hand"]
        times = " | ".join(_numbers(side["min_ms"]) for side in sides)
        memory = " | ".join(_numbers(side["added_mib"]) for side in sides)
        rows.append(f"| {name} | {times} | {one['ratio']} | {one['cpu_ratio']} | {memory} |")
    return "\n".join(rows)


def _into_arrays(file: str) -> str:
    """Return a table of the shortest times of writing 64 MiB to an existing array, in milliseconds."""
    rows = ["| conversion | `out=` | a new array | by hand |", "|---|---|---|---|"]
    results = json.loads((RESULTS / file).read_text(encoding="utf-8"))["results"]["64 MiB"]
    for name, one in results.items():
        times = (
            f"{_numbers(one[side]['min_ns'] / 1e6)}\N{NO-BREAK SPACE}ms" for side in ("out", "copy", "native")
        )
        rows.append(f"| {name} | {' | '.join(times)} |")
    return "\n".join(rows)


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


def _checkpoints(file: str) -> str:
    """Return a table of the CPU time and the peak memory of loading a checkpoint into each framework."""
    cells: dict[str, list[str]] = {}
    for row in json.loads((RESULTS / file).read_text(encoding="utf-8"))["load"]["rows"]:
        cell = f"{_numbers(row['load'] * 1e3)} ms, {_numbers(row['peak'])} MiB"
        cells.setdefault(row["target"], []).append(cell.replace(" ", "\N{NO-BREAK SPACE}"))
    rows = [f"| {target} | {' | '.join(row)} |" for target, row in cells.items()]
    head = "| to | the package's reader | `load_safetensors` | `load_safetensors`, file of the package |"
    return "\n".join([head, "|---|---|---|---|", *rows])


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


def _link_to_gallery(page: str) -> str:
    """Return a page whose links to programs in ``examples`` lead to their pages in the gallery."""
    page = re.sub(r"\]\(\.\./examples/(\w+)\.py\)", r"](gallery/\1.rst)", page)
    return page.replace("](../examples)", "](gallery/index.rst)")


def _fill_in(app: Sphinx, page: str, source: list[str]) -> None:
    source[0] = _link_to_gallery(source[0])
    if page == "benchmarks":
        source[0] = re.sub(r"<!-- targets: (\S+) -->", lambda m: _targets(m[1]), source[0])
        source[0] = re.sub(r"<!-- verdicts: (\S+) -->", lambda m: _verdicts(m[1]), source[0])
        source[0] = re.sub(r"<!-- ratios: (\S+) -->", lambda m: _ratios(m[1]), source[0])
        source[0] = re.sub(r"<!-- checkpoints: (\S+) -->", lambda m: _checkpoints(m[1]), source[0])
        source[0] = re.sub(r"<!-- by hand: (\S+) -->", lambda m: _by_hand(m[1]), source[0])
        source[0] = re.sub(r"<!-- jobs: (\S+) -->", lambda m: _jobs(m[1]), source[0])
        source[0] = re.sub(r"<!-- into: (\S+) -->", lambda m: _into_arrays(m[1]), source[0])
        source[0] = re.sub(r"<!-- times: (\S+) -->", lambda m: _times(m[1]), source[0])
        source[0] = re.sub(r"<!-- own: (\S+) -->", lambda m: _own_memory(m[1]), source[0])
        source[0] = re.sub(r"<!-- machine: (\S+) -->", lambda m: _taken_on(m[1]), source[0])


# Functions with several call signatures; the reference shows one.
_OVERLOADED = {
    "arraybridge.conversion.convert": "convert_memory",
    "arraybridge.decorators.framework_decorators": "FrameworkDecorator.__call__",
    "arraybridge.offload.gpu_decorator": "gpu",
}
_DECORATOR = "arraybridge.decorators.framework_decorators.FrameworkDecorator"
_OPTIONS = (
    "copy: bool | None = None, dtype: Any = None, grad: Grad = 'error', device: DeviceLike | None = None,"
    " out: Any = None"
)
_FORM = f"(data: Any, target: FrameworkLike, gpu_id: GpuId = None, *, {_OPTIONS})"
_FORMS = {
    "arraybridge.convert_memory": (_FORM, "Any"),
    "arraybridge.explain": (_FORM, "Route"),
    "arraybridge.Pipeline.__call__": ("(batch: Any)", "Any"),
    "arraybridge.gpu": (
        "(fn: Callable | None = None, /, *, gpu_id: GpuId = None, backend: FrameworkLike | None = None)",
        "Any",
    ),
    _DECORATOR: ("", None),  # users do not create it
    f"{_DECORATOR}.__call__": (
        "(fn: Callable | None = None, /, *, output_type: FrameworkLike | None = None, **options)",
        "Any",
    ),
}
# Generators under `contextlib.contextmanager`, which does not change the annotation of the result.
_CONTEXT_MANAGERS = (
    "arraybridge.memory_peak",
    "arraybridge.interface.Autodiff.replay",
    "arraybridge.testing.inject_oom",
)
# Pattern and replacement in signatures.
_CLEARER = (
    # Aliases inside other types show as TypeAliasForwardRef('FrameworkLike'): sphinx-doc/sphinx#14003, 9.0.
    (r"TypeAliasForwardRef\('([\w.]+)'\)", r"\1"),
    # Sphinx 9.0 shows Callable[..., R] and Callable[P, R] with further brackets; no issue found.
    (r"Callable\[\[(\.\.\.|~P)\],", r"Callable[\1,"),
    # Type hints for editors and type checkers.
    (r": ~?[\w.]*Unpack\[[~\w.]+\]", ""),
    # The default of a dataclass field with `default_factory`, which Sphinx cannot parse.
    ("<factory>", "..."),
)


def _clear(text: str) -> str:
    """Return a signature or a type in the notation of the source code."""
    for pattern, replacement in _CLEARER:
        text = re.sub(pattern, replacement, text)
    return text


def _signature(
    app: Sphinx, what: str, name: str, item: object, options: object, *signature: str | None
) -> tuple[str | None, ...]:
    """Return the signature and the result that the reference shows for a name."""
    if what == "exception" and signature[0] and name != "arraybridge.MemoryConversionError":
        return "", None  # the same as that of the base class
    if isinstance(item, EnumType):
        return "", None
    if name in _FORMS:
        return _FORMS[name]
    arguments, result = (text and _clear(text) for text in signature)
    if name in _CONTEXT_MANAGERS:
        result = result and result.replace("Iterator", "AbstractContextManager")
    return arguments, result


def _shorten_types(
    app: Sphinx, what: str, name: str, item: object, options: object, lines: list[str]
) -> None:
    """Show the types of attributes without their modules, with links to the full names."""
    for number, line in enumerate(lines):
        if line.lstrip().startswith(":type:"):
            lines[number] = re.sub(r"\b(?:arraybridge|collections)(?:\.\w+)+", r"~\g<0>", _clear(line))


def _allow_breaks(app: Sphinx, page: str, template: str, context: dict[str, str], *_: object) -> None:
    """Let long inline code wrap at dots, underscores and parentheses."""
    code = re.compile(r'(?<=<span class="pre">)[^<]{13,}')
    context["body"] = code.sub(
        lambda match: re.sub(r"(?<=[(._=/])(?=[\w&])", "<wbr>", match[0]), context.get("body", "")
    )


# -- the search --------------------------------------------------------------------------------------------


def _text_of(section: nodes.Element) -> str:
    """Return the text of a section or a documented name, without that of the parts inside it."""
    parts = [child for child in section.children if not isinstance(child, (nodes.section, addnodes.desc))]
    return " ".join(" ".join(part.astext() for part in parts).lower().split())


def _sections(page: nodes.document) -> list[tuple[str, str, str]]:
    """Return anchor, title and text of each section and of each documented name of a page."""
    names = [name for name in page.findall(addnodes.desc_signature) if name["ids"]]
    return [
        *((part["ids"][0], part[0].astext(), _text_of(part)) for part in page.findall(nodes.section)),
        *((name["ids"][0], name["ids"][0], _text_of(name.parent)) for name in names),
    ]


def _search_sections(app: Sphinx, page: str, *_: object) -> None:
    """Add the search for sections to the search page."""
    if page == "search":
        app.add_js_file("sections.js", priority=900, defer="defer")
        app.add_js_file("search_sections.js", priority=901, defer="defer")


def _write_sections(app: Sphinx, error: Exception | None) -> None:
    """Write the sections of all pages for `search_sections.js`."""
    if error is None and app.builder.format == "html":
        pages = {page: _sections(app.env.get_doctree(page)) for page in sorted(app.env.found_docs)}
        file = Path(app.outdir) / "_static" / "sections.js"
        file.write_text(f"const SECTIONS = {json.dumps(pages)};\n", encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Connect the functions of this file to the events of Sphinx."""
    # autodoc asks for the signature of a function only if it finds no overloads.
    for module, function in _OVERLOADED.items():
        source = ModuleAnalyzer.for_module(module)
        source.analyze()
        source.overloads.pop(function)
    app.connect("source-read", _fill_in)
    app.connect("html-page-context", _search_sections)
    app.connect("html-page-context", _allow_breaks)
    app.connect("build-finished", _write_sections)
    app.connect("autodoc-process-signature", _signature, priority=100)  # the first result counts
    app.connect("autodoc-process-docstring", _shorten_types, priority=600)  # after Napoleon
