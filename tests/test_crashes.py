"""Mistakes that crash or hang the process, and silent data loss or corruption.

Scripts under tests/crashes that could crash run in separate processes.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from arraybridge import MemoryConversionError, convert_memory
from tests.helpers import require, run_python

CRASHES = Path(__file__).parent / "crashes"
HOST = ("numpy", "torch", "jax", "tensorflow")
OTHERS = ("torch", "jax", "tensorflow", "pyclesperanto")


def run(script: str, *arguments: str) -> tuple[str, str]:
    """Return the output of a script in tests/crashes, and a description of an abnormal exit ("" if there
    was none).
    """
    try:
        done = run_python("-X", "faulthandler", str(CRASHES / script), *arguments)
    except subprocess.TimeoutExpired as late:
        printed = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        return printed, f"{script} hung"
    wrong = f"{script} ended with {done.returncode}\n{done.stderr[-4000:]}" if done.returncode else ""
    return done.stdout, wrong


# ---- crashes and hangs -------------------------------------------------------------------------------------

SCRIPTS = (
    # This script must be first, because it checks the order in which it imports the frameworks. A test below
    # runs it in reverse order, so that each framework is imported before and after every other one.
    "import_order",
    *("misaligned_tensorflow", "strange_tensors", "high_rank", "resized_source", "read_only_pages"),
    *("poisoned_scalar", "unaligned_complex", "freed_storage"),
)


@pytest.fixture(scope="module")
def together() -> dict[str, str]:
    """Return the output of each script; one process runs them in turn, to import TensorFlow once.

    It exits while all their arrays are alive. After a script that crashes it, the rest run in another
    process.
    """
    for name in OTHERS:
        require(name)
    printed: dict[str, str] = {}
    while left := [script for script in SCRIPTS if script not in printed]:
        text, wrong = run("together.py", *left)
        begun = dict(part.split("\n", 1) for part in text.split("#### ")[1:])
        assert begun, wrong
        begun[list(begun)[-1]] += wrong
        printed |= begun
    return printed


@pytest.mark.timeout(1800)  # the first test waits for all scripts
@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_do_not_crash(script: str, together: dict[str, str]) -> None:
    assert together[script] == "right\n"


@pytest.mark.parametrize("times", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_exit_right_after_a_misaligned_import_into_jax(times: int) -> None:
    """Before the fix, eight of seventeen processes hung here.

    tox has five environments with JAX, so two processes in each make ten.
    """
    require("jax")
    for _ in range(times):
        assert run("exit_after_jax.py") == ("", "")


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
    assert run("import_order.py", *order) == ("", "")


# ---- silent data loss and corruption -----------------------------------------------------------------------


@pytest.mark.parametrize("target", ["numpy", "torch", "tensorflow"])
def test_traced_jax_values_raise(target: str) -> None:
    jax = require("jax")
    require(target)

    def leak(x: Any) -> Any:
        convert_memory(x, target)
        return x.sum()

    for transformed in (jax.jit(leak), jax.grad(leak), jax.make_jaxpr(leak), jax.vmap(leak)):
        with pytest.raises(MemoryConversionError, match=r"outside jax\.jit"):
            transformed(jax.numpy.ones(3))


@pytest.mark.parametrize("target", ["numpy", "torch", "jax"])
def test_symbolic_tensorflow_tensors_raise(target: str) -> None:
    tf = require("tensorflow")
    require(target)

    @tf.function(autograph=False)
    def traced(x: Any) -> Any:
        with pytest.raises(MemoryConversionError, match=r"outside tf\.function"):
            convert_memory(x, target)
        return x

    traced(tf.ones(3))


#: Orders of imports, with whether Triton is imported before TensorFlow.
TRITON_ORDERS = {
    "tensorflow torch": False,
    "torch tensorflow": False,
    "triton tensorflow torch": True,
    "torch ours": True,
}


@pytest.fixture(scope="module")
def of_triton() -> tuple[dict[str, str], str]:
    """Return the outcome of each order of imports, and the errors of all."""
    for name in ("triton", "torch", "jax", "tensorflow", "pandas", "matplotlib"):
        require(name)
    if not hasattr(os, "fork"):
        pytest.skip("the script forks, which this system cannot")
    done = run_python("-X", "faulthandler", str(CRASHES / "triton_order.py"), *TRITON_ORDERS)
    return dict(line.split("\t") for line in done.stdout.splitlines()), done.stderr


@pytest.mark.parametrize("order", TRITON_ORDERS)
def test_triton_and_tensorflow_in_any_order(order: str, of_triton: tuple[dict[str, str], str]) -> None:
    outcomes, errors = of_triton
    assert outcomes[order] == f"right, {TRITON_ORDERS[order]}", errors
