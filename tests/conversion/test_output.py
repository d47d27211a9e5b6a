"""`convert_memory(x, out=buffer)`: values are written to an existing array."""

from __future__ import annotations

import random
import re
import tracemalloc
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraybridge as ab
from arraybridge import aligned, convert_memory, explain
from arraybridge.conversion import convert
from arraybridge.host import dtype_names
from arraybridge.reasons import Reason
from tests.helpers import output_of, require

SOURCES = ("numpy", "torch", "jax", "tensorflow", "pyclesperanto")
TARGETS = ("numpy", "torch", "pyclesperanto")
VALUES = np.arange(1, 7, dtype="float32").reshape(2, 3)


def array_of(framework: str, values: np.ndarray = VALUES) -> Any:
    """Return a new array of a framework."""
    require(framework)
    return convert_memory(values.copy(), framework, copy=True)


def values_of(x: Any) -> Any:
    return ab.to_numpy(x, copy=True, grad="detach").tolist()


# -- every pair --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_values_are_written_and_out_is_returned(source: str, target: str) -> None:
    x = array_of(source)
    out = array_of(target, np.zeros_like(VALUES))
    route = explain(x, out=out)
    assert values_of(out) == np.zeros_like(VALUES).tolist()  # `explain` writes nothing
    for _ in range(3):  # the first call decides, later ones use its plan
        assert convert_memory(x, out=out) is out
        assert values_of(out) == VALUES.tolist()
        convert_memory(array_of(target, np.zeros_like(VALUES)), out=out)
    on_host = target != "pyclesperanto"
    assert (route.source, route.target, route.code) == (source, target, Reason.INTO_OUTPUT)
    assert route.method == ("host" if on_host else "device")
    assert route.copies == 1 + (source == "pyclesperanto" and on_host)  # its memory cannot be viewed
    assert not route.shares_memory
    with ab.trace() as log:
        convert_memory(x, out=out)
    assert log.records == [route]


@pytest.mark.parametrize("target", ["numpy", "torch"])
def test_any_call_signature_accepts_out(target: str) -> None:
    out = array_of(target, np.zeros_like(VALUES))
    calls: list[dict[str, Any]] = [
        {"target": target},
        {"source_type": "numpy", "target_type": target},
        {"device": "cpu"},
        {"dtype": "float32"},
        {"copy": True},
        {"grad": "detach"},
    ]
    for options in calls:
        convert_memory(np.zeros_like(VALUES), out=out)
        assert convert_memory(VALUES, out=out, **options) is out
        assert values_of(out) == VALUES.tolist()
    assert convert_memory(VALUES, target, out=out) is out
    with pytest.raises(ab.SourceMismatchError):
        convert_memory(VALUES, "jax", target, out=out)


def test_an_array_written_to_itself_is_the_same_object() -> None:
    for framework in TARGETS:
        x = array_of(framework)
        assert convert_memory(x, out=x) is x
        route = explain(x, out=x)
        assert (route.method, route.copies, route.code) == ("same", 0, Reason.SAME_OBJECT)


# -- possible targets --------------------------------------------------------------------------------------


def test_arrays_with_any_strides_are_written_in_place() -> None:
    torch = require("torch")
    memory = np.zeros((8, 8), np.float32)
    tensor = torch.zeros(8, 8)
    for index in ((slice(2), slice(3)), (slice(1, 3), slice(0, 6, 2)), (slice(6, None), slice(5, None))):
        for whole in (memory, tensor):
            whole[...] = 0
            part = whole[index]
            assert convert_memory(VALUES, out=part) is part
            assert values_of(part) == VALUES.tolist()
            assert whole.sum() == VALUES.sum()
    for view in (memory[::-1][:2, 7:4:-1], memory.T[3:5, :3]):
        memory[...] = 0
        convert_memory(torch.from_numpy(VALUES), out=view)
        assert values_of(view) == VALUES.tolist()
        assert memory.sum() == VALUES.sum()


