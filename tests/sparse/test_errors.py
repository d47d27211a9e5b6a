"""Unsupported conversions raise typed errors, whose advice stays sparse and runs as printed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import ArrayNotSupportedError, MemoryConversionError, convert_memory, explain
from tests.helpers import require
from tests.sparse.arrays import BETA, HAS_MORE_AXES, dense_of, made, random_contents, read, scipy_sparse

pytestmark = pytest.mark.filterwarnings(BETA)


def scipy_csr() -> Any:
    return made("numpy", random_contents("csr", dtype="float32", index_dtype="int32"))


def in_torch(layout: str) -> Any:
    return made("torch", random_contents(layout, dtype="float32", index_dtype="int32"))


def in_jax(layout: str) -> Any:
    return made("jax", random_contents(layout, dtype="float32", index_dtype="int32"))


def blocked_columns() -> Any:
    return in_torch("bsr").to_sparse_coo().to_sparse_bsc((2, 2))


def older_jax(name: str) -> Any:
    require("jax")
    from jax.experimental import sparse

    return getattr(sparse, name).fromdense(np.eye(3, 4, dtype=np.float32))


def batched_torch() -> Any:
    torch = require("torch")
    return torch.stack([torch.eye(3), torch.eye(3) * 2]).to_sparse_csr()


def with_jax_layout(name: str, **layout: int) -> Any:
    require("jax")
    from jax.experimental import sparse

    return getattr(sparse, name).fromdense(np.arange(24, dtype=np.float32).reshape(2, 3, 4), **layout)


#: Array, target → layouts that the message names, and the expressions of the advice.
MISSING: dict[str, tuple[Callable[[], Any], str, str, list[str]]] = {
    "scipy csr, tensorflow": (scipy_csr, "tensorflow", "COO", ["x.tocoo()"]),
    "scipy csc, tensorflow": (lambda: scipy_csr().tocsc(), "tensorflow", "COO", ["x.tocoo()"]),
    "scipy csc, jax": (lambda: scipy_csr().tocsc(), "jax", "CSR, COO", ["x.tocsr()"]),
    "scipy bsr, jax": (lambda: scipy_csr().tobsr((2, 2)), "jax", "CSR, COO", ["x.tocsr()"]),
    "scipy bsr, tensorflow": (lambda: scipy_csr().tobsr((2, 2)), "tensorflow", "COO", ["x.tocoo()"]),
    "scipy dia, torch": (lambda: scipy_csr().todia(), "torch", "dia_array", ["x.tocsr()"]),
    "scipy lil, jax": (lambda: scipy_csr().tolil(), "jax", "lil_array", ["x.tocsr()"]),
    "scipy dok, tensorflow": (lambda: scipy_csr().todok(), "tensorflow", "dok_array", ["x.tocoo()"]),
    "scipy 1-D csr, torch": (lambda: scipy_sparse.csr_array(np.ones(3)), "torch", "1 axis", ["x.tocoo()"]),
    "torch csr, tensorflow": (lambda: in_torch("csr"), "tensorflow", "COO", ["x.to_sparse_coo()"]),
    "torch csc, jax": (lambda: in_torch("csc"), "jax", "CSR, COO", ["x.to_sparse_csr()"]),
    "torch bsr, jax": (lambda: in_torch("bsr"), "jax", "CSR", ["x.to_sparse_coo().to_sparse_csr()"]),
    "torch bsr, tensorflow": (lambda: in_torch("bsr"), "tensorflow", "COO", ["x.to_sparse_coo()"]),
    "torch bsc, numpy": (blocked_columns, "numpy", "BSR", ["x.to_sparse_coo().to_sparse_csr()"]),
    "torch bsc, jax": (blocked_columns, "jax", "CSR, COO", ["x.to_sparse_coo().to_sparse_csr()"]),
    "torch batch, numpy": (batched_torch, "numpy", "batches", ["x.to_sparse_coo()"]),
    "torch batch, jax": (batched_torch, "jax", "batches", ["x.to_sparse_coo()"]),
    "jax csr, tensorflow": (lambda: in_jax("csr"), "tensorflow", "COO", ["x.to_bcoo()"]),
    "jax CSR, numpy": (
        lambda: older_jax("CSR"),
        "numpy",
        "CSR of jax",
        ["jax.experimental.sparse.BCSR((x.data, x.indices, x.indptr), shape=x.shape)"],
    ),
    "jax CSC, numpy": (
        lambda: older_jax("CSC"),
        "numpy",
        "CSC of jax",
        ["jax.experimental.sparse.BCSR((x.data, x.indices, x.indptr), shape=x.shape[::-1]).to_bcoo().T"],
    ),
    "jax COO, torch": (
        lambda: older_jax("COO"),
        "torch",
        "COO of jax",
        ["jax.experimental.sparse.BCOO((x.data, jax.numpy.stack([x.row, x.col], axis=1)), shape=x.shape)"],
    ),
    "jax batch, numpy": (
        lambda: with_jax_layout("BCOO", n_batch=1),
        "numpy",
        "batches",
        ["x.update_layout(n_batch=0, n_dense=0).sum_duplicates(remove_zeros=False)"],
    ),
    "jax csr batch, torch": (
        lambda: with_jax_layout("BCSR", n_batch=1),
        "torch",
        "batches",
        ["x.to_bcoo().update_layout(n_batch=0, n_dense=0).sum_duplicates(remove_zeros=False)"],
    ),
    "jax dense axes, numpy": (
        lambda: with_jax_layout("BCOO", n_dense=1),
        "numpy",
        "dense axes",
        ["x.update_layout(n_batch=0, n_dense=0)"],
    ),
    "jax dense axes, tensorflow": (
        lambda: with_jax_layout("BCOO", n_dense=1),
        "tensorflow",
        "dense axes",
        ["x.update_layout(n_batch=0, n_dense=0)"],
    ),
    "jax csr dense axes, torch": (
        lambda: with_jax_layout("BCSR", n_dense=1),
        "torch",
        "dense axes",
        ["x.to_bcoo().update_layout(n_batch=0, n_dense=0)"],
    ),
}


#: The cases with SciPy arrays of one axis (CSR) or more than two axes.
NEED_SCIPY_1_15 = ("scipy 1-D csr, torch", "torch batch, numpy", "jax batch, numpy", "jax dense axes, numpy")


def run(expression: str, x: Any) -> Any:
    """Evaluate an expression. The packages that it names are imported first."""
    space: dict[str, Any] = {"x": x, "np": np}
    if "jax." in expression:
        space["jax"] = require("jax")
    return eval(expression, space)  # noqa: S307  # the expressions of the library itself


@pytest.mark.parametrize("case", MISSING)
def test_missing_layouts_name_those_that_exist_and_an_expression_that_stays_sparse(case: str) -> None:
    make, target, part, expressions = MISSING[case]
    require(target)
    if case in NEED_SCIPY_1_15 and not HAS_MORE_AXES:
        pytest.skip("SciPy before 1.15 does not have such arrays")
    x = make()
    for call in (explain, convert_memory):
        with pytest.raises(ArrayNotSupportedError) as caught:
            call(x, target)
    error = caught.value
    assert part in str(error)
    assert list(error.expressions) == expressions
    assert all(expression in str(error) for expression in expressions)
    assert (error.source_type, error.target_type) == (arraybridge.detect_memory_type(x), target)
    for expression in expressions:
        converted = convert_memory(run(expression, x), target)
        assert explain(converted, target).layout
        assert dense_of(converted) == (x.todense() if hasattr(x, "todense") else x.to_dense()).tolist()


@pytest.mark.parametrize("flaw", ["batch", "negative", "padding"])
def test_expressions_for_bools_of_jax_avoid_sums_of_bools(flaw: str) -> None:
    """JAX cannot sum bools, and each of these arrays has to be summed (jax-ml/jax#18427)."""
    jax = require("jax")
    require("tensorflow")
    from jax.experimental import sparse

    indices = np.array([[0, 0, 0], [0, 1, {"batch": 1, "negative": -1, "padding": 2}[flaw]]])
    values = np.array([True, True])
    if flaw == "batch":
        indices, values = indices[None, :, 1:], values[None]
    x = sparse.BCOO((jax.numpy.array(values), jax.numpy.array(indices)), shape=(1, 2, 2))
    with pytest.raises(ArrayNotSupportedError) as caught:
        convert_memory(x, "tensorflow")
    (expression,) = caught.value.expressions
    converted = convert_memory(run(expression, x), "tensorflow")
    assert dense_of(converted) == [[[1, 0], [0, 1 if flaw != "padding" else 0]]]


def test_dense_axes_of_pytorch_have_no_sparse_expression() -> None:
    torch = require("torch")
    values = torch.ones(2, 3)
    x = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), values, (3, 3), check_invariants=False)
    for target in ("numpy", "tensorflow"):
        require(target)
        with pytest.raises(ArrayNotSupportedError, match="dense axes") as caught:
            convert_memory(x, target)
        (expression,) = caught.value.expressions
        convert_memory(run(expression, x), target)
    indices, pointers = torch.tensor([0, 1]), torch.tensor([0, 1, 2])
    rows = torch.sparse_compressed_tensor(
        pointers, indices, values, (2, 2, 3), layout=torch.sparse_csr, check_invariants=False
    )
    for target in ("numpy", "jax"):
        with pytest.raises(ArrayNotSupportedError, match="dense axes"):
            convert_memory(rows, target)
    assert convert_memory(rows, "torch", copy=True).shape == (2, 2, 3)


