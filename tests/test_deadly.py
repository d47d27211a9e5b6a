"""What ends or hangs the process, and what loses or corrupts data in silence: each a test.

The deadly ones run in processes of their own, as the scripts under tests/deadly.
"""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import (
    CopyRequiredError,
    MemoryConversionError,
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
    "unaligned_complex",
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


@reported_by("unaligned_complex")
def test_complex_numbers_that_torch_would_call_unaligned(report: dict[str, str]) -> None:
    """Torch 2.13 ends the process on complex128 off a 16-byte boundary, which NumPy calls aligned."""
    assert_all(report, "right", 3)


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


@pytest.mark.parametrize("target", [*HOST, "pyclesperanto"])
@pytest.mark.parametrize("source", HOST)
def test_what_has_no_plain_values_is_refused(source: str, target: str) -> None:
    require(source)
    require(target)
    if source == target:
        return  # the very object: tests/conversion/test_plans.py
    for what, array in data.without_values(source).items():
        if what == "longdouble" and target == "numpy":
            continue
        for options in ({}, {"copy": True}, {"copy": False}):
            for call in (convert_memory, arraybridge.explain):
                with pytest.raises(MemoryConversionError) as caught:
                    call(array, target, **options)
                assert len(str(caught.value)) > 20, what


@pytest.mark.parametrize("target", ["numpy", "torch", "tensorflow"])
def test_traced_values_of_jax_are_refused(target: str) -> None:
    jax = require("jax")
    require(target)

    def leak(x: Any) -> Any:
        convert_memory(x, target)
        return x.sum()

    for transformed in (jax.jit(leak), jax.grad(leak), jax.make_jaxpr(leak), jax.vmap(leak)):
        with pytest.raises(MemoryConversionError, match=r"outside jax\.jit"):
            transformed(jax.numpy.ones(3))


@pytest.mark.parametrize("target", ["numpy", "torch", "jax"])
def test_symbolic_tensors_of_tensorflow_are_refused(target: str) -> None:
    tf = require("tensorflow")
    require(target)

    @tf.function(autograph=False)
    def traced(x: Any) -> Any:
        with pytest.raises(MemoryConversionError, match=r"outside tf\.function"):
            convert_memory(x, target)
        return x

    traced(tf.ones(3))
