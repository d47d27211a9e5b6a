"""docs/coming-from.md: what it calls the same is the same, and its line for old imports leaves what runs.

What the older library does was seen with its releases 0.2.11 and 0.5.2; the values here are written by hand.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import arraybridge
from arraybridge import DtypeConversion, MemoryConversionError, MemoryType
from tests.helpers import require, run_python

PAGE = (Path(__file__).parent.parent / "docs" / "coming-from.md").read_text(encoding="utf-8")
IMAGE = np.arange(6, dtype=np.uint8).reshape(2, 3)


def positional_call() -> None:
    with arraybridge.settings(missing_gpu="host"):
        assert arraybridge.convert_memory(IMAGE, "numpy", "torch", 0).tolist() == IMAGE.tolist()


def detection() -> None:
    assert arraybridge.detect_memory_type(IMAGE) == "numpy"
    with pytest.raises(ValueError, match="list"):
        arraybridge.detect_memory_type([1, 2])


def memory_type() -> None:
    assert MemoryType.TORCH == MemoryType.TORCH.value == "torch"
    assert MemoryType("torch") is MemoryType.TORCH


def declaration() -> None:
    @arraybridge.memory_types("numpy", "torch", lambda result: result > 0)
    def count(image: np.ndarray) -> int:
        return int(image.sum())

    assert (count.input_memory_type, count.output_memory_type, count(IMAGE)) == ("numpy", "torch", 15)
    with pytest.raises(ValueError, match="contract"):
        count(IMAGE * 0)


def decorators() -> None:
    double = arraybridge.torch(output_type="numpy")(lambda image: image * 2)
    assert double(IMAGE).tolist() == [[0, 2, 4], [6, 8, 10]]


def dtype_conversion() -> None:
    dtypes = {"preserve": None, "native": None, "uint8": np.uint8, "float64": np.float64}
    assert {name: DtypeConversion(name).numpy_dtype for name in dtypes} == dtypes
    for value in ("uint16", "int16", "int32", "float32"):
        assert DtypeConversion(value).value == value


def stacking() -> None:
    with arraybridge.settings(missing_gpu="host"):
        stack = arraybridge.stack_slices([IMAGE, IMAGE + 1], "torch", 0)
    assert stack.tolist() == [IMAGE.tolist(), (IMAGE + 1).tolist()]


def cleaning_all() -> None:
    assert arraybridge.cleanup_all_gpu_frameworks() >= 0
    assert arraybridge.cleanup_all_gpu_frameworks(device_id=0) >= 0
    with pytest.raises(arraybridge.DeviceNotFoundError):  # by its new name a card that is missing is an error
        arraybridge.cleanup_all_gpu_frameworks(gpu_id=99)


def cleaning_one() -> None:
    for name in ("torch", "cupy", "jax", "tensorflow", "pyclesperanto"):
        clean = getattr(arraybridge, f"cleanup_{name}_gpu")
        assert min(clean(), clean(device_id=0)) >= 0  # without a card it does nothing


def errors() -> None:
    facts = {"source_type": "numpy", "target_type": "torch", "method": "dlpack", "reason": "no card"}
    for error in (MemoryConversionError(**facts), MemoryConversionError(*facts.values())):
        assert str(error) == "Cannot convert from numpy to torch using dlpack. Reason: no card"
        assert {name: getattr(error, name) for name in facts} == facts


#: The first name of each row that promises the same, and what shows it.
SAME: dict[str, Callable[[], None]] = {
    'convert_memory(x, "numpy", "torch", 0)': positional_call,
    "detect_memory_type(x)": detection,
    "MemoryType.TORCH": memory_type,
    "memory_types(input, output, contract)": declaration,
    "@torch": decorators,
    "DtypeConversion": dtype_conversion,
    'stack_slices(slices, "torch", 0)': stacking,
    "cleanup_all_gpu_frameworks(device_id=0)": cleaning_all,
    "cleanup_torch_gpu(device_id=0)": cleaning_one,
    "MemoryConversionError": errors,
}


def test_each_row_that_says_the_same_is_tested() -> None:
    rows = re.findall(r"^\| `([^`]+)`[^|]*\|[^|]*\| the same", PAGE, re.MULTILINE)
    assert sorted(rows) == sorted(SAME)


@pytest.mark.parametrize("name", SAME)
def test_what_is_called_the_same_is_the_same(name: str) -> None:
    require("torch")
    if arraybridge.gpu_available():
        pytest.skip("written for a machine without a card")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", arraybridge.MissingGpuWarning)
        SAME[name]()


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
def test_the_line_that_rewrites_imports(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(OLD_PROGRAM)
    assert "ModuleNotFoundError" in run_python(str(program)).stderr
    (line,) = re.findall(r"```sh\n(git ls-files .*?)```", PAGE, re.DOTALL)
    line = line.replace("git ls-files '*.py'", "echo program.py")
    subprocess.run(line, shell=True, cwd=tmp_path, check=True)  # noqa: S602
    after = run_python(str(program))
    assert after.returncode == 0, after.stderr