def test_no_axes() -> None:
    torch = require("torch")
    x = torch.tensor(3.0).to_sparse()
    for target in ("numpy", "tensorflow"):
        require(target)
        with pytest.raises(ArrayNotSupportedError, match="0 axes"):
            convert_memory(x, target)
    require("jax")
    y = convert_memory(x, "jax")
    assert y.shape == ()
    assert torch.equal(convert_memory(y, "torch").to_dense(), x.to_dense())


def test_frameworks_without_sparse_arrays_report_the_dense_size() -> None:
    require("pyclesperanto")
    x = scipy_sparse.csr_array((200_000, 200_000), dtype=np.float32)
    for call in (explain, convert_memory):
        with pytest.raises(ArrayNotSupportedError, match="does not have sparse arrays") as caught:
            call(x, "pyclesperanto")
    assert caught.value.expressions == ("x.data", "x.toarray()")
    assert "149.0 GiB" in str(caught.value)
    assert "cast" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["float64", "int64", "bool"])
def test_advice_to_densify_names_a_cast_if_the_target_needs_one(dtype: str) -> None:
    require("pyclesperanto")
    contents = np.array([[0, 1], [2, 0]], dtype)
    with pytest.raises(ArrayNotSupportedError, match="does not have sparse arrays") as caught:
        convert_memory(scipy_sparse.csr_array(contents), "pyclesperanto")
    cast = {"float64": "float32", "int64": "int32", "bool": "uint8"}[dtype]
    values, dense = caught.value.expressions
    assert (values, dense) == (f'x.data.astype("{cast}")', f'x.toarray().astype("{cast}")')
    result = convert_memory(run(dense, scipy_sparse.csr_array(contents)), "pyclesperanto")
    np.testing.assert_array_equal(arraybridge.to_numpy(result), contents)


