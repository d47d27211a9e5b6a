"""`arraybridge demo`, and the program around it, as a user runs them."""

from __future__ import annotations

import base64
import importlib.util
import io
import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

import arraybridge
from arraybridge.frameworks import registry
from tests.cli.programs import call_cli
from tests.helpers import run_python

BARE = Path(__file__).parent / "without_frameworks.py"
FRAMEWORKS = ("torch", "jax", "tensorflow", "pyclesperanto")
# A narrow terminal would wrap what is looked for.
WIDE = {"COLUMNS": "200"}


def installed() -> list[str]:
    return [name for name in FRAMEWORKS if registry.is_installed(name)]


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    # Frameworks warn as they are imported; what a user sees, not what pytest makes of it, is tested here.
    return run_python("-m", "arraybridge", *arguments, env={**WIDE, "PYTHONWARNINGS": "", **env}, timeout=240)


def run_bare(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The program where NumPy is the only framework."""
    return run_python(str(BARE), *arguments, env={**WIDE, "PYTHONWARNINGS": "", **env})


def assert_plain(done: subprocess.CompletedProcess[str] | Result) -> None:
    assert "\x1b" not in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.fixture(scope="module")
def shown() -> subprocess.CompletedProcess[str]:
    """The whole demo, into a pipe."""
    return run("demo")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[np.ndarray[Any, Any], Any, str]:
    """A picture of one's own, and the demo's JSON and page about it (no page where Pillow is missing)."""
    picture = np.random.default_rng(1).integers(0, 256, (40, 30), dtype=np.uint8)
    folder = tmp_path_factory.mktemp("demo")
    np.save(folder / "picture.npy", picture)
    page = folder / "report.html"
    with_page = ["--html", str(page)] if importlib.util.find_spec("PIL") is not None else []
    done = run("demo", "--image", str(folder / "picture.npy"), "--json", *with_page)
    assert done.returncode == 0, done.stderr
    return picture, json.loads(done.stdout), page.read_text(encoding="utf-8") if with_page else ""


def test_the_demo_runs_through_every_framework(shown: subprocess.CompletedProcess[str]) -> None:
    assert shown.returncode == 0, shown.stderr
    assert_plain(shown)
    there = installed()
    for name in (*there, "numpy"):
        assert f"→ {name} " in shown.stdout, "the table names it as a target"
    for word in ("method", "memory", "bytes", "time"):
        assert word in shown.stdout
    assert shown.stdout.count("equal") >= len(there) + 1
    assert "DIFFERENT" not in shown.stdout
    assert shown.stderr == ""


def test_the_demo_names_what_is_missing_and_what_would_bring_it(
    shown: subprocess.CompletedProcess[str],
) -> None:
    if importlib.util.find_spec("cupy") is None:
        assert ".[cupy-cuda" in shown.stdout
    elif shutil.which("nvidia-smi") is None:
        assert "cupy left out" in shown.stdout
        assert "driver" in shown.stdout
    for name in set(FRAMEWORKS) - set(installed()):
        assert f".[{name}" in shown.stdout


def test_json_alone(told: tuple[np.ndarray[Any, Any], Any, str]) -> None:
    picture, report, _ = told
    assert report["image"] == "picture.npy"
    assert report["shape"] == [40, 30]
    assert report["dtype"] == "uint8"
    route = ["numpy", *installed(), "numpy"]
    steps = report["steps"]
    assert [step["target"] for step in steps if step["target"] != "cupy"] == route[1:]
    assert steps[0]["source"] == "numpy"
    for before, after in itertools.pairwise(steps):
        assert after["source"] == before["target"]
    for step in steps:
        assert step["exact"] is True
        assert step["nbytes"] == picture.nbytes
        assert step["shares_memory"] == (step["copies"] == 0)
        assert step["method"] in ("view", "dlpack", "device", "host")
        assert step["device"].partition(":")[0] in ("cpu", "gpu", "opencl")
        assert 0 < step["seconds"] < 60
        assert step["reason"]


def test_without_frameworks_the_demo_says_what_to_install() -> None:
    done = run_bare("demo")
    assert done.returncode == 0, done.stderr
    assert_plain(done)
    for extra in ("cupy-cuda13x", "torch", "jax", "tensorflow", "pyclesperanto"):
        assert f'pip install ".[{extra}]"' in done.stdout
    assert "equal" in done.stdout
    assert "DIFFERENT" not in done.stdout


def test_a_missing_gpu_is_named() -> None:
    """Whether or not a framework that would need one is installed."""
    if shutil.which("nvidia-smi") is not None:
        pytest.skip("there may be a card")
    assert re.search(r"GPU|NVIDIA", run_bare("demo").stdout)


def test_without_frameworks_json_names_them_too() -> None:
    done = run_bare("demo", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report["missing"]) == {"cupy", *FRAMEWORKS}
    assert [step["target"] for step in report["steps"]] == ["numpy"]


def test_no_colour_on_request() -> None:
    for env in (
        {"NO_COLOR": "1"},
        {"NO_COLOR": "1", "FORCE_COLOR": "", "TERM": "xterm-256color"},
        {"TERM": "dumb"},
    ):
        assert_plain(run_bare("demo", **env))


def test_a_picture_that_pillow_reads(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    file = tmp_path / "tiny.png"
    pillow.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4)).save(file)
    done = run_bare("demo", "--image", str(file), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["shape"] == [3, 4]


def write_nothing(file: Path) -> None:
    """There is no such file."""


def write_text(file: Path) -> None:
    file.write_text("this is no picture", encoding="utf-8")


def write_empty(file: Path) -> None:
    file.touch()


def write_half(file: Path) -> None:
    np.save(file, np.zeros((9, 9), np.uint8))
    file.write_bytes(file.read_bytes()[:-20])


def write_objects(file: Path) -> None:
    np.save(file, np.array([None, "a"], object))


def write_floats(file: Path) -> None:
    np.save(file, np.zeros((2, 2)))


def write_a_line(file: Path) -> None:
    np.save(file, np.zeros(4, np.uint8))


def write_no_pixel(file: Path) -> None:
    np.save(file, np.zeros((0, 3), np.uint8))


def write_a_folder(file: Path) -> None:
    file.mkdir()


WRONG = [
    *(write_nothing, write_text, write_empty, write_half, write_objects),
    *(write_floats, write_a_line, write_no_pixel, write_a_folder),
]


@pytest.mark.parametrize("write", WRONG)
def test_a_picture_that_cannot_be_read(write: Any, tmp_path: Path) -> None:
    file = tmp_path / "it.npy"
    write(file)
    done = call_cli("demo", "--image", str(file))
    assert done.exit_code == 2, done.stdout
    assert_plain(done)
    assert "--image" in done.stderr
    assert done.stdout == ""


def test_a_picture_in_no_known_format(tmp_path: Path) -> None:
    file = tmp_path / "it.png"
    write_text(file)
    done = run_bare("demo", "--image", str(file), "--json")
    assert done.returncode == 2
    assert_plain(done)
    assert done.stdout == ""


# ---- the program -----------------------------------------------------------------------------------------


def test_help() -> None:
    for arguments in (("--help",), ("demo", "--help")):
        done = run(*arguments)
        assert done.returncode == 0
        assert_plain(done)
        assert "demo" in done.stdout
    for option in ("--image", "--json", "--help"):
        assert option in done.stdout


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"arraybridge {arraybridge.__version__}")


@pytest.mark.parametrize(
    "arguments", [("dmeo",), ("demo", "--imgae", "x"), ("demo", "extra"), ("--nonsense",)]
)
def test_what_it_does_not_know_is_refused(arguments: tuple[str, ...]) -> None:
    done = call_cli(*arguments)
    assert done.exit_code == 2
    assert_plain(done)
    assert arguments[-1] in done.stderr or arguments[-2] in done.stderr
    assert done.stdout == ""


def test_help_and_version_load_no_framework() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "arraybridge", "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=Path(arraybridge.__file__).parent.parent,
    )
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "arraybridge" in loaded
    assert not loaded & {"torch", "jax", "tensorflow", "cupy", "pyclesperanto", "pyopencl"}


def test_the_report_holds_its_pictures(told: tuple[np.ndarray[Any, Any], Any, str]) -> None:
    pillow = pytest.importorskip("PIL.Image", reason="pictures need Pillow")
    text = told[2]
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    sizes = [pillow.open(io.BytesIO(base64.b64decode(p))).size for p in pictures]
    height, width = told[0].shape
    assert sizes == [(width, height), (width - 1, height - 1)]
    assert not re.search(r'(?:src|href)="(?!data:)', text)  # nothing comes from elsewhere
    assert "DIFFERENT" not in text


def test_a_report_that_cannot_be_written_is_told_before_the_work(tmp_path: Path) -> None:
    done = run("demo", "--html", str(tmp_path / "nowhere" / "report.html"))
    assert done.returncode == 2
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_demo_decorates_recovers_and_pipes(told: tuple[np.ndarray[Any, Any], Any, str]) -> None:
    document = told[1]
    assert document["exact"] is True
    assert document["decorated"]["exact"] is True
    oom = document["out_of_memory"]
    assert oom["exact"] is True
    assert oom["attempts"] == [40, 40, 20, 10, 10, 10, 10]  # 13 rows fit: the whole twice, then halves
    assert oom["failed"] == 3
    assert document["pipeline"]["exact"] is True
    assert len(document["pipeline"]["stages"]) == 2
