"""Calls inside torch.compile and ``tf.function``, also as the first ones of a process."""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import compilers
from tests.helpers import SCRIPTS, output_of, require, run_python
from tests.scripts.first_calls_in_compiled_code import CASES, FEW

#: Classes whose methods are not called inside compiled code.
NOT_CALLED = {"Device", "Framework", "Carrier"}


@pytest.fixture(scope="module")
def problems() -> dict[tuple[str, str], str]:
    """Return the exception of each case in compiled code, by backend and case; ``""`` if there was none."""
    if not hasattr(os, "fork") or sys.platform == "darwin":
        pytest.skip("the script forks, which is not safe on this platform")
    for package in ("torch", "jax", "tensorflow", "pandas", "scipy", "xarray", "zarr"):
        pytest.importorskip(package)
    done = run_python(str(SCRIPTS / "first_calls_in_compiled_code.py"), imported=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines() if "\t" in line]
    return {(backend, case): problem for backend, case, problem in lines}


@pytest.mark.parametrize("case", CASES)
def test_first_call_inside_torch_compile(case: str, problems: dict[tuple[str, str], str]) -> None:
    assert problems["eager", case] == ""


@pytest.mark.parametrize("case", FEW)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_first_call_with_another_backend(
    backend: str, case: str, problems: dict[tuple[str, str], str]
) -> None:
    assert problems[backend, case] == ""


@pytest.mark.parametrize("case", FEW)
def test_first_call_inside_a_full_graph(case: str, problems: dict[tuple[str, str], str]) -> None:
    assert "arraybridge converts between frameworks outside of a graph" in problems["fullgraph", case]


def test_every_public_function_has_a_case() -> None:
    called = {name for case in CASES for name in case.split()}
    public = {name for name in arraybridge.__all__ if not _is_error(getattr(arraybridge, name))}
    assert public - called == NOT_CALLED


def _is_error(x: Any) -> bool:
    return inspect.isclass(x) and issubclass(x, Exception)


# -- run_eagerly ---------------------------------------------------------------------------------------


def compiled(fn: Any) -> Any:
    torch = require("torch")
    torch.compiler.reset()
    return torch.compile(fn, backend="eager")


