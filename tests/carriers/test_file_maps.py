"""Files that are mapped into memory: read-only maps are copied for PyTorch, copy-on-write maps are shared."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraybridge as ab
from arraybridge.reasons import Reason
from tests import matrix_data as data
from tests.helpers import output_of, require

torch = require("torch")

VALUES = np.arange(24, dtype=np.float32).reshape(4, 6)


def saved(folder: Path) -> Path:
    path = folder / "values.npy"
    np.save(path, VALUES)
    return path


def raw_map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def loaded(path: Path) -> Any:
    return np.load(path, mmap_mode="r")


#: Kind → the array or buffer over a file that is mapped read-only.
READ_ONLY_MAPS: dict[str, Callable[[Path], Any]] = {
    "np.load": loaded,
    "np.memmap": lambda path: np.memmap(path, "f4", "r", offset=128, shape=(4, 6)),
    "slice": lambda path: loaded(path)[1:, ::2],
    "np.asarray": lambda path: np.asarray(loaded(path)),
    "transposed": lambda path: loaded(path).T,
    "cast to bytes": lambda path: loaded(path).view(np.uint8),
    "np.frombuffer": lambda path: np.frombuffer(raw_map(path), np.float32, offset=128),
    "memoryview": lambda path: memoryview(raw_map(path))[128:].cast("f"),
    "mmap": raw_map,
}


@pytest.mark.parametrize("kind", READ_ONLY_MAPS)
def test_a_read_only_map_is_copied_and_the_advice_names_copy_on_write(kind: str, tmp_path: Path) -> None:
    x = READ_ONLY_MAPS[kind](saved(tmp_path))
    route = ab.explain(x, "torch")
    assert (route.code, route.copies) == (Reason.READ_ONLY_FILE_MAP, 1)
    assert "read-only map of a file" in str(route)
    for expression in ('np.load(path, mmap_mode="c")', 'np.memmap(mode="c")', "do not overwrite or shorten"):
        assert expression in route.advice
    with ab.trace() as log:
        tensor = ab.to_torch(x)
    assert log.records == [route]
    assert [spot.advice for spot in log.hotspots()] == [route.advice]
    before = data.bits(ab.to_numpy(x))
    tensor.zero_()
    assert data.bits(ab.to_numpy(x)) == before
    shared = ab.to_torch(x, copy=False)  # do not write to it
    assert shared.data_ptr() == ab.to_numpy(x).__array_interface__["data"][0]


def test_the_page_on_files_names_copy_on_write_mode_and_the_danger() -> None:
    page = Path(__file__).parents[2] / "docs" / "carriers.md"
    if not page.exists():
        pytest.skip("requires the documentation, which only a checkout has")
    section = page.read_text(encoding="utf-8").partition("\n## A file mapped into memory\n")[2]
    section = section.partition("\n## ")[0]
    for expression in (
        'np.load(path, mmap_mode="c")',
        "np.memmap(",
        'mode="c")',
        "Do not overwrite or shorten",
    ):
        assert expression in section


def test_calls_of_pytorch_itself_have_the_same_advice(tmp_path: Path) -> None:
    with ab.trace(foreign=True) as log:
        torch.tensor(loaded(saved(tmp_path)))
    (spot,) = log.hotspots()
    assert 'np.load(path, mmap_mode="c")' in spot.advice


@pytest.mark.parametrize("mode", ["c", "r+"])
def test_a_writable_map_whose_view_is_read_only_has_the_general_advice(mode: Any, tmp_path: Path) -> None:
    x = np.load(saved(tmp_path), mmap_mode=mode)
    view = x[:]
    view.flags.writeable = False
    route = ab.explain(view, "torch")
    assert route.code == Reason.READ_ONLY
    assert "mmap_mode" not in route.advice
    plain = VALUES.copy()
    plain.flags.writeable = False
    assert ab.explain(plain, "torch").code == Reason.READ_ONLY


def test_copy_on_write_shares_and_never_changes_the_file(tmp_path: Path) -> None:
    path = saved(tmp_path)
    before = path.read_bytes()
    for x in (np.load(path, mmap_mode="c"), np.memmap(path, "f4", "c", offset=128, shape=(4, 6))):
        assert ab.explain(x, "torch").shares_memory
        tensor = ab.to_torch(x)
        assert tensor.data_ptr() == x.ctypes.data
        tensor.add_(1)
        assert np.array_equal(x, VALUES + 1)
        del tensor
        x.flush()
    assert path.read_bytes() == before
    assert np.array_equal(np.load(path), VALUES)


def test_targets_that_never_write_share_a_read_only_map(tmp_path: Path) -> None:
    x = loaded(saved(tmp_path))
    assert ab.explain(x, "numpy").shares_memory
    for target in ("jax", "tensorflow"):
        require(target)
        assert ab.explain(x, target).shares_memory
        assert data.bits(ab.convert_memory(x, target)) == VALUES.tobytes()


@pytest.mark.skipif(os.name == "nt", reason="requires POSIX file maps")
def test_a_new_file_of_the_same_name_leaves_the_map_intact(tmp_path: Path) -> None:
    """Check the method that docs/carriers.md recommends instead of overwriting the file."""
    lines = (
        "import os, sys, numpy as np, arraybridge as ab",
        f"path = {str(saved(tmp_path))!r}",
        "tensor = ab.to_torch(np.load(path, mmap_mode='c'))",
        "np.save(path + '.new.npy', np.zeros(2, np.float32))",
        "os.replace(path + '.new.npy', path)",
        "print(float(tensor.sum()), np.load(path).tolist())",
    )
    assert output_of(*lines, imported=True).split() == ["276.0", "[0.0,", "0.0]"]
