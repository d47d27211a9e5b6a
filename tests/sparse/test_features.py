"""A sparse array is one array in decorators, containers, recovery, pipelines and worker processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import (
    ArrayNotSupportedError,
    CannotSplitError,
    GradientError,
    Pipeline,
    convert_tree,
    device_map,
    fixed,
    prefetch,
    run_with_oom_recovery,
    split_and_retry,
    stack_slices,
    trace,
    unstack_slices,
)
from arraybridge.memory.segments import Exchange
from arraybridge.memory.serialization import dumps, loads
from arraybridge.testing import inject_oom
from tests.helpers import require
from tests.sparse import functions
from tests.sparse.arrays import (
    BETA,
    HAS_MORE_AXES,
    LAYOUTS,
    dense_of,
    framework_of,
    made,
    random_contents,
    read,
    scipy_sparse,
)

pytestmark = pytest.mark.filterwarnings(BETA)

KINDS = [(framework, layout) for framework in LAYOUTS for layout in LAYOUTS[framework]]


def matrix(layout: str = "csr", dtype: str = "float32") -> Any:
    x = made("numpy", random_contents(layout, dtype=dtype, index_dtype="int32"))
    return getattr(scipy_sparse, f"{layout}_matrix")(x)


# -- decorators ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS["numpy"])
@pytest.mark.parametrize("kind", ["array", "matrix"])
def test_output_type_input_restores_the_kind(kind: str, layout: str) -> None:
    require("torch")
    seen: list[Any] = []

    @arraybridge.torch(output_type="input")
    def same(x: Any) -> Any:
        seen.append(x.layout)
        return x

    cls = getattr(scipy_sparse, f"{layout}_{kind}")
    x = cls(made("numpy", random_contents(layout)))
    for _ in range(2):
        y = same(x)
        assert type(y) is cls
        assert read(y).bits() == read(x).bits()
    assert str(seen[0]) == f"torch.sparse_{layout}"


def test_results_of_other_layouts_and_dense_results_of_a_matrix() -> None:
    require("torch")

    @arraybridge.torch(output_type="input")
    def several(x: Any) -> Any:
        return {"coo": x.to_sparse_coo(), "dense": x.to_dense(), "sum": x.to_dense().sum()}

    results = several(matrix())
    assert type(results["coo"]) is scipy_sparse.coo_matrix
    assert type(results["dense"]) is np.ndarray
    assert results["dense"].tolist() == dense_of(matrix())
    assert type(several(scipy_sparse.csr_array(matrix()))["coo"]) is scipy_sparse.coo_array


def test_results_with_three_axes_become_arrays() -> None:
    torch = require("torch")
    if not HAS_MORE_AXES:
        pytest.skip("SciPy before 1.15 has no arrays with more than two axes")

    @arraybridge.torch(output_type="input")
    def cube(x: Any) -> Any:
        return torch.ones(2, 2, 2).to_sparse()

    assert type(cube(matrix())) is scipy_sparse.coo_array


def test_sparse_arrays_together_with_dense_ones() -> None:
    require("torch")

    @arraybridge.torch(output_type="input")
    def product(x: Any, y: Any) -> Any:
        return x @ y

    sparse, dense = matrix(), np.ones((8, 3), np.float32)
    expected = (np.array(dense_of(sparse)) @ dense).astype(np.float32)
    for result in (product(sparse, dense), product(x=sparse, y=dense), product(sparse, y=dense)):
        assert type(result) is np.ndarray
        np.testing.assert_allclose(result, expected, rtol=1e-6)
    left = product(np.ones((2, 6), np.float32), sparse)
    np.testing.assert_allclose(left, np.ones((2, 6)) @ np.array(dense_of(sparse)), rtol=1e-6)


def test_options_of_decorators() -> None:
    torch = require("torch")

    @arraybridge.torch(dtype="float64", input_type="numpy", strict=True, contract=lambda y: y.is_sparse_csr)
    def same(x: Any) -> Any:
        return x

    assert same(matrix()).dtype is torch.float64
    with pytest.raises(arraybridge.SourceMismatchError):
        same(same(matrix()))

    @arraybridge.torch(dtype_conversion="float64")
    def converted(x: Any) -> Any:
        return x

    with pytest.raises(ArrayNotSupportedError, match="sparse CSR"):
        converted(matrix())
    assert converted(matrix(dtype="float64")).dtype is torch.float64  # it has that dtype already

    @arraybridge.torch(slice_by_slice=True)
    def by_planes(x: Any) -> Any:
        return x

    assert by_planes(matrix()).layout is torch.sparse_csr


@pytest.mark.parametrize(("framework", "layout"), KINDS)
def test_stacks_of_sparse_arrays_are_exact_or_raise(framework: str, layout: str) -> None:
    x = made(framework, random_contents(layout, dtype="float32"))
    if (framework, layout) == ("torch", "coo"):  # the only one that its framework stacks
        stack = stack_slices([x, x], framework)
        assert [plane.to_dense().tolist() for plane in unstack_slices(stack, framework)] == [dense_of(x)] * 2
        return
    with pytest.raises(ArrayNotSupportedError, match="not a dense array"):
        stack_slices([x, x], framework)


def test_memory_types_and_methods() -> None:
    torch = require("torch")

    class Model:
        @arraybridge.torch
        def layout(self, x: Any) -> Any:
            return x.layout

    assert Model().layout(matrix()) is torch.sparse_csr


def test_sparse_jax_arrays_are_not_containers() -> None:
    require("jax")
    x = made("jax", random_contents("csr"))
    assert convert_tree([x], "jax")[0] is x
    results = convert_tree({"x": x, "y": (x, 1)}, "numpy")
    assert type(results["x"]) is type(results["y"][0]) is scipy_sparse.csr_array
    assert results["y"][1] == 1

    @arraybridge.jax
    def same(y: Any) -> Any:
        return y

    assert same(x) is x


@pytest.mark.parametrize(("framework", "layout"), KINDS)
def test_each_kind_in_a_tree_and_a_decorator(framework: str, layout: str) -> None:
    require("torch")
    x = made(framework, random_contents(layout))
    (y,) = convert_tree([x], "torch")
    assert read(y).bits() == read(x).bits()

    @arraybridge.torch(output_type="input")
    def same(z: Any) -> Any:
        assert framework_of(z) == "torch"
        return z

    assert framework_of(same(x)) == framework
    assert read(same(x)).bits() == read(x).bits()


# -- @gpu ----------------------------------------------------------------------------------------------


def test_gpu_functions_keep_sparse_arrays_on_the_cpu() -> None:
    seen: list[type] = []

    @arraybridge.gpu
    def doubled(x: Any) -> Any:
        seen.append(type(x))
        return x * 2

    @arraybridge.gpu
    def total(x: Any, y: Any) -> Any:
        return x.sum() + y.sum()

    for x in (matrix(), scipy_sparse.csr_array(matrix())):
        for _ in range(3):
            y = doubled(x)
            assert type(y) is type(x) is seen[-1]
            assert dense_of(y) == (np.array(dense_of(x)) * 2).tolist()
    assert "arse arrays stay on the CPU" in str(doubled.explain(matrix()))
    assert isinstance(total(matrix(), np.ones(3, np.float32)), np.floating)
    require("torch")
    tensor = made("torch", random_contents("csr"))
    assert read(doubled(tensor)).layout == "csr"
    assert framework_of(doubled(tensor)) == "torch"


def test_gpu_functions_stay_on_the_cpu_next_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from arraybridge.offload.call_signature import Call
    from arraybridge.offload.decision import DeviceChooser
    from arraybridge.offload.records import Record

    chooser = DeviceChooser(lambda x: x)
    monkeypatch.setattr(chooser, "_gpu", lambda: pytest.fail("the call searched for a GPU"))
    call = Call((), (matrix(),), {}).inspect()
    assert chooser.decide(call, Record()) == (None, "sparse arrays stay on the CPU")


# -- gradients -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["csr", "csc", "coo", "bsr"])
def test_differentiated_sparse_tensors_raise_at_the_call(layout: str) -> None:
    torch = require("torch")
    require("jax")

    @arraybridge.jax(grad="flow")
    def same(x: Any) -> Any:
        pytest.fail("the function was called")

    x = made("torch", random_contents(layout, dtype="float32")).requires_grad_(True)
    with pytest.raises(GradientError, match="sparse array of PyTorch") as caught:
        same(x)
    assert str(caught.value).count("same()") == 1
    with pytest.raises(GradientError):
        same({"x": [x]}, torch.ones(2, requires_grad=True))


def test_differentiated_values_of_jax_and_tensorflow_raise() -> None:
    jax, tf = require("jax"), require("tensorflow")
    require("torch")
    from jax.experimental import sparse

    @arraybridge.torch(grad="flow")
    def total(x: Any) -> Any:
        pytest.fail("the function was called")

    x = made("jax", random_contents("coo", dtype="float32", index_dtype="int32"))

    def loss(values: Any) -> Any:
        return total(sparse.BCOO((values, x.indices), shape=x.shape))

    with pytest.raises(GradientError, match="sparse array of jax"):
        jax.grad(loss)(x.data)
    y = made("tensorflow", random_contents("coo", dtype="float32"))
    with tf.GradientTape() as tape:
        tape.watch(y.values)
        with pytest.raises(GradientError, match="sparse array of tf"):
            total(y)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_sparse_constants_together_with_differentiated_arrays(framework: str) -> None:
    torch = require("torch")
    require("jax")

    @arraybridge.jax(grad="flow")
    def product(x: Any, y: Any) -> Any:
        return (x @ y).sum()

    x = made(framework, random_contents("csr", dtype="float32", index_dtype="int32"))
    y = torch.ones(8, 2, requires_grad=True)
    product(x, y).backward()
    expected = np.array(dense_of(x)).sum(axis=0)
    assert y.grad is not None
    np.testing.assert_allclose(y.grad.numpy(), np.stack([expected, expected], axis=1), rtol=1e-5)


def test_sparse_results_of_differentiated_functions_raise() -> None:
    torch = require("torch")
    require("jax")

    @arraybridge.jax(grad="flow")
    def second(x: Any, y: Any) -> Any:
        return y

    with pytest.raises(ArrayNotSupportedError, match="not a result that can be differentiated"):
        second(torch.ones(2, requires_grad=True), matrix())
    assert read(second(torch.ones(2), matrix())).layout == "csr"  # nothing is differentiated


# -- recovery ------------------------------------------------------------------------------------------


def twice(x: Any) -> Any:
    return x * 2


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_split_recovery_splits_and_joins_csr_by_rows(framework: str, index_dtype: str) -> None:
    contents = random_contents("csr", shape=(10, 8), count=30, index_dtype=index_dtype)
    x = made(framework, contents)
    rows: list[int] = []

    def fn(part: Any) -> Any:
        rows.append(part.shape[0])
        assert read(part).layout == "csr"
        assert read(part).indices[1][0] == 0
        return part

    with inject_oom("numpy", above_rows=3):
        y = split_and_retry(fn, x)
    assert len(rows) > 2
    assert read(y).bits() == read(x).bits()
    assert {index.dtype.name for index in read(y).indices} == {index_dtype}
    if framework == "numpy":
        assert np.shares_memory(x.data, x.data[1:])


def test_split_recovery_of_jax_keeps_64_bits() -> None:
    require("jax")
    x = made("jax", random_contents("csr", shape=(10, 8), count=30))
    with inject_oom("numpy", above_rows=3):
        y = split_and_retry(lambda part: part, x)
    assert read(y).bits() == read(x).bits()
    assert read(y).indices[1].dtype == np.int64


def test_split_recovery_in_a_decorator_with_dense_arrays() -> None:
    require("torch")

    @arraybridge.torch(oom_recovery="split", output_type="input")
    def product(x: Any, weights: Any, bias: Any) -> Any:
        return x @ weights + bias

    x = made("numpy", random_contents("csr", shape=(10, 8), count=30, dtype="float32"))
    weights, bias = np.eye(8, 3, dtype=np.float32), np.arange(10, dtype=np.float32)[:, None]
    expected = product(x, fixed(weights), bias)
    with inject_oom("numpy", above_rows=4):
        assert product(x, fixed(weights), bias).tolist() == expected.tolist()


def test_parts_share_the_memory_of_the_whole() -> None:
    x = made("numpy", random_contents("csr", shape=(10, 8), count=30))
    seen: list[bool] = []

    def fn(part: Any) -> Any:
        seen.append(np.shares_memory(part.data, x.data) or not part.nnz)
        return part.sum(axis=1)

    with inject_oom("numpy", above_rows=3):
        y = split_and_retry(fn, x)
    assert all(seen)
    assert y.tolist() == x.sum(axis=1).tolist()


def test_the_error_for_a_sparse_array_that_cannot_be_split_names_the_argument() -> None:
    def rows(x: Any) -> Any:
        return x

    with pytest.raises(CannotSplitError) as caught, inject_oom("numpy", above_rows=2):
        split_and_retry(rows, require("scipy.sparse").csc_array(np.eye(8)))
    assert str(caught.value) == (
        "argument 'x': A sparse CSC array of scipy.sparse cannot be split or joined along axis 0. Pass"
        " x.tocsr(), or arraybridge.fixed(x) if every part needs the whole array."
    )


def test_csc_is_split_along_columns() -> None:
    x = made("numpy", random_contents("csc", shape=(6, 12), count=30))
    with inject_oom("numpy", above_rows=4):
        y = split_and_retry(lambda part: part, x, axis=1)
    assert read(y).bits() == read(x).bits()
    kept = scipy_sparse.csc_matrix(x)
    with inject_oom("numpy", above_rows=4):
        assert type(split_and_retry(lambda part: part, kept, axis=1)) is scipy_sparse.csc_matrix


@pytest.mark.parametrize(("framework", "layout"), [kind for kind in KINDS if kind[1] != "csr"])
def test_other_layouts_raise_with_a_splittable_expression(framework: str, layout: str) -> None:
    x = made(framework, random_contents(layout))
    with (
        inject_oom("numpy", above_rows=3),
        pytest.raises(CannotSplitError, match="cannot be split") as caught,
    ):
        run_with_oom_recovery(lambda part: part, x, split=True)
    if framework != "tensorflow":
        assert caught.value.expressions
        assert any(word in str(caught.value) for word in ("tocsr", "to_sparse_csr", "from_bcoo"))
    with inject_oom("numpy", above_rows=3):  # every part receives the whole sparse array
        result = run_with_oom_recovery(lambda rows, whole: rows, np.ones((6, 2)), fixed(x), split=True)
    assert result.shape == (6, 2)


def test_results_of_different_layouts_cannot_be_joined() -> None:
    x = made("torch", random_contents("csr", shape=(7, 8), count=30))

    def fn(part: Any) -> Any:
        return part if part.shape[0] % 2 else part.to_sparse_csc()

    with inject_oom("torch", above_rows=5), pytest.raises(CannotSplitError, match="different layouts"):
        split_and_retry(fn, x)


# -- parallel ------------------------------------------------------------------------------------------


def test_pipelines_split_csr_into_microbatches() -> None:
    require("torch")
    require("jax")

    @arraybridge.torch
    def first(x: Any) -> Any:
        return x * 2

    @arraybridge.numpy
    def second(x: Any) -> Any:
        return x.sum(axis=1)

    x = made("numpy", random_contents("csr", shape=(12, 8), count=40))
    pipeline = Pipeline(first, second, microbatches=4)
    np.testing.assert_allclose(pipeline(x), np.array(dense_of(x)).sum(axis=1) * 2, atol=1e-12)
    whole = Pipeline(first, first, microbatches=3)(x)
    assert read(whole).layout == "csr"
    np.testing.assert_allclose(dense_of(whole), np.array(dense_of(x)) * 4, atol=1e-12)
    with pytest.raises(CannotSplitError, match="COO"):
        pipeline(x.tocoo())
    (mapped,) = pipeline.map([x.tocsc()])
    assert mapped.shape == (12,)


def test_prefetch_and_device_map() -> None:
    torch = require("torch")
    items = [made("numpy", random_contents("csr", seed=seed)) for seed in range(4)]
    batches = list(prefetch([{"x": x, "name": "a"} for x in items], "torch"))
    assert [read(batch["x"]).bits() for batch in batches] == [read(x).bits() for x in items]
    results = list(device_map(arraybridge.torch(output_type="numpy")(torch.Tensor.sum), items))
    np.testing.assert_allclose(results, [x.sum() for x in items])
    kept = list(device_map(functions.same, items, devices=["cpu"]))
    assert [one is other for one, other in zip(kept, items, strict=True)] == [True] * 4


@pytest.mark.parametrize(("framework", "layout"), KINDS)
def test_sparse_arrays_pass_to_processes(framework: str, layout: str) -> None:
    x = made(framework, random_contents(layout))
    exchange = Exchange()
    y = loads(dumps({"x": x}, exchange), exchange)["x"]
    assert framework_of(y) == framework
    assert read(y).bits() == read(x).bits()
    if framework != "jax":  # JAX's own pickle needs x64
        assert read(pickle.loads(pickle.dumps(x))).bits() == read(x).bits()


def test_sparse_arrays_in_worker_processes() -> None:
    require("torch")
    items = [
        # Too large for the pipe, so it is sent in shared memory.
        made("numpy", random_contents("csr", shape=(1000, 1000), count=200_000, seed=0)),
        made("torch", random_contents("coo", seed=1)),
        made("jax", random_contents("csr", seed=2)),
    ]
    results = list(device_map(functions.same, items, devices=["cpu"], processes=True))
    for x, y in zip(items, results, strict=True):
        assert framework_of(y) == framework_of(x)
        assert read(y).bits() == read(x).bits()


def test_dask_knows_the_size_of_sparse_arrays() -> None:
    size = pytest.importorskip("arraybridge.dask.array_registration").size
    for framework in ("torch", "tensorflow", "jax"):
        x = made(framework, random_contents("coo"))
        contents = read(x)
        assert size(x) == contents.values.nbytes + contents.indices[0].nbytes


# -- devices -------------------------------------------------------------------------------------------


def test_to_gpu_and_missing_gpus() -> None:
    torch = require("torch")
    x = made("torch", random_contents("csr"))
    with pytest.raises(arraybridge.DeviceNotFoundError, match="convert_memory"):
        arraybridge.to_gpu(matrix())
    if torch.cuda.is_available():  # pragma: no cover
        assert arraybridge.to_gpu(x).is_cuda
        return
    with pytest.raises(arraybridge.DeviceNotFoundError):
        arraybridge.to_gpu(x)
    assert arraybridge.to_cpu(x) is x
    assert arraybridge.convert_memory(matrix(), "numpy", 0) is not None


def test_traces_of_decorated_calls() -> None:
    require("torch")

    @arraybridge.torch(output_type="input")
    def doubled(x: Any) -> Any:
        return x * 2

    with trace() as log:
        doubled(matrix())
    assert [(record.source, record.target, record.layout) for record in log.records] == [
        ("numpy", "torch", "csr"),
        ("torch", "numpy", "csr"),
    ]
    assert all(record.shares_memory for record in log.records)


def test_tf_functions_keep_symbolic_sparse_tensors() -> None:
    tf = require("tensorflow")

    @arraybridge.tensorflow
    def total(x: Any) -> Any:
        return tf.sparse.reduce_sum(x)

    call: Callable[..., Any] = tf.function(tf.autograph.experimental.do_not_convert(lambda x: total(x)))
    x = made("tensorflow", random_contents("coo", dtype="float32"))
    assert float(call(x)) == pytest.approx(float(read(x).values.sum()), rel=1e-5)
