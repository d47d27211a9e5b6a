"""Run all examples: those of the pages, from top to bottom, and those of the docstrings."""

from __future__ import annotations

import ast
import builtins
import contextlib
import doctest
import importlib
import importlib.util
import inspect
import io
import os
import re
import sys
import tomllib
import typing
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import arraybridge
from arraybridge import hardware
from arraybridge.interface.registry import framework_names, load_or_none
from tests.helpers import registry_kept, require, run_python

DOCS = Path(__file__).parent.parent / "docs"
# test_readme.py runs those of the README; the wheel's tests have no pages next to them.
PAGES = sorted([*DOCS.glob("*.md"), *(DOCS / "reference").glob("*.rst")])
PACKAGE = Path(arraybridge.__file__).parent
MODULES = [
    ".".join(("arraybridge", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for file in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in file.read_text(encoding="utf-8")
]


def _name_of_page(page: Path) -> str:
    return page.relative_to(DOCS).with_suffix("").as_posix()


#: Packages by the names of their distributions, if these differ.
MODULES_OF = {
    "pillow": "PIL",
    "scikit-image": "skimage",
    "ml-dtypes": "ml_dtypes",
    "tensorflow-cpu": "tensorflow",
}
FRAMEWORKS = {"cupy", "jax", "mlx", "paddle", "pyclesperanto", "tensorflow", "torch"}


def _programs(page: Path) -> list[Any]:
    """Return the blocks of Python code that a page runs, from top to bottom."""
    sybil = pytest.importorskip("sybil")
    from sybil.parsers import myst, rest

    parser = rest.PythonCodeBlockParser() if page.suffix == ".rst" else myst.PythonCodeBlockParser()
    return list(sybil.Sybil(parsers=[parser]).parse(page).examples())


def _packages_of(programs: list[Any]) -> set[str]:
    """Return the packages that programs import, and those of the frameworks that they name."""
    found = set()
    for node in ast.walk(ast.parse("\n".join(str(program.parsed) for program in programs))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module).partition(".")[0]}
            found |= {"dask", "distributed"} if node.module == "arraybridge.dask" else set()
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ab":
            found |= {node.attr.removeprefix("to_")} & FRAMEWORKS
        elif isinstance(node, ast.Constant) and node.value in FRAMEWORKS:
            found.add(node.value)
    return found - set(sys.stdlib_module_names) - {"arraybridge", "numpy"}


def _packages_named(page: Path) -> set[str]:
    """Return the packages that the installation commands of a page install from a checkout."""
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: set[str] = set()
    commands = re.findall(r'pip install "\.\[([\w,-]+)\]"([\w -]*)', page.read_text(encoding="utf-8"))
    waiting = [extra for extras, _ in commands for extra in extras.split(",")]
    names = [name for _, others in commands for name in others.split()]
    while waiting:
        for requirement in project["optional-dependencies"][waiting.pop()]:
            name, extras = re.match(r"([\w-]+)(?:\[([\w,-]+)\])?", requirement).groups()  # type: ignore[union-attr]
            names.append(name)
            waiting += extras.split(",") if name == "arraybridge" else []
    found |= {MODULES_OF.get(name, name) for name in names}
    return found


@pytest.mark.parametrize("page", PAGES, ids=_name_of_page)
def test_each_page_names_the_extras_that_its_programs_need(page: Path) -> None:
    needed = _packages_of(_programs(page))
    if page.parent.name == "reference":
        page = page.with_name("index.rst")
    assert needed - _packages_named(page) == set()


@pytest.mark.parametrize("page", PAGES, ids=_name_of_page)
def test_code_of_each_page_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = _programs(page)
    text = page.read_text(encoding="utf-8")
    assert examples or not re.search("```python|code-block:: python", text)
    for name in sorted(_packages_of(examples)):
        require(name)
    if page.stem in ("decorators", "kernels"):
        pytest.importorskip("pyclesperanto", reason="the page imports this one of the two packages itself")
    if page.stem.startswith("dask"):
        pytest.importorskip("distributed")
        # On a machine with GPUs, cluster() would require dask-cuda.
        monkeypatch.setattr(hardware, "gpus", lambda: ())
        from tests.dask.timeouts import let_workers_end

        let_workers_end()
    with registry_kept():
        for example in examples:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                example.evaluate()
            shown = re.match(
                r"\s*```text\n(.*?)^```$", example.document.text[example.end :], re.MULTILINE | re.DOTALL
            )
            if shown is not None:
                assert printed.getvalue().strip() == shown[1].strip()


@pytest.mark.parametrize("page", PAGES, ids=_name_of_page)
def test_no_paragraph_of_a_page_is_repeated(page: Path) -> None:
    paragraphs = [text for text in page.read_text(encoding="utf-8").split("\n\n") if len(text) > 100]
    assert [text for text in paragraphs if paragraphs.count(text) > 1] == []


@pytest.mark.parametrize("page", PAGES, ids=_name_of_page)
def test_lines_of_code_fit_on_the_page(page: Path) -> None:
    """Longer lines scroll, even on a wide screen."""
    blocks = re.findall(r"^```\w+\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert [line for line in "".join(blocks).splitlines() if len(line) > 107] == []


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
    assert _trace(script, imported=True).strip() == "no copies"


def _trace(script: Path, imported: bool = False) -> str:
    done = run_python("-m", "arraybridge", "trace", str(script), imported=imported)
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
LOADED_LATER = set(dir(arraybridge)) - set(vars(arraybridge)) - {"dask", "interface", "testing"}
PUBLIC_NAMES = sorted({*arraybridge.__all__, *LOADED_LATER})


def _read(page: str) -> str:
    return (DOCS / f"{page}.md").read_text(encoding="utf-8")


@needs_pages
@pytest.mark.parametrize("name", [name for name in PUBLIC_NAMES if not OLDER_NAMES.match(name)])
def test_the_reference_has_each_public_name_and_an_example(name: str) -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.rst"))
    # A directive can have several names, one per line.
    directive = rf"^(?:\.\. (?:auto\w+|py:\w+):: | {{13}})(?:arraybridge\.\w+\.)?{name}(?:\(.*\))?$"
    assert re.search(directive, pages, re.MULTILINE)
    docstring = inspect.getdoc(getattr(arraybridge, name)) or ""
    in_docstring = ">>> " in docstring or re.search(r"::\n\n    ", docstring)
    blocks = re.findall(r"^\.\. code-block:: py(?:thon)?\n\n((?:    .*\n|\n)+)", pages, re.MULTILINE)
    assert in_docstring or any(re.search(rf"\b{name}\b", block) for block in blocks)


def _public_functions() -> dict[str, Any]:
    """Return the public functions, and the public methods of public classes, by name."""
    found: dict[str, Any] = {}
    packages = ["arraybridge", "arraybridge.testing"]
    if importlib.util.find_spec("distributed") is not None:
        packages.append("arraybridge.dask")
    for package in map(importlib.import_module, packages):
        for name in PUBLIC_NAMES if package is arraybridge else package.__all__:
            value = getattr(package, name)
            if inspect.isfunction(value):
                found[name] = value
            elif isinstance(value, type) and value.__module__.startswith("arraybridge"):
                methods = inspect.getmembers(value, inspect.isfunction)
                found |= {f"{name}.{method}": f for method, f in methods if not method.startswith("_")}
    return found


FUNCTIONS = _public_functions()
# Its result is in a module that a trace loads when it ends.
del FUNCTIONS["TraceLog.hotspots"]


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_type_hints_of_public_functions_resolve(name: str) -> None:
    assert "return" in typing.get_type_hints(FUNCTIONS[name])


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
        assert len(sentences) > 1 or ".md)" in answer, f"the answer is too short: {section}"


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
