"""`arraybridge doctor`: each fault of its table, and planted packages that crash, hang and are in the way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import arraybridge
from arraybridge.cli.doctor import FAULTS, Findings, problems_of
from arraybridge.frameworks.pyclesperanto.opencl import pocl_wheel
from arraybridge.hardware import Driver, Gpu
from tests.cli.programs import Site, environment
from tests.helpers import require

Json = dict[str, Any]
NONE = Driver(reason="no NVIDIA driver is installed")
FAILS = Driver(reason="the NVIDIA driver does not respond: version mismatch", is_silent=True)
OLD, NEW = Driver("550.54.15", (12, 4)), Driver("580.65.06", (13, 0))
FAKE_GPUS = (Gpu(0, "Fake RTX 9000", "GPU-1", "0000:01:00.0", 24 << 30),)
HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}


def look(built_for: str = "CPU", **more: Any) -> Json:
    return {"state": "works", "devices": [], "version": "1.2", "built_for": built_for, **more}


CUPY_12, CUPY_13 = {"cupy-cuda12x": "14"}, {"cupy-cuda13x": "14"}
CL = {"no": {"pyclesperanto": look(state="no device")}, "half": {"pyclesperanto": look(plain_import="fails")}}
CL["old"] = {"pyclesperanto": look(state="broken", error="Build log: error: unknown target CPU 'generic'")}
CRASH = {"order": ("a", "b"), "crash": "SIGSEGV", "at": "b"}
HANGS = look(state="timed out", error="no answer within 5 seconds")
BLIND = look("CUDA 13", state="no device")
E, W, N = "error", "warning", "note"
# Fault, severity, facts, and what is in the message and in the fix.
FOUND = [
    ("no-driver", N, Findings(NONE, looks={"torch": look("CUDA 13.0")}), "CUDA (torch)", "nvidia-smi"),
    ("no-driver", N, Findings(FAILS), "version mismatch", "reboot"),
    ("driver-too-old", E, Findings(OLD, looks={"jax": look("CUDA 13")}), "CUDA 12 at most", "for CUDA 12"),
    ("cupy-cuda-major", E, Findings(OLD, versions=CUPY_13), "every allocation will fail", "cupy-cuda12x"),
    ("cupy-cuda-major", W, Findings(NEW, versions=CUPY_12), "needs libraries of CUDA 12", "cupy-cuda13x"),
    ("two-cupys", E, Findings(NEW, versions={"cupy": "14"} | CUPY_13), "at once", "-y cupy cupy-cuda13x"),
    ("cpu-build", W, Findings(NEW, FAKE_GPUS, {"torch": look()}), "can't use the Fake RTX", "uninstall -y torch"),
    ("no-opencl", E, Findings(looks=CL["no"]), "no OpenCL device. A card", 'pip install "pyopencl[pocl]"'),
    ("no-opencl", W, Findings(looks=CL["half"]), "before arraybridge finds no", "export OCL_ICD_FILENAMES="),
    ("old-pocl", E, Findings(looks=CL["old"]), "older than this CPU", "apt install pocl-opencl-icd"),
    ("takes-card", W, Findings(NEW, FAKE_GPUS, {"jax": look("CUDA 13")}), "three quarters", "PREALLOCATE=false"),
    ("import-order", E, Findings(looks={"b": look()}, trials=[CRASH]), "After a the", "import b before a"),
    ("import-order", E, Findings(looks={"b": look()}, trials=[CRASH | {"at": ""}]), "ends", "two processes"),
    ("namesake", E, Findings(versions={"arraybridge": "0.5.2"}), "0.5.2 is installed", "pip uninstall"),
    ("broken", E, Findings(looks={"jax": HANGS}), "jax hangs: no answer within 5", "--force-reinstall"),
    ("broken", E, Findings(NEW, FAKE_GPUS, {"torch": BLIND}, environ=HIDDEN), "", "unset"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "severity", "facts", "message", "fix"), FOUND)
def test_a_fault_is_found_with_its_fix(
    fault: str, severity: str, facts: Findings, message: str, fix: str
) -> None:
    (problem,) = problems_of(facts)
    assert (problem["id"], problem["severity"]) == (fault, severity)
    assert message in problem["message"]
    assert any(fix in line for line in problem["fix"])


def test_every_fault_of_the_table_has_a_case() -> None:
    assert len(FAULTS) == len({fault for fault, *_ in FOUND}) == 11


MODEST = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}


@pytest.mark.parametrize(
    "facts",
    [
        Findings(NONE, looks={"torch": look(), "cupy": {"state": "missing", "devices": []}}),
        Findings(NEW, FAKE_GPUS, {"torch": look("CUDA 13.0")}, versions=CUPY_13),
        Findings(NEW, FAKE_GPUS, {"jax": look("CUDA 12"), "tensorflow": look("CUDA 12.8")}, environ=MODEST),
        Findings(looks={"b": look()}, trials=[CRASH | {"order": ("b",)}]),
        Findings(versions={"arraybridge": arraybridge.__version__}),
    ],
)
def test_what_is_sound_is_no_fault(facts: Findings) -> None:
    assert problems_of(facts) == []


def test_the_worst_comes_first() -> None:
    facts = Findings(OLD, FAKE_GPUS, {"torch": look()}, versions={"cupy": "14", "cupy-cuda13x": "14"})
    assert [problem["severity"] for problem in problems_of(facts)] == ["error", "error", "warning"]


def report(done: subprocess.CompletedProcess[str]) -> Json:
    """What it printed, with the exit code, and its problems by id."""
    assert "Traceback" not in done.stderr, done.stderr
    answer: Json = json.loads(done.stdout)
    return answer | {"code": done.returncode, "by_id": {one["id"]: one for one in answer["problems"]}}


def test_packages_that_crash_hang_import_half_or_are_in_the_way(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.package("jax", "jax_that_hangs.py")
    site.package("cupy", "import os\nos.abort()\n")
    site.package("pyclesperanto", "__version__ = '0.25.1'\n")
    site.distribution("cupy-cuda13x", "14.2.0")
    (site.work / "torch.py").write_text("raise LookupError('no such lamp')\n", encoding="utf-8")
    answer = report(site.run("doctor", "--json", "--timeout", "3"))
    frameworks = answer["frameworks"]
    assert {name: look["state"] for name, look in frameworks.items()} == {
        "numpy": "works", "cupy": "crashed", "torch": "broken", "jax": "timed out",
        "tensorflow": "missing", "pyclesperanto": "no device", "mlx": "missing", "paddle": "missing",
    }  # fmt: skip
    assert "SIGABRT" in frameworks["cupy"]["error"]
    assert frameworks["cupy"]["version"] == "14.2.0", "by its package: it could not say so itself"
    assert frameworks["jax"]["error"] == "no answer within 3 seconds"
    assert (answer["code"], answer["ok"]) == (1, False)
    (problem,) = (one for one in answer["problems"] if one["framework"] == "torch")
    assert "no such lamp" in problem["message"]
    assert "torch.py is imported in its place" in problem["message"]
    assert problem["fix"] == [f"mv {site.work / 'torch.py'} {site.work / 'my_torch.py'}"]


def test_the_order_that_crashes_is_narrowed_down_to_a_pair(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.package("torch", "torch_after_tensorflow.py")
    site.package("tensorflow", "tensorflow_for_cuda.py")
    answer = report(site.run("doctor", "--json", "--timeout", "20"))
    assert answer["frameworks"]["tensorflow"]["built_for"] == "CUDA 13.1"
    crashed = [trial["order"] for trial in answer["import_orders"] if trial["crash"]]
    assert crashed == [["tensorflow", "torch"]]
    problem = answer["by_id"]["import-order"]
    assert (
        "After tensorflow the process is ended when torch is imported and used: SIGABRT" in problem["message"]
    )
    assert problem["fix"] == ["# import torch before tensorflow"]


def test_triton_after_tensorflow_is_predicted(tmp_path: Path) -> None:
    """PyTorch imports it late, so that no order of frameworks shows it."""
    site = Site(tmp_path)
    site.package("triton", "triton_after_tensorflow.py")
    site.package("tensorflow", "tensorflow_for_cuda.py")
    answer = report(site.run("doctor", "--json", "--timeout", "20"))
    crashed = [trial["order"] for trial in answer["import_orders"] if trial["crash"]]
    assert crashed == [["tensorflow", "triton"]]
    assert "triton" not in answer["frameworks"]
    problem = answer["by_id"]["import-order"]
    assert "After tensorflow the process is ended when triton is imported" in problem["message"]
    assert "PyTorch imports it late: in torch.compile, optimizers, torch.func," in problem["message"]
    assert problem["fix"] == ["# import triton before tensorflow"]
    assert answer["code"] == 1


def test_a_triton_that_crashes_alone_is_no_matter_of_order(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.package("triton", "import os\nos.abort()\n")
    site.package("tensorflow", "tensorflow_for_cuda.py")
    answer = report(site.run("doctor", "--json", "--timeout", "20"))
    assert "import-order" not in answer["by_id"]


def test_the_real_triton_and_tensorflow(tmp_path: Path) -> None:
    """The doctor says of this environment what really happens in it."""
    require("triton")
    require("tensorflow")
    done = subprocess.run(
        [sys.executable, "-c", "import tensorflow, triton"], capture_output=True, check=False
    )
    answer = report(Site(tmp_path).run("doctor", "--json", SHOWN="tensorflow triton"))
    crashed = [trial["order"] for trial in answer["import_orders"] if trial["crash"]]
    assert crashed == ([["tensorflow", "triton"]] if done.returncode else [])


def test_the_report_for_people_and_a_sound_environment(tmp_path: Path) -> None:
    done = Site(tmp_path).run("doctor", COLUMNS="40")
    assert done.returncode == 0, done.stdout
    assert "Nothing is wrong." in done.stdout
    assert "not installed" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 40


def test_pyclesperanto_is_imported_as_a_user_does(tmp_path: Path) -> None:
    """Where only the PoCL wheel is there, `import pyclesperanto` alone imports half, until it is exported."""
    require("pyclesperanto")
    if pocl_wheel() is None:
        pytest.skip("needs the PoCL wheel, which is not installed")
    site = Site(tmp_path)
    without_a_driver = {"SHOWN": "pyclesperanto", "OCL_ICD_VENDORS": str(tmp_path)}
    answer = report(site.run("doctor", "--json", **without_a_driver))
    seen = answer["frameworks"]["pyclesperanto"]
    assert (seen["state"], seen["plain_import"]) == ("works", "fails")
    assert answer["by_id"]["no-opencl"]["fix"][0] == f"export OCL_ICD_FILENAMES={pocl_wheel()}"
    advice = environment(site.folder, **without_a_driver, OCL_ICD_FILENAMES=str(pocl_wheel()))
    command = [sys.executable, "-c", "import pyclesperanto; pyclesperanto.push"]
    assert subprocess.run(command, capture_output=True, env=advice, check=False).returncode == 0


@pytest.mark.slow
def test_real_frameworks_work_in_both_orders(tmp_path: Path) -> None:
    """Each is imported by two processes, which takes long."""
    names = ("torch", "jax", "tensorflow")
    for name in names:
        require(name)
    answer = report(Site(tmp_path).run("doctor", "--json", SHOWN=" ".join((*names, "jaxlib"))))
    for name in ("numpy", *names):
        assert answer["frameworks"][name]["state"] == "works"
        assert answer["frameworks"][name]["devices"]
    assert [trial["crash"] for trial in answer["import_orders"]] == [None, None]