def test_dense_functions_name_the_stored_values() -> None:
    require("torch")
    cases = (
        (scipy_csr(), "x.data"),
        (scipy_csr().todok(), "x.tocoo().data"),
        (in_torch("csr"), "x.values()"),
        (in_torch("coo"), "x.coalesce().values()"),
        (in_jax("csr"), "x.data"),
        (made("tensorflow", random_contents("coo")), "x.values"),
    )
    for x, expression in cases:
        for call in (arraybridge.pinned, arraybridge.shared):
            with pytest.raises(ArrayNotSupportedError, match="sparse") as caught:
                call(x)
            assert caught.value.expressions == (expression,)
            assert call(run(expression, x)) is not None


def test_values_outside_of_cupys_dtypes() -> None:
    from arraybridge.interface.sparse import SparseArrays

    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    assert cupy
    sparse = arraybridge.framework("cupy").sparse
    assert isinstance(sparse, SparseArrays)
    assert sparse.dtypes is not None
    assert "float64" in sparse.dtypes
    assert "int32" not in sparse.dtypes


def test_traced_values_raise_except_within_their_framework() -> None:
    jax = require("jax")
    x = in_jax("coo")

    def convert(y: Any) -> Any:
        return convert_memory(y, "numpy")

    with pytest.raises(ArrayNotSupportedError, match="traced"):
        jax.jit(convert)(x)
    dense = np.ones((8, 2), np.float32)

    @arraybridge.jax
    def product(y: Any) -> Any:
        return y @ dense

    assert np.allclose(jax.jit(product)(x), product(x))