def test_memory_of_every_kind_is_filled(tmp_path: Path) -> None:
    file = np.memmap(tmp_path / "file", "float32", "w+", shape=VALUES.shape)
    pool = ab.BufferPool(1 << 20)
    for out in (
        file,
        aligned(VALUES.shape, "float32"),
        ab.shared(VALUES.shape, "float32"),
        pool.take(VALUES.shape, "float32", "numpy"),
        np.zeros(VALUES.shape, ">f4"),
        np.zeros((3, 2), "f4").T.view(np.matrix),
    ):
        assert convert_memory(VALUES, out=out) is out
        assert np.asarray(out).tolist() == VALUES.tolist()
    file.flush()
    assert np.fromfile(tmp_path / "file", np.float32).tolist() == VALUES.ravel().tolist()


def test_objects_that_cannot_be_modified_raise() -> None:
    tf = require("tensorflow")
    xarray = pytest.importorskip("xarray", reason="xarray is not installed")
    scipy_sparse = pytest.importorskip("scipy.sparse", reason="SciPy is not installed")
    cases: list[tuple[Any, str]] = [
        (array_of("jax"), "Omit out"),
        (array_of("tensorflow"), "Omit out"),
        (tf.Variable(VALUES), "variable.assign"),
        (xarray.DataArray(VALUES), "out.data"),
        ([0.0] * 6, "Pass a NumPy"),
        (np.float32(1), "Pass a NumPy"),
        (scipy_sparse.csr_array(VALUES), "dense"),
        (np.ma.zeros(VALUES.shape, "float32"), "dense"),
        (np.zeros(VALUES.shape, object), "numbers"),
    ]
    for out, words in cases:
        with pytest.raises(TypeError, match=words):
            convert_memory(VALUES, out=out)
        with pytest.raises(TypeError, match=words):
            explain(VALUES, out=out)


