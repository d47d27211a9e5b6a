"""After `import arraybridge`, `import pyclesperanto` finds the OpenCL driver of the PoCL wheel."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.helpers import require, run_python

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pyclesperanto") is None,
    reason="pyclesperanto is not installed, and pyclesperanto_prototype finds the driver itself",
)
PROGRAM = """
import json, os, sys
import arraybridge
early = sorted({"pyopencl", "pyclesperanto"} & set(sys.modules))
import pyclesperanto as cle
devices = getattr(cle, "list_available_devices", list)  # without a driver it imports half
print(json.dumps([early, os.environ.get("OCL_ICD_FILENAMES", ""), len(devices())]))
"""


def run(vendors: Path) -> tuple[list[str], str, int]:
    env = {"OCL_ICD_FILENAMES": "", "OCL_ICD_VENDORS": str(vendors), "PYTHONWARNINGS": ""}
    done = run_python("-c", PROGRAM, env=env)
    assert done.returncode == 0, done.stderr
    early, driver, devices = json.loads(done.stdout)
    return early, driver, devices


@pytest.mark.skipif(sys.platform != "linux", reason="the wheel is for Linux")
def test_pocl_wheel_is_used_without_another_driver(tmp_path: Path) -> None:
    require("pyclesperanto")
    pytest.importorskip("pyopencl")
    early, driver, devices = run(tmp_path)
    assert early == []
    assert "libpocl" in driver
    assert devices >= 1
    (tmp_path / "own.icd").write_text("libown.so", encoding="utf-8")
    assert run(tmp_path)[1] == "", "an existing driver must remain selected"


@pytest.mark.skipif(sys.platform != "linux", reason="the wheel is for Linux")
def test_importing_pyclesperanto_first_raises_with_advice(tmp_path: Path) -> None:
    require("pyclesperanto")
    program = (
        "import pyclesperanto, numpy as np, arraybridge as ab\n"
        "try: ab.to_pyclesperanto(np.ones((2, 2), np.float32))\n"
        "except ab.FrameworkNotInstalledError as error: print(error)"
    )
    env = {"OCL_ICD_FILENAMES": "", "OCL_ICD_VENDORS": str(tmp_path), "PYTHONWARNINGS": ""}
    done = run_python("-c", program, env=env)
    assert "import arraybridge before pyclesperanto" in done.stdout, done.stderr
