"""Every example runs: those of the pages, page by page from top to bottom, and those of the docstrings."""

from __future__ import annotations

import doctest
import importlib
import os
from pathlib import Path
from unittest import mock

import pytest

import arraybridge
from arraybridge import hardware
from arraybridge.frameworks.registry import framework_names, usable
from tests.helpers import registry_kept, require

DOCS = Path(__file__).parent.parent / "docs"
# Those of the README run in test_readme.py; the wheel's tests have no pages beside them.
PAGES = sorted(DOCS.glob("*.md"))
PACKAGE = Path(arraybridge.__file__).parent
MODULES = [
    ".".join(("arraybridge", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for file in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in file.read_text(encoding="utf-8")
]

#: What the blocks of a page import, so that it is skipped where that is missing.
NEEDS = {
    "carriers": ("torch", "xarray", "zarr", "h5py", "SimpleITK", "PIL", "pandas", "polars", "matplotlib"),
    "coming-from": ("torch",),
    "conversion-table": ("torch", "tensorflow"),
    "dask": ("dask", "distributed", "torch", "jax"),
    "dask-cluster": ("dask", "distributed", "torch"),
    "decorators": ("torch", "jax", "pyclesperanto"),
    "devices": ("torch", "jax"),
    "gradients": ("torch", "jax", "tensorflow"),
    "index": ("torch", "jax", "tensorflow"),
    "kernels": ("torch", "jax", "pyclesperanto", "numba"),
    "memory": ("torch",),
    "parallel": ("jax",),
    "quickstart": ("torch", "jax"),
    "troubleshooting": ("torch", "jax"),
    "traces": ("tensorflow", "torch", "skimage"),
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sybil = pytest.importorskip("sybil")
    from sybil.parsers.myst import PythonCodeBlockParser

    for name in NEEDS.get(page.stem, ()):
        require(name)
    if page.stem in ("decorators", "kernels"):
        pytest.importorskip("pyclesperanto", reason="the page imports this one of the two packages itself")
    if page.stem.startswith("dask"):
        # Where there are cards, cluster() would want dask-cuda.
        monkeypatch.setattr(hardware, "cards", lambda: ())
        from tests.dask.timeouts import let_workers_end

        let_workers_end()
    document = sybil.Sybil(parsers=[PythonCodeBlockParser()]).parse(page)
    examples = list(document.examples())
    assert examples or "```python" not in page.read_text(encoding="utf-8")
    with registry_kept():
        for example in examples:
            example.evaluate()


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name: str) -> None:
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
    assert found.failed == 0, "see what was printed"


def _can_run(examples: doctest.DocTest) -> bool:
    """Return whether the framework of an example, such as that of ``to_cupy``, works on this machine."""
    name = examples.name.rpartition(".")[2].removeprefix("to_")
    if name not in framework_names():
        return True
    framework = usable(name)
    return framework is not None and len(framework.devices.available()) > 0
