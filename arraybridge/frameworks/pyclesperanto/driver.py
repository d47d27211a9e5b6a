"""The OpenCL drivers of this machine, and the one in the wheel of PoCL; imports neither package."""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache
from pathlib import Path

from arraybridge.frameworks.presence import can_find

__all__ = ["configured_icds", "pocl_wheel", "use_pocl_wheel"]


def configured_icds() -> list[str]:
    """What the OpenCL loader will open: the contents of the .icd files, or the libraries by name."""
    named = os.environ.get("OCL_ICD_FILENAMES")
    if named:
        return named.split(os.pathsep)
    folder = Path(
        os.environ.get("OCL_ICD_VENDORS") or os.environ.get("OPENCL_VENDOR_PATH") or "/etc/OpenCL/vendors"
    )
    if not folder.is_dir():
        return []
    return [file.read_text(errors="replace").strip() for file in sorted(folder.glob("*.icd"))]


def pocl_wheel() -> Path | None:
    """The OpenCL driver in the wheel that ``pip install "pyopencl[pocl]"`` brings, or None."""
    spec = importlib.util.find_spec("pyopencl") if can_find("pyopencl") else None
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / ".libs"
    icd = folder / "pocl.icd"
    return folder / icd.read_text().strip() if icd.is_file() else None


@cache
def use_pocl_wheel() -> str:
    """Where no OpenCL platform is configured, point pyclesperanto's loader to the PoCL wheel.

    pyopencl finds the wheel by itself; pyclesperanto brings a loader of its own, which does not. Returns the
    path of the wheel's driver where that was needed, else ``""``.
    """
    library = pocl_wheel()
    if sys.platform != "linux" or configured_icds() or library is None:
        return ""
    os.environ["OCL_ICD_FILENAMES"] = str(library)
    return str(library)
