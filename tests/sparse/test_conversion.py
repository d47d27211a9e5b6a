"""Sparse arrays are converted exactly, without densifying, and share memory as dense arrays do."""

from __future__ import annotations

import sys
import types
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import CopyRequiredError, aligned, convert_memory, explain
from tests.helpers import jax_with, require, run_python
from tests.sparse.arrays import (
    BETA,
    COO_PAIRS,
    HAS_MORE_AXES,
    LAYOUTS,
    PAIRS,
    Contents,
    as_numpy,
    framework_of,
    made,
    random_contents,
    read,
    scipy_sparse,
)

pytestmark = pytest.mark.filterwarnings(BETA)


def in_aligned_memory(contents: Contents) -> Contents:
    """Return the same parts in memory that every framework can share."""

    def moved(x: np.ndarray) -> np.ndarray:
        y: Any = aligned(x.shape, x.dtype)
        y[...] = x
        return y

    return Contents(
        contents.layout, contents.shape, moved(contents.values), tuple(map(moved, contents.indices))
    )


def address(x: Any) -> int:
    """Return the address of the first value."""
    return int(read(x).values.ctypes.data)


def index_addresses(x: Any) -> list[int]:
    if getattr(x, "format", "") == "coo":
        return [int(axis.ctypes.data) for axis in x.coords]
    if framework_of(x) == "jax":  # np.asarray copies a matrix whose columns are contiguous
        arrays = (x.indices, x.indptr) if hasattr(x, "indptr") else (x.indices,)
        return [array.unsafe_buffer_pointer() for array in arrays]
    return [int(index.ctypes.data) for index in read(x).indices]


# -- pairs of frameworks -------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target", "layout"), PAIRS)
def test_each_pair_keeps_layout_values_indices_and_shape(source: str, target: str, layout: str) -> None:
    require(target)
    x = made(source, random_contents(layout))
    y = convert_memory(x, target)
    assert arraybridge.detect_memory_type(y) == target
    assert read(y).bits() == read(x).bits()
    assert read(convert_memory(y, source)).bits() == read(x).bits()


def test_the_results_have_the_types_of_the_table() -> None:
    torch, tf = require("torch"), require("tensorflow")
    require("jax")
    from jax.experimental import sparse

    x = made("numpy", random_contents("csr"))
    assert convert_memory(x, "torch").layout is torch.sparse_csr
    assert type(convert_memory(x, "jax")) is sparse.BCSR
    coo = x.tocoo()
    assert type(convert_memory(coo, "jax")) is sparse.BCOO
    assert type(convert_memory(coo, "tensorflow")) is tf.SparseTensor
    for layout in LAYOUTS["torch"]:
        y = convert_memory(made("torch", random_contents(layout)), "numpy")
        assert type(y) is getattr(scipy_sparse, f"{layout}_array")


def test_scipy_sources_keep_their_kind_and_others_give_arrays() -> None:
    require("torch")
    for layout in LAYOUTS["numpy"]:
        array = made("numpy", random_contents(layout))
        matrix = getattr(scipy_sparse, f"{layout}_matrix")(array)
        for x in (array, matrix):
            copied = convert_memory(x, "numpy", copy=True)
            cast = convert_memory(x, "numpy", dtype="float32")
            assert type(copied) is type(cast) is type(x)
            assert read(copied).bits() == read(x).bits()
        back = convert_memory(convert_memory(matrix, "torch"), "numpy")
        assert type(back) is type(array)


def test_matrices_keep_int64_indices_which_their_constructor_narrows() -> None:
    require("torch")
    contents = random_contents("csr")
    matrix = scipy_sparse.csr_matrix((contents.values, *contents.indices), shape=contents.shape)
    assert matrix.indices.dtype == np.int32
    matrix.indices, matrix.indptr = contents.indices
    for y in (convert_memory(matrix, "numpy", copy=True), convert_memory(matrix, "numpy", dtype="float32")):
        assert type(y) is scipy_sparse.csr_matrix
        assert y.indices.dtype == y.indptr.dtype == np.int64

    @arraybridge.torch(output_type="input")
    def same(x: Any) -> Any:
        return x

    restored = same(matrix)
    assert type(restored) is scipy_sparse.csr_matrix
    assert restored.indices.dtype == np.int64


