"""Every Python block of the guide pages runs, page by page, from top to bottom."""

from __future__ import annotations

from pathlib import Path

import pytest

from arraybridge import machine
from tests.helpers import registry_kept, require

DOCS = Path(__file__).parent.parent / "docs"
# The wheel's tests have no pages beside them.
PAGES = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))] if DOCS.is_dir() else []

#: What the blocks of a page import, so that it is skipped where that is missing.
NEEDS = {
    "README": ("torch", "jax", "tensorflow"),
    "carriers": ("torch", "xarray", "zarr", "h5py", "SimpleITK", "PIL", "pandas", "polars", "matplotlib"),
    "coming-from": ("torch",),
    "dask": ("dask", "distributed", "torch", "jax"),
    "decorators": ("torch", "jax", "pyclesperanto"),
    "devices": ("jax",),
    "gradients": ("torch", "jax", "tensorflow"),
    "kernels": ("torch", "jax", "pyclesperanto", "numba"),
    "memory": ("torch",),
    "quickstart": ("torch", "jax"),
    "timeline": ("tensorflow", "torch", "skimage"),
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sybil = pytest.importorskip("sybil")
    from sybil.parsers.myst import PythonCodeBlockParser

    for name in NEEDS.get(page.stem, ()):
        require(name)
    if page.stem in ("decorators", "kernels"):
        pytest.importorskip("pyclesperanto", reason="the page imports this one of the two packages itself")
    if page.stem == "dask":
        # Where there are cards, cluster() would want dask-cuda.
        monkeypatch.setattr(machine, "cards", lambda: ())
        from tests.dask.patience import let_workers_end

        let_workers_end()
    document = sybil.Sybil(parsers=[PythonCodeBlockParser()]).parse(page)
    examples = list(document.examples())
    assert examples or "```python" not in page.read_text(encoding="utf-8")
    with registry_kept():
        for example in examples:
            example.evaluate()