def test_the_advice_for_a_file_assigns_its_values(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    with h5py.File(tmp_path / "file.h5", "w") as file:
        out = file.create_dataset("x", data=np.zeros_like(VALUES))
        with pytest.raises(TypeError, match=re.escape('out[...] = convert_memory(x, "numpy")')):
            convert_memory(VALUES, out=out)
        out[...] = convert_memory(VALUES, "numpy")
        assert out[...].tolist() == VALUES.tolist()


def test_read_only_and_repeated_elements_raise() -> None:
    torch = require("torch")
    frozen = np.zeros_like(VALUES)
    frozen.flags.writeable = False
    windows = np.lib.stride_tricks.sliding_window_view(np.zeros(4, np.float32), 3, writeable=True)
    for out in (frozen, windows, torch.zeros(1, 3).expand(2, 3), torch.zeros(4).unfold(0, 3, 1)):
        for x in (VALUES, out):
            with pytest.raises(ValueError, match=r"read-only|share memory"):
                convert_memory(x, out=out)
    interleaved = np.lib.stride_tricks.as_strided(np.zeros(7, np.float32), (2, 3), (12, 8))
    with pytest.raises(ValueError, match="share memory"):  # addresses 0, 8, 16 and 12, 20, 28 are distinct
        convert_memory(VALUES, out=np.lib.stride_tricks.as_strided(interleaved, (2, 3), (8, 4)))
    assert convert_memory(VALUES, out=interleaved) is interleaved
    # The elements 0, 1, 4, 5, 8 and 9, and six places behind each of them.
    adjacent = np.lib.stride_tricks.as_strided(np.zeros(16, np.float32), (3, 2, 2), (16, 4, 24))
    values = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    np.testing.assert_array_equal(convert_memory(values, out=adjacent), values)


# -- exact or error ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_mismatches_raise_and_nothing_is_written(target: str) -> None:
    require("torch")
    require("jax")
    out = array_of(target, np.zeros_like(VALUES))
    for x in (VALUES[:1], VALUES[0], VALUES[..., None], VALUES.astype("float64"), VALUES.astype("int32")):
        with pytest.raises((TypeError, ValueError), match="to out"):
            convert_memory(x, out=out)
    for x in (np.ma.masked_equal(VALUES, 2), VALUES.astype(object), VALUES.astype("U3")):
        with pytest.raises(ab.MemoryConversionError):
            convert_memory(x, out=out)
    for options in (
        {"target": "jax"},
        {"target": "torch" if target == "numpy" else "numpy"},
        {"dtype": "int8"},
        {"copy": False},
        {"device": "cpu:1"},
        {"grad": "flow"},
    ):
        with pytest.raises(ValueError, match=r"out|device|grad"):
            convert_memory(VALUES, out=out, **options)
    assert values_of(out) == np.zeros_like(VALUES).tolist()


def test_the_dtype_of_out_asks_for_a_cast() -> None:
    torch = require("torch")
    x = np.array([[1.5, -2.5], [300.0, 7.9]])
    for out in (np.zeros((2, 2), "int16"), torch.zeros(2, 2, dtype=torch.int16)):
        convert_memory(x, out=out, dtype="int16")
        assert values_of(out) == [[1, -2], [300, 7]]
    reversed_ = convert_memory(x[::-1], out=torch.zeros(2, 2, dtype=torch.float16), dtype="float16")
    assert values_of(reversed_) == x[::-1].astype("float16").tolist()
    for dtype in ("longdouble", "float8_e4m3", "int4"):  # PyTorch has none of these, so NumPy casts
        small = np.array([1, 2]).astype(dtype_names.np_dtype(dtype))
        assert convert_memory(small, out=torch.zeros(2), dtype="float32").tolist() == [1, 2]
    image = array_of("pyclesperanto", np.zeros((2, 2), "float32"))
    convert_memory(x, out=image, dtype="float32")
    assert values_of(image) == x.astype("float32").tolist()


def test_freed_memory_raises() -> None:
    torch = require("torch")
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    for out in (torch.zeros(4), np.zeros(4, np.float32)):
        with pytest.raises(ab.ArrayNotSupportedError):
            convert_memory(freed, out=out)
    with pytest.raises(TypeError, match="freed"):
        convert_memory(np.ones(4, np.float32), out=freed)


# -- copies ------------------------------------------------------------------------------------------------

LARGE = (1024, 2048)  # 16 MiB of float64


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "reversed", "cast", "big-endian"])
@pytest.mark.parametrize("source", ["numpy", "torch", "jax"])
def test_no_temporary_copy_is_made(source: str, layout: str) -> None:
    """Check NumPy's memory, which tracemalloc sees. PyTorch's is tested below."""
    out = np.zeros(LARGE, {"cast": "f4", "big-endian": ">f8"}.get(layout, "f8"))
    x = array_of(source, np.ones(LARGE))
    if layout == "transposed":
        out = np.zeros(LARGE[::-1]).T
    elif layout == "reversed":
        out = out[::-1]
    options = {"dtype": "float32"} if layout == "cast" else {}
    assert explain(x, out=out, **options).copies == 1
    tracemalloc.start()
    try:
        for _ in range(2):
            convert_memory(x, out=out, **options)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert np.all(out == 1)


def test_out_needs_no_memory_where_a_copy_fails() -> None:
    require("torch")
    lines = (
        "import resource, numpy as np, torch, arraybridge as ab",
        "x = np.ones(1 << 25, np.float32); out = torch.zeros(1 << 25); half = torch.zeros(1 << 25).half()",
        "ab.convert_memory(np.ones(4), 'torch', copy=True)",
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()",
        "resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), -1))",
        "ab.convert_memory(x, out=out); ab.convert_memory(x, out=half, dtype='float16')",
        "try: ab.convert_memory(x, 'torch', copy=True)",
        "except (RuntimeError, MemoryError): print(float(out.sum()), float(half[-1]))",
    )
    if not Path("/proc/self/statm").exists():
        pytest.skip("the limit of the address space is only tested on Linux")
    assert output_of(*lines, imported=True).split() == [str(float(1 << 25)), "1.0"]


