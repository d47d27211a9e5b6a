"""The library with only NumPy installed: supported functions, and errors for the rest."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest

import arraybridge
from tests.helpers import run_python

# The packages that provide a framework, and the extra that the message must name.
OTHERS = {
    "cupy": (("cupy",), ".[cupy-cuda13x]"),
    "torch": (("torch",), ".[torch]"),
    "jax": (("jax",), ".[jax]"),
    "tensorflow": (("tensorflow",), ".[tensorflow]"),
    "pyclesperanto": (("pyclesperanto", "pyclesperanto_prototype"), ".[pyclesperanto]"),
}
ALONE = os.environ.get("ARRAYBRIDGE_MINIMAL")


def need_absence(*packages: str) -> None:
    """Skip if one of them is installed, and fail if the environment is meant to have none."""
    for package in packages:
        if importlib.util.find_spec(package) is not None:
            if ALONE:
                pytest.fail(f"{package} is installed, but this environment must only have NumPy")
            pytest.skip(f"{package} is installed, but the test needs its absence")


@pytest.mark.skipif(not ALONE, reason="the wheel is installed only in the environment minimal")
def test_tests_use_the_wheel_and_not_the_checkout() -> None:
    installed, checkout = Path(arraybridge.__file__).parent, Path(__file__).parents[2] / "arraybridge"
    assert installed != checkout
    files = [sorted(path.name for path in folder.rglob("*.py")) for folder in (installed, checkout)]
    assert files[0] == files[1]


@pytest.mark.parametrize("name", OTHERS)
def test_missing_framework_error_names_its_extra(name: str) -> None:
    packages, extra = OTHERS[name]
    need_absence(*packages)
    for _ in range(2):
        with pytest.raises(arraybridge.FrameworkNotInstalledError) as caught:
            arraybridge.convert_memory(np.arange(3), name)
        assert isinstance(caught.value, ImportError)
        assert name in str(caught.value)
        assert extra in str(caught.value)
    # An array that does not match the declaration raises, regardless of the installed packages.
    with pytest.raises(arraybridge.MemoryConversionError):
        arraybridge.convert_memory(np.arange(3), name, "numpy", gpu_id=0)


def test_numpy_to_numpy() -> None:
    x = np.arange(6).reshape(2, 3)[:, ::-1]
    assert arraybridge.detect_memory_type(x) == "numpy"
    assert arraybridge.convert_memory(x, "numpy") is x
    copied = arraybridge.convert_memory(x, "numpy", copy=True)
    x[:] = 0
    assert copied.tolist() == [[2, 1, 0], [5, 4, 3]]
    cast = arraybridge.convert_memory(np.array([0.5, 1.75]), "numpy", dtype="float32")
    assert (cast.dtype, cast.tolist()) == (np.float32, [0.5, 1.75])


def test_command_line_program_starts() -> None:
    done = run_python("-m", "arraybridge", "--help")
    if importlib.util.find_spec("typer") is None:
        assert (done.returncode, done.stdout) == (1, "")
        assert '".[cli]" in a checkout' in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert "demo" in done.stdout


def test_missing_dask_error_names_its_extra() -> None:
    need_absence("dask")
    wanted = r"pip install \"\.\[dask\]\" in a checkout"
    with pytest.raises(arraybridge.FrameworkNotInstalledError, match=wanted):
        importlib.import_module("arraybridge.dask").cluster  # noqa: B018