# -- index dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize(("source", "target", "layout"), PAIRS)
def test_index_dtypes_are_kept_if_the_target_has_them(
    source: str, target: str, layout: str, index_dtype: str
) -> None:
    require(target)
    x = made(source, random_contents(layout, index_dtype=index_dtype))
    always_int64 = (layout == "coo" and "torch" in (source, target)) or "tensorflow" in (source, target)
    expected = "int64" if always_int64 else index_dtype
    y = convert_memory(x, target)
    assert {index.dtype.name for index in read(y).indices} == {expected}


@pytest.mark.parametrize("index_dtype", ["int8", "uint8", "int16", "uint16", "uint32", "uint64"])
def test_other_index_dtypes_of_jax_become_int64(index_dtype: str) -> None:
    require("torch")
    for layout, targets in (("csr", ("numpy", "torch")), ("coo", ("numpy", "torch", "tensorflow"))):
        x = made("jax", random_contents(layout, index_dtype=index_dtype))
        for target in targets:
            require(target)
            y = convert_memory(x, target)
            assert {index.dtype.name for index in read(y).indices} == {"int64"}
            assert read(y).bits() == read(x).bits()
        copied = convert_memory(x, "jax", copy=True)
        assert {index.dtype.name for index in read(copied).indices} == {index_dtype}


def test_indices_and_pointers_of_two_dtypes_become_int64() -> None:
    require("torch")
    contents = random_contents("csr")
    mixed = contents.indices[0].astype(np.int32), contents.indices[1]
    x = made("jax", Contents("csr", contents.shape, contents.values, mixed))
    for target in ("numpy", "torch"):
        y = convert_memory(x, target)
        assert [index.dtype.name for index in read(y).indices] == ["int64", "int64"]
        assert read(y).bits() == read(x).bits()


def test_large_indices_are_never_narrowed() -> None:
    torch = require("torch")
    shape = (2**40, 2**20)
    indices = np.array([[2**40 - 1, 2**20 - 1], [3, 2**19]])
    x = made("torch", Contents("coo", shape, np.array([1.0, 2.0]), (indices,)))
    for target in ("numpy", "jax", "tensorflow"):
        require(target)
        y = convert_memory(x, target)
        assert read(y).shape == shape
        assert read(y).indices[0].tolist() == indices.tolist()
        assert torch.equal(convert_memory(y, "torch")._indices(), x._indices())


# -- structure -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), COO_PAIRS)
def test_duplicates_explicit_zeros_and_order_are_preserved(source: str, target: str) -> None:
    require(target)
    indices = np.array([[1, 2], [0, 1], [1, 2], [0, 0]])
    values = np.array([3.0, 0.0, 5.0, -0.0])
    x = made(source, Contents("coo", (2, 3), values, (indices,)))
    y = read(convert_memory(x, target))
    assert y.indices[0].tolist() == indices.tolist()
    assert y.values.tobytes() == values.tobytes()


@pytest.mark.parametrize("layout", ["csc", "bsr"])
def test_space_behind_columns_and_blocks_is_omitted(layout: str) -> None:
    require("torch")
    blocks = (1, 1) if layout == "bsr" else ()
    values = np.array([1.0, 2.0, 7.0, 7.0]).reshape(4, *blocks)
    x = getattr(scipy_sparse, f"{layout}_array")((2, 2), **({"blocksize": (1, 1)} if blocks else {}))
    x.data, x.indices, x.indptr = values, np.array([1, 0, 9, 9]), np.array([0, 1, 2])
    for _ in range(2):  # also by the plan of the first call
        y = convert_memory(x, "torch")
        result = read(y)
        assert (result.layout, result.values.tolist()) == (layout, values[:2].tolist())
        assert [index.tolist() for index in result.indices] == [[1, 0], [0, 1, 2]]
        dense = [[0.0, 2.0], [1.0, 0.0]] if layout == "csc" else [[0.0, 1.0], [2.0, 0.0]]
        assert y.to_dense().tolist() == dense
    assert explain(x, "torch").nbytes == 2 * 8 + 2 * 8 + 3 * 8


