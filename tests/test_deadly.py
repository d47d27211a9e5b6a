"""What ends or hangs the process, and what loses or corrupts data in silence: each a test.

The deadly ones run in processes of their own, as the scripts under tests/deadly.
"""

from __future__ import annotations

import itertools
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import (
    CopyRequiredError,
    DtypeNotSupportedError,
    GradientError,
    MemoryConversionError,
    UnknownArrayError,
    convert_memory,
)
from tests import matrix_data as data
from tests.helpers import require, run_python

DEADLY = Path(__file__).parent / "deadly"
HOST = ("numpy", "torch", "jax", "tensorflow")


def run_to_its_end(*arguments: str, timeout: float) -> tuple[list[str], str]:
    """Run a script of tests/deadly; return its lines, and what was wrong with its end ("" for nothing)."""
    try:
        done = run_python("-X", "faulthandler", str(DEADLY / arguments[0]), *arguments[1:], timeout=timeout)
    except subprocess.TimeoutExpired as late:
        printed = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        return printed.splitlines(), f"{arguments[0]} hung for {timeout} s"
    wrong = f"{arguments[0]} ended with {done.returncode}\n{done.stderr[-4000:]}" if done.returncode else ""
    return done.stdout.splitlines(), wrong


def report_of(lines: list[str]) -> dict[str, str]:
    """What a script reported, case by case."""
    pairs = [line.split(": ", 1) for line in lines if ": " in line]
    assert len({case for case, _ in pairs}) == len(pairs), "a case was reported twice"
    return dict(pairs)


def lines_of(script: str, *arguments: str, timeout: float = 120) -> dict[str, str]:
    """Run a script in a process of its own to its end, and return its report."""
    lines, wrong = run_to_its_end(script, *arguments, timeout=timeout)
    assert not wrong, f"{wrong}\n{lines}"
    return report_of(lines)


# Scripts that one process can run in turn: it imports TensorFlow once, and not ten times. It ends while all
# their arrays are alive.
TOGETHER = (
    "import_order",  # its order is pyclesperanto, torch, jax, tensorflow
    "negative_stride",
    "misaligned_tensorflow",
    "strange_tensors",
    "high_rank",
    "opencl_to_host",
    "opencl_round_after_release",
    "resized_source",
    "read_only_pages",
    "poisoned_scalar",
)


@pytest.fixture(scope="module")
def together() -> dict[str, tuple[list[str], str]]:
    """Lines and wrong end of each script. After one that ends its process the rest run in another."""
    for name in ("torch", "jax", "tensorflow", "pyclesperanto"):
        require(name)
    found: dict[str, tuple[list[str], str]] = {}
    left = list(TOGETHER)
    while left:
        lines, wrong = run_to_its_end("together.py", *left, timeout=280)
        script = ""
        for line in lines:
            if line.startswith("== "):
                script = line.removeprefix("== ")
                found[script] = ([], "")
            elif script:
                found[script][0].append(line)
        assert script, f"no script began\n{wrong}"
        if wrong:
            found[script] = (found[script][0], wrong)
        left = left[left.index(script) + 1 :]
    return found


@pytest.fixture
def report(request: pytest.FixtureRequest, together: dict[str, tuple[list[str], str]]) -> dict[str, str]:
    """The report of the script that the test names."""
    lines, wrong = together[request.param]
    assert not wrong, f"{wrong}\n{lines}"
    return report_of(lines)


def reported_by(script: str) -> pytest.MarkDecorator:
    """Give the test the report of one of these scripts; the first test to ask waits for all of them."""
    patient = pytest.param(script, marks=pytest.mark.timeout(900))
    return pytest.mark.parametrize("report", [patient], indirect=True)


def assert_all(lines: dict[str, str], outcome: str, count: int) -> None:
    """Every case ended as it should, and none was left out."""
    wrong = [f"{case}: {got}" for case, got in lines.items() if got != outcome]
    assert not wrong, "\n".join(wrong)
    assert len(lines) == count


# ---- what ends the process ---------------------------------------------------------------------------------


@reported_by("negative_stride")
def test_negative_strides(report: dict[str, str]) -> None:
    assert_all(report, "right", 10 * 3)