def test_many_functions_are_compiled_once_and_see_unchanged_arguments(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch = require("torch")
    constant = np.frombuffer(bytes(8))  # torch.compile raises if it inspects this array
    frozen = np.ones(1)
    frozen.flags.writeable = False
    functions = [arraybridge.numpy(lambda x, i=i: float(x[0]) + i) for i in range(12)]
    results: list[float] = []

    def call() -> None:
        results.extend(f(x) for f in functions for x in (constant, frozen))

    def around(x: Any) -> Any:
        call()
        return x + 1

    assert compiled(around)(torch.ones(1)).tolist() == [2.0]
    assert results == [i + x for i in range(12) for x in (0, 1)]
    assert not frozen.flags.writeable
    assert not any("recompile_limit" in record.getMessage() for record in caplog.records)


def test_code_around_a_call_is_still_compiled() -> None:
    torch = require("torch")
    traced = []

    @compilers.run_eagerly
    def convert(x: Any) -> Any:
        traced.append(torch.compiler.is_compiling())
        return torch.from_numpy(np.cos(x.numpy()))

    def around(x: Any) -> Any:
        traced.append(torch.compiler.is_compiling())
        return convert(x * 0) + 1

    assert compiled(around)(torch.ones(2)).tolist() == [2.0, 2.0]
    assert traced == [True, False]


@pytest.mark.parametrize("private", [True, False])
def test_the_hook_is_found(private: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = require("torch")
    require("torch._dynamo")
    if not private:
        monkeypatch.delattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback")
    monkeypatch.setattr(compilers, "hook_getter", [])
    compilers.add_hook_getter()
    assert compilers.find_untraced_call() is None
    f = arraybridge.numpy(output_type="torch")(lambda x: x + 1)
    assert f(torch.ones(2)).tolist() == [2.0, 2.0]


# -- AutoGraph -----------------------------------------------------------------------------------------

# AutoGraph reads the source of the functions that it rewrites, so that they have to be in a file.
TENSORFLOW_SCRIPT = """
import warnings
import numpy as np, tensorflow as tf, arraybridge as ab

# On Python 3.13, AutoGraph causes this warning (TensorFlow 2.21), and fails if it is an error.
warnings.simplefilter("ignore", DeprecationWarning)

x = np.arange(3.0)
double = ab.tensorflow(lambda a: a * 2)

@ab.tensorflow
def clip(a):
    if tf.reduce_sum(a) > 4:  # a symbolic tensor: AutoGraph rewrites this statement
        return a * 0
    return a

@ab.tensorflow(output_type="input", oom_recovery=True, device="cpu")
def clip_carefully(a):
    if tf.reduce_sum(a) > 4:
        return a * 0
    return a

@ab.numpy(output_type="tensorflow")
def square(a):
    return a * a if a.sum() > 2 else a

@tf.function
def convert(t):
    total = t + ab.to_tensorflow(x) + ab.convert_memory(x, "tensorflow")
    total += ab.convert_tree({"a": x}, "tensorflow")["a"]
    return total if ab.explain(x, "tensorflow").target == "tensorflow" else t

@tf.function
def call(t):
    return clip(t) + clip_carefully(t), double(x) + square(x), ab.tensorflow(output_type="input")(square)(x)

@tf.function
def fail(t):
    return t + ab.to_tensorflow(np.array([object()]))

@tf.function
def fail_on_traced(t):
    return square(t)

print(convert(tf.zeros(3, tf.float64)).numpy().tolist())
for t in (tf.ones(3), 2 * tf.ones(3)):
    print([y.numpy().tolist() for y in call(t)])
for function in (fail, fail_on_traced):
    try:
        function(tf.zeros(1))
    except ab.MemoryConversionError as error:
        print(type(error).__name__, error.advice * (function is fail_on_traced))
"""


def test_autograph_rewrites_the_functions_of_users_only(tmp_path: Path) -> None:
    require("tensorflow")
    script = tmp_path / "script.py"
    script.write_text(TENSORFLOW_SCRIPT)
    done = run_python(str(script), imported=True)
    assert done.returncode == 0, done.stderr
    assert "AutoGraph could not transform" not in done.stderr
    assert done.stdout.splitlines() == [
        "[0.0, 3.0, 6.0]",
        "[[2.0, 2.0, 2.0], [0.0, 3.0, 8.0], [0.0, 1.0, 4.0]]",
        "[[0.0, 0.0, 0.0], [0.0, 3.0, 8.0], [0.0, 1.0, 4.0]]",
        "DtypeNotSupportedError ",
        "ArrayNotSupportedError Convert outside tf.function.",
    ]


# -- other tracers of PyTorch --------------------------------------------------------------------------


def test_conversions_raise_while_pytorch_records_a_program() -> None:
    require("torch")
    printed = output_of(
        "import warnings, torch, arraybridge",
        "from torch.fx.experimental.proxy_tensor import make_fx",
        "warnings.simplefilter('ignore')",
        "double = arraybridge.numpy(output_type='input')(lambda x: x * 2)",
        "for _ in range(2): double(torch.ones(2))",  # plans are cached
        "for record in (torch.jit.trace, lambda f, x: make_fx(f)(*x)):",
        "    try:",
        "        record(lambda x: x + double(x), (torch.ones(2),))",
        "    except arraybridge.ArrayNotSupportedError as error:",
        "        print(error.reason)",
        "    program = record(lambda x: arraybridge.torch(torch.cos)(x), (torch.ones(2),))",
        "    print(program(torch.zeros(2)).tolist())",
        imported=True,
    )
    reason = "its values would become constants"
    assert printed.splitlines() == [reason, "[1.0, 1.0]"] * 2


def test_make_fx_records_copies_and_casts() -> None:
    require("torch")
    printed = output_of(
        "import warnings, torch",
        "from arraybridge import convert_memory as to",
        "from torch.fx.experimental.proxy_tensor import make_fx",
        "warnings.simplefilter('ignore')",
        "for mode in ('real', 'fake', 'symbolic'):",
        "    run = lambda x: to(x, 'torch', copy=True) + to(x, 'torch', dtype='float64')",
        "    program = make_fx(run, tracing_mode=mode)(torch.ones(2))",
        "    print(program(torch.full((2,), 3.0)).tolist())",
        imported=True,
    )
    assert printed.splitlines() == ["[6.0, 6.0]"] * 3


WRAPPED_SCRIPT = """
import torch, arraybridge as ab

@torch.fx.wrap
def double(x):
    return ab.to_torch(ab.to_numpy(x) * 2)

program = torch.fx.symbolic_trace(lambda x: double(x) + 1)
print(program(torch.ones(2)).tolist())
try:
    torch.fx.symbolic_trace(lambda x: ab.to_numpy(x))
except ab.UnknownArrayError as error:
    print(error.advice)
"""


def test_the_advice_for_torch_fx_works(tmp_path: Path) -> None:
    require("torch")
    script = tmp_path / "script.py"
    script.write_text(WRAPPED_SCRIPT)
    done = run_python(str(script), imported=True)
    assert done.returncode == 0, done.stderr
    values, advice = done.stdout.splitlines()
    assert values == "[3.0, 3.0]"
    assert "call torch.fx.wrap with the name of the function in that module" in advice