def test_entries_beyond_the_last_pointer_are_omitted() -> None:
    require("torch")
    values, indices, pointers = np.array([1.0, 2.0, 7.0, 7.0]), np.array([1, 0, 9, 9]), np.array([0, 1, 2])
    x = scipy_sparse.csr_array((2, 3))
    x.data, x.indices, x.indptr = values, indices, pointers
    y = made("jax", Contents("csr", (2, 3), values, (indices, pointers)))
    for source in (x, y):
        for target in {"torch", "numpy", "jax"} - {arraybridge.detect_memory_type(source)}:
            result = read(convert_memory(source, target))
            assert result.values.tolist() == [1.0, 2.0]
            assert [index.tolist() for index in result.indices] == [[1, 0], [0, 1, 2]]
    assert explain(x, "torch").shares_memory
    assert explain(x, "torch").nbytes == 2 * 8 + 2 * 8 + 3 * 8
    assert explain(y, "numpy").nbytes == 2 * 8 + 2 * 8 + 3 * 8
    for _ in range(2):  # also by the plan of the first call
        assert len(read(convert_memory(x, "torch")).values) == 2
        assert len(read(convert_memory(y, "torch")).values) == 2


@pytest.mark.parametrize(
    ("target", "layout"), [(target, layout) for one, target, layout in PAIRS if one == "jax" != target]
)
def test_padding_of_jax_is_an_error_of_the_conversion(target: str, layout: str) -> None:
    jax = require("jax")
    require(target)
    if layout == "coo":
        contents = Contents("coo", (2, 3), np.array([1.0, 9.0]), (np.array([[1, 2], [2, 3]]),))
    else:
        contents = Contents("csr", (2, 3), np.array([1.0, 9.0]), (np.array([2, 3]), np.array([0, 1, 2])))
    x = made("jax", contents)
    assert explain(x, target).layout == layout  # nothing is read
    for _ in range(2):
        with pytest.raises(arraybridge.ArrayNotSupportedError, match="outside of its shape") as caught:
            convert_memory(x, target)
    (expression,) = caught.value.expressions
    assert expression in str(caught.value)
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        removed = eval(expression, {"x": x, "jax": jax})  # noqa: S307  # our own advice
    y = read(convert_memory(removed, target))
    assert (y.layout, y.shape, y.values.tolist()) == (layout, (2, 3), [1.0])
    assert convert_memory(x, "jax") is x
    assert read(convert_memory(x, "jax", copy=True)).bits() == read(x).bits()


def test_padding_that_jax_makes_itself() -> None:
    jax = require("jax")
    from jax.experimental import sparse

    dense = np.eye(3, dtype=np.float32)
    coo = sparse.BCOO.fromdense(dense, nse=5)
    with pytest.raises(arraybridge.ArrayNotSupportedError, match="sum_duplicates"):
        arraybridge.to_numpy(coo)
    rows = sparse.BCSR.fromdense(dense, nse=5)  # its padding is behind the last pointer
    assert read(arraybridge.to_numpy(rows)).values.tolist() == [1.0, 1.0, 1.0]
    negative = sparse.BCOO((jax.numpy.ones(1), jax.numpy.array([[-1, 0]])), shape=(3, 3))
    with pytest.raises(arraybridge.ArrayNotSupportedError, match="outside of its shape"):
        arraybridge.to_numpy(negative)


@pytest.mark.parametrize("target", ["torch", "numpy"])
def test_spare_entries_whose_indices_need_a_cast(target: str) -> None:
    jax = require("jax")
    require(target)
    from jax.experimental import sparse

    parts = (jax.numpy.ones(3), jax.numpy.array([0, 1, 9], "int8"), jax.numpy.array([0, 1, 2], "int8"))
    x = sparse.BCSR(parts, shape=(2, 2))
    assert read(convert_memory(x, target)).values.tolist() == [1.0, 1.0]
    for call in (convert_memory, arraybridge.explain):
        with pytest.raises(arraybridge.CopyRequiredError, match="int64"):
            call(x, target, copy=False)


