"""`arraybridge doctor`: planted faults in throw-away environments, each found with its fix."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from arraybridge.cli import doctor
from arraybridge.cli.app import app
from arraybridge.cli.faults import Card, Distribution, Driver, Facts, Problem, find_problems
from arraybridge.cli.script_faults import read_script
from tests.cli.programs import PLANTED, Site
from tests.helpers import require

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the planted nvidia-smi is a shell script")

Json = dict[str, Any]


def report(done: subprocess.CompletedProcess[str]) -> Json:
    """The JSON that a run printed, with its problems by id."""
    assert "Traceback" not in done.stderr, done.stderr
    answer: Json = json.loads(done.stdout)
    answer["by_id"] = {}
    for problem in answer["problems"]:
        answer["by_id"].setdefault(problem["id"], []).append(problem)
    answer["code"] = done.returncode
    return answer


@pytest.fixture(scope="module")
def old_driver(tmp_path_factory: pytest.TempPathFactory) -> Json:
    """A card with a driver for CUDA 12, and what does not go together with it."""
    site = Site(tmp_path_factory.mktemp("old_driver"))
    site.card("12.4", "550.54.15")
    site.package("torch", "torch_for_cpu.py")
    site.package("jax", "jax_alone.py")
    site.package("tensorflow", "tensorflow_for_cuda.py")
    site.package("cupy", "cupy_that_aborts.py")
    site.package("pyclesperanto", "pyclesperanto_half.py")
    site.distribution("cupy-cuda12x", "14.2.0")
    site.distribution("cupy-cuda13x", "14.2.0")
    site.distribution("nvidia-nccl-cu12", "2.27.3")
    site.distribution("nvidia-nccl-cu13", "2.28.1")
    site.distribution("jax-cuda12-plugin", "0.10.2", 'nvidia-nccl-cu12>=2.18; extra == "with-cuda"')
    libraries = site.work / "cuda libraries"
    libraries.mkdir()
    (libraries / "libcudnn.so.9").touch()
    return report(
        site.run(
            "doctor",
            "--json",
            "--no-orders",
            CUDA_VISIBLE_DEVICES="-1",
            LD_LIBRARY_PATH=f"{libraries}:/nowhere",
            XLA_PYTHON_CLIENT_MEM_FRACTION=".5",
            XLA_CLIENT_MEM_FRACTION=".5",
            XLA_PYTHON_CLIENT_ALLOCATOR="greedy",
            TF_GPU_ALLOW_GROWTH="true",
        )
    )


def test_what_is_there_is_told(old_driver: Json) -> None:
    assert old_driver["driver"]["version"] == "550.54.15"
    assert old_driver["driver"]["cuda"] == "12.4"
    assert [card["name"] for card in old_driver["driver"]["cards"]] == ["Fake RTX 9000"]
    frameworks = old_driver["frameworks"]
    assert frameworks["numpy"]["state"] == "works"
    assert frameworks["torch"]["version"] == "2.13.0+cpu"
    assert frameworks["torch"]["built_for"] == "CPU"
    assert frameworks["tensorflow"]["built_for"] == "CUDA 13.1"
    assert frameworks["cupy"]["state"] == "crashed"
    assert frameworks["cupy"]["version"] == "14.2.0"  # by its package; it could not say so itself
    assert old_driver["code"] == 1
    assert old_driver["ok"] is False


@pytest.mark.parametrize(
    ("fault", "framework", "severity", "in_message", "in_fix"),
    [
        ("two-cupys", "cupy", "error", "cupy-cuda12x and cupy-cuda13x", "pip install cupy-cuda12x"),
        ("cupy-cuda-major", "cupy", "error", "CUDA 13", "pip uninstall -y cupy-cuda13x"),
        ("cpu-build", "torch", "warning", "Fake RTX 9000", "pip uninstall -y torch"),
        ("driver-too-old", "tensorflow", "error", "CUDA 12.4 at most", "CUDA 12"),
        ("framework-crashed", "cupy", "error", "SIGABRT", "pip install"),
        ("no-opencl", "pyclesperanto", "error", "no OpenCL device", 'pip install "pyopencl[pocl]"'),
        ("cards-hidden", "", "warning", "hides every card", "unset CUDA_VISIBLE_DEVICES"),
        ("library-path", "", "warning", "libcudnn", "export LD_LIBRARY_PATH=/nowhere"),
        ("both-names", "jax", "error", "refuses to start", "unset XLA_PYTHON_CLIENT_MEM_FRACTION"),
        ("wrong-value", "jax", "error", "greedy", "unset XLA_PYTHON_CLIENT_ALLOCATOR"),
        (
            "unread-variable",
            "tensorflow",
            "warning",
            "TF_GPU_ALLOW_GROWTH",
            "export TF_FORCE_GPU_ALLOW_GROWTH",
        ),
        (
            "tensorflow-takes-card",
            "tensorflow",
            "warning",
            "every card",
            "export TF_FORCE_GPU_ALLOW_GROWTH=true",
        ),
        ("jax-takes-card", "jax", "warning", ".5 of a card", "export XLA_PYTHON_CLIENT_PREALLOCATE=false"),
        ("two-cuda-libraries", "", "warning", "nccl", "pip uninstall -y nvidia-nccl-cu13"),
        ("framework-broken", "jax", "error", "jax does not work", "pip install --force-reinstall"),
    ],
)
def test_a_fault_beside_an_old_driver_is_found(
    old_driver: Json, fault: str, framework: str, severity: str, in_message: str, in_fix: str
) -> None:
    found = [p for p in old_driver["by_id"].get(fault, ()) if p["framework"] == framework]
    assert len(found) == 1, sorted(old_driver["by_id"])
    assert found[0]["severity"] == severity
    assert in_message in found[0]["message"]
    assert in_fix in "\n".join(found[0]["fix"])


@pytest.fixture(scope="module")
def new_driver(tmp_path_factory: pytest.TempPathFactory) -> Json:
    """A card with a driver for CUDA 13, frameworks that get in each other's way, and one that hangs."""
    site = Site(tmp_path_factory.mktemp("new_driver"))
    site.card("13.0", "580.65.06")
    site.package("torch", "torch_after_tensorflow.py")
    site.package("tensorflow", "tensorflow_for_cuda.py")
    site.package("jax", "jax_that_hangs.py")
    site.distribution("torch", "2.13.0", "nvidia-cudnn-cu13==9.10.2.21", "numpy")
    site.distribution("jax", "0.10.2", "jaxlib>=0.10.2")
    site.distribution("jaxlib", "0.10.1", "numpy>=2")
    site.distribution("jax-cuda12-plugin", "0.10.1")
    site.distribution("jax-cuda13-plugin", "0.9.0", 'nvidia-cudnn-cu13>=9.12; extra == "with-cuda"')
    site.distribution("nvidia-cudnn-cu13", "9.10.2.21")
    site.distribution("old-tool", "1.0", "numpy<2")
    site.distribution("new-tool", "1.0", "numpy>=2")
    site.distribution("cupy-cuda12x", "13.6.0")
    return report(
        site.run(
            "doctor", "--json", "--timeout", "5", XLA_PYTHON_CLIENT_MEM_FRACTION=".4", JAX_PLATFORMS="cpu"
        )
    )


