"""Tests of docs/migration.md: names that are the same, and the command that rewrites old imports.

The expected values are written by hand after the releases 0.2.11 and 0.5.2.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import arraybridge
from arraybridge import DtypeConversion, MemoryType
from tests.helpers import require, run_python

PAGE = (Path(__file__).parent.parent / "docs" / "migration.md").read_text(encoding="utf-8")
IMAGE = np.arange(6, dtype=np.uint8).reshape(2, 3)


def test_unchanged_names_are_equivalent() -> None:
    """Modules of the package test the other names that the page lists."""
    require("torch")
    with arraybridge.settings(missing_gpu="host"), warnings.catch_warnings():
        warnings.simplefilter("ignore", arraybridge.MissingGpuWarning)
        assert arraybridge.convert_memory(IMAGE, "numpy", "torch", 0).tolist() == IMAGE.tolist()
        assert arraybridge.stack_slices([IMAGE], "torch", 0).tolist() == [IMAGE.tolist()]
    assert MemoryType.TORCH == MemoryType.TORCH.value == "torch"
    assert MemoryType("torch") is MemoryType.TORCH
    assert DtypeConversion("uint8") is DtypeConversion.UINT8
    assert arraybridge.cleanup_all_gpu_frameworks() >= 0
    with pytest.raises(arraybridge.DeviceNotFoundError):
        arraybridge.cleanup_all_gpu_frameworks(99)


OLD_PROGRAM = """
from arraybridge.converters import convert_memory, detect_memory_type
from arraybridge.decorators import numpy, torch, memory_types, DtypeConversion
from arraybridge.stack_utils import stack_slices, unstack_slices
from arraybridge.slice_processing import process_slices
from arraybridge.gpu_cleanup import cleanup_torch_gpu, cleanup_all_gpu_frameworks
from arraybridge.exceptions import MemoryConversionError
from arraybridge.types import MemoryType
def later():
    from arraybridge.converters import convert_memory as convert
    return convert
import numpy as np
assert later()(np.arange(3), MemoryType.NUMPY).tolist() == [0, 1, 2]
"""


@pytest.mark.skipif(shutil.which("sed") is None or sys.platform != "linux", reason="needs GNU sed")
def test_command_that_rewrites_imports(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(OLD_PROGRAM)
    assert "ModuleNotFoundError" in run_python(str(program)).stderr
    (line,) = re.findall(r"```sh\n(git ls-files .*?)```", PAGE, re.DOTALL)
    line = line.replace("git ls-files '*.py'", "echo program.py")
    subprocess.run(line, shell=True, cwd=tmp_path, check=True)  # noqa: S602
    after = run_python(str(program))
    assert after.returncode == 0, after.stderr