@pytest.mark.parametrize(
    ("name", "module"),
    [("numpy", "scipy.sparse"), ("cupy", "cupyx.scipy.sparse"), ("jax", "jax.experimental.sparse")],
)
def test_modules_that_another_thread_is_importing(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(name)
    framework = arraybridge.framework(name)
    monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    for x in ([1], object(), {}):
        assert framework.owns(x) is False
        assert arraybridge.numpy(lambda given, y: given)(x, np.ones(2)) is x


def test_sorted_and_unique_indices_are_passed_on_if_stated() -> None:
    torch = require("torch")
    require("jax")
    from jax.experimental import sparse

    unordered = made("torch", random_contents("coo"))
    assert not unordered.is_coalesced()
    for target in ("numpy", "jax"):
        require(target)
        y = convert_memory(unordered, target)
        stated = y.has_canonical_format if target == "numpy" else (y.indices_sorted or y.unique_indices)
        assert not stated
        assert not convert_memory(y, "torch").is_coalesced()
    sorted_once = unordered.coalesce()
    y = convert_memory(sorted_once, "numpy")
    assert y.has_canonical_format
    assert convert_memory(y, "torch").is_coalesced()
    z = convert_memory(sorted_once, "jax")
    assert (z.indices_sorted, z.unique_indices) == (True, True)
    assert convert_memory(z, "torch").is_coalesced()
    assert convert_memory(z, "numpy").has_canonical_format
    only_sorted = sparse.BCOO((z.data, z.indices), shape=z.shape, indices_sorted=True)
    assert not convert_memory(only_sorted, "torch").is_coalesced()
    assert not convert_memory(only_sorted, "numpy").has_canonical_format
    copied = convert_memory(only_sorted, "jax", copy=True)
    assert (copied.indices_sorted, copied.unique_indices) == (True, False)
    tf = require("tensorflow")
    assert not convert_memory(tf.sparse.from_dense([[1.0, 2.0]]), "torch").is_coalesced()
    assert torch.equal(convert_memory(z, "torch").to_dense(), sorted_once.to_dense())


def test_scipy_compressed_indices_make_no_claim_about_order() -> None:
    require("jax")
    x = made("numpy", random_contents("csr"))
    y = convert_memory(x, "jax")
    assert (y.indices_sorted, y.unique_indices) == (False, False)
    assert "_has_canonical_format" not in vars(x)  # the indices were not read
    from jax.experimental import sparse

    parts = y.data, y.indices, y.indptr
    both = sparse.BCSR(parts, shape=y.shape, indices_sorted=True, unique_indices=True)
    assert convert_memory(both, "numpy").has_canonical_format  # stated, though it is not true
    ordered = sparse.BCSR(parts, shape=y.shape, indices_sorted=True)
    back = convert_memory(ordered, "numpy")
    assert back.has_sorted_indices
    assert not back.has_canonical_format


# -- sharing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "layout"),
    [pair for pair in PAIRS if pair[0] in ("numpy", "torch") and pair[0] != pair[1] and pair[2] != "coo"],
)
def test_compressed_layouts_share_values_and_indices(source: str, target: str, layout: str) -> None:
    require(target)
    contents = in_aligned_memory(random_contents(layout))
    x = made(source, contents)
    y = convert_memory(x, target)
    assert explain(x, target).shares_memory
    assert address(y) == address(x)
    assert index_addresses(y) == index_addresses(x)
    back = convert_memory(y, source)
    assert address(back) == address(x)


def test_writes_to_the_values_are_seen_on_both_sides() -> None:
    torch = require("torch")
    x = made("numpy", random_contents("csr"))
    y = convert_memory(x, "torch")
    x.data[0] = 41
    assert y.values()[0] == 41
    y.values()[0] += 1
    assert x.data[0] == 42
    assert torch.equal(y.col_indices(), torch.from_numpy(x.indices))


def test_only_the_values_of_coo_are_shared_with_scipy() -> None:
    require("torch")
    x = made("numpy", random_contents("coo"))
    y = convert_memory(x, "torch")
    assert address(y) == address(x)
    back = convert_memory(y, "numpy")
    assert address(back) == address(x)
    for axis in back.coords:
        assert not np.shares_memory(axis, as_numpy(y._indices()))
        assert axis.flags.writeable
        assert axis.flags.c_contiguous
    assert not explain(y, "numpy").shares_memory