@pytest.mark.parametrize(
    ("fault", "severity", "in_message", "in_fix"),
    [
        ("framework-timed-out", "error", "5 seconds", "pip install --force-reinstall"),
        ("import-order", "error", "After tensorflow", "import torch before tensorflow"),
        ("old-variable", "warning", "XLA_CLIENT_MEM_FRACTION now", "export XLA_CLIENT_MEM_FRACTION=.4"),
        ("numpy-pins", "error", "old-tool needs numpy<2", "-env/bin/pip install "),
        ("cuda-pins", "error", "no version serves both", "venv"),
        ("requirement-version", "error", "jaxlib>=0.10.2", 'pip install "jaxlib>=0.10.2"'),
        ("two-jax-plugins", "error", "CUDA 12 and 13", "pip uninstall -y jax-cuda12-plugin"),
        ("jax-plugin-version", "warning", "jaxlib 0.10.1", 'pip install --upgrade "jax[cuda13]"'),
        ("card-not-for-jax", "warning", "JAX_PLATFORMS='cpu'", "unset JAX_PLATFORMS"),
        ("cupy-cuda-major", "warning", "libraries of CUDA 12", "pip install cupy-cuda13x"),
    ],
)
def test_a_fault_among_the_packages_is_found(
    new_driver: Json, fault: str, severity: str, in_message: str, in_fix: str
) -> None:
    found = new_driver["by_id"].get(fault, ())
    matching = [p for p in found if in_message in p["message"]]
    # More than one where the environment of the tests holds packages with the same fault.
    assert matching, [p["message"] for p in found] or sorted(new_driver["by_id"])
    assert matching[0]["severity"] == severity
    assert in_fix in "\n".join(matching[0]["fix"])