def test_parts_that_are_not_arrays() -> None:
    jax = require("jax")
    x = jax.tree_util.tree_map(lambda part: None if part.ndim == 1 else object(), in_jax("coo"))
    with pytest.raises(ArrayNotSupportedError, match="in place of an array"):
        convert_memory(x, "numpy")
    assert arraybridge.convert_tree({"x": 1}, "numpy") == {"x": 1}


def test_options_are_checked_first() -> None:
    x = scipy_csr()
    for options in ({"copy": 3}, {"grad": "flow"}, {"gpu_id": -1}, {"grad": "no"}):
        with pytest.raises(ValueError, match=r"copy|grad|gpu_id"):
            convert_memory(x, "torch", **options)
    with pytest.raises(MemoryConversionError):
        convert_memory(x, "torch", dtype="no_such_dtype")


def test_dtypes_that_a_target_lacks() -> None:
    require("tensorflow")
    require("ml_dtypes")
    x = made("numpy", random_contents("coo", dtype="longdouble"))
    for target in ("torch", "jax", "tensorflow"):
        require(target)
        with pytest.raises(arraybridge.DtypeNotSupportedError, match='dtype="float64"'):
            convert_memory(x, target)
        assert read(convert_memory(x, target, dtype="float64")).values.dtype == np.float64
    objects = scipy_sparse.coo_array((2, 2))
    objects.data = np.array([None])
    objects.coords = (np.array([0]), np.array([1]))
    with pytest.raises(arraybridge.DtypeNotSupportedError):
        convert_memory(objects, "torch")


def test_parts_that_do_not_fit_together() -> None:
    require("torch")

    def damaged(name: str, value: Any, layout: str = "csr") -> Any:
        x = made("numpy", random_contents(layout))
        setattr(x, name, value)
        return x

    x = scipy_csr()
    cases = (
        damaged("indptr", x.indptr[:0]),
        damaged("indptr", x.indptr[:-1]),
        damaged("indices", x.indices[:1]),
        damaged("data", x.data[:1]),
        damaged("data", None),
        damaged("data", x.data[:1], "coo"),
        damaged("coords", (x.indices, x.indices[:2]), "coo"),
        damaged("data", x.data[:, None]),
        damaged("data", list(x.data)),
        damaged("indices", x.indices[:, None]),
        damaged("indices", list(x.indices)),
        damaged("data", x.data[:, None], "coo"),
        damaged("coords", (np.zeros((9, 1), int),) * 2, "coo"),
    )
    for damage in cases:
        for call in (explain, convert_memory):
            with pytest.raises(ArrayNotSupportedError, match="do not fit together"):
                call(damage, "torch")
        assert convert_memory(damage, "numpy") is damage
    with pytest.raises(ArrayNotSupportedError, match="not integers, but float64"):
        convert_memory(damaged("indptr", x.indptr.astype(float)), "torch")
    with pytest.raises(ArrayNotSupportedError, match="not integers, but bool"):
        convert_memory(damaged("coords", (np.zeros(9, bool),) * 2, "coo"), "torch")