def test_coo_indices_are_shared_if_the_order_of_axes_allows_it() -> None:
    tf = require("tensorflow")
    require("torch")
    require("jax")
    x = made("tensorflow", in_aligned_memory(random_contents("coo")))
    for target in ("torch", "jax"):
        y = convert_memory(x, target)
        assert explain(x, target).shares_memory
        assert index_addresses(y) == index_addresses(x)
        assert isinstance(x, tf.SparseTensor)
    # PyTorch stores axes × entries, which JAX can view and TensorFlow cannot.
    z = made("torch", random_contents("coo"))
    assert z._indices().is_contiguous()
    assert not explain(z, "tensorflow").shares_memory
    assert read(convert_memory(z, "tensorflow")).bits() == read(z).bits()


@pytest.mark.parametrize(("source", "target", "layout"), PAIRS)
def test_copy_true_never_shares(source: str, target: str, layout: str) -> None:
    require(target)
    x = made(source, in_aligned_memory(random_contents(layout)))
    for _ in range(2):
        y = convert_memory(x, target, copy=True)
        assert y is not x
        assert read(y).bits() == read(x).bits()
        assert address(y) != address(x)
        assert not set(index_addresses(y)) & set(index_addresses(x))


@pytest.mark.parametrize(("source", "target", "layout"), PAIRS)
def test_copy_false_shares_or_raises(source: str, target: str, layout: str) -> None:
    require(target)
    x = made(source, in_aligned_memory(random_contents(layout)))
    if explain(x, target).shares_memory:
        y = convert_memory(x, target, copy=False)
        assert address(y) == address(x)
        assert index_addresses(y) == index_addresses(x)
    else:
        for call in (explain, convert_memory):
            with pytest.raises(CopyRequiredError, match="Pass copy=None"):
                call(x, target, copy=False)


def test_a_cast_of_indices_is_a_copy() -> None:
    require("torch")
    x = made("jax", random_contents("coo", index_dtype="int32"))
    with pytest.raises(CopyRequiredError, match="int64"):
        convert_memory(x, "torch", copy=False)
    with pytest.raises(CopyRequiredError, match="one array per axis"):
        convert_memory(x, "numpy", copy=False)


def test_views_of_immutable_arrays_are_read_only_and_scipy_respects_it() -> None:
    require("jax")
    y = convert_memory(made("jax", random_contents("csr")), "numpy")
    for part in (y.data, y.indices, y.indptr):
        assert not part.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        y.sum_duplicates()
    copied = convert_memory(made("jax", random_contents("csr")), "numpy", copy=True)
    copied.sum_duplicates()


def test_read_only_parts_of_scipy_are_copied_for_pytorch_unless_copy_is_false() -> None:
    require("torch")
    x = made("numpy", random_contents("csr"))
    x.data.flags.writeable = False
    route = explain(x, "torch")
    assert (route.shares_memory, route.copies, str(route.code)) == (False, 1, "read_only")
    y = convert_memory(x, "torch")
    assert address(y) != address(x)
    assert index_addresses(y) == index_addresses(x)
    assert address(convert_memory(x, "torch", copy=False)) == address(x)


def test_scipy_damages_shared_duplicates_and_sum_duplicates_or_copy_avoids_it() -> None:
    """The documented hazard: ``max`` sums duplicates in place."""
    require("torch")

    def duplicated() -> Any:
        return scipy_sparse.csr_array(
            (np.array([5.0, 3.0]), np.array([0, 0]), np.array([0, 2])), shape=(1, 2)
        )

    x = duplicated()
    shared = convert_memory(x, "torch")
    assert x.max() == 8
    assert shared.values().tolist() == [8.0, 3.0]  # 16 in total before, 11 now
    x = duplicated()
    x.sum_duplicates()
    shared = convert_memory(x, "torch")
    assert x.max() == 8
    assert shared.values().tolist() == [8.0]
    x = duplicated()
    copied = convert_memory(x, "torch", copy=True)
    assert x.max() == 8
    assert copied.values().tolist() == [5.0, 3.0]


def test_shared_memory_outlives_the_source() -> None:
    require("torch")
    x = made("numpy", random_contents("csr", count=1000, shape=(100, 100)))
    expected = read(x).bits()
    y = convert_memory(x, "torch")
    gone = weakref.ref(x)
    del x
    assert gone() is None
    assert read(y).bits() == expected


