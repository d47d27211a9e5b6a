"""The library with NumPy alone: what works, and what a user is told about the rest."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest

import arraybridge
from tests.helpers import run_python, run_script

# The packages that serve a framework, and the extra that the message has to name.
OTHERS = {
    "cupy": (("cupy",), ".[cupy-cuda13x]"),
    "torch": (("torch",), ".[torch]"),
    "jax": (("jax",), ".[jax]"),
    "tensorflow": (("tensorflow",), ".[tensorflow]"),
    "pyclesperanto": (("pyclesperanto", "pyclesperanto_prototype"), ".[pyclesperanto]"),
}


def need_absence(name: str) -> None:
    """Skip where the framework is installed, and fail where the environment is meant to be without any."""
    packages, _ = OTHERS[name]
    present = [package for package in packages if importlib.util.find_spec(package) is not None]
    if present and os.environ.get("ARRAYBRIDGE_MINIMAL"):
        pytest.fail(f"{present[0]} is installed, where NumPy should be alone")
    if present:
        pytest.skip(f"{present[0]} is installed")


@pytest.mark.skipif(not os.environ.get("ARRAYBRIDGE_MINIMAL"), reason="only there the wheel is installed")
def test_the_wheel_is_tested_and_not_the_checkout() -> None:
    checkout = Path(__file__).parent.parent.parent
    assert Path(arraybridge.__file__).parent != checkout / "arraybridge"
    assert sorted(path.name for path in Path(arraybridge.__file__).parent.rglob("*.py")) == sorted(
        path.name for path in (checkout / "arraybridge").rglob("*.py")
    )


@pytest.mark.parametrize("name", OTHERS)
def test_a_missing_framework_names_its_extra(name: str) -> None:
    need_absence(name)
    with pytest.raises(arraybridge.FrameworkNotInstalledError) as caught:
        arraybridge.convert_memory(np.arange(3), name)
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, arraybridge.MemoryConversionError)
    assert name in str(caught.value)
    assert OTHERS[name][1] in str(caught.value)


@pytest.mark.parametrize("name", OTHERS)
def test_a_missing_framework_as_declared_source_is_no_crash(name: str) -> None:
    """An array that is not what was declared is refused, whatever is installed."""
    need_absence(name)
    with pytest.raises((arraybridge.MemoryConversionError, ValueError, TypeError)):
        arraybridge.convert_memory(np.arange(3), name, "numpy", gpu_id=0)


def test_numpy_to_numpy_is_the_very_object() -> None:
    array = np.arange(6).reshape(2, 3)[:, ::-1]
    assert arraybridge.convert_memory(array, "numpy") is array


def test_numpy_to_numpy_copies_when_told() -> None:
    array = np.arange(6)
    copied = arraybridge.convert_memory(array, "numpy", copy=True)
    array[:] = 0
    assert copied.tolist() == [0, 1, 2, 3, 4, 5]


def test_numpy_to_numpy_casts_when_told() -> None:
    cast = arraybridge.convert_memory(np.array([0.5, 1.75]), "numpy", dtype="float32")
    assert cast.dtype == np.dtype("float32")
    assert cast.tolist() == [0.5, 1.75]


@pytest.mark.parametrize("array", [np.zeros(2), np.ma.masked_array([1, 2], [True, False]), np.array(1)])
def test_numpy_is_detected(array: np.ndarray) -> None:
    assert arraybridge.detect_memory_type(array) == "numpy"


@pytest.mark.parametrize("thing", [[1, 2], 3, 2.5, "abc", None, object()])
def test_what_is_no_array_is_refused(thing: object) -> None:
    with pytest.raises(arraybridge.UnknownArrayError) as caught:
        arraybridge.detect_memory_type(thing)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, ValueError)


def test_an_unknown_framework_is_a_value_error_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="numpy"):
        arraybridge.convert_memory(np.arange(3), "nunpy")


def test_containers_work_with_numpy_alone() -> None:
    array = np.arange(3)
    tree = {"b": [array, 1, "x"], "a": (array, None)}
    converted = arraybridge.convert_tree(tree, "numpy")
    assert list(converted) == ["b", "a"]
    assert converted["b"][0] is array
    assert converted["b"][1:] == [1, "x"]
    assert converted["a"] == (array, None)


def test_the_program_starts() -> None:
    done = run_python("-m", "arraybridge", "--help")
    if importlib.util.find_spec("typer") is None:
        assert (done.returncode, done.stdout) == (1, "")
        assert '".[cli]" in a checkout' in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert "demo" in done.stdout


def test_a_missing_framework_is_refused_again_the_second_time() -> None:
    done = run_script("convert_to_missing.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["FrameworkNotInstalledError"] * 2


def test_dask_is_named_with_its_extra_where_it_is_missing() -> None:
    if importlib.util.find_spec("dask") is not None:
        if os.environ.get("ARRAYBRIDGE_MINIMAL"):
            pytest.fail("dask is installed, where NumPy should be alone")
        pytest.skip("dask is installed")
    with pytest.raises(
        arraybridge.FrameworkNotInstalledError, match=r"pip install \"\.\[dask\]\" in a checkout"
    ):
        importlib.import_module("arraybridge.dask").cluster  # noqa: B018