@reported_by("misaligned_tensorflow")
def test_misaligned_memory_in_tensorflow(report: dict[str, str]) -> None:
    assert_all(report, "right", 9 + 5 + 4 * 2 + 2)


@reported_by("strange_tensors")
def test_strange_tensors_of_tensorflow(report: dict[str, str]) -> None:
    assert_all(report, "refused", 6 * 3)


@reported_by("high_rank")
def test_high_ranks(report: dict[str, str]) -> None:
    """NumPy ends at rank 64 (32 before NumPy 2), TensorFlow at 254; what is too high is refused by name."""
    assert len(report) == 6 * 3 + 3
    most = 64 if np.__version__ >= "2" else 32
    for target in ("numpy", "jax", "tensorflow"):
        assert report[f"rank {most} -> {target}"] == "right", target
    for rank in (65, 254, 255, 256, 300):
        assert report[f"rank {rank} -> numpy"] == "refused", rank
    for rank in (255, 256, 300):
        assert report[f"rank {rank} -> tensorflow"] == "refused", rank
    assert set(report.values()) <= {"right", "refused"}, report


@reported_by("opencl_to_host")
def test_opencl_arrays_to_the_host(report: dict[str, str]) -> None:
    for target in (*HOST, "pyclesperanto"):
        assert report[f"{target}, copy=None"] == "right"
        assert report[f"{target}, copy=True"] == "right"
    for target in HOST:
        assert report[f"{target}, copy=False"] == "refused"


@reported_by("opencl_round_after_release")
def test_opencl_arrays_that_are_released(report: dict[str, str]) -> None:
    assert_all(report, "right", 4)


@reported_by("resized_source")
def test_resized_sources(report: dict[str, str]) -> None:
    assert_all(report, "intact", 2 * (3 * 2 + 3))


@reported_by("read_only_pages")
def test_read_only_pages(report: dict[str, str]) -> None:
    lent = ("jax", "tensorflow", "jax -> tensorflow", "tensorflow -> jax")
    ways = [f"{source} -> {way}" for source in ("memmap", "array", "bytes") for way in lent]
    assert report == {
        "memmap -> torch, written": "1.0",
        "window -> torch, written": "0.0",
        "bytes -> torch, written": "16.0",
        "bytes themselves": "8.0",
        **{f"{way} -> torch": "copied" for way in ways},
        "file": "unchanged",
        "what can be written to, by jax": "shared",
    }