# -- same object, options, other devices ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("framework", "layout"), [(name, layout) for name in LAYOUTS for layout in LAYOUTS[name]]
)
def test_the_same_framework_and_dtype_return_the_same_object(framework: str, layout: str) -> None:
    x = made(framework, random_contents(layout))
    for _ in range(2):
        assert convert_memory(x, framework) is x
        assert convert_memory(x, framework, dtype="float64") is x
        assert convert_memory(x, framework, copy=False) is x
        assert convert_memory(x, framework, device="cpu") is x
        assert convert_memory(x, framework, framework) is x
        assert convert_memory(x, framework, dtype="float32") is not x
    assert explain(x, framework, dtype="float64").method == "same"
    assert arraybridge.to_cpu(x) is x


@pytest.mark.parametrize(("source", "target", "layout"), PAIRS)
def test_dtype_casts_only_the_values(source: str, target: str, layout: str) -> None:
    require(target)
    x = made(source, random_contents(layout))
    y = convert_memory(x, target, dtype="float32")
    expected = read(x)
    assert read(y).values.tobytes() == expected.values.astype(np.float32).tobytes()
    assert [index.tolist() for index in read(y).indices] == [index.tolist() for index in expected.indices]
    again = made(source, random_contents(layout, dtype="float32"))
    assert read(convert_memory(again, target, dtype="float32")).values.dtype == np.float32
    assert read(convert_memory(x, target, dtype="float32")).values.dtype == np.float32


def test_a_declared_source_is_checked() -> None:
    require("torch")
    x = made("numpy", random_contents("csr"))
    assert convert_memory(x, "numpy", "torch").layout
    with pytest.raises(arraybridge.SourceMismatchError):
        convert_memory(x, "torch", "jax")


def test_layouts_without_arrays_stay_in_scipy() -> None:
    x = made("numpy", random_contents("csr"))
    for other in (x.todia(), x.tolil(), x.todok()):
        assert convert_memory(other, "numpy") is other
        copied = convert_memory(other, "numpy", copy=True)
        assert copied is not other
        assert (copied.toarray() == other.toarray()).all()
        assert convert_memory(other, "numpy", dtype="float32").dtype == np.float32
        assert arraybridge.detect_memory_type(other) == "numpy"
        with pytest.raises(CopyRequiredError):
            convert_memory(other, "numpy", copy=False, dtype="float32")


def test_other_cpu_devices() -> None:
    jax_with(4)
    require("torch")
    x = made("numpy", random_contents("csr"))
    y = convert_memory(x, "jax", device="cpu:2")
    assert str(arraybridge.device_of(y)) == "cpu:2"
    assert read(y).bits() == read(x).bits()
    moved = convert_memory(y, "jax", device="cpu:1")
    assert str(arraybridge.device_of(moved)) == "cpu:1"
    assert convert_memory(y, "jax") is y
    assert convert_memory(y, "jax", device="cpu:2") is y
    assert str(arraybridge.device_of(convert_memory(y, "jax", device="cpu:0"))) == "cpu"
    assert read(convert_memory(y, "torch")).bits() == read(x).bits()
    assert explain(y, "jax", device="cpu:1").layout == "csr"


@pytest.mark.parametrize("shape", [(5,), (3, 4, 5), (2, 3, 4, 5)])
@pytest.mark.parametrize(("source", "target"), COO_PAIRS)
def test_axes_other_than_two(source: str, target: str, shape: tuple[int, ...]) -> None:
    require(target)
    if len(shape) > 2 and "numpy" in (source, target) and not HAS_MORE_AXES:
        pytest.skip("SciPy before 1.15 has no arrays with more than two axes")
    random = np.random.default_rng(1)
    indices = np.stack([random.integers(0, n, 4) for n in shape], axis=1)
    contents = Contents("coo", shape, random.normal(size=4), (indices,))
    x = made(source, contents)
    assert read(convert_memory(x, target)).bits() == contents.bits()


def test_scipy_before_1_15_has_at_most_two_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = require("torch")
    monkeypatch.setattr("scipy.__version__", "1.14.1")
    x = torch.ones(2, 2, 2).to_sparse()
    for call in (explain, convert_memory):
        with pytest.raises(arraybridge.ArrayNotSupportedError, match="3 axes") as caught:
            call(x, "numpy")
        assert caught.value.expressions == ("x.coalesce().values()",)
    assert convert_memory(torch.ones(2).to_sparse(), "numpy").toarray().tolist() == [1.0, 1.0]


