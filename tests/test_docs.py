"""Run all examples: those of the pages, from top to bottom, and those of the docstrings."""

from __future__ import annotations

import builtins
import contextlib
import doctest
import importlib
import inspect
import io
import os
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import arraybridge
from arraybridge import hardware
from arraybridge.frameworks.registry import framework_names, load_or_none
from tests.helpers import registry_kept, require, run_python

DOCS = Path(__file__).parent.parent / "docs"
# test_readme.py runs those of the README; the wheel's tests have no pages next to them.
PAGES = sorted(DOCS.glob("*.md"))
PACKAGE = Path(arraybridge.__file__).parent
MODULES = [
    ".".join(("arraybridge", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for file in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in file.read_text(encoding="utf-8")
]

#: Packages that the blocks of a page import, without which it is skipped.
NEEDS = {
    "add-a-framework": ("torch",),
    "api": ("torch",),
    "carriers": (
        "torch",
        "xarray",
        "zarr",
        "h5py",
        "SimpleITK",
        "PIL",
        "pandas",
        "polars",
        "pyarrow",
        "matplotlib",
    ),
    "coming-from": ("torch",),
    "concepts": ("torch", "jax", "tensorflow"),
    "conversion-table": ("torch", "tensorflow"),
    "dask": ("dask", "distributed", "torch", "jax"),
    "dask-cluster": ("dask", "distributed", "torch"),
    "decorators": ("torch", "jax", "pyclesperanto"),
    "devices": ("torch", "jax"),
    "gradients": ("torch", "jax", "tensorflow"),
    "how-it-works": ("jax",),
    "index": ("torch", "jax", "tensorflow"),
    "kernels": ("torch", "jax", "pyclesperanto", "numba"),
    "memory": ("torch",),
    "parallel": ("jax",),
    "quickstart": ("torch",),
    "sparse": ("torch", "jax", "tensorflow", "scipy"),
    "troubleshooting": ("torch", "jax"),
    "traces": ("tensorflow", "torch", "skimage"),
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_of_each_page_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sybil = pytest.importorskip("sybil")
    from sybil.parsers.myst import PythonCodeBlockParser

    for name in NEEDS.get(page.stem, ()):
        require(name)
    if page.stem in ("decorators", "kernels"):
        pytest.importorskip("pyclesperanto", reason="the page imports this one of the two packages itself")
    if page.stem.startswith("dask"):
        # On a machine with GPUs, cluster() would require dask-cuda.
        monkeypatch.setattr(hardware, "gpus", lambda: ())
        from tests.dask.timeouts import let_workers_end

        let_workers_end()
    document = sybil.Sybil(parsers=[PythonCodeBlockParser()]).parse(page)
    examples = list(document.examples())
    assert examples or "```python" not in page.read_text(encoding="utf-8")
    with registry_kept():
        for example in examples:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                example.evaluate()
            shown = re.match(
                r"\s*```text\n(.*?)^```$", document.text[example.end :], re.MULTILINE | re.DOTALL
            )
            if shown is not None:
                assert printed.getvalue().strip() == shown[1].strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_paragraph_of_a_page_is_repeated(page: Path) -> None:
    paragraphs = [text for text in page.read_text(encoding="utf-8").split("\n\n") if len(text) > 100]
    assert [text for text in paragraphs if paragraphs.count(text) > 1] == []


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_each_module_run(name: str) -> None:
    own = name.rpartition(".")[2]
    for framework in ("torch", "jax", *({own} & {"mlx", "paddle"})):  # most examples show the first two
        require(framework)
    if "dask" in name:
        pytest.importorskip("distributed")
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    with mock.patch.dict(os.environ), registry_kept():
        for examples in doctest.DocTestFinder().find(module):
            if _can_run(examples):
                runner.run(examples)
    found = runner.summarize(verbose=False)
    assert found.attempted > 0
    assert found.failed == 0, "an example failed, see the output"


def _can_run(examples: doctest.DocTest) -> bool:
    """Return whether the framework of an example, such as that of ``to_cupy``, works on this machine."""
    name = examples.name.rpartition(".")[2].removeprefix("to_")
    if name not in framework_names():
        return True
    framework = load_or_none(name)
    return framework is not None and len(framework.devices.available()) > 0


needs_pages = pytest.mark.skipif(not DOCS.is_dir(), reason="there are no docs next to these tests")


@needs_pages
def test_the_page_on_traces_shows_the_table_of_its_script(tmp_path: Path) -> None:
    """Run the script before and after the change. `…` stands for the rest of a line."""
    for name in ("torch", "jax", "tensorflow"):
        require(name)
    pytest.importorskip("typer")
    page = _read("traces")
    shown = re.findall(r"^```console\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    loop, changed = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    head = [
        "import jax.numpy as jnp",
        "import numpy as np",
        "import tensorflow as tf",
        "import torch",
        "",
        "",
    ]
    head += ["net = torch.nn.Conv2d(1, 8, 3, padding=1)", "kernel = tf.ones((3, 3, 8, 4))", ""]
    script = tmp_path / "features.py"
    script.write_text("\n".join([*head, loop]), encoding="utf-8")
    printed = _without_times(_trace(script))
    _, *lines = _without_times(shown)
    for line in lines:
        start = line.partition("…")[0]
        assert any(one.startswith(start) for one in printed), line
    rows = r"^features\.py:\d+ "
    assert len([line for line in lines if re.match(rows, line)]) == 4
    assert {line for line in printed if re.match(rows, line)} <= set(lines)

    start = loop.index("        maps =")
    head.insert(0, "import arraybridge as ab")
    script.write_text("\n".join([*head, loop[:start] + changed]), encoding="utf-8")
    assert _trace(script).strip() == "no copies"


def _trace(script: Path) -> str:
    done = run_python("-m", "arraybridge", "trace", str(script))
    assert done.returncode == 0, done.stderr
    return done.stdout


def _without_times(text: str) -> list[str]:
    text = re.sub(r"[\d.]+ (?:µs|ms|s)\b", "TIME", text)
    text = re.sub(r"^\S*?(features\.py:\d+)", r"\1", text, flags=re.MULTILINE)
    return [re.sub(r" +", " ", line) for line in text.splitlines()]


# -- the reference and the page on errors ----------------------------------------------------------------

#: Names of `arraybridge` 0.5, which one paragraph of the reference describes.
OLDER_NAMES = re.compile("cleanup_(all|torch|cupy|jax|tensorflow|pyclesperanto)_")
#: Names that are loaded at the first access.
LOADED_LATER = set(dir(arraybridge)) - set(vars(arraybridge))
PUBLIC_NAMES = sorted({*arraybridge.__all__, *LOADED_LATER})


def _read(page: str) -> str:
    return (DOCS / f"{page}.md").read_text(encoding="utf-8")


@needs_pages
@pytest.mark.parametrize("name", [name for name in PUBLIC_NAMES if not OLDER_NAMES.match(name)])
def test_the_reference_has_each_public_name_and_an_example(name: str) -> None:
    page = _read("api")
    assert re.search(rf"^\.\. (?:auto\w+|py:\w+):: (?:arraybridge\.\w+\.)?{name}$", page, re.MULTILINE)
    docstring = inspect.getdoc(getattr(arraybridge, name)) or ""
    in_docstring = ">>> " in docstring or re.search(r"::\n\n    ", docstring)
    blocks = re.findall(r"^```py(?:thon)?\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert in_docstring or any(re.search(rf"\b{name}\b", block) for block in blocks)


@needs_pages
def test_the_first_call_signature_has_the_parameters_of_its_docstring() -> None:
    configuration = (DOCS / "conf.py").read_text(encoding="utf-8")
    parts = re.search(r"^_OPTIONS = \((.*?)^\)\n_FORM = (.*?)$", configuration, re.MULTILINE | re.DOTALL)
    assert parts is not None
    options, form = parts.groups()
    names = re.findall(r"(\w+): ", form) + re.findall(r"(\w+): ", options)
    for function in (arraybridge.convert_memory, arraybridge.explain):
        arguments = (inspect.getdoc(function) or "").partition("Args:\n")[2].partition("\n\n")[0]
        assert re.findall(r"^    (\w+): ", arguments, re.MULTILINE) == names


def _errors_and_warnings() -> set[str]:
    """Return the names of the exceptions and warnings that the package, its tests and Dask offer to users."""
    found = set()
    for module in ("arraybridge", "arraybridge.dask", "arraybridge.testing"):
        package = importlib.import_module(module)
        for name in {*dir(package), *package.__all__}:
            value = getattr(package, name)
            is_exception = isinstance(value, type) and issubclass(value, Exception)
            if is_exception and value.__module__.startswith("arraybridge"):
                found.add(name)
    return found


@needs_pages
def test_each_error_and_warning_has_a_heading_with_an_answer() -> None:
    pytest.importorskip("distributed")
    text = re.sub(r"^```.*?^```$", "", _read("troubleshooting"), flags=re.MULTILINE | re.DOTALL)
    sections = re.split(r"^### ", text, flags=re.MULTILINE)[1:]
    headings = [section.partition("\n")[0] for section in sections]
    explained = {
        match[1] for heading in headings if (match := re.match(r"`(\w+(?:Error|Warning))\b", heading))
    }
    ours = _errors_and_warnings()
    assert "SharedMemoryGoneError" in ours
    assert "BlockError" in ours
    assert ours - explained == set()
    built_in = {name for name in explained if hasattr(builtins, name)}
    assert explained - built_in - ours == set(), "the page describes classes that do not exist"
    for section in sections:
        answer = section.partition("\n")[2].partition("\n## ")[0]
        sentences = re.findall(r"[.:](?:\s|$)", answer)
        assert len(sentences) > 1 or "{doc}" in answer, f"the answer is too short: {section}"


def _layouts() -> dict[str, np.ndarray]:
    """Return one array per row of the table of layouts. All but the second are aligned."""
    x = arraybridge.aligned((4, 1024, 1024), "float32")
    x[:] = 1
    memory = arraybridge.aligned(x.nbytes + 4, "uint8")
    read_only = x.view()
    read_only.flags.writeable = False
    return {
        "C-contiguous, aligned to 64 bytes": x,
        "not aligned to 64 bytes": memory[4:].view("float32").reshape(x.shape),
        "transposed or otherwise permuted": x.transpose(2, 0, 1),
        "strided, such as `x[::2, ::3]`": x[::2, ::3],
        "reversed, such as `x[::-1]`": x[::-1],
        "read-only NumPy": read_only,
        "broadcast NumPy": np.broadcast_to(x[:1], x.shape),
        "in the other byte order": x.view(x.dtype.newbyteorder()),
    }


@needs_pages
def test_the_table_of_layouts_states_what_is_shared() -> None:
    for name in ("torch", "jax", "tensorflow"):
        require(name)
    table = _read("conversion-table").partition("| layout | to NumPy ")[2].partition("\n\n")[0]
    rows = {
        cells[0]: cells[1:]
        for cells in re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", table, re.MULTILINE)
    }
    layouts = _layouts()
    assert set(rows) == set(layouts)
    for layout, array in layouts.items():
        routes = [arraybridge.explain(array, target) for target in ("numpy", "torch", "jax", "tensorflow")]
        stated = [cell.startswith("shared") for cell in rows[layout]]
        assert [route.shares_memory for route in routes] == stated, layout
