"""Expressions in advice: each one runs, and its value converts to the target of the failed conversion."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraybridge as ab
from tests.carriers.refused import REFUSED, REFUSED_WITH_OPTIONS, package
from tests.helpers import require

pytestmark = pytest.mark.filterwarnings("ignore")
TARGETS = ("numpy", "torch", "jax", "tensorflow", "pyclesperanto")
#: The names under which users import the packages in expressions.
NAMES = {
    **{name: name for name in ("torch", "jax", "SimpleITK", "pandas", "polars", "pyarrow", "arraybridge")},
    "tf": "tensorflow",
}
#: Refused objects without an expression that could help.
WITHOUT_HELP = {("h5py empty", "pyclesperanto"): "it has no elements, and pyclesperanto has no empty arrays"}


def run(expression: str, x: Any) -> Any:
    """Evaluate an expression. The packages that it names are imported first."""
    found = {name: package(module) for name, module in NAMES.items() if f"{name}." in expression}
    if "jax.experimental.sparse" in expression:
        package("jax.experimental.sparse")
    found |= {name: getattr(ab, name) for name in ("to_numpy", "to_tensorflow")}
    return eval(expression, {"x": x, "np": np, **found})  # noqa: S307  # the expressions of the library itself


@cache
def available() -> list[str]:
    """Return the targets that are installed."""
    found = []
    for target in TARGETS:
        with suppress(pytest.skip.Exception):
            require(target)
            found.append(target)
    return found


def refusal(x: Any, target: str) -> ab.MemoryConversionError | None:
    """Return the error of a conversion, or None."""
    try:
        ab.convert_memory(x, target)
    except ab.MemoryConversionError as error:
        return error
    return None


@pytest.mark.parametrize("kind", REFUSED)
def test_expressions_run_and_their_values_convert(kind: str, tmp_path: Path) -> None:
    make, count = REFUSED[kind]
    x = make(tmp_path)
    usual = "numpy" if type(x).__module__.startswith("torch") else "torch"
    for target in available():
        error = refusal(x, target)
        expressions = () if error is None else error.expressions
        if error is not None:
            assert error.advice, str(error)
            assert str(error).endswith(error.advice)
            assert str(error).startswith(("Cannot convert ", "the ")), str(error)
        if target == usual and count is not None:
            assert len(expressions) == count, str(error)
        if (kind, target) in WITHOUT_HELP:
            continue
        for expression in expressions:
            assert error is not None
            assert expression in error.advice
            ab.convert_memory(run(expression, x), target)


@pytest.mark.parametrize("kind", REFUSED_WITH_OPTIONS)
def test_expressions_for_refused_options_run(kind: str) -> None:
    make, target, options = REFUSED_WITH_OPTIONS[kind]
    x = make()
    with pytest.raises(ab.MemoryConversionError) as caught:
        ab.convert_memory(x, target, **options)
    (expression,) = caught.value.expressions
    ab.convert_memory(run(expression, x), target)


# -- every place that creates an expression ------------------------------------------------------------

PACKAGE = Path(ab.__file__).parent
#: Parts of expressions that no object here reaches → the package that must be installed, or another reason.
NOT_REACHED = {
    ".get()": "pyopencl arrays need a device queue; CuPy needs a GPU",
    ".copy_to_host()": "needs a GPU",
    ".to_local()": "needs several processes",
    ".full_tensor()": "needs several processes",
    ".wait()": "needs torch.distributed",
    "process_allgather(": "needs several processes",
    ".addressable_shards[0]": "needs several processes",
    ".pixel_array": "pydicom",
    ".source.with_format(": "datasets",
    ".with_format(": "datasets",
    "np.array({x}[:])": "datasets",
    "np.ma.filled(": "netCDF4",
    ".numpy()": "torchio",
    "get_coordinates": "geopandas",
    "to_numpy_ndarray": "pyarrow",
    ".magnitude": "pint",
    ".to_scipy_sparse()": "sparse",
}


def code_in(tree: ast.AST) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the literal parts of each expression in a module, in which ``{x}`` is the object."""
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        parts: list[str] = []
        if isinstance(node, ast.JoinedStr):
            parts = [str(one.value) for one in node.values if isinstance(one, ast.Constant)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            parts = [] if id(node) in documentation | inside else [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "step":
            parts = [ast.unparse(one)[1:-1] for one in node.args[2:3] if isinstance(one, ast.Constant)]
            parts = [f"{{x}}.{part}" for part in parts]
        if any("{x}" in part for part in parts):
            pieces = [piece for part in parts for piece in re.split(r"\{?\{\w+\}\}?", part)]
            yield getattr(node, "lineno", 0), [piece for piece in pieces if piece]


def test_every_expression_in_the_code_is_tested(tmp_path: Path) -> None:
    """Each literal part of the code that creates expressions occurs in the advice for a refused object."""
    for framework in ("torch", "jax", "tensorflow"):
        require(framework)
    reached = set()
    for i, (make, _) in enumerate(REFUSED.values()):
        folder = tmp_path / str(i)
        folder.mkdir()
        with suppress(pytest.skip.Exception):
            x = make(folder)
            for target in available():
                error = refusal(x, target)
                reached |= set() if error is None else set(error.templates)
    for make, target, options in REFUSED_WITH_OPTIONS.values():
        with suppress(pytest.skip.Exception), pytest.raises(ab.MemoryConversionError) as caught:
            ab.convert_memory(make(), target, **options)
        reached |= set(caught.value.templates)
    everything = "\n".join(reached)
    missing = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for line, pieces in code_in(ast.parse(path.read_text(encoding="utf-8"))):
            code = "{x}".join(pieces)
            reason = next((why for part, why in NOT_REACHED.items() if part in code), "")
            if all(piece in everything for piece in pieces) or (reason and find_spec(reason) is None):
                continue
            missing.append(f"{path.relative_to(PACKAGE)}:{line}: {code}")
    assert not missing, "\n".join(missing)