def test_dense_axes_between_pytorch_and_jax() -> None:
    torch = require("torch")
    require("jax")
    values = torch.arange(6, dtype=torch.float32).reshape(3, 2)
    x = torch.sparse_coo_tensor(torch.tensor([[0, 2, 0]]), values, (3, 2), check_invariants=False)
    y = convert_memory(x, "jax")
    assert (y.n_dense, y.n_batch, y.shape) == (1, 0, (3, 2))
    assert np.asarray(y.data).tolist() == values.tolist()
    assert np.asarray(y.indices).tolist() == [[0], [2], [0]]
    back = convert_memory(y, "torch")
    assert back.dense_dim() == 1
    assert torch.equal(back.to_dense(), x.to_dense())


def test_gradients_are_detached_only_if_asked() -> None:
    torch = require("torch")
    require("jax")
    for layout in LAYOUTS["torch"]:
        x = made("torch", random_contents(layout)).requires_grad_(True)
        for target in ("numpy", "jax"):
            if layout not in LAYOUTS[target]:
                continue
            for call in (explain, convert_memory):
                with pytest.raises(arraybridge.GradientError, match="grad='detach'") as caught:
                    call(x, target)
                assert "flow" not in str(caught.value)
            for _ in range(2):
                y = convert_memory(x, target, grad="detach")
                assert read(y).bits() == read(x.detach()).bits()
        assert convert_memory(x, "torch") is x
        copied = convert_memory(x, "torch", copy=True)
        assert copied.requires_grad
        assert torch.equal(copied.detach().to_dense(), x.detach().to_dense())


def test_conjugated_values_are_resolved() -> None:
    torch = require("torch")
    values = torch.tensor([1 + 2j, 3 - 4j]).conj()
    x = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), values, (2, 2), check_invariants=False)
    assert read(convert_memory(x, "numpy")).values.tolist() == [1 - 2j, 3 + 4j]


def test_settings_of_pytorch_stay_as_they_are() -> None:
    torch = require("torch")
    x = made("numpy", random_contents("csr"))
    check = torch.sparse.check_sparse_tensor_invariants
    assert not check.is_enabled()
    convert_memory(x, "torch")
    assert not check.is_enabled()
    wrong = made("numpy", random_contents("csr"))
    wrong.indices = wrong.indices + 100
    with check(True):
        convert_memory(made("numpy", random_contents("csr", count=2)), "torch")
        with pytest.raises(arraybridge.MemoryConversionError):  # PyTorch rejects the indices
            convert_memory(wrong, "torch")
        assert check.is_enabled()
    assert convert_memory(wrong, "torch").layout is torch.sparse_csr


def test_arraybridge_imports_no_scipy() -> None:
    """Also check conversions of dense arrays."""
    lines = (
        "import sys, arraybridge, numpy",
        "arraybridge.convert_memory(numpy.ones(3), 'numpy')",
        "arraybridge.explain(numpy.ones(3), 'numpy')",
        "print([name for name in sys.modules if name.startswith('scipy')])",
    )
    done = run_python("-c", "; ".join(lines))
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_the_first_compressed_tensor_of_a_process_converts_where_warnings_are_errors() -> None:
    require("torch")
    imports = "import numpy as np, scipy.sparse, arraybridge"
    line = "print(arraybridge.to_torch(scipy.sparse.csr_array(np.eye(2))).to_dense().tolist())"
    done = run_python("-c", f"{imports}; {line}", imported=True)
    assert (done.returncode, done.stdout) == (0, "[[1.0, 0.0], [0.0, 1.0]]\n"), done.stderr


def test_duplicates_hazard_is_documented() -> None:
    assert convert_memory.__doc__ is not None
    assert "sum_duplicates()" in convert_memory.__doc__
    root = Path(__file__).parents[2]
    page = root / "docs" / "sparse.md"
    if not page.exists():
        pytest.skip("there are no docs next to these tests")
    assert "sum_duplicates()" in "".join(page.read_text(encoding="utf-8").splitlines(keepends=True)[:30])
    assert "counts.sum_duplicates()" in (root / "examples" / "13_sparse_counts.py").read_text(
        encoding="utf-8"
    )