@pytest.mark.parametrize("times", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_exit_right_after_a_misaligned_import_into_jax(times: int) -> None:
    """Eight of seventeen processes hung here; four in each of tox's five environments with JAX are twenty."""
    require("jax")
    for _ in range(times):
        assert lines_of("exit_after_jax.py", timeout=60) == {"converted": "4"}


# Import orders. An order and its reverse hold each of the frameworks before and after each other one, and no
# single order can: so two are the fewest. `together` takes the one, this test the other.
@reported_by("import_order")
def test_import_order(report: dict[str, str]) -> None:
    assert report == {"round": "right"}


def test_the_reverse_import_order() -> None:
    for name in ("torch", "jax", "tensorflow", "pyclesperanto"):
        require(name)
    assert lines_of("import_order.py", "tensorflow", "jax", "torch", "pyclesperanto") == {"round": "right"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "order", list(itertools.permutations(("torch", "jax", "tensorflow", "pyclesperanto"))), ids=" ".join
)
def test_every_import_order(order: tuple[str, ...]) -> None:
    for name in order:
        require(name)
    assert lines_of("import_order.py", *order) == {"round": "right"}


def test_half_an_import_of_pyclesperanto() -> None:
    """Without a driver it imports half, and `push` is missing: repaired or refused by name."""
    for name in ("tensorflow", "pyclesperanto"):
        require(name)
    pytest.importorskip("pyclesperanto")
    lines = lines_of("half_imported.py")
    assert lines["round"] in ("right", "refused")
    assert lines["after it"] == "right"


# ---- what loses or corrupts data in silence ----------------------------------------------------------------


@reported_by("poisoned_scalar")
def test_tensorflow_scalars_are_not_poisoned(report: dict[str, str]) -> None:
    assert report == {
        "tf.constant(2.0)": "2.0",
        "2.0 + 2.0": "4.0",
        "tf.constant(3.0)": "3.0",
        "jnp.float32(4.0)": "4.0",
        "jnp.float32(4.0) again": "4.0",
        "tf.constant(5.0)": "5.0",
        "numpy scalar arrays": "5.0",
    }


@pytest.mark.parametrize("source", ["numpy", "torch", "tensorflow"])
def test_wide_values_reach_jax_without_x64(source: str) -> None:
    jax = require("jax")
    require(source)
    assert not jax.config.jax_enable_x64
    for values in (
        np.array([2**32 + 5, -(2**63)]),
        np.array([2**64 - 1, 2**32 + 5], np.uint64),
        np.array([1e300, -1e-300, 0.1]),
        np.array([1e300 + 1e-300j]),
    ):
        for misaligned in (False, True):
            array = convert_memory(values[1:] if misaligned else values, source)
            result = convert_memory(array, "jax")
            assert result.dtype.name == values.dtype.name
            assert np.asarray(result).tobytes() == (values[1:] if misaligned else values).tobytes()
    assert not jax.config.jax_enable_x64, "the global flag is not touched"
    assert jax.numpy.arange(3.0).dtype.name == "float32", "nor what JAX makes by itself"


@pytest.mark.parametrize("copy", [True, None])
def test_jax_never_aliases_a_copy(copy: bool | None) -> None:
    """`from_dlpack(copy=True)` aliases aligned memory in JAX: a copy that was asked for is one."""
    require("jax")
    memory = data.aligned_bytes(4096).view(np.float32)
    memory[...] = 1.0
    result = convert_memory(memory, "jax", copy=copy)
    memory[...] = 2.0
    assert float(result[0]) == (1.0 if copy else 2.0)
    again = convert_memory(result, "jax", copy=True)
    assert again is not result
    assert again.unsafe_buffer_pointer() != result.unsafe_buffer_pointer()


@pytest.mark.parametrize("target", HOST)
def test_negative_and_conjugate_bits(target: str) -> None:
    torch = require("torch")
    require(target)
    base = torch.tensor([1 + 2j, 3 - 4j])
    conjugate = base.conj()
    negative = base.conj().imag
    both = torch.view_as_real(base.clone())[:, 1].neg()
    assert conjugate.is_conj()
    assert negative.is_neg()
    if target == "torch":
        for lazy in (conjugate, negative):
            assert convert_memory(lazy, "torch") is lazy
            copied = convert_memory(lazy, "torch", copy=True)
            assert copied is not lazy
            assert torch.equal(copied, lazy)
        return
    values = np.array([1 - 2j, 3 + 4j], np.complex64)
    assert data.bits(convert_memory(conjugate, target)) == values.tobytes()
    assert data.bits(convert_memory(negative, target)) == np.array([-2, 4], np.float32).tobytes()
    assert data.bits(convert_memory(both, target)) == np.array([-2, 4], np.float32).tobytes()
    assert data.bits(convert_memory(conjugate, target, copy=True)) == values.tobytes()
    for lazy in (conjugate, negative):
        with pytest.raises(CopyRequiredError):
            convert_memory(lazy, target, copy=False)


@pytest.mark.parametrize(
    "dtype",
    ["float64", "int64", "uint64", "bool", "complex64", "complex128", "float16", "bfloat16", "float8_e5m2"],
)
def test_pyclesperanto_narrows_nothing(dtype: str) -> None:
    require("pyclesperanto")
    with pytest.raises(DtypeNotSupportedError, match=dtype):
        convert_memory(np.ones((2, 2), data.numpy_dtype(dtype)), "pyclesperanto")
    with pytest.raises(TypeError):
        convert_memory(np.ones((2, 2), data.numpy_dtype(dtype)), "pyclesperanto")


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (1, 1, 1, 1), (2, 2, 2, 2, 2)])
def test_pyclesperanto_refuses_what_it_cannot_hold(shape: tuple[int, ...]) -> None:
    require("pyclesperanto")
    with pytest.raises(MemoryConversionError):
        convert_memory(np.ones(shape, np.float32), "pyclesperanto")