def test_lazy_bits_are_resolved_while_they_are_written() -> None:
    torch = require("torch")
    x = torch.tensor([[1 + 2j, 3 - 4j]]).conj()
    for out in (
        np.zeros((1, 2), "c8"),
        torch.zeros(1, 2, dtype=torch.complex64),
        np.zeros((1, 4), "c8")[:, ::2],
    ):
        assert explain(x, out=out).copies == 1
        assert values_of(convert_memory(x, out=out)) == [[1 - 2j, 3 + 4j]]
    lazy = torch.zeros(1, 2, dtype=torch.complex64).conj()
    for source in (x, x.resolve_conj(), x.resolve_conj().numpy()):
        assert values_of(convert_memory(source, out=lazy)) == [[1 - 2j, 3 + 4j]]
    negated = x.imag  # has the neg bit
    assert negated.is_neg()
    assert values_of(convert_memory(negated, out=np.zeros((1, 2), "f4"))) == [[-2, 4]]


def test_unaligned_complex128_does_not_crash() -> None:
    torch = require("torch")
    memory = np.zeros(16 * 4 + 8, np.uint8)[8:].view("c16")
    out = torch.from_numpy(memory.view("f8")).view(torch.complex128)
    x = torch.tensor([1 + 2j, 2, 3, 4], dtype=torch.complex128)
    for source in (x, x.conj().resolve_conj(), x.conj(), x.numpy(), x.to(torch.complex64)):
        options = {"dtype": "complex128"} if source.dtype == torch.complex64 else {}
        convert_memory(source, out=out, **options)
        assert memory.tolist() == values_of(source)
        convert_memory(source, out=memory, **options)
        assert memory.tolist() == values_of(source)
        for i in range(4):
            convert_memory(source[i], out=out[i].conj(), **options)
        assert memory.conj().tolist() == values_of(source)