def test_unusual_memory_of_scipy() -> None:
    torch = require("torch")
    require("jax")
    contents = random_contents("csr")
    doubled = np.repeat(contents.values, 2)
    for values, shares in (
        (contents.values.astype(">f8"), False),
        (doubled[::2], True),
        (contents.values[::-1].copy()[::-1], False),
    ):
        x = made("numpy", contents)
        x.data = values
        assert explain(x, "torch").shares_memory == shares
        for target in ("torch", "jax"):
            assert read(convert_memory(x, target)).values.tobytes() == contents.values.tobytes()
    x = made("numpy", contents)
    x.indices, x.indptr = x.indices.astype(">i4"), x.indptr.astype(">i4")
    assert convert_memory(x, "torch").col_indices().dtype is torch.int32
    x.indices, x.indptr = x.indices.astype(np.uint16), x.indptr.astype(np.uint16)
    assert convert_memory(x, "torch").col_indices().dtype is torch.int64
    assert convert_memory(x, "jax").indices.dtype == np.uint16


def test_subclasses_of_scipy() -> None:
    torch = require("torch")

    class Named(scipy_sparse.csr_matrix):
        pass

    x = Named(scipy_csr())
    assert convert_memory(x, "numpy") is x
    assert type(convert_memory(x, "numpy", copy=True)) is scipy_sparse.csr_matrix
    assert convert_memory(x, "torch").layout is torch.sparse_csr


@pytest.mark.parametrize("pointers", [[0, 1, 100], [0, 1, -1], [0, 5, 3]])
@pytest.mark.parametrize("target", ["numpy", "torch"])
def test_row_pointers_beyond_the_entries_raise_instead_of_reading_other_memory(
    pointers: list[int], target: str
) -> None:
    jax = require("jax")
    require(target)
    from jax.experimental import sparse

    parts = map(np.array, (np.float32([1, 2, 3]), [0, 1, 2], pointers))
    x = sparse.BCSR(tuple(map(jax.numpy.asarray, parts)), shape=(2, 3))
    for _ in range(2):
        with pytest.raises(ArrayNotSupportedError, match="padding") as caught:
            convert_memory(x, target)
    (expression,) = caught.value.expressions
    assert dense_of(convert_memory(run(expression, x), target)) == x.todense().tolist()


def test_row_pointers_that_do_not_begin_at_zero_raise() -> None:
    jax = require("jax")
    from jax.experimental import sparse

    parts = map(np.array, (np.float32([1, 2, 3]), [0, 1, 2], [1, 2, 3]))
    x = sparse.BCSR(tuple(map(jax.numpy.asarray, parts)), shape=(2, 3))
    with pytest.raises(ArrayNotSupportedError, match="do not begin at 0"):
        convert_memory(x, "numpy")


@pytest.mark.parametrize("name", ["lil", "dok"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_casts_that_a_kind_of_scipy_lacks_raise_before_the_conversion(name: str, dtype: str) -> None:
    require("ml_dtypes")
    x = scipy_csr().asformat(name)
    for call in (explain, convert_memory):
        with pytest.raises(arraybridge.DtypeNotSupportedError, match=dtype) as caught:
            call(x, "numpy", dtype=dtype)
    (expression,) = caught.value.expressions
    rows = run(expression, x)
    converted = convert_memory(rows, "numpy", dtype=dtype)
    assert converted.dtype.name == dtype
    assert converted.data.tobytes() == rows.data.astype(dtype).tobytes()


def test_advice_about_elements_is_about_the_stored_values() -> None:
    tf = require("tensorflow")
    texts = tf.SparseTensor([[0, 1], [1, 0]], ["b", "a"], [2, 3])
    masked = made("numpy", random_contents("csr"))
    masked.data = np.ma.masked_array(masked.data, np.arange(len(masked.data)) == 0)
    for x, target, expected in (
        (texts, "numpy", [0, 1]),
        (masked, "torch", [0.0, *masked.data[1:].tolist()]),
    ):
        require(target)
        for call in (explain, convert_memory):
            with pytest.raises(MemoryConversionError) as caught:
                call(x, target)
        expression = caught.value.expressions[0]
        values = eval(expression, {"tf": tf, "np": np, "x": x})  # noqa: S307  # of the library itself
        assert convert_memory(values, "numpy").tolist() == expected