def test_pyclesperanto_arrays_are_recognised() -> None:
    """Their type sits in `pyclesperanto_opencl` since 0.25."""
    require("pyclesperanto")
    array = convert_memory(np.ones((2, 2), np.float32), "pyclesperanto")
    assert arraybridge.detect_memory_type(array) == "pyclesperanto"


TARGETS = pytest.mark.parametrize("target", ["torch", "jax", "tensorflow", "pyclesperanto"])


@TARGETS
def test_masked_arrays_are_refused(target: str) -> None:
    require(target)
    masked = np.ma.masked_array(np.arange(3, dtype=np.float32), [True, False, False])
    for copy in (None, True):
        with pytest.raises(MemoryConversionError, match=r"(?i)mask"):
            convert_memory(masked, target, copy=copy)
    with pytest.raises(MemoryConversionError):
        convert_memory(masked.reshape(3, 1), target, dtype="float32")


@pytest.mark.parametrize(
    "array",
    [
        np.array([1, "a", None], object),
        np.array(["a", "bc"]),
        np.array([b"a", b"bc"]),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.array([1, 2], "timedelta64[s]"),
        np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
        np.zeros(2, "V3"),
        np.zeros(2, np.longdouble),
    ],
    ids=["object", "string", "bytes", "datetime", "timedelta", "structured", "void", "longdouble"],
)
@TARGETS
def test_dtypes_without_a_counterpart_are_refused(target: str, array: np.ndarray[Any, Any]) -> None:
    require(target)
    with pytest.raises(DtypeNotSupportedError):
        convert_memory(array, target)
    with pytest.raises(MemoryConversionError):
        convert_memory(array, target, copy=True)
    with pytest.raises(MemoryConversionError):
        arraybridge.explain(array, target)


