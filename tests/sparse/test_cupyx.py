"""Sparse matrices of CuPy, simulated by classes with the same attributes on fake GPUs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

import arraybridge
from arraybridge import convert_memory, explain, trace
from arraybridge.interface import component, unsupported
from arraybridge.interface import framework as base
from arraybridge.interface.streams import Streams
from tests.fake_gpu import FAKE_GPUS, FakeGpuArray, FakeGpuFramework, GpuDevices
from tests.helpers import registry_kept, require
from tests.sparse.arrays import BETA, made, random_contents, read

cupyx_sparse = pytest.importorskip("arraybridge.frameworks.cupy.sparse", reason="CuPy is not installed")
pytestmark = pytest.mark.filterwarnings(BETA)


class DeviceArray(FakeGpuArray):
    """An array with the attributes of a CuPy array that the library uses."""

    @property
    def device(self) -> Any:
        return SimpleNamespace(id=self.gpu)

    @property
    def T(self) -> FakeGpuArray:  # noqa: N802  # as CuPy calls it
        return self._like(self.values.T)

    def __len__(self) -> int:
        return len(self.values)

    def __int__(self) -> int:
        return int(self.values)

    def __sub__(self, other: Any) -> FakeGpuArray:
        return self._like(self.values - other)


class Matrix:
    """A sparse matrix, whose constructor makes an empty one on the current device."""

    format = ""
    current: ClassVar[list[int]] = []

    def __init__(self, shape: tuple[int, int], dtype: Any = "d") -> None:
        assert self.current, "no device is selected"
        self.shape = shape
        self.data = DeviceArray(np.zeros(0, dtype), self.current[-1])

    @property
    def dtype(self) -> Any:
        return self.data.dtype


class csr_matrix(Matrix):  # noqa: N801
    format = "csr"
    indices: Any
    indptr: Any


class csc_matrix(csr_matrix):  # noqa: N801
    format = "csc"


class coo_matrix(Matrix):  # noqa: N801
    format = "coo"
    row: Any
    col: Any
    has_canonical_format = False


class dia_matrix(Matrix):  # noqa: N801
    format = "dia"


def is_sparse(x: Any) -> bool:
    return isinstance(x, Matrix)


class SparseDevices(GpuDevices):
    def device_of(self, x: Any) -> Any:
        return super().device_of(x.data if is_sparse(x) else x)


class SparseGpus(FakeGpuFramework):
    name = "cards"
    array = DeviceArray
    devices = component(SparseDevices)
    sparse = cupyx_sparse.CupyxSparse()

    def owns(self, x: Any) -> bool:
        return isinstance(x, (DeviceArray, Matrix))

    def check(self, x: Any) -> None:
        if is_sparse(x):
            raise unsupported.sparse_array_error(self, x)


@contextmanager
def selected(gpu: int) -> Iterator[None]:
    Matrix.current.append(gpu)
    try:
        yield
    finally:
        Matrix.current.pop()


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[SparseGpus]:
    module: Any = ModuleType("cupyx.scipy.sparse")
    module.issparse = is_sparse
    for cls in (csr_matrix, csc_matrix, coo_matrix):
        setattr(module, cls.__name__, cls)
    monkeypatch.setitem(sys.modules, "cupyx.scipy.sparse", module)
    monkeypatch.setattr(cupyx_sparse, "on_gpu", selected)
    with registry_kept():
        framework = SparseGpus()
        arraybridge.register(framework)
        yield framework


def on_host(x: Any) -> Any:
    """Return the parts of a matrix on a GPU: layout, shape, values and indices."""
    parts = (x.row, x.col) if x.format == "coo" else (x.indices, x.indptr)
    return x.format, x.shape, x.data.values, [part.values for part in parts]


@pytest.mark.parametrize("layout", ["csr", "csc", "coo"])
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_scipy_to_a_gpu_and_back(layout: str, index_dtype: str) -> None:
    x = made("numpy", random_contents(layout, index_dtype=index_dtype))
    y = convert_memory(x, "cards")
    name, shape, values, indices = on_host(y)
    assert (name, shape, type(y).__name__) == (layout, x.shape, f"{layout}_matrix")
    assert values.tobytes() == x.data.tobytes()
    expected = x.coords if layout == "coo" else (x.indices, x.indptr)
    assert [part.tolist() for part in indices] == [part.tolist() for part in expected]
    assert {part.dtype.name for part in indices} == {index_dtype}
    assert arraybridge.device_of(y) == FAKE_GPUS[0]
    assert arraybridge.detect_memory_type(y) == "cards"
    back = convert_memory(y, "numpy")
    assert type(back) is type(x)
    assert read(back).bits() == read(x).bits()
    assert convert_memory(y, "cards") is y


def test_routes_count_the_copies_to_and_from_a_gpu() -> None:
    x = made("numpy", random_contents("csr"))
    route = explain(x, "cards")
    assert (route.method, route.copies, route.shares_memory, route.layout) == ("device", 1, False, "csr")
    assert route.device == FAKE_GPUS[0]
    y = convert_memory(x, "cards")
    with trace() as log:
        convert_memory(y, "numpy")
    assert log.records == [explain(y, "numpy")]
    assert log.records[0].nbytes == x.data.nbytes + x.indices.nbytes + x.indptr.nbytes


def test_other_gpus_and_frameworks() -> None:
    require("torch")
    require("jax")
    x = made("torch", random_contents("coo"))
    y = convert_memory(x, "cards", gpu_id=1)
    assert arraybridge.device_of(y) == FAKE_GPUS[1]
    assert {y.data.gpu, y.row.gpu, y.col.gpu} == {1}
    z = convert_memory(y, "torch")
    assert read(z).bits() == read(x).bits()
    assert explain(y, "torch").copies == 2  # joined on the GPU, and copied to the host
    assert read(convert_memory(y, "jax")).bits() == read(x).bits()
    moved = convert_memory(y, "cards", gpu_id=0)
    assert {moved.data.gpu, moved.row.gpu} == {0}
    assert read(convert_memory(moved, "torch")).bits() == read(x).bits()
    assert arraybridge.to_gpu(y, 1) is y


def test_stated_order_is_passed_on() -> None:
    torch = require("torch")
    x = made("torch", random_contents("coo")).coalesce()
    y = convert_memory(x, "cards")
    assert y.has_canonical_format
    assert convert_memory(y, "torch").is_coalesced()
    assert not convert_memory(made("torch", random_contents("coo")), "cards").has_canonical_format
    assert torch.is_tensor(x)


def test_copies_and_casts_on_a_gpu() -> None:
    x = convert_memory(made("numpy", random_contents("csr")), "cards")
    copied = convert_memory(x, "cards", copy=True)
    assert copied is not x
    assert not np.shares_memory(copied.data.values, x.data.values)
    assert convert_memory(x, "cards", dtype="float32").data.dtype == np.float32


def test_layouts_that_cupy_lacks_raise() -> None:
    integers = made("numpy", random_contents("csr", dtype="int32"))
    for call in (explain, convert_memory):
        with pytest.raises(arraybridge.DtypeNotSupportedError, match='dtype="float64"'):
            call(integers, "cards")
    assert convert_memory(integers, "cards", dtype="float32").data.dtype == np.float32
    blocks = made("numpy", random_contents("bsr"))
    with pytest.raises(arraybridge.ArrayNotSupportedError, match="CSR, CSC, COO") as caught:
        convert_memory(blocks, "cards")
    assert caught.value.expressions == ("x.tocsr()",)
    require("torch")
    with pytest.raises(arraybridge.ArrayNotSupportedError, match="3 axes"):
        convert_memory(require("torch").ones(2, 2, 2).to_sparse(), "cards")
    with selected(0):
        diagonal = dia_matrix((2, 2))
    with pytest.raises(arraybridge.ArrayNotSupportedError, match="dia_matrix") as caught:
        convert_memory(diagonal, "numpy")
    assert caught.value.expressions == ("x.tocsr()",)


def test_matrices_of_a_gpu_are_split_by_rows(gpus: SparseGpus) -> None:
    from arraybridge.interface import sparse_rows

    x = made("numpy", random_contents("csr", shape=(10, 8), count=30))
    y = convert_memory(x, "cards")
    part = sparse_rows.slice_axis(gpus, y, 0, 2, 7)
    assert read(convert_memory(part, "numpy")).bits() == read(x[2:7]).bits()
    with pytest.raises(arraybridge.ArrayNotSupportedError, match="sparse CSR"):
        arraybridge.pinned(y)


@pytest.mark.parametrize("layout", ["csr", "csc", "coo"])
def test_results_of_another_stream_are_taken_over_part_by_part(
    layout: str, gpus: SparseGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Side(Streams):
        def take_over(self, x: Any) -> Any:
            assert isinstance(x, DeviceArray)
            return DeviceArray(x.values, x.gpu)

    monkeypatch.setattr(gpus, "streams", Side())
    y = convert_memory(made("numpy", random_contents(layout)), "cards", gpu_id=1)
    result = base.take_over(gpus, y)
    assert type(result) is type(y)
    assert on_host(result)[:2] == on_host(y)[:2]
    arrays = [gpus.sparse.take_apart(x).arrays for x in (result, y)]
    for part, before in zip(*arrays, strict=True):
        assert part is not before
        assert part.values is before.values
        assert part.gpu == 1


def test_sparse_tensors_that_are_taken_over_stay_the_same_object() -> None:
    """PyTorch records the stream in the tensor, whose graph would be lost if it were put together again."""
    torch = require("torch")
    framework = arraybridge.framework("torch")
    for layout in ("csr", "csc", "coo", "bsr"):
        x = made("torch", random_contents(layout)).requires_grad_(True)
        assert base.take_over(framework, x) is x
    assert base.take_over(framework, dense := torch.ones(2)) is dense


def test_gpu_functions_run_on_the_cpu() -> None:
    @arraybridge.gpu
    def doubled(x: Any) -> Any:
        return x * 2

    x = made("numpy", random_contents("csr"))
    y = doubled(convert_memory(x, "cards"))
    assert arraybridge.detect_memory_type(y) == "cards"
    assert read(convert_memory(y, "numpy")).bits() == read(x * 2).bits()
