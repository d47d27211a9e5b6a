"""Configure every test run: environment variables of the frameworks, and skips that depend on the machine."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache

import pytest

# Frameworks read these variables when they are first imported, which is after this file. They are set here
# and not only in tox.ini, so that plain `pytest` behaves the same. Variables that are set already are kept.
ENVIRONMENT = {
    # Several devices without a GPU.
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    "POCL_DEVICES": "pthread pthread",
    # TensorFlow's start-up messages, below errors.
    "TF_CPP_MIN_LOG_LEVEL": "2",
    # The frameworks share one GPU, so none of them may allocate all of its memory.
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    # By default, waiting threads of PyTorch keep the CPUs busy, which several test processes share.
    "OMP_WAIT_POLICY": "passive",
}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

# `import triton` after `import tensorflow` crashes the process (Triton 3.8, TensorFlow 2.21).
# The reverse order works. PyTorch's CUDA build installs Triton, and `torch.compile` imports it late.
if importlib.util.find_spec("triton") is not None and importlib.util.find_spec("tensorflow") is not None:
    importlib.import_module("triton")

# The names that ARRAYBRIDGE_REQUIRE accepts. "gpu" means an NVIDIA GPU, and "triton" the package that
# PyTorch's CUDA build installs.
REQUIRABLE = frozenset(
    {"numpy", "cupy", "torch", "jax", "tensorflow", "pyclesperanto", "mlx", "paddle", "triton", "gpu"}
)


def required() -> frozenset[str]:
    """Return the names in ARRAYBRIDGE_REQUIRE, whose tests must not be skipped."""
    return frozenset(
        filter(None, (name.strip() for name in os.environ.get("ARRAYBRIDGE_REQUIRE", "").split(",")))
    )


@cache
def nvidia_gpus() -> str:
    """Return nvidia-smi's list of GPUs; "" if there are none. This imports no framework."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    try:
        listing = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return listing.stdout.strip() if listing.returncode == 0 else ""


def pytest_configure() -> None:
    """Reject misspelled requirements, which would otherwise have no effect."""
    unknown = required() - REQUIRABLE
    if unknown:
        raise pytest.UsageError(
            f"ARRAYBRIDGE_REQUIRE names {', '.join(sorted(unknown))}; "
            f"it may name {', '.join(sorted(REQUIRABLE))}."
        )
    if importlib.util.find_spec("hypothesis") is not None:
        from hypothesis import settings

        # The first call of a framework compiles and takes seconds: a deadline would only measure that.
        settings.register_profile("arraybridge", deadline=None)
        settings.load_profile("arraybridge")


def pytest_report_header() -> list[str]:
    """Report the GPUs that the tests use, and whether they are emulated."""
    mode = os.environ.get("ARRAYBRIDGE_EMULATED_GPU", "")
    if mode:
        return [f"NVIDIA GPUs: EMULATED in host memory ({mode}), by tests/emulated_gpu; no real GPU"]
    return [f"NVIDIA GPUs: {nvidia_gpus() or 'none'}"]


@pytest.fixture(autouse=True, scope="module")
def _freeze_existing_objects() -> None:
    """Exclude existing objects from garbage collections.

    Every out-of-memory recovery collects garbage, which takes a second if all frameworks are loaded.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked ``gpu`` if there is no NVIDIA GPU, unless one is required."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and "gpu" not in required() and not nvidia_gpus():
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU, and nvidia-smi lists none")
        for item in marked:
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip tests on the emulated GPU that need machine code of PyTorch; see tests/emulated_gpu."""
    try:
        return (yield)
    except RuntimeError as error:
        missing = "no kernel image is available for execution on the device" in str(error)
        if missing and os.environ.get("ARRAYBRIDGE_EMULATED_GPU"):
            pytest.skip("the emulated GPU cannot run machine code of PyTorch")
        raise