def _odd_tensors(torch: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces beta and deprecated layouts
        return {
            "sparse COO": torch.eye(3).to_sparse(),
            "sparse CSR": torch.eye(3).to_sparse_csr(),
            "quantized": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
            "meta": torch.ones(3, device="meta"),
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            "mkldnn": torch.ones(3, 3).to_mkldnn(),
            "uint4": torch.zeros(4, dtype=torch.uint8).view(torch.uint4),
            "int4": torch.zeros(4, dtype=torch.uint8).view(torch.int4),
        }


@pytest.mark.parametrize(
    "kind", ["sparse COO", "sparse CSR", "quantized", "meta", "nested", "mkldnn", "uint4", "int4"]
)
@pytest.mark.parametrize("target", ["numpy", "jax", "tensorflow", "pyclesperanto"])
def test_tensors_without_a_dense_host_form_are_refused(target: str, kind: str) -> None:
    torch = require("torch")
    require(target)
    tensor = _odd_tensors(torch)[kind]
    for copy in (None, True, False):
        with pytest.raises(MemoryConversionError):
            convert_memory(tensor, target, copy=copy)


@pytest.mark.parametrize("target", ["numpy", "torch", "tensorflow"])
def test_four_bit_integers_of_jax(target: str) -> None:
    """Exact or refused: int4 stays int4, or a typed error says why not."""
    jax = require("jax")
    require(target)
    array = jax.numpy.array([1, -2, 7], "int4")
    try:
        result = convert_memory(array, target)
    except MemoryConversionError:
        return
    assert data.dtype_name(result) == "int4"
    assert data.bits(result) == np.asarray(array).tobytes()


@pytest.mark.parametrize("target", ["numpy", "torch", "tensorflow"])
def test_random_keys_of_jax_are_refused(target: str) -> None:
    jax = require("jax")
    require(target)
    with pytest.raises(MemoryConversionError):
        convert_memory(jax.random.key(0), target)


@pytest.mark.parametrize("target", ["numpy", "torch", "tensorflow"])
def test_traced_values_of_jax_are_refused(target: str) -> None:
    jax = require("jax")
    require(target)
    ones = jax.numpy.ones(3)

    def leak(x: Any) -> Any:
        convert_memory(x, target)
        return x.sum()

    transforms: dict[str, Callable[[Any], Any]] = {
        "jit": jax.jit(leak),
        "grad": jax.grad(leak),
        "make_jaxpr": jax.make_jaxpr(leak),
    }
    for name, transformed in transforms.items():
        with pytest.raises(MemoryConversionError) as caught:
            transformed(ones)
        assert len(str(caught.value)) > 20, name
    with pytest.raises(MemoryConversionError):
        jax.vmap(leak)(jax.numpy.ones((2, 3)))


@pytest.mark.parametrize("target", ["numpy", "torch", "jax"])
def test_symbolic_tensors_of_tensorflow_are_refused(target: str) -> None:
    tf = require("tensorflow")
    require(target)
    seen = []

    @tf.function(autograph=False)
    def traced(x: Any) -> Any:
        with pytest.raises(MemoryConversionError) as caught:
            convert_memory(x, target)
        seen.append(str(caught.value))
        return x

    traced(tf.ones(3))
    assert len(seen) == 1
    assert len(seen[0]) > 20


@pytest.mark.parametrize("target", ["numpy", "torch", "jax"])
def test_sparse_tensors_of_tensorflow_are_refused(target: str) -> None:
    tf = require("tensorflow")
    require(target)
    with pytest.raises((MemoryConversionError, UnknownArrayError)):
        convert_memory(tf.sparse.from_dense([[1.0, 0.0]]), target)


@pytest.mark.parametrize("target", ["numpy", "jax", "tensorflow", "pyclesperanto"])
def test_gradients_are_refused_or_detached(target: str) -> None:
    torch = require("torch")
    require(target)
    leaf = torch.ones(2, 3, requires_grad=True)
    for tensor in (leaf, leaf * 1.0, torch.nn.Parameter(torch.ones(2, 3))):
        for options in ({}, {"copy": True}, {"dtype": "float32"}, {"grad": "error"}):
            with pytest.raises(GradientError, match="detach"):
                convert_memory(tensor, target, **options)
        with pytest.raises(RuntimeError):
            convert_memory(tensor, target)
        result = convert_memory(tensor, target, grad="detach")
        assert data.bits(result) == np.ones((2, 3), np.float32).tobytes()
        assert tensor.requires_grad, "the source keeps its graph"


def test_gradients_stay_in_torch() -> None:
    torch = require("torch")
    leaf = torch.ones(2, 3, requires_grad=True)
    assert convert_memory(leaf, "torch") is leaf


def test_without_gradient_detach_changes_nothing() -> None:
    torch = require("torch")
    tensor = torch.ones(2, 3)
    assert convert_memory(tensor, "numpy", grad="detach").__array_interface__["data"][0] == tensor.data_ptr()


@pytest.mark.parametrize("target", ["torch", "tensorflow"])
@pytest.mark.parametrize("dtype", ["int32", "int64", "float64", "uint8", "bool"])
def test_jax_arrays_keep_dtype_and_shape(target: str, dtype: str) -> None:
    """`torch.asarray(jax_array)` reads the buffer as flat float32; that call is not used."""
    jax = require("jax")
    require(target)
    values = np.arange(6).reshape(2, 3).astype(dtype)
    with data.x64(jax):
        array = jax.numpy.array(values)
    result = convert_memory(array, target)
    assert (data.dtype_name(result), tuple(result.shape)) == (dtype, (2, 3))
    assert data.bits(result) == values.tobytes()


@pytest.mark.parametrize("target", HOST)
def test_nothing_warns_and_nothing_global_changes(target: str) -> None:
    """Read-only and stride-0 sources draw a warning from torch's own import; ours brings none."""
    torch, jax = require("torch"), require("jax")
    require(target)
    before = (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        jax.config.jax_enable_x64,
        torch.initial_seed(),
    )
    state = torch.get_rng_state().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for layout in data.LAYOUTS:
            convert_memory(data.build("numpy", layout, "float64").array, target)
    after = (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        jax.config.jax_enable_x64,
        torch.initial_seed(),
    )
    assert before == after
    assert torch.equal(state, torch.get_rng_state())