def test_files_are_read_in_parts(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    zarr = pytest.importorskip("zarr", reason="zarr is not installed")
    values = np.arange(80 << 20, dtype=np.uint8).reshape(80, -1)
    with h5py.File(tmp_path / "file.h5", "w") as file:
        datasets = [
            file.create_dataset("chunks", data=values, chunks=(3, values.shape[1])),
            file.create_dataset("plain", data=values),
            zarr.create_array(tmp_path / "zarr", data=values, chunks=(7, values.shape[1])),
        ]
        for dataset in datasets:
            out = np.zeros_like(values)
            assert explain(dataset, out=out).copies == 1
            tracemalloc.start()
            convert_memory(dataset, out=out)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 50 << 20, f"{type(dataset).__module__}: {peak >> 20} MiB"
            assert np.array_equal(out, values)
        tensor = ab.to_torch(np.zeros_like(values))
        assert values_of(convert_memory(datasets[0], out=tensor)[79, :3]) == values[79, :3].tolist()
        scalar = file.create_dataset("scalar", data=5.0)
        assert convert_memory(scalar, out=np.zeros(())) == 5
        empty = file.create_dataset("empty", data=np.zeros((0, 3)))
        assert convert_memory(empty, out=np.zeros((0, 3))).shape == (0, 3)


def test_carriers_are_written() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    table = pandas.DataFrame(VALUES.astype("float64"))
    assert convert_memory(table, out=np.zeros(VALUES.shape)).tolist() == VALUES.tolist()
    pixels = image.fromarray(VALUES.astype("uint8"))
    assert convert_memory(pixels, out=np.zeros(VALUES.shape, "uint8")).tolist() == VALUES.tolist()


# -- overlap and gradients ---------------------------------------------------------------------------------


def overlapping_array(rng: random.Random, memory: np.ndarray, framework: str, length: int) -> Any:
    """Return a random view of ``length`` elements of ``memory``, as an array of NumPy or PyTorch."""
    step = rng.choice([1, 1, 2, 3]) * (rng.choice([1, -1]) if framework == "numpy" else 1)
    begin = rng.randrange(len(memory) - length * abs(step))
    view = memory[begin : begin + length * abs(step)][:: abs(step)][:: 1 if step > 0 else -1]
    if length % 4 == 0 and rng.random() < 0.3:
        view = view.reshape(4, -1) if rng.random() < 0.5 else view.reshape(-1, 4).T
    return view if framework == "numpy" else require("torch").from_numpy(view)


def test_overlapping_memory_is_written_as_if_it_had_been_copied() -> None:
    frameworks = ("numpy", "torch")
    rng = random.Random(7)
    for _ in range(2000):
        memory = np.arange(64, dtype="f8")
        length = rng.choice([2, 3, 5, 8, 12])
        out = overlapping_array(rng, memory, rng.choice(frameworks), length)
        source, dtype = rng.choice([(memory, "float64"), (memory.view("i4"), "int32"), (memory, "float64")])
        x = overlapping_array(rng, source, rng.choice(frameworks), length)
        if rng.random() < 0.2:  # one element, repeated
            x = np.broadcast_to(x[:1], x.shape) if isinstance(x, np.ndarray) else x[:1].expand(x.shape)
        if tuple(x.shape) != tuple(out.shape):
            continue
        expected = values_of(x)
        convert_memory(x, out=out, dtype=None if dtype == "float64" else "float64")
        assert values_of(out) == expected, (x.shape, x.strides, out.strides)


def test_one_array_into_another_with_a_larger_stride() -> None:
    memory = np.arange(24.0)
    convert_memory(memory[:8], out=memory[::3])
    assert memory[::3].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_out_that_requires_grad_raises_while_gradients_are_recorded() -> None:
    torch = require("torch")
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    with pytest.raises(ab.GradientError, match=r"out\.detach\(\)"):
        convert_memory(VALUES, out=weight)
    assert values_of(weight) == np.zeros_like(VALUES).tolist()
    with torch.no_grad():
        assert convert_memory(VALUES, out=weight) is weight
    assert values_of(weight) == VALUES.tolist()
    with pytest.raises(ab.GradientError):  # no plan forgets the check
        convert_memory(VALUES, out=weight)
    convert_memory(VALUES * 2, out=weight.detach())
    assert values_of(weight) == (VALUES * 2).tolist()


def test_out_never_becomes_part_of_a_graph() -> None:
    torch = require("torch")
    x = torch.ones(2, 3, requires_grad=True)
    for out in (torch.zeros(2, 3), np.zeros((2, 3), "f4"), torch.zeros(3, 2).T):
        for _ in range(2):
            with pytest.raises(ab.GradientError):
                convert_memory(x, out=out)
            assert convert_memory(x, out=out, grad="detach") is out
            assert not getattr(out, "requires_grad", False)
            assert values_of(out) == [[1, 1, 1]] * 2


@pytest.mark.parametrize("shape", [(2, 3), (400, 300)])
def test_autograd_notices_that_out_was_written_to(shape: tuple[int, ...]) -> None:
    torch = require("torch")
    weight = torch.ones(shape, requires_grad=True)
    for x in (np.ones(shape, "f4"), np.ones(shape[::-1], "f4").T, torch.ones(shape), np.ones(shape)):
        saved = torch.ones(shape)
        loss = (weight * saved).sum()
        convert_memory(x, out=saved, dtype="float32")
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_tensors_of_inference_mode_are_written_outside_of_it() -> None:
    torch = require("torch")
    with torch.inference_mode():
        out = torch.zeros(2, 3)
    for x in (VALUES, torch.from_numpy(VALUES.T.copy()).T):
        assert values_of(convert_memory(x, out=out)) == VALUES.tolist()
    with torch.inference_mode():
        assert values_of(convert_memory(VALUES, out=torch.zeros(2, 3))) == VALUES.tolist()


@pytest.mark.parametrize("x", [np.ma.masked_array([1.0, 2.0], [False, True]), np.array(["a", "b"])])
def test_errors_of_the_source_name_both_frameworks(x: Any) -> None:
    out = require("torch").zeros(2, dtype=require("torch").float64)
    with pytest.raises(ab.MemoryConversionError) as caught:
        convert_memory(x, out=out)
    assert (caught.value.source_type, caught.value.target_type) == ("numpy", "torch")


# -- plans -------------------------------------------------------------------------------------------------


def test_later_calls_use_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = require("torch")
    arrays = [VALUES, VALUES[::-1], torch.from_numpy(VALUES), array_of("jax"), array_of("tensorflow")]
    outputs = [np.zeros_like(VALUES), torch.zeros(2, 3), torch.zeros(3, 2).T]
    for x in arrays:
        for out in outputs:
            convert_memory(x, out=out)
    monkeypatch.setattr(convert, "decide_output", None)
    for x in arrays:
        for out in outputs:
            assert values_of(convert_memory(x, out=out)) == values_of(x)
    with pytest.raises(TypeError, match="not callable"):  # a strided output of another dtype has no plan
        convert_memory(VALUES.astype("int8"), out=np.zeros(VALUES.T.shape, "int8").T)


def test_a_plan_declines_arrays_that_differ() -> None:
    torch = require("torch")
    out = torch.zeros(2, 3)
    convert_memory(VALUES, out=out)
    frozen = np.zeros_like(VALUES)
    convert_memory(VALUES, out=frozen)
    frozen.flags.writeable = False
    for x, other in (
        (VALUES[:1], out),
        (VALUES.astype("float64"), out),
        (VALUES, torch.zeros(1, 3).expand(2, 3)),
        (VALUES, torch.zeros(2, 3, requires_grad=True)),
        (VALUES, frozen),
        (VALUES.view(np.ma.MaskedArray), out),
    ):
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            convert_memory(x, out=other)


def test_a_plan_declines_dtypes_that_are_not_numbers() -> None:
    convert_memory(VALUES, out=np.zeros_like(VALUES))
    for dtype in ("O", "U1", "S1", "M8[s]", "m8[s]", "V4", [("a", "f4")]):
        out = np.zeros(2, dtype)
        with pytest.raises(TypeError, match="numbers"):
            convert_memory(np.zeros(2, dtype), out=out)


# -- shortcuts and trees ---------------------------------------------------------------------------------


def test_shortcuts_accept_out() -> None:
    torch = require("torch")
    out = np.zeros_like(VALUES)
    assert ab.to_numpy(torch.from_numpy(VALUES), out=out) is out
    assert out.tolist() == VALUES.tolist()
    assert ab.to_cpu(VALUES, out=np.zeros_like(VALUES)).tolist() == VALUES.tolist()
    with pytest.raises(ValueError, match="target"):
        ab.to_torch(VALUES, out=out)


def test_trees_are_written_by_key() -> None:
    torch = require("torch")
    model = torch.nn.Linear(3, 2)
    weights = {"bias": array_of("jax", VALUES[:, 0].copy()), "weight": array_of("jax")}
    state = model.state_dict()
    assert ab.convert_tree(weights, out=state) is state
    assert values_of(model.weight) == VALUES.tolist()
    assert values_of(model.bias) == VALUES[:, 0].tolist()
    point = types.SimpleNamespace(x=np.zeros(2), y=[np.zeros(1), "kept"])
    tree = {"y": (np.ones(1), "other"), "x": torch.ones(2, dtype=torch.float64)}
    assert ab.convert_tree(tree, out=point) is point
    assert (point.x.tolist(), point.y[0].tolist(), point.y[1]) == ([1, 1], [1], "kept")
    assert ab.convert_tree({}, out=state | {}) == state if not state else True
    single = np.zeros(2)
    assert ab.convert_tree(np.ones(2), "numpy", out=single) is single
    assert single.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"a": np.ones(2)}, "structure of out differs"),
        ({"a": np.ones(2), "b": np.ones(2), "c": 1}, "structure of out differs"),
        ({"a": np.ones(2), "b": 5}, r"at \['b'\]"),
        ({"a": np.ones(2), "b": None}, r"at \['b'\]"),
        ({"a": np.ones(2), "b": {"inner": np.ones(2)}}, r"at \['b'\]"),
        ({"a": np.ones(2), "b": np.ones(3)}, r"at \['b'\]: Cannot write"),
        ({"a": np.ones(2), "b": np.ones(2, "f4")}, r"at \['b'\]: Cannot write"),
        ({"a": np.ones(2), "b": np.array(["x", "y"])}, r"\['b'\]"),
    ],
)
def test_nothing_is_written_if_trees_differ(tree: Any, words: str) -> None:
    out = {"a": np.zeros(2), "b": np.zeros(2)}
    with pytest.raises((TypeError, ValueError), match=words):
        ab.convert_tree(tree, out=out)
    assert out["a"].tolist() == [0, 0]


