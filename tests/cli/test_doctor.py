"""`arraybridge doctor`: each fault of its table, and planted packages that crash, hang and are in the way."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import arraybridge
from arraybridge.cli.doctor import FAULTS, Facts, Trial, problems_of
from arraybridge.frameworks.pyclesperanto.driver import pocl_wheel
from arraybridge.machine import Card, Driver
from tests.cli.programs import PLANTED, Site, call_cli, environment, run_cli
from tests.helpers import require

Json = dict[str, Any]
NO_DRIVER = Driver(reason="there is no NVIDIA driver")
OLD, NEW = Driver("550.54.15", (12, 4)), Driver("580.65.06", (13, 0))
CARDS = (Card(0, "Fake RTX 9000", "GPU-1", "0000:01:00.0", 24 << 30, (8, 9)),)


def look(built_for: str = "CPU", **more: Any) -> Json:
    return {"state": "works", "devices": [], "version": "1.2", "built_for": built_for, **more}


FOUND = [
    (
        "no-driver",
        "note",
        Facts(NO_DRIVER, looks={"torch": look("CUDA 13.0"), "cupy": look("CUDA 13.2")}),
        "there is no NVIDIA driver: what was built for CUDA (torch, cupy)",
        "nvidia-smi",
    ),
    (
        "no-driver",
        "note",
        Facts(Driver(reason="the NVIDIA driver does not answer: version mismatch")),
        "version mismatch",
        "reboot",
    ),
    (
        "driver-too-old",
        "error",
        Facts(OLD, looks={"tensorflow": look("CUDA 13.1")}),
        "tensorflow was built for CUDA 13, and the driver 550.54.15 runs CUDA 12 at most",
        "# or install a build of tensorflow for CUDA 12",
    ),
    (
        "cupy-cuda-major",
        "error",
        Facts(OLD, CARDS, versions={"cupy-cuda13x": "14.2.0"}),
        "cupy-cuda13x is for CUDA 13, and the driver runs CUDA 12: every allocation will fail.",
        "pip install cupy-cuda12x",
    ),
    (
        "cupy-cuda-major",
        "warning",
        Facts(NEW, CARDS, versions={"cupy-cuda12x": "14.2.0"}),
        "it needs libraries of CUDA 12 beside",
        "pip uninstall -y cupy-cuda12x",
    ),
    (
        "two-cupys",
        "error",
        Facts(NEW, versions={"cupy": "14", "cupy-cuda13x": "14"}),
        "cupy and cupy-cuda13x are installed at once",
        "pip uninstall -y cupy cupy-cuda13x",
    ),
    (
        "cpu-build",
        "warning",
        Facts(NEW, CARDS, {"torch": look()}),
        "torch 1.2 is a build for the CPU: it can't use the Fake RTX 9000",
        "pip uninstall -y torch",
    ),
    (
        "no-opencl",
        "error",
        Facts(looks={"pyclesperanto": look("OpenCL", state="no device")}),
        "pyclesperanto finds no OpenCL device.",
        'pip install "pyopencl[pocl]"',
    ),
    (
        "no-opencl",
        "warning",
        Facts(looks={"pyclesperanto": look("OpenCL", plain_import="fails")}),
        "A program that imports pyclesperanto before arraybridge",
        "export OCL_ICD_FILENAMES=",
    ),
    (
        "takes-card",
        "warning",
        Facts(NEW, CARDS, {"jax": look("CUDA 13")}),
        "jax takes three quarters of a card's memory",
        "export XLA_PYTHON_CLIENT_PREALLOCATE=false",
    ),
    (
        "import-order",
        "error",
        Facts(looks={"b": look()}, trials=[Trial(("a", "b"), {}, "SIGSEGV", "b")]),
        "After a the process is ended when b is imported and used: SIGSEGV.",
        "# import b before a",
    ),
    (
        "import-order",
        "error",
        Facts(looks={"b": look()}, trials=[Trial(("a", "b"), {}, "SIGSEGV")]),
        "when b was used and the program ends",
        "in two processes",
    ),
    (
        "namesake",
        "error",
        Facts(versions={"arraybridge": "0.5.2"}),
        f"arraybridge 0.5.2 is installed, and arraybridge {arraybridge.__version__} is imported, from",
        "pip uninstall -y arraybridge",
    ),
    (
        "broken",
        "error",
        Facts(looks={"jax": look(state="timed out", error="no answer within 5 seconds")}),
        "jax hangs: no answer within 5 seconds",
        "pip install --force-reinstall",
    ),
    (
        "broken",
        "error",
        Facts(
            NEW, CARDS, {"torch": look("CUDA 13.0", state="no device")}, environ={"CUDA_VISIBLE_DEVICES": ""}
        ),
        "torch finds no device",
        "unset CUDA_VISIBLE_DEVICES",
    ),
]


@pytest.mark.parametrize(("fault", "severity", "facts", "message", "fix"), FOUND)
def test_a_fault_is_found_with_its_fix(
    fault: str, severity: str, facts: Facts, message: str, fix: str
) -> None:
    (problem,) = problems_of(facts)
    assert (problem["id"], problem["severity"]) == (fault, severity)
    assert message in problem["message"]
    assert any(fix in line for line in problem["fix"])


def test_every_fault_of_the_table_has_a_case() -> None:
    assert len(FAULTS) == len({fault for fault, *_ in FOUND}) == 10


@pytest.mark.parametrize(
    "facts",
    [
        Facts(NO_DRIVER, looks={"torch": look(), "cupy": {"state": "missing", "devices": []}}),
        Facts(NEW, CARDS, {"torch": look("CUDA 13.0")}, versions={"cupy-cuda13x": "14"}),
        Facts(
            NEW,
            CARDS,
            {"jax": look("CUDA 12"), "tensorflow": look("CUDA 12.8")},
            environ={"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"},
        ),
        Facts(looks={"b": look()}, trials=[Trial(("b",), {}, "SIGSEGV", "b")]),
        Facts(versions={"arraybridge": arraybridge.__version__}),
    ],
)
def test_what_is_sound_is_no_fault(facts: Facts) -> None:
    assert problems_of(facts) == []


def test_the_worst_comes_first() -> None:
    facts = Facts(OLD, CARDS, {"torch": look()}, versions={"cupy": "14", "cupy-cuda13x": "14"})
    assert [p["severity"] for p in problems_of(facts)] == ["error", "error", "warning"]


def report(done: subprocess.CompletedProcess[str]) -> Json:
    assert "Traceback" not in done.stderr, done.stderr
    answer: Json = json.loads(done.stdout)
    return answer | {"code": done.returncode}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Json:
    """Packages of which one crashes, one hangs, one imports half, and two can't follow each other."""
    site = Site(tmp_path_factory.mktemp("faulty"))
    site.package("torch", "torch_after_tensorflow.py")
    site.package("tensorflow", "tensorflow_for_cuda.py")
    site.package("jax", "jax_that_hangs.py")
    site.package("cupy", "cupy_that_aborts.py")
    site.package("pyclesperanto", "pyclesperanto_half.py")
    site.distribution("cupy-cuda13x", "14.2.0")
    return report(site.run("doctor", "--json", "--timeout", "6"))


