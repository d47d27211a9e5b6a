"""The OpenCL drivers of this machine, and the one in the wheel of PoCL; imports neither package."""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache

from arraybridge.frameworks.facts import can_find

__all__ = ["use_pocl_wheel"]


def configured_icds() -> list[str]:
    """What the OpenCL loader will open: the contents of the .icd files, or the libraries by name."""
    named = os.environ.get("OCL_ICD_FILENAMES")
    if named:
        return named.split(os.pathsep)
    folder = (
        os.environ.get("OCL_ICD_VENDORS") or os.environ.get("OPENCL_VENDOR_PATH") or "/etc/OpenCL/vendors"
    )
    try:
        files = sorted(file.path for file in os.scandir(folder) if file.name.endswith(".icd"))
    except OSError:
        return []
    return [_text(file) for file in files]


def _text(path: str) -> str:
    with open(path, errors="replace") as file:  # noqa: PTH123  # pathlib is a tenth of the time of an import
        return file.read().strip()


def pocl_wheel() -> str | None:
    """The OpenCL driver in the wheel that ``pip install "pyopencl[pocl]"`` brings, or None."""
    spec = importlib.util.find_spec("pyopencl") if can_find("pyopencl") else None
    if spec is None or spec.origin is None:
        return None
    folder = spec.origin.rpartition(os.sep)[0] + f"{os.sep}.libs{os.sep}"
    try:
        return folder + _text(f"{folder}pocl.icd")
    except OSError:
        return None


@cache
def use_pocl_wheel() -> str:
    """Where no OpenCL platform is configured, point pyclesperanto's loader to the PoCL wheel.

    pyopencl finds the wheel by itself; pyclesperanto brings a loader of its own, which does not. Returns the
    path of the wheel's driver where that was needed, else ``""``.
    """
    library = None if sys.platform != "linux" or configured_icds() else pocl_wheel()
    if library is None:
        return ""
    os.environ["OCL_ICD_FILENAMES"] = library
    return library
