"""Test `arraybridge doctor`: each check, and fake packages that crash, hang or hide others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import arraybridge
from arraybridge.cli.doctor_checks import CHECKS, Findings, find_problems
from arraybridge.frameworks.pyclesperanto.opencl import pocl_wheel
from arraybridge.hardware import Driver, Gpu
from tests.cli.programs import Site, environment
from tests.helpers import require

Json = dict[str, Any]
NONE = Driver(reason="no NVIDIA driver is installed")
FAILS = Driver(reason="the NVIDIA driver does not respond: version mismatch", is_silent=True)
OLD, NEW = Driver("550.54.15", (12, 4)), Driver("580.65.06", (13, 0))
GPUS = (Gpu(0, "Fake RTX 9000", "GPU-1", "0000:01:00.0", 24 << 30),)
HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}


def probe(built_for: str = "CPU", **more: Any) -> Json:
    return {"state": "works", "devices": [], "version": "1.2", "built_for": built_for, **more}


CUPY_12, CUPY_13 = {"cupy-cuda12x": "14"}, {"cupy-cuda13x": "14"}
NO_OPENCL = {"pyclesperanto": probe(state="no device")}
PLAIN_IMPORT_FAILS = {"pyclesperanto": probe(plain_import="fails")}
OLD_POCL = {"pyclesperanto": probe(state="broken", error="Build log: error: unknown target CPU 'generic'")}
CRASH = {"order": ("a", "b"), "crash": "SIGSEGV", "at": "b"}
HANGS = probe(state="timed out", error="no response within 5 seconds")
NO_DEVICE = probe("CUDA 13", state="no device")
# The check, its severity, its findings, and parts of the message and of the fix.
FOUND = [
    (
        *("no-driver", "note", Findings(NONE, probes={"torch": probe("CUDA 13.0")})),
        *("CUDA builds cannot use a GPU (torch)", "install its driver"),
    ),
    ("no-driver", "note", Findings(FAILS), "version mismatch. No framework can use a GPU", "reboot"),
    (
        *("driver-too-old", "error", Findings(OLD, probes={"jax": probe("CUDA 13")})),
        *("driver 550.54.15 supports only CUDA 12 and older", "for CUDA 12"),
    ),
    (
        *("cupy-cuda-major", "error", Findings(OLD, versions=CUPY_13)),
        *("CuPy cannot allocate GPU memory", "pip install cupy-cuda12x"),
    ),
    (
        *("cupy-cuda-major", "warning", Findings(NEW, versions=CUPY_12)),
        *("CuPy requires CUDA 12 libraries", "pip install cupy-cuda13x"),
    ),
    (
        *("two-cupys", "error", Findings(NEW, versions={"cupy": "14"} | CUPY_13)),
        *("cupy and cupy-cuda13x are installed together", "pip uninstall -y cupy cupy-cuda13x"),
    ),
    (
        *("cpu-build", "warning", Findings(NEW, GPUS, {"torch": probe()})),
        *("cannot use the Fake RTX 9000", "pip uninstall -y torch"),
    ),
    (
        *("no-opencl", "error", Findings(probes=NO_OPENCL)),
        *("finds no OpenCL device: no OpenCL driver is installed", 'pip install "pyopencl[pocl]"'),
    ),
    (
        *("no-opencl", "warning", Findings(probes=PLAIN_IMPORT_FAILS)),
        *("before arraybridge find no OpenCL device", "export OCL_ICD_FILENAMES="),
    ),
    ("old-pocl", "error", Findings(probes=OLD_POCL), "older than this CPU", "apt install pocl-opencl-icd"),
    (
        *("preallocation", "warning", Findings(NEW, GPUS, {"jax": probe("CUDA 13")})),
        *("three quarters", "export XLA_PYTHON_CLIENT_PREALLOCATE=false"),
    ),
    (
        *("import-order", "error", Findings(probes={"b": probe()}, trials=[CRASH])),
        *("Importing and using b after a crashes the process: SIGSEGV", "import b before a"),
    ),
    (
        *("import-order", "error", Findings(probes={"b": probe()}, trials=[CRASH | {"at": ""}])),
        *("when it exits", "use b and a in two processes"),
    ),
    ("namesake", "error", Findings(versions={"arraybridge": "0.5.2"}), "0.5.2 is installed", "pip uninstall"),
    ("broken", "error", Findings(probes={"jax": HANGS}), "jax hangs: no response within 5", "--force-reinst"),
    (
        *("broken", "error", Findings(NEW, GPUS, {"torch": NO_DEVICE}, environ=HIDDEN)),
        *("torch finds no device", "unset CUDA_VISIBLE_DEVICES"),
    ),
]


@pytest.mark.parametrize(("check", "severity", "findings", "message", "fix"), FOUND)
def test_each_check_reports_its_problem_with_a_fix(
    check: str, severity: str, findings: Findings, message: str, fix: str
) -> None:
    (problem,) = find_problems(findings)
    assert (problem["id"], problem["severity"]) == (check, severity)
    assert message in problem["message"]
    assert any(fix in line for line in problem["fix"])


def test_every_check_has_a_case() -> None:
    assert len(CHECKS) == len({check for check, *_ in FOUND}) == 11


NO_PREALLOCATION = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}


@pytest.mark.parametrize(
    "findings",
    [
        Findings(NONE, probes={"torch": probe(), "cupy": {"state": "missing", "devices": []}}),
        Findings(NEW, GPUS, {"torch": probe("CUDA 13.0")}, versions=CUPY_13),
        Findings(
            NEW, GPUS, {"jax": probe("CUDA 12"), "tensorflow": probe("CUDA 12.8")}, environ=NO_PREALLOCATION
        ),
        Findings(probes={"b": probe()}, trials=[CRASH | {"order": ("b",)}]),
        Findings(versions={"arraybridge": arraybridge.__version__}),
    ],
)
def test_working_environments_have_no_problems(findings: Findings) -> None:
    assert find_problems(findings) == []


def test_the_most_severe_problems_come_first() -> None:
    findings = Findings(OLD, GPUS, {"torch": probe()}, versions={"cupy": "14", "cupy-cuda13x": "14"})
    assert [problem["severity"] for problem in find_problems(findings)] == ["error", "error", "warning"]


def report(done: subprocess.CompletedProcess[str]) -> Json:
    """Return the printed JSON document, the exit code, and the problems by id."""
    assert "Traceback" not in done.stderr, done.stderr
    answer: Json = json.loads(done.stdout)
    return answer | {"code": done.returncode, "by_id": {one["id"]: one for one in answer["problems"]}}


def test_doctor_reports_packages_that_crash_hang_or_hide_others(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.package("jax", "jax_that_hangs.py")
    site.package("cupy", "import os\nos.abort()\n")
    site.package("pyclesperanto", "__version__ = '0.25.1'\n")
    site.distribution("cupy-cuda13x", "14.2.0")
    (site.work / "torch.py").write_text("raise LookupError('no such lamp')\n", encoding="utf-8")
    answer = report(site.run("doctor", "--json", "--timeout", "3"))
    frameworks = answer["frameworks"]
    assert {name: probe["state"] for name, probe in frameworks.items()} == {
        "numpy": "works", "cupy": "crashed", "torch": "broken", "jax": "timed out",
        "tensorflow": "missing", "pyclesperanto": "no device", "mlx": "missing", "paddle": "missing",
    }  # fmt: skip
    assert "SIGABRT" in frameworks["cupy"]["error"]
    assert frameworks["cupy"]["version"] == "14.2.0", "must be read from the metadata"
    assert frameworks["jax"]["error"] == "no response within 3 seconds"
    assert (answer["code"], answer["ok"]) == (1, False)
    (problem,) = (one for one in answer["problems"] if one["framework"] == "torch")
    assert "no such lamp" in problem["message"]
    assert f"Python imports {site.work / 'torch.py'} instead" in problem["message"]
    assert problem["fix"] == [f"mv {site.work / 'torch.py'} {site.work / 'my_torch.py'}"]


def test_a_crashing_import_order_is_narrowed_down_to_a_pair(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.package("torch", "torch_after_tensorflow.py")
    site.package("tensorflow", "tensorflow_for_cuda.py")
    answer = report(site.run("doctor", "--json", "--timeout", "20"))
    assert answer["frameworks"]["tensorflow"]["built_for"] == "CUDA 13.1"
    crashed = [trial["order"] for trial in answer["import_orders"] if trial["crash"]]
    assert crashed == [["tensorflow", "torch"]]
    problem = answer["by_id"]["import-order"]
    assert "Importing and using torch after tensorflow crashes the process: SIGABRT" in problem["message"]
    assert problem["fix"] == ["# import torch before tensorflow"]


def test_doctor_predicts_crashes_of_triton_after_tensorflow(tmp_path: Path) -> None:
    """PyTorch imports Triton late, so importing the frameworks in any order does not crash."""
    site = Site(tmp_path)
    site.package("triton", "triton_after_tensorflow.py")
    site.package("tensorflow", "tensorflow_for_cuda.py")
    answer = report(site.run("doctor", "--json", "--timeout", "20"))
    crashed = [trial["order"] for trial in answer["import_orders"] if trial["crash"]]
    assert crashed == [["tensorflow", "triton"]]
    assert "triton" not in answer["frameworks"]
    problem = answer["by_id"]["import-order"]
    assert "Importing and using triton after tensorflow crashes the process" in problem["message"]
    assert "PyTorch imports it late: in torch.compile, optimizers, torch.func," in problem["message"]
    assert problem["fix"] == ["# import triton before tensorflow"]
    assert answer["code"] == 1


def test_a_triton_that_always_crashes_is_not_an_import_order_problem(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.package("triton", "import os\nos.abort()\n")
    site.package("tensorflow", "tensorflow_for_cuda.py")
    answer = report(site.run("doctor", "--json", "--timeout", "20"))
    assert "import-order" not in answer["by_id"]


def test_doctor_predicts_the_real_triton_and_tensorflow(tmp_path: Path) -> None:
    """The report must match what happens in this environment."""
    require("triton")
    require("tensorflow")
    done = subprocess.run(
        [sys.executable, "-c", "import tensorflow, triton"], capture_output=True, check=False
    )
    answer = report(Site(tmp_path).run("doctor", "--json", SHOWN="tensorflow triton"))
    crashed = [trial["order"] for trial in answer["import_orders"] if trial["crash"]]
    assert crashed == ([["tensorflow", "triton"]] if done.returncode else [])


def test_the_text_report_fits_40_columns(tmp_path: Path) -> None:
    done = Site(tmp_path).run("doctor", COLUMNS="40")
    assert done.returncode == 0, done.stdout
    assert "No problems found." in done.stdout
    assert "not installed" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 40


def test_doctor_reports_a_pyclesperanto_that_works_only_after_arraybridge(tmp_path: Path) -> None:
    """With only the PoCL wheel, `import pyclesperanto` fails unless OCL_ICD_FILENAMES is exported."""
    require("pyclesperanto")
    if pocl_wheel() is None:
        pytest.skip("requires the PoCL wheel, which is not installed")
    site = Site(tmp_path)
    without_a_driver = {"SHOWN": "pyclesperanto", "OCL_ICD_VENDORS": str(tmp_path)}
    answer = report(site.run("doctor", "--json", **without_a_driver))
    found = answer["frameworks"]["pyclesperanto"]
    assert (found["state"], found["plain_import"]) == ("works", "fails")
    assert answer["by_id"]["no-opencl"]["fix"][0] == f"export OCL_ICD_FILENAMES={pocl_wheel()}"
    fixed = environment(site.folder, **without_a_driver, OCL_ICD_FILENAMES=str(pocl_wheel()))
    command = [sys.executable, "-c", "import pyclesperanto; pyclesperanto.push"]
    assert subprocess.run(command, capture_output=True, env=fixed, check=False).returncode == 0


@pytest.mark.slow
def test_real_frameworks_work_in_both_orders(tmp_path: Path) -> None:
    """Import each framework in two processes, which takes a long time."""
    names = ("torch", "jax", "tensorflow")
    for name in names:
        require(name)
    answer = report(Site(tmp_path).run("doctor", "--json", SHOWN=" ".join((*names, "jaxlib"))))
    for name in ("numpy", *names):
        assert answer["frameworks"][name]["state"] == "works"
        assert answer["frameworks"][name]["devices"]
    assert [trial["crash"] for trial in answer["import_orders"]] == [None, None]
