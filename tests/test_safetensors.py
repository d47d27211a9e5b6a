"""Safetensors files: maps, sharing, bad files, and failures in the middle of writing."""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import stat
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import arraybridge as ab
from arraybridge import CheckpointError, DtypeNotSupportedError, load_safetensors, save_safetensors
from arraybridge import safetensors as module
from arraybridge.reasons import Reason
from tests import matrix_data as data
from tests.helpers import output_of, require, run_python

MODES: tuple[Any, ...] = ("c", "r", None)
#: Dtype in the format → NumPy's name, from the documentation of the format.
DTYPES = {
    **{f"I{8 * n}": f"int{8 * n}" for n in (1, 2, 4, 8)},
    **{f"U{8 * n}": f"uint{8 * n}" for n in (1, 2, 4, 8)},
    **{f"F{8 * n}": f"float{8 * n}" for n in (2, 4, 8)},
    "BOOL": "bool",
    "C64": "complex64",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
linux = pytest.mark.skipif(sys.platform != "linux", reason="requires /proc of Linux")


def raw(header: Any, values: bytes = b"") -> bytes:
    """Return a file with this header: bytes, text, or an object for JSON."""
    text = header if isinstance(header, (bytes, str)) else json.dumps(header)
    text = text.encode() if isinstance(text, str) else text
    return len(text).to_bytes(8, "little") + text + values


def entry(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def written(folder: Path, content: bytes, name: str = "model.safetensors") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def saved(folder: Path, arrays: Any, name: str = "model.safetensors") -> Path:
    path = folder / name
    save_safetensors(path, arrays)
    return path


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def parsed(path: Path) -> tuple[int, dict[str, Any]]:
    """Return the position of the values in a file, and its header."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    return start, json.loads(content[8:start])


def weights() -> dict[str, np.ndarray[Any, Any]]:
    """Return tensors with sizes that are multiples of 64 bytes, and others."""
    random = np.random.default_rng(0)
    return {
        "bias": random.random(10, np.float32),
        "weight": random.random((32, 16), np.float32),
        "steps": np.arange(3),
        "mask": random.random(192) < 0.5,
        "scale": np.array(2.5),
        "none": np.empty((0, 4), np.float16),
    }


def equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return whether both dicts have equal arrays in the same order, with equal shapes and dtypes."""
    pairs = zip(first.items(), second.items(), strict=True)
    return all(
        (name, x.dtype, x.shape, x.tobytes()) == (other, y.dtype, y.shape, y.tobytes())
        for (name, x), (other, y) in pairs
    )


@pytest.fixture
def nothing_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if a file is mapped."""

    def fail(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a file was mapped")

    monkeypatch.setattr(module, "SafetensorsMap", fail)


# -- load ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_file_is_a_dict_of_numpy_arrays_in_the_order_of_its_header(mode: Any, tmp_path: Path) -> None:
    path = saved(tmp_path, weights())
    loaded = load_safetensors(str(path), mmap_mode=mode)
    assert type(loaded) is dict
    assert equal(loaded, weights())
    assert {type(x) for x in loaded.values()} == {np.ndarray}
    assert {x.flags.writeable for x in loaded.values()} == {mode != "r"}
    if mode is None:
        assert {x.ctypes.data % 64 for x in loaded.values()} == {0}
        path.write_bytes(b"")  # independent of the file
        assert equal(loaded, weights())


def test_copy_on_write_is_the_default_and_never_changes_the_file(tmp_path: Path) -> None:
    path = saved(tmp_path, weights())
    before = path.read_bytes()
    loaded = load_safetensors(path)
    for x in loaded.values():
        x[...] = 0
    assert path.read_bytes() == before
    assert equal(load_safetensors(path), weights())
    assert not any(x.any() for x in loaded.values())


def test_pytorch_trains_on_the_mapped_arrays(tmp_path: Path) -> None:
    torch = require("torch")
    path = saved(tmp_path, {"weight": np.ones((4, 16), np.float32)})
    before = path.read_bytes()
    loaded = load_safetensors(path)
    weight = ab.to_torch(loaded["weight"]).requires_grad_()
    assert weight.data_ptr() == loaded["weight"].ctypes.data
    optimizer = torch.optim.SGD([weight], lr=0.5)
    weight.sum().backward()
    optimizer.step()
    assert loaded["weight"].tolist() == [[0.5] * 16] * 4
    assert path.read_bytes() == before


@linux
def test_only_the_header_is_read_and_values_are_read_when_used(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": np.ones(2**21), "b": np.ones(2**21)})

    def read_bytes() -> int:
        return int(re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())[0])

    header = parsed(path)[0]
    before = read_bytes()
    loaded = load_safetensors(path)
    assert read_bytes() - before < header + 1024  # reading /proc counts, too
    assert mapped_kib(path)["Rss"] == 0
    assert loaded["b"].sum() == 2**21
    assert 2**14 <= mapped_kib(path)["Rss"] < 2**14 + 4096  # 16 MiB, and pages around them


def mapped_kib(path: Path) -> dict[str, int]:
    """Return the memory counters of this process's map of a file, in KiB."""
    _, _, after = Path("/proc/self/smaps").read_text().partition(f"{path}\n")
    return {name: int(kib) for name, kib in re.findall(r"^(\w+): +(\d+) kB$", after, re.MULTILINE)[:20]}


@linux
def test_processes_that_map_the_same_file_share_its_memory(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": np.ones(2**20)})  # 8 MiB
    here = load_safetensors(path)["a"]
    assert here.sum() == 2**20
    lines = (
        "from pathlib import Path",
        "import arraybridge as ab",
        "from tests.test_safetensors import mapped_kib",
        f"path = Path({str(path)!r})",
        "x = ab.load_safetensors(path)['a']",
        "x.sum()",
        "print(*(mapped_kib(path)[name] for name in ('Rss', 'Pss', 'Private_Clean', 'Private_Dirty')))",
        "x[0] = 5",
        "print(mapped_kib(path)['Private_Dirty'])",
    )
    first, dirty = output_of(*lines).splitlines()
    rss, pss, *private = map(int, first.split())
    assert rss >= 2**13
    # The system may unmap pages that one of the processes has not used for some time.
    assert pss <= rss * 0.75  # half of each page
    assert sum(private) <= rss / 2
    assert 0 < int(dirty) <= 64  # the page that was written
    assert here[0] == 1


def test_a_file_that_is_larger_than_the_memory_is_mapped(tmp_path: Path) -> None:
    size = 2**40
    path = written(tmp_path, raw({"w": entry([size], [0, size], "U8")}))
    try:
        os.truncate(path, path.stat().st_size + size)
    except OSError as error:
        pytest.skip(f"the file system has no sparse files of 1 TiB: {error}")
    assert load_safetensors(path, "r")["w"][size // 2] == 0
    if sys.version_info >= (3, 13) and sys.platform == "linux":
        assert load_safetensors(path)["w"][size // 2] == 0


def test_a_failure_to_map_names_the_mode_that_needs_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    path = saved(tmp_path, weights())
    monkeypatch.setattr(module, "SafetensorsMap", fail)
    with pytest.raises(OSError, match="Cannot allocate") as caught:
        load_safetensors(path)
    assert caught.value.__notes__ == ['Pass mmap_mode="r" to map a file that is larger than the memory.']
    with pytest.raises(OSError, match="Cannot allocate") as caught:
        load_safetensors(path, "r")
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.skipif(sys.version_info < (3, 13), reason="requires trackfd of Python 3.13")
@linux
def test_a_map_keeps_no_file_descriptor(tmp_path: Path) -> None:
    path = saved(tmp_path, weights())
    before = len(names_in(Path("/proc/self/fd")))
    maps = [load_safetensors(path, mmap_mode=mode) for mode in ("c", "r")]
    assert len(names_in(Path("/proc/self/fd"))) == before
    assert all(equal(one, weights()) for one in maps)


def test_the_arrays_keep_the_map_alive_and_it_cannot_be_closed(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": np.arange(8.0), "b": np.ones(8)})
    slice_of_a = load_safetensors(path)["a"][2:4]
    base: Any = slice_of_a
    while isinstance(base, np.ndarray):
        base = base.base
    with pytest.raises(BufferError):
        base.obj.close()
    assert slice_of_a.tolist() == [2.0, 3.0]


@pytest.mark.parametrize("mode", ["r+", "w+", "w", "", True])
def test_modes_that_write_to_the_file_are_rejected(mode: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"files are never changed in place\. Pass 'c' \(copy-on-write\)"):
        load_safetensors(tmp_path / "missing.safetensors", mode)


def test_a_missing_file_and_a_wrong_type_raise_the_usual_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape("missing.safetensors")):
        load_safetensors(tmp_path / "missing.safetensors")
    with pytest.raises(IsADirectoryError):
        load_safetensors(tmp_path)
    with pytest.raises(TypeError, match="must be the name of a file"):
        load_safetensors(b"bytes")  # type: ignore[arg-type]


# -- an index of several files ---------------------------------------------------------------------------


def index_of(folder: Path, places: Any, name: str = "model.safetensors.index.json") -> Path:
    content = {"metadata": {"total_size": 1}, "weight_map": places}
    return written(folder, json.dumps(content, indent=2).encode(), name)


@pytest.mark.parametrize("mode", MODES)
def test_an_index_loads_the_files_in_its_folder(mode: Any, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    saved(snapshot, {"a": np.ones(3), "b": np.zeros(2)}, "one.safetensors")
    blob = saved(tmp_path, {"c": np.arange(4), "d": np.ones(1)}, "two.safetensors")
    (snapshot / "two.safetensors").symlink_to(blob)  # as in the cache of huggingface_hub
    index = index_of(
        snapshot, {"c": "two.safetensors", "b": "one.safetensors", "a": "one.safetensors"}, ".index.json"
    )
    assert equal(load_safetensors(index, mode), {"c": np.arange(4), "b": np.zeros(2), "a": np.ones(3)})
    assert load_safetensors(index_of(tmp_path, {})) == {}


OUTSIDE = (
    *("../secret.safetensors", "folder/../../secret.safetensors", "folder/part.safetensors", "/etc/passwd"),
    *("..", ".", "", "a\0b", "\ud800", "./one.safetensors", "one.safetensors/", 5, None, ["one.safetensors"]),
)


@pytest.mark.usefixtures("nothing_mapped")
@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_that_leaves_its_folder_is_rejected(name: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "folder").mkdir(parents=True)
    for place in (tmp_path / "secret.safetensors", folder / "folder" / "part.safetensors"):
        save_safetensors(place, {"a": np.ones(2)})
    saved(folder, {"a": np.ones(2)}, "one.safetensors")
    index = index_of(folder, {"b": "one.safetensors", "a": name})
    with pytest.raises(CheckpointError, match="is not the name of a file in its folder") as caught:
        load_safetensors(index)
    assert str(index) in str(caught.value)


@pytest.mark.usefixtures("nothing_mapped")
def test_an_index_with_another_defect_is_rejected_before_anything_is_mapped(tmp_path: Path) -> None:
    saved(tmp_path, {"a": np.ones(2)}, "one.safetensors")
    bad = written(tmp_path, b"12345", "two.safetensors")
    with pytest.raises(CheckpointError, match=r"two\.safetensors: it has only 5 bytes"):
        load_safetensors(index_of(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}))
    bad.unlink()
    with pytest.raises(FileNotFoundError, match=r"two\.safetensors"):
        load_safetensors(index_of(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}))
    with pytest.raises(CheckpointError, match=r"one\.safetensors does not contain the tensor 'b'"):
        load_safetensors(index_of(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"}))
    itself = index_of(tmp_path, {"a": "model.safetensors.index.json"})
    for content in (itself.read_bytes(), b"", b"[]", b'{"weight_map": []}', b"{}", b'{"weight_map": NaN}'):
        itself.write_bytes(content)
        with pytest.raises(CheckpointError, match=re.escape(str(itself))):
            load_safetensors(itself)
    itself.write_bytes(b'{"weight_map": {"a": "one.safetensors", "a": "one.safetensors"}}')
    with pytest.raises(CheckpointError, match="a name occurs twice"):
        load_safetensors(itself)


# -- bad files -----------------------------------------------------------------------------------------

BIG = 2**62
#: Content of a file → a part of the message.
BAD = [
    (b"", "only 0 bytes"),
    (b"\1\0\0\0\0\0\0", "only 7 bytes"),
    ((2).to_bytes(8, "little") + b"{", "the size of its header is given as 2"),
    ((2**63).to_bytes(8, "little") + b"{}", f"the size of its header is given as {2**63}"),
    (b"version https://git-lfs.github.com/spec/v1\n", "the size of its header is given as"),
    (raw(b""), "not valid JSON"),
    (raw(b"\xff\xfe"), "not valid JSON"),
    (raw('{"a": 1'), "not valid JSON"),
    (raw("{}".encode("utf-16")), "not valid JSON"),
    (raw("\ufeff{}"), "not valid JSON"),
    (raw("[" * 200_000), "not valid JSON"),
    (raw('{"a":' * 100_000 + "1" + "}" * 100_000), "not valid JSON"),
    (raw("[]"), "no JSON object"),
    (raw('"a"'), "no JSON object"),
    (raw({"a": entry([2], [0, 8])}, b"1234567"), "its header describes"),
    (raw({"a": entry([2], [0, 8])}, b"123456789"), "its header describes"),
    (raw({}, b"1"), "its header describes"),
    (raw({"a": entry([2], [8, 16])}, bytes(16)), "'a' follows a gap"),
    (raw({"a": entry([2], [0, 8]), "b": entry([2], [12, 20])}, bytes(20)), "'b' follows a gap"),
    (raw({"a": entry([2], [0, 8]), "b": entry([2], [4, 12])}, bytes(12)), "'b' overlaps"),
    (raw({"a": entry([2], [0, 8]), "b": entry([2], [0, 8])}, bytes(8)), "'b' overlaps"),
    (raw({"a": entry([4], [0, 16]), "b": entry([0], [8, 8])}, bytes(16)), "'b' overlaps"),
    (raw(f'{{"a": {json.dumps(entry())}, "a": {json.dumps(entry())}}}', bytes(8)), "a name occurs twice"),
    (raw('{"a": {"dtype": "F32", "shape": [2], "shape": [2], "data_offsets": [0, 8]}}', bytes(8)), "twice"),
    (raw({"a": entry([3], [0, 8])}, bytes(8)), "'a' has 8 bytes instead of 12"),
    (raw({"a": entry([2], [8, 0])}, bytes(8)), "'a' has -8 bytes instead of 8"),
    (raw({"a": entry([-2], [0, 8])}, bytes(8)), "the entry of 'a' needs"),
    (raw({"a": entry([-2, -1], [0, 8])}, bytes(8)), "the entry of 'a' needs"),
    (raw({"a": entry([2], [-8, 0])}, bytes(8)), "the entry of 'a' needs"),
    (raw({"a": entry([2.0], [0, 8])}, bytes(8)), "the entry of 'a' needs"),
    (raw({"a": entry([2], [0.0, 8])}, bytes(8)), "the entry of 'a' needs"),
    (raw({"a": entry([True, 2], [0, 8])}, bytes(8)), "the entry of 'a' needs"),
    (raw({"a": entry([2], [False, 8])}, bytes(8)), "the entry of 'a' needs"),
    (raw({"a": entry(["2"], [0, 8])}, bytes(8)), "the entry of 'a' needs"),
    (raw('{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 8]}}', bytes(8)), "NaN is not a number"),
    (
        raw('{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 8]}}', bytes(8)),
        "the entry of 'a' needs",
    ),
    (raw({"a": entry([10**400], [0, 8])}, bytes(8)), "too large"),
    (raw('{"a": {"dtype": "F32", "shape": [%s], "data_offsets": [0, 8]}}' % ("9" * 5000)), "not valid JSON"),
    (raw({"a": entry([BIG, BIG], [0, 8])}, bytes(8)), "too large"),
    (raw({"a": entry([BIG, BIG, 0], [0, 0])}), "too large"),
    (raw({"a": entry([2**64, 0], [0, 0])}), "too large"),
    (raw({"a": entry([1] * 65, [0, 4])}, bytes(4)), "too large"),
    (raw({"a": entry([BIG] * 50_000, [0, 4])}, bytes(4)), "too large"),
    (raw({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)), "the entry of 'a' needs"),
    (raw({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)), "the entry of 'a' needs"),
    (raw({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)), "the entry of 'a' needs"),
    (raw({"a": entry([2], [0, 8, 8])}, bytes(8)), "the entry of 'a' needs"),
    (raw({"a": entry([2], [0])}, bytes(8)), "the entry of 'a' needs"),
    (raw({"a": entry(2, [0, 8])}, bytes(8)), "the entry of 'a' needs"),
    (raw({"a": entry("2", [0, 8])}, bytes(8)), "the entry of 'a' needs"),
    (raw({"a": entry([2], "08")}, bytes(8)), "the entry of 'a' needs"),
    (raw({"a": entry([2], [0, 8], None)}, bytes(8)), "the entry of 'a' needs"),
    (raw({"a": entry([2], [0, 8], 32)}, bytes(8)), "the entry of 'a' needs"),
    (raw({"a": None}), "the entry of 'a' needs"),
    (raw({"a": [1, 2, 3]}), "the entry of 'a' needs"),
    (raw({"__metadata__": {"a": 1}}), "__metadata__ is not an object of strings"),
    (raw({"__metadata__": []}), "__metadata__ is not an object of strings"),
    (raw({"__metadata__": "text"}), "__metadata__ is not an object of strings"),
]


@pytest.mark.usefixtures("nothing_mapped")
@pytest.mark.parametrize("number", range(len(BAD)))
def test_a_bad_file_is_rejected_before_it_is_mapped(number: int, tmp_path: Path) -> None:
    content, message = BAD[number]
    path = written(tmp_path, content)
    for mode in MODES:
        with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
            load_safetensors(path, mode)
    assert str(caught.value).startswith(f"Cannot load {path}: ")
    assert isinstance(caught.value, (ab.MemoryConversionError, ValueError))
    assert caught.value.advice


@pytest.mark.usefixtures("nothing_mapped")
def test_a_file_that_is_truncated_at_any_length_is_rejected(tmp_path: Path) -> None:
    content = saved(tmp_path, {"a": np.ones(2, np.float32), "b": np.ones(3, np.int8)}).read_bytes()
    for length in range(len(content)):
        with pytest.raises(CheckpointError):
            load_safetensors(written(tmp_path, content[:length], "short.safetensors"))


def test_a_header_of_more_than_100_mb_is_rejected(tmp_path: Path) -> None:
    length = 100_000_001
    path = written(tmp_path, length.to_bytes(8, "little"))
    os.truncate(path, 8 + length)
    with pytest.raises(CheckpointError, match="the size of its header is given as 100000001"):
        load_safetensors(path)


FLIPS = """
import random, sys
from pathlib import Path
import arraybridge as ab

path = Path(sys.argv[1])
content = path.read_bytes()
values = b"".join(x.tobytes() for x in ab.load_safetensors(path).values())
end = len(content) - len(values)
changed = [(i, content[i] ^ 1 << bit) for i in range(end) for bit in range(8)]
random.seed(0)
changed += [(random.randrange(end), random.randrange(256)) for _ in range(1000)]
loaded = rejected = 0
file = path.open("r+b", buffering=0)
for i, byte in changed:
    file.seek(0)
    file.write(content[:i] + bytes([byte]) + content[i + 1 :])
    try:
        arrays = ab.load_safetensors(path)
    except (ab.CheckpointError, ab.DtypeNotSupportedError) as error:
        assert str(path) in str(error)
        rejected += 1
    else:  # another name, or a value of the metadata
        assert b"".join(x.tobytes() for x in arrays.values()) == values
        loaded += 1
file.close()
print(loaded, rejected)
"""


def test_changed_bits_of_the_header_are_rejected_or_change_no_value(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_safetensors(path, {"w": np.arange(6.0).reshape(2, 3), "b": np.ones(3, "int8")}, {"format": "pt"})
    done = run_python("-c", FLIPS, str(path))
    assert done.returncode == 0, done.stderr
    loaded, rejected = map(int, done.stdout.split())
    assert loaded > 50
    assert rejected > 1000


def test_spaces_and_additional_fields_are_accepted_as_by_other_readers(tmp_path: Path) -> None:
    header = (
        '\n {"z": {"dtype": "U8", "shape": [0], "data_offsets": [2, 2], "more": 1}, "__metadata__": null,'
        ' "": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}} \n'
    )
    loaded = load_safetensors(written(tmp_path, raw(header, b"\1\2")))
    assert equal(loaded, {"z": np.empty(0, np.uint8), "": np.array([1, 2], np.uint8)})
    assert load_safetensors(written(tmp_path, raw("{}"))) == {}


@pytest.mark.usefixtures("nothing_mapped")
@pytest.mark.parametrize("code", ["F4", "F6_E2M3", "F6_E3M2", "C128", "f32", ""])
def test_a_dtype_that_numpy_does_not_have_is_rejected(code: str, tmp_path: Path) -> None:
    path = written(tmp_path, raw({"a": entry([16], [0, 8], code)}, bytes(8)))
    with pytest.raises(DtypeNotSupportedError, match=f"'a' has dtype {code}, which NumPy") as caught:
        load_safetensors(path)
    assert str(path) in str(caught.value)


@pytest.mark.usefixtures("nothing_mapped")
def test_without_ml_dtypes_the_error_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    path = written(tmp_path, raw({"a": entry([4], [0, 8], "BF16")}, bytes(8)))
    with pytest.raises(DtypeNotSupportedError, match=r"not installed\. Run pip install ml_dtypes\.$"):
        load_safetensors(path)


# -- save ----------------------------------------------------------------------------------------------


def test_the_values_begin_at_a_multiple_of_64_bytes_and_large_tensors_are_aligned(tmp_path: Path) -> None:
    for length in range(1, 70):  # of the header
        path = saved(tmp_path, {"x" * length: np.ones(3, np.int8), **weights()})
        start, header = parsed(path)
        assert start % 64 == 0
        assert path.read_bytes()[8:start].rstrip(b" ").endswith(b"}")
    assert list(header) == ["x" * length, *weights()]
    for name, x in weights().items():
        begin, end = header[name]["data_offsets"]
        assert end - begin == x.nbytes
        assert begin % (x.itemsize if x.nbytes % 64 else 64) == 0
    loaded = load_safetensors(path)
    assert {x.ctypes.data % 64 for x in loaded.values() if not x.nbytes % 64} == {0}


def test_every_framework_maps_the_file_without_a_copy(tmp_path: Path) -> None:
    arrays = {"a": np.arange(16, dtype=np.float32), "odd": np.ones(3, np.int8), "b": np.ones((8, 8))}
    loaded = load_safetensors(saved(tmp_path, arrays))
    assert loaded["odd"].ctypes.data % 64 == 0  # the first of the others
    for target in ("torch", "jax", "tensorflow"):
        require(target)
        with ab.trace() as log:
            converted = ab.convert_tree(loaded, target)
        assert log.total_bytes_copied == 0
        for name, x in converted.items():
            assert data.address(x) == loaded[name].ctypes.data
            assert data.bits(x) == arrays[name].tobytes()


def test_arrays_of_every_framework_are_saved_exactly(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    torch = require("torch")
    jax = require("jax")
    tf = require("tensorflow")
    arrays = {
        "parameter": torch.nn.Parameter(torch.from_numpy(values.copy())),
        "with a graph": torch.from_numpy(values).requires_grad_() * 1,
        "transposed": torch.from_numpy(values.T.copy()).T,
        "conjugated": torch.from_numpy(values + 1j * values).to(torch.complex64).conj(),
        "jax": jax.numpy.asarray(values),
        "tensorflow": tf.constant(values),
        "variable": tf.Variable(values),
        "memoryview": memoryview(values),
    }
    expected = dict.fromkeys(arrays, values)
    expected["conjugated"] = np.conj(values + 1j * values).astype(np.complex64)
    assert equal(load_safetensors(saved(tmp_path, arrays)), expected)


def test_pyclesperanto_images_are_saved_exactly(tmp_path: Path) -> None:
    require("pyclesperanto")
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    image = data.build("pyclesperanto", "C", "float32").array
    loaded = load_safetensors(saved(tmp_path, {"image": image, "values": values}))
    assert data.bits(image) == loaded["image"].tobytes()


class Old(np.ndarray):
    """A subclass of NumPy arrays."""


def test_every_layout_of_numpy_is_saved_exactly(tmp_path: Path) -> None:
    values = np.arange(24.0).reshape(4, 6)
    tied = values[1:3]
    arrays = {
        "transposed": values.T,
        "reversed": values[::-1, ::2],
        "broadcast": np.broadcast_to(values[0], (3, 6)),
        "big-endian": values.astype(">f4"),
        "unaligned": np.frombuffer(b"1" + values.tobytes(), np.uint8)[1:].view(np.float64),
        "0-d": np.array(7, np.int16),
        "scalar": np.float32(1.5),
        "empty": np.empty((3, 0, 2), np.float32),
        "subclass": values.view(Old),
        "tied": tied,
        "the same memory": tied,
    }
    path = saved(tmp_path, MappingProxyType(arrays))
    expected = {name: np.array(x, order="C") for name, x in arrays.items()}
    expected["big-endian"] = values.astype("=f4")
    for mode in MODES:
        assert equal(load_safetensors(path, mode), expected)
    bits = np.array([0, 1, 2, 255], np.uint8)
    assert load_safetensors(saved(tmp_path, {"b": bits.view(bool)}))["b"].tobytes() == bits.tobytes()


def test_carriers_are_saved_exactly(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    zarr = pytest.importorskip("zarr")
    values = np.arange(600, dtype=np.int32).reshape(20, 30)
    file = zarr.array(values, chunks=(7, 7))
    arrays = {"file": file, "table": pandas.DataFrame(values), "buffer": b"123"}
    loaded = load_safetensors(saved(tmp_path, arrays))
    expected = {"file": values, "table": values, "buffer": np.frombuffer(b"123", np.uint8)}
    assert equal(loaded, expected)


class Generated:
    """An object whose array is generated when it is read."""

    def __init__(self, rows: int) -> None:
        self.shape = (rows,)
        self.dtype = np.dtype(np.float64)
        self.nbytes = 8 * rows

    def __getitem__(self, index: Any) -> Any:
        return np.ones(self.shape)[index]


class GeneratedCarrier(ab.Carrier):
    def carries(self, x: Any) -> bool:
        return isinstance(x, Generated)

    def array(self, x: Any) -> Any:
        return x, "it is generated"


@pytest.fixture
def _generated() -> Iterator[None]:
    from tests.helpers import registry_kept

    with registry_kept():
        ab.register_carrier(GeneratedCarrier())
        yield


@pytest.mark.usefixtures("_generated")
def test_one_array_at_a_time_is_in_memory(tmp_path: Path) -> None:
    rows = 2**20
    arrays = {str(i): Generated(rows) for i in range(6)}
    save_safetensors(tmp_path / "warm.safetensors", {"a": Generated(1)})
    tracemalloc.start()
    try:
        path = saved(tmp_path, arrays)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * 8 * rows
    assert load_safetensors(path)["5"].sum() == rows


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        ([1, 2], ab.UnknownArrayError, "at ['layer']: Cannot convert an object of type list"),
        ({"w": np.ones(2)}, ab.UnknownArrayError, "flatten nested dicts first, as in"),
        (5, ab.UnknownArrayError, "at ['layer']"),
        (
            np.ma.masked_equal([1, 2], 2),
            ab.ArrayNotSupportedError,
            "at ['layer']: Cannot convert a masked NumPy array",
        ),
        (np.array(["a"]), DtypeNotSupportedError, "at ['layer']"),
        (np.ones(2, complex), DtypeNotSupportedError, "at ['layer']: Cannot save dtype complex128"),
    ],
)
def test_a_value_that_cannot_be_saved_is_named_and_leaves_the_old_file(
    x: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    path = saved(tmp_path, weights())
    with pytest.raises(error, match=re.escape(message)):
        save_safetensors(path, {"first": np.ones(4), "layer": x})
    assert names_in(tmp_path) == [path.name]
    assert equal(load_safetensors(path), weights())


def test_sparse_and_meta_tensors_are_named(tmp_path: Path) -> None:
    torch = require("torch")
    sparse = torch.eye(3).to_sparse_coo()
    for x in (sparse, torch.ones(2, device="meta")):
        with pytest.raises(ab.ArrayNotSupportedError, match=re.escape("at ['layer']")):
            save_safetensors(tmp_path / "model.safetensors", {"layer": x})
    scipy = pytest.importorskip("scipy.sparse")
    with pytest.raises(ab.ArrayNotSupportedError, match=re.escape("at ['layer']: A sparse CSR array")):
        save_safetensors(tmp_path / "model.safetensors", {"layer": scipy.eye_array(3, format="csr")})
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    ("arrays", "metadata", "error", "message"),
    [
        ({1: np.ones(2)}, None, TypeError, "must be strings, not 1"),
        ({b"a": np.ones(2)}, None, TypeError, "must be strings"),
        ({"__metadata__": np.ones(2)}, None, ValueError, "reserves the name __metadata__. Pass metadata="),
        ({"\ud800": np.ones(2)}, None, ValueError, "cannot be encoded as UTF-8"),
        ({}, {"epoch": 1}, TypeError, "metadata must be a dict of strings"),
        ({}, {1: "epoch"}, TypeError, "metadata must be a dict of strings"),
        ({}, "pt", TypeError, "metadata must be a dict of strings"),
        ([np.ones(2)], None, TypeError, "arrays must be a dict of arrays, not list"),
        ({"x" * 100_000_000: np.ones(2)}, None, ValueError, "Save several files"),
    ],
)
def test_invalid_names_and_metadata_raise(
    arrays: Any, metadata: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        save_safetensors(tmp_path / "model.safetensors", arrays, metadata)
    assert names_in(tmp_path) == []


def test_swapped_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"not str\. Call save_safetensors\(path, arrays\)"):
        save_safetensors({"a": np.ones(2)}, str(tmp_path))  # type: ignore[arg-type]


def test_names_and_metadata_may_be_any_text(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    arrays = {"": np.ones(1), "µ\n\"'": np.zeros(2), np.str_("text"): np.ones(3)}
    save_safetensors(path, arrays, {"é": "\\ \N{SNOWMAN}", "format": "pt"})
    assert parsed(path)[1]["__metadata__"] == {"é": "\\ \N{SNOWMAN}", "format": "pt"}
    assert equal(load_safetensors(path), arrays)
    save_safetensors(path, {}, {})
    assert parsed(path) == (64, {})


# -- replacement -----------------------------------------------------------------------------------------


def test_maps_of_the_old_file_keep_their_values(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": np.ones(2**14)})
    old = {mode: load_safetensors(path, mode)["a"] for mode in MODES}
    save_safetensors(path, {"a": np.zeros(2)})
    assert {x.sum() for x in old.values()} == {2**14}
    assert load_safetensors(path)["a"].tolist() == [0, 0]


def test_arrays_are_saved_to_the_path_that_they_map(tmp_path: Path) -> None:
    path = saved(tmp_path, weights())
    for mode in MODES:
        loaded = load_safetensors(path, mode)
        save_safetensors(path, loaded)
        assert equal(loaded, weights())
        assert equal(load_safetensors(path), weights())
    loaded = load_safetensors(path)
    loaded["bias"] += 1
    save_safetensors(path, dict(reversed(loaded.items())))
    again = load_safetensors(path)
    assert list(again) == list(weights())[::-1]
    assert np.array_equal(again["bias"], weights()["bias"] + 1)


@pytest.mark.parametrize("call", ["convert_memory", "fsync", "replace"])
def test_a_failure_in_the_middle_leaves_the_old_file_and_no_other(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path, weights())
    calls: list[Any] = []

    def fail(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if call == "convert_memory" and len(calls) < 3:
            return arguments[0]
        raise PermissionError("the disk is full")

    owners = {"convert_memory": module, "fsync": os, "replace": Path}
    monkeypatch.setattr(owners[call], call, fail)
    for target in (path, tmp_path / "new.safetensors"):
        with pytest.raises(PermissionError, match="the disk is full") as caught:
            save_safetensors(target, {"a": np.ones(4), "b": np.ones(8), "c": np.ones(2)})
    assert names_in(tmp_path) == [path.name]
    assert equal(load_safetensors(path), weights())
    if call == "replace" and os.name == "nt":
        assert "Windows cannot replace a file while arrays map it" in caught.value.__notes__[0]


def test_an_array_that_changes_while_it_is_saved_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "convert_memory", lambda x, *_, **__: x[1:])
    with pytest.raises(ValueError, match="'a' changed while it was saved"):
        save_safetensors(tmp_path / "model.safetensors", {"a": np.ones(4)})
    assert names_in(tmp_path) == []


def test_the_file_is_complete_on_the_disk_before_it_replaces_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path, weights())
    seen = []
    sync = os.fsync

    def record(descriptor: int) -> None:
        sync(descriptor)
        seen.append((os.fstat(descriptor).st_size, os.path.samestat(os.fstat(descriptor), path.stat())))

    monkeypatch.setattr(os, "fsync", record)
    save_safetensors(path, {"a": np.ones(16)})
    assert seen == [(path.stat().st_size, False)]


@pytest.mark.skipif(os.name == "nt", reason="requires POSIX permissions")
def test_new_files_follow_the_umask_and_old_ones_keep_their_permissions(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = saved(tmp_path, weights())
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o604)
        save_safetensors(path, weights())
        assert stat.S_IMODE(path.stat().st_mode) == 0o604
    finally:
        os.umask(before)


@pytest.mark.skipif(os.name == "nt", reason="requires POSIX files")
def test_links_remain_links_and_other_kinds_of_files_remain(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "model.safetensors"
    link.symlink_to(tmp_path / "disk" / "model.safetensors")
    for values in (np.ones(2), np.zeros(3)):
        save_safetensors(link, {"a": values})
        assert link.is_symlink()
        assert equal(load_safetensors(tmp_path / "disk" / "model.safetensors"), {"a": values})
    for path in (tmp_path / "disk", Path(os.devnull)):
        with pytest.raises(FileExistsError, match=r"is not a file\. Pass the name of a file"):
            save_safetensors(path, weights())
    assert names_in(tmp_path / "disk") == ["model.safetensors"]
    with pytest.raises(FileNotFoundError):
        save_safetensors(tmp_path / "missing" / "model.safetensors", weights())


# -- other readers and writers ----------------------------------------------------------------------------


def all_dtypes() -> dict[str, np.ndarray[Any, Any]]:
    require("ml_dtypes")
    return {
        f"{code} {shape}": data.random_bits(data.numpy_dtype(name), int(np.prod(shape))).reshape(shape)
        for code, name in DTYPES.items()
        for shape in ((3, 5), (8, 8), (), (0, 2))
    }


def test_every_dtype_is_exact(tmp_path: Path) -> None:
    arrays = all_dtypes()
    path = saved(tmp_path, arrays)
    for name, description in parsed(path)[1].items():
        assert description["dtype"] == name.partition(" ")[0]
    for mode in MODES:
        assert equal(load_safetensors(path, mode), arrays)


def package_dtypes(reader: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays that a reader of the package safetensors returns exactly."""
    package = pytest.importorskip("safetensors", reason="requires the package safetensors")
    arrays = all_dtypes()
    if package.__version__ < "0.8":
        arrays = {name: x for name, x in arrays.items() if "FNUZ" not in name}
    if reader != "torch":
        arrays = {name: x for name, x in arrays.items() if not name.startswith("F8")}
    if reader == "flax":  # JAX narrows 64-bit dtypes
        arrays = {name: x for name, x in arrays.items() if x.itemsize < 8 or x.dtype.kind == "c"}
    return arrays


@pytest.mark.parametrize("reader", ["numpy", "torch", "flax", "tensorflow"])
def test_each_reader_of_the_package_reads_every_dtype_that_it_has(reader: str, tmp_path: Path) -> None:
    arrays = package_dtypes(reader)
    require({"flax": "jax"}.get(reader, reader))
    found = importlib.import_module(f"safetensors.{reader}").load_file(saved(tmp_path, arrays))
    assert set(found) == set(arrays)
    for name, x in arrays.items():
        assert data.dtype_name(found[name]) == x.dtype.name, name
        assert tuple(found[name].shape) == x.shape, name
        assert data.bits(found[name]) == x.tobytes(), name


def test_files_of_the_package_are_read_exactly(tmp_path: Path) -> None:
    arrays = package_dtypes("torch")
    require("torch")
    path = tmp_path / "model.safetensors"
    tensors = ab.convert_tree(arrays, "torch")
    importlib.import_module("safetensors.torch").save_file(tensors, path, {"format": "pt"})
    for mode in MODES:
        loaded = load_safetensors(path, mode)
        assert equal({name: loaded[name] for name in arrays}, arrays)
        assert set(loaded) == set(arrays)


# -- advice ----------------------------------------------------------------------------------------------


def misaligned(folder: Path) -> Path:
    """Return a file as other programs write it: 64 bytes of values, which start 8 bytes too late."""
    text = json.dumps({"a": entry([16], [0, 64]), "b": entry([3], [64, 76])}).encode()
    text += b" " * (-len(text) % 64)
    return written(folder, raw(text, np.arange(19, dtype=np.float32).tobytes()))


@pytest.mark.parametrize("mode", ["c", "r"])
def test_the_advice_for_a_misaligned_file_names_save_safetensors(mode: Any, tmp_path: Path) -> None:
    jax = require("jax")
    path = misaligned(tmp_path)
    new_path = tmp_path / "aligned.safetensors"
    x = load_safetensors(path, mode)["a"]
    route = ab.explain(x, "jax")
    assert (route.code, route.copies) == (Reason.MISALIGNED_IN_FILE, 1)
    assert "its place in the safetensors file is not aligned to 64 bytes" in str(route)
    (call,) = re.findall(r"save_safetensors\(.*\)(?=,)", route.advice)
    with ab.trace(foreign=True) as log:
        ab.to_jax(x)
        jax.numpy.asarray(x)
    assert log.records[0] == route
    assert all(call in spot.advice for spot in log.hotspots())
    with pytest.raises(ab.CopyRequiredError, match="its place in the safetensors file"):
        ab.to_jax(x, copy=False)
    assert call == "save_safetensors(new_path, load_safetensors(path))"
    save_safetensors(new_path, load_safetensors(path))
    assert ab.explain(load_safetensors(new_path)["a"], "jax").shares_memory


def test_slices_and_small_tensors_have_the_general_advice(tmp_path: Path) -> None:
    require("jax")
    odd = load_safetensors(misaligned(tmp_path))["b"]  # 12 bytes: no order of the file aligns all of these
    slice_of_aligned = load_safetensors(saved(tmp_path, {"a": np.ones((33, 16))}))["a"].reshape(-1)[8:16]
    assert slice_of_aligned.ctypes.data % 64 == 0
    for x in (odd, slice_of_aligned[1:], odd[1:]):
        assert ab.explain(x, "jax").code == Reason.MISALIGNED


def test_the_advice_for_a_read_only_map_names_load_safetensors(tmp_path: Path) -> None:
    require("torch")
    x = load_safetensors(saved(tmp_path, {"a": np.ones(16)}), "r")["a"]
    route = ab.explain(x, "torch")
    assert (route.code, route.copies) == (Reason.READ_ONLY_FILE_MAP, 1)
    assert "load_safetensors(path)" in route.advice
    for target in ("jax", "tensorflow"):
        require(target)
        assert ab.explain(x, target).shares_memory


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "a.safetensors"
    with pytest.raises(FileNotFoundError) as caught:
        save_safetensors(path, {"a": np.ones(2)})
    assert caught.value.filename == str(path)