@pytest.mark.parametrize(
    ("framework", "state", "error"),
    [
        ("numpy", "works", ""),
        ("cupy", "crashed", "SIGABRT"),
        ("jax", "timed out", "no answer within 6 seconds"),
        ("pyclesperanto", "no device", "OpenCL"),
        ("mlx", "missing", ""),
    ],
)
def test_what_each_framework_does_is_seen(faulty: Json, framework: str, state: str, error: str) -> None:
    if framework == "mlx" and faulty["frameworks"]["mlx"]["state"] != "missing":
        pytest.skip("MLX is installed")
    seen = faulty["frameworks"][framework]
    assert seen["state"] == state
    assert error in (seen.get("error") or "")


def test_what_crashes_is_told_by_its_package_and_with_exit_code_1(faulty: Json) -> None:
    assert faulty["frameworks"]["cupy"]["version"] == "14.2.0"  # it could not say so itself
    assert faulty["frameworks"]["tensorflow"]["built_for"] == "CUDA 13.1"
    assert faulty["code"] == 1
    assert faulty["ok"] is False


def test_the_order_that_crashes_is_narrowed_down_to_a_pair(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.package("torch", "torch_after_tensorflow.py")
    site.package("tensorflow", "tensorflow_for_cuda.py")
    answer = report(site.run("doctor", "--json", "--timeout", "20"))
    crashed = [trial["order"] for trial in answer["import_orders"] if trial["crash"]]
    assert crashed == [["tensorflow", "torch"]]
    (problem,) = [p for p in answer["problems"] if p["id"] == "import-order"]
    assert (
        "After tensorflow the process is ended when torch is imported and used: SIGABRT" in problem["message"]
    )
    assert problem["fix"] == ["# import torch before tensorflow"]


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    site = Site(tmp_path)
    shutil.copy(PLANTED / "own_torch.py", site.work / "torch.py")
    (problem,) = [p for p in report(site.run("doctor", "--json"))["problems"] if p["id"] == "broken"]
    assert "no such lamp" in problem["message"]
    assert "torch.py is imported in its place" in problem["message"]
    assert problem["fix"] == [f"mv {site.work / 'torch.py'} {site.work / 'my_torch.py'}"]


def test_the_report_for_people_and_a_sound_environment(tmp_path: Path) -> None:
    done = Site(tmp_path).run("doctor", COLUMNS="40")
    assert done.returncode == 0, done.stdout
    assert "Nothing is wrong." in done.stdout
    assert "not installed" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["train.py"], "unexpected extra argument"), (["--timeout", "0"], "--timeout")],
)
def test_a_mistake_is_told_with_exit_code_2(arguments: list[str], message: str) -> None:
    done = call_cli("doctor", *arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert done.stdout == ""


def test_pyclesperanto_is_imported_as_a_user_does(tmp_path: Path) -> None:
    """Where only the PoCL wheel is there, `import pyclesperanto` alone imports half."""
    require("pyclesperanto")
    answer = report(run_cli("doctor", "--json", env=environment(OCL_ICD_VENDORS=str(tmp_path))))
    seen = answer["frameworks"]["pyclesperanto"]
    if pocl_wheel() is None:
        pytest.skip("the PoCL wheel is not installed")
    assert (seen["state"], seen["plain_import"]) == ("works", "fails")
    (problem,) = [p for p in answer["problems"] if p["id"] == "no-opencl"]
    assert problem["fix"][0] == f"export OCL_ICD_FILENAMES={pocl_wheel()}"
    advised = environment(OCL_ICD_VENDORS=str(tmp_path), OCL_ICD_FILENAMES=str(pocl_wheel()))
    assert not [
        p for p in report(run_cli("doctor", "--json", env=advised))["problems"] if p["id"] == "no-opencl"
    ]