def test_the_order_that_crashes_is_narrowed_down_to_a_pair(new_driver: Json) -> None:
    crashed = [trial for trial in new_driver["import_orders"] if trial["crash"]]
    assert [trial["order"] for trial in crashed] == [["tensorflow", "torch"]]
    assert "SIGABRT" in crashed[0]["crash"]
    # The other way round, it went well.
    assert [trial["order"] for trial in new_driver["import_orders"] if not trial["crash"]] == [
        ["torch", "tensorflow"]
    ]


def test_those_after_a_crash_have_their_turn_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four frameworks, two pairs crash, one behind the other in the first order that is tried."""
    deadly = {("a", "b"), ("c", "d")}

    def trial(order: list[str], timeout: float, environ: dict[str, str]) -> Json:
        for place, name in enumerate(order):
            if any((before, name) in deadly for before in order[:place]):
                return {"order": order, "crash": "SIGSEGV", "at": name}
        return {"order": order, "crash": None, "at": None}

    monkeypatch.setattr(doctor, "_try_order", trial)
    seen = {name: {"state": "works", "version": "1"} for name in "abcd"} | {"e": {"state": "missing"}}
    trials = doctor.try_orders(Facts({}, {}, inspections=seen), 1)
    assert [tuple(t["order"]) for t in trials if t["crash"]] == [("a", "b"), ("c", "d")]
    assert [doctor.order_problem(t).message.split(":")[0] for t in trials if t["crash"]] == [
        "After a the process is ended when b is imported and used",
        "After c the process is ended when d is imported and used",
    ]


@pytest.mark.parametrize(
    ("order", "at", "message"),
    [
        (["a", "b"], None, "Using a and b together crashes when the process ends: SIGSEGV."),
        (["a", "b"], "a", "a ends the process when it is used: SIGSEGV."),
        (["a", "b", "c"], "c", "After a and b the process is ended when c is imported and used: SIGSEGV."),
    ],
)
def test_what_an_order_did_is_told(order: list[str], at: str | None, message: str) -> None:
    problem = doctor.order_problem({"order": order, "at": at, "crash": "SIGSEGV"})
    assert problem.message.startswith(message)
    assert problem.fix


def test_fork_is_a_note_beside_a_card(new_driver: Json) -> None:
    if multiprocessing.get_context().get_start_method() != "fork":
        pytest.skip("this Python does not fork unless asked to")
    assert new_driver["by_id"]["fork-after-cuda"][0]["severity"] == "note"


def test_warnings_alone_exit_with_0(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.distribution("jax", "0.10.2")
    found = report(site.run("doctor", "--json", JAX_PLATFORM_NAME="cpu"))
    assert list(found["by_id"]) == ["old-variable"]
    assert found["code"] == 0
    assert found["ok"] is True


def test_a_driver_that_fails_and_a_file_in_the_way(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.card("13.0", "580", FAKE_DRIVER_FAILS="1")
    shutil.copy(PLANTED / "own_torch.py", site.work / "torch.py")
    found = report(site.run("doctor", "--json", "--no-orders"))
    assert "mismatch" in found["by_id"]["driver-fails"][0]["message"]
    # It is not in the way of everything: what the file raised is told as well.
    assert "no such lamp" in found["by_id"]["framework-broken"][0]["message"]
    assert found["code"] == 1


def test_fix_prints_commands_and_changes_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.card("12.4", "550.54.15")
    site.distribution("cupy-cuda12x", "14.2.0")
    site.distribution("cupy-cuda13x", "14.2.0")
    before = sorted(site.folder.rglob("*"))
    done = site.run("doctor", "--fix", "--no-orders", PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert "pip uninstall -y cupy-cuda12x cupy-cuda13x" in lines
    assert all(line.startswith(("#", "pip ", "export ", "unset ")) for line in lines), lines
    assert sorted(site.folder.rglob("*")) == before


def test_the_report_for_people_and_a_sound_environment(tmp_path: Path) -> None:
    site = Site(tmp_path)
    done = site.run("doctor", COLUMNS="40")
    assert done.returncode == 0, done.stdout
    assert "Nothing is wrong." in done.stdout
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 40
    assert "not installed" in done.stdout


def test_a_program_is_read_for_what_it_does_too_late(tmp_path: Path) -> None:
    script = PLANTED / "late_script.py"
    problems = read_script(script)
    late = [p.message.split(" on line ")[0] for p in problems if p.id == "set-too-late"]
    assert late == [
        "late_script.py sets XLA_PYTHON_CLIENT_PREALLOCATE",
        "late_script.py sets CUDA_VISIBLE_DEVICES",
        "late_script.py sets JAX_PLATFORMS",
    ]
    assert [p.id for p in problems if p not in problems[:3]] == ["fork-after-cuda"]
    assert read_script(PLANTED / "sound_script.py") == []
    found = report(Site(tmp_path).run("doctor", str(script), "--json", "--no-orders"))
    assert len(found["by_id"]["set-too-late"]) == 3
    assert found["code"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-file.py"], "does not exist"),
        ([str(PLANTED / "nvidia-smi")], "can't be read as a Python program"),
        (["--json", "--fix"], "leave --fix out"),
        (["--timeout", "nan"], "at least 0.1 seconds"),
        (["--timeout", "soon"], "--timeout"),
    ],
)
def test_a_mistake_is_told_with_exit_code_2(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert done.stdout == ""


@pytest.mark.parametrize("name", ["numpy", "torch", "pyclesperanto"])
def test_what_is_installed_here_works(name: str) -> None:
    if name != "numpy":
        require(name)
    seen = doctor.look_at(name, 120)
    assert seen["state"] == "works", seen
    assert seen["devices"]
    assert seen["version"]


SOUND = {"a": "works", "b": "works", "c": "no device"}


def planted_looks(monkeypatch: pytest.MonkeyPatch, crash: str | None, **first: str) -> list[list[str]]:
    """Frameworks a to c in place of the real ones; the orders in which they are looked at.

    ``first``: the state of a framework where others are used in its process; alone it is as in `SOUND`.
    """
    asked: list[list[str]] = []

    def look(order: list[str], timeout: float, environ: Any, hear: Any = lambda name, found: None) -> Json:
        asked.append(list(order))
        for name in order:
            state = first.get(name, SOUND[name]) if len(order) > 1 else SOUND[name]
            hear(name, {"state": state, "version": "1", "devices": [], "error": None, "seconds": len(order)})
        return {"order": order, "crash": crash if len(order) > 1 else None, "at": None}

    monkeypatch.setattr(doctor, "_try_order", look)
    monkeypatch.setattr(doctor.registry, "framework_names", lambda: list(SOUND))
    monkeypatch.setattr(doctor.registry, "is_installed", SOUND.__contains__)
    return asked


def test_two_processes_are_enough_where_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = planted_looks(monkeypatch, None)
    told: list[str] = []
    facts, trials = doctor.gather(5, True, lambda name, found: told.append(f"{name} {found['state']}"))
    assert sorted(asked) == [["a", "b", "c"], ["c", "b", "a"]]
    assert sorted(told) == ["a works", "b works", "c no device"]
    assert sorted(t["order"] for t in trials) == sorted(asked)
    assert {name: seen["state"] for name, seen in facts.inspections.items()} == SOUND


@pytest.mark.parametrize(("crash", "state"), [("SIGSEGV", "works"), (None, "broken")])
def test_a_framework_that_others_harm_is_looked_at_alone(
    monkeypatch: pytest.MonkeyPatch, crash: str | None, state: str
) -> None:
    asked = planted_looks(monkeypatch, crash, b=state)
    facts, trials = doctor.gather(5, True)
    alone = [order for order in asked if len(order) == 1]
    assert sorted(alone) == ([["a"], ["b"], ["c"]] if crash else [["b"]])
    assert bool(trials) is (crash is None)
    assert {name: seen["state"] for name, seen in facts.inspections.items()} == SOUND


# -- the checks alone --------------------------------------------------------------------------------


def facts(*distributions: Distribution, driver: Driver | None = None, **environ: str) -> Facts:
    return Facts(environ, {d.name: d for d in distributions}, driver or Driver())


def ids(problems: list[Problem]) -> list[str]:
    return [problem.id for problem in problems]


def test_nothing_is_wrong_with_nothing() -> None:
    assert find_problems(facts()) == []


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("<2", ">=2", ["numpy-pins"]),
        ("<2", ">=1.26", ["numpy-version"]),
        ("==1.26.*", ">=1.25,<1.27", ["numpy-version", "numpy-version"]),
        ("==1.26.*", ">=2.1", ["numpy-pins"]),
        ("!=2.4.6", ">=2", ["numpy-version"]),
        (">=2,<3", ">=2.1", []),
    ],
)
def test_pins_of_numpy(one: str, other: str, expected: list[str]) -> None:
    pytest.importorskip("packaging")
    found = find_problems(
        facts(
            Distribution("numpy", "2.4.6"),
            Distribution("a", "1", (f"numpy{one}",)),
            Distribution("b", "1", (f"numpy{other}", 'numpy<1; extra == "never"', "what is this?")),
        )
    )
    assert ids(found) == expected


@pytest.mark.parametrize(
    ("name", "extra", "expected"),
    [
        ("tensorflow-cpu", "and-cuda", []),
        ("tensorflow", "and-cuda", [("cuda-version", "warning")]),
        ("jax-cuda12-plugin", "with-cuda", [("cuda-version", "error")]),
    ],
)
def test_pins_of_cuda_libraries_under_an_extra(
    name: str, extra: str, expected: list[tuple[str, str]]
) -> None:
    pytest.importorskip("packaging")
    found = find_problems(
        facts(
            Distribution("nvidia-nccl-cu12", "2.27.3"),
            Distribution(name, "1", (f'nvidia-nccl-cu12>=2.27.7; extra == "{extra}"',)),
        )
    )
    assert [(p.id, p.severity) for p in found] == expected


@pytest.mark.parametrize(("release", "expected"), [("2.8.1", []), ("2.9.0+cu130", ["old-variable"])])
def test_a_name_is_old_from_the_release_that_replaced_it(release: str, expected: list[str]) -> None:
    found = find_problems(
        facts(Distribution("torch", release), PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    )
    assert ids(found) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [("0", []), ("GPU-1234", []), ("0,1", ["cards-hidden"]), ("", ["cards-hidden"])]
)
def test_visible_devices(value: str, expected: list[str]) -> None:
    driver = Driver("580", "13.0", (Card(0, "Fake", "GPU-1234", 1, 1),))
    assert ids(find_problems(facts(driver=driver, CUDA_VISIBLE_DEVICES=value))) == expected


def test_the_worst_comes_first() -> None:
    driver = Driver("550", "12.4", (Card(0, "Fake", "GPU-1234", 1, 1),))
    found = find_problems(
        facts(
            Distribution("cupy-cuda13x", "14"),
            driver=driver,
            CUDA_VISIBLE_DEVICES="",
            ARRAYBRIDGE_MISSING_GPU="perhaps",
        )
    )
    assert [p.severity for p in found] == ["error", "error", "warning"]
    assert all(p.fix for p in found)
