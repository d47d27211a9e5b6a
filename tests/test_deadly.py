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

from arraybridge import CopyRequiredError, MemoryConversionError, convert_memory
from tests import matrix_data as data
from tests.helpers import require, run_python

DEADLY = Path(__file__).parent / "deadly"
HOST = ("numpy", "torch", "jax", "tensorflow")
OTHERS = ("torch", "jax", "tensorflow", "pyclesperanto")


def run_to_its_end(*arguments: str) -> tuple[list[str], str]:
    """Run a script of tests/deadly; return its lines, and what was wrong with its end ("" for nothing)."""
    try:
        done = run_python("-X", "faulthandler", str(DEADLY / arguments[0]), *arguments[1:])
    except subprocess.TimeoutExpired as late:
        printed = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        return printed.splitlines(), f"{arguments[0]} hung"
    wrong = f"{arguments[0]} ended with {done.returncode}\n{done.stderr[-4000:]}" if done.returncode else ""
    return done.stdout.splitlines(), wrong


def report_of(lines: list[str], wrong: str) -> dict[str, str]:
    """What a script reported, case by case."""
    assert not wrong, f"{wrong}\n{lines}"
    pairs = [line.split(": ", 1) for line in lines if ": " in line]
    assert len({case for case, _ in pairs}) == len(pairs), "a case was reported twice"
    return dict(pairs)


def lines_of(script: str, *arguments: str) -> dict[str, str]:
    """Run a script in a process of its own to its end, and return its report."""
    return report_of(*run_to_its_end(script, *arguments))


# ---- what ends the process ---------------------------------------------------------------------------------


def of_read_only_pages() -> dict[str, str]:
    lent = ("jax", "tensorflow", "jax -> tensorflow", "tensorflow -> jax")
    return {
        "memmap -> torch, written": "1.0",
        "window -> torch, written": "0.0",
        "bytes -> torch, written": "16.0",
        "bytes themselves": "8.0",
        **{
            f"{source} -> {way} -> torch": "copied" for source in ("memmap", "array", "bytes") for way in lent
        },
        "file": "unchanged",
        "what can be written to, by jax": "shared",
    }


# What each script reports: the outcome of all its cases and how many they are, or its cases.
REPORTS: dict[str, tuple[str, int] | dict[str, str]] = {
    # First, since it imports them in an order of its own. That and its reverse (below) hold each framework
    # before and after each other one, and no single order can: two are the fewest.
    "import_order": {"round": "right"},
    "misaligned_tensorflow": ("right", 9 + 5 + 4 * 2 + 2),
    "strange_tensors": ("refused", 6 * 3),
    "high_rank": ("right", 6 * 3 + 3),
    "resized_source": ("intact", 2 * (3 * 2 + 3)),
    "read_only_pages": of_read_only_pages(),
    "poisoned_scalar": {
        "tf.constant(2.0)": "2.0",
        "2.0 + 2.0": "4.0",
        "tf.constant(3.0)": "3.0",
        "jnp.float32(4.0)": "4.0",
        "tf.constant(5.0)": "5.0",
    },
    "unaligned_complex": ("right", 3),
}


@pytest.fixture(scope="module")
def together() -> dict[str, tuple[list[str], str]]:
    """Lines and wrong end of each script, which one process runs in turn: it imports TensorFlow once.

    It ends while all their arrays are alive. After a script that ends it the rest run in another.
    """
    for name in OTHERS:
        require(name)
    found: dict[str, tuple[list[str], str]] = {}
    left = list(REPORTS)
    while left:
        lines, wrong = run_to_its_end("together.py", *left)
        script = ""
        for line in lines:
            if line.startswith("== "):
                script = line.removeprefix("== ")
                found[script] = ([], "")
            elif script:
                found[script][0].append(line)
        assert script, f"no script began\n{wrong}"
        found[script] = (found[script][0], wrong)
        left = left[left.index(script) + 1 :]
    return found


@pytest.mark.timeout(1800)  # the first one waits for all
@pytest.mark.parametrize("script", REPORTS)
def test_what_ends_the_process(script: str, together: dict[str, tuple[list[str], str]]) -> None:
    report, expected = report_of(*together[script]), REPORTS[script]
    if isinstance(expected, tuple):
        outcome, count = expected
        assert len(report) == count
        expected = dict.fromkeys(report, outcome)
    assert report == expected


@pytest.mark.parametrize("times", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_exit_right_after_a_misaligned_import_into_jax(times: int) -> None:
    """Eight of seventeen processes hung here; two in each of tox's five environments with JAX are ten."""
    require("jax")
    for _ in range(times):
        assert lines_of("exit_after_jax.py") == {"converted": "4"}


@pytest.mark.parametrize(
    "order",
    [
        ("tensorflow", "jax", "torch", "pyclesperanto"),
        *(pytest.param(order, marks=pytest.mark.slow) for order in itertools.permutations(OTHERS)),
    ],
    ids=" ".join,
)
def test_import_orders(order: tuple[str, ...]) -> None:
    for name in order:
        require(name)
    assert lines_of("import_order.py", *order) == {"round": "right"}


# ---- what loses or corrupts data in silence ----------------------------------------------------------------


@pytest.mark.parametrize("target", HOST)
def test_negative_and_conjugate_bits(target: str) -> None:
    torch = require("torch")
    require(target)
    base = torch.tensor([1 + 2j, 3 - 4j])
    conjugate, negative = base.conj(), base.conj().imag
    assert conjugate.is_conj()
    assert negative.is_neg()
    both = torch.view_as_real(base.clone())[:, 1].neg()
    for lazy, values in (
        (conjugate, np.array([1 - 2j, 3 + 4j], np.complex64)),
        (negative, np.array([-2, 4], np.float32)),
        (both, np.array([-2, 4], np.float32)),
    ):
        copied = convert_memory(lazy, target, copy=True)
        assert copied is not lazy
        if target == "torch":
            assert convert_memory(lazy, "torch") is lazy
            assert torch.equal(copied, lazy)
            continue
        assert data.bits(convert_memory(lazy, target)) == data.bits(copied) == values.tobytes()
        if lazy is not both:
            with pytest.raises(CopyRequiredError):
                convert_memory(lazy, target, copy=False)


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