def test_errors_about_arrays_of_out_name_the_place() -> None:
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    for bad in (frozen, [0.0, 0.0], array_of("jax", np.zeros(2)), 5, None):
        out = {"a": np.zeros(2), "b": bad}
        with pytest.raises((TypeError, ValueError)) as caught:
            ab.convert_tree({"a": np.ones(2), "b": np.ones(2)}, out=out)
        assert "['b']" in str(caught.value) + "".join(getattr(caught.value, "__notes__", ()))
        assert out["a"].tolist() == [0, 0]
    with pytest.raises(TypeError, match="target framework is missing"):
        ab.convert_tree({"a": np.ones(2)})


def test_arrays_that_are_swapped_are_read_before_they_are_written() -> None:
    torch = require("torch")
    a, b = np.arange(4.0), np.arange(4.0) + 10
    ab.convert_tree({"a": a, "b": b}, out={"a": b, "b": torch.from_numpy(a)})
    assert (a.tolist(), b.tolist()) == ([10, 11, 12, 13], [0, 1, 2, 3])
    whole = np.arange(6.0)
    ab.convert_tree([whole[:3], whole[2:5]], out=[whole[3:], whole[:3]])
    assert whole.tolist() == [2, 3, 4, 0, 1, 2]


def test_trees_of_overlapping_arrays_are_read_before_they_are_written() -> None:
    rng = random.Random(3)
    for _ in range(200):
        memory = np.arange(60.0)
        sources, outputs = (
            [memory[(begin := rng.randrange(55)) : begin + 5] for _ in range(6)] for _ in range(2)
        )
        expected = memory.copy()
        for x, out in zip([x.copy() for x in sources], outputs, strict=True):
            begin = (out.ctypes.data - memory.ctypes.data) // 8
            expected[begin : begin + 5] = x
        ab.convert_tree(sources, out=outputs)
        assert memory.tolist() == expected.tolist()


# -- advice ------------------------------------------------------------------------------------------------


def test_hot_spots_advise_out_for_lines_that_copy_one_size_often() -> None:
    require("torch")
    batches = [np.full((8, 4), i, np.float32)[::-1] for i in range(5)]
    buffer = ab.to_torch(np.zeros((8, 4), np.float32))
    with ab.trace() as log:
        for x in batches:
            convert_memory(x, "torch")
        for x in batches[:3]:
            convert_memory(x, "torch")
        for x in batches:
            convert_memory(x, out=buffer)
        for x in batches:
            convert_memory(x, "jax")
    first, *others = sorted(log.hotspots(), key=lambda spot: spot.line)
    assert "convert_memory(x, out=buffer)" in first.advice
    assert not any("out=" in spot.advice for spot in others)
