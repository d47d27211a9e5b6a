"""The rules of the house: what an import loads, which way imports run, and what the package gives away."""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import json
import os
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import arraybridge
from arraybridge.frameworks.base import Framework
from tests.helpers import run_python, run_script

CHECKOUT = Path(__file__).parent.parent
PACKAGE = CHECKOUT / "arraybridge"

# What `import arraybridge` leaves alone: the frameworks, and whatever only a part of the library needs.
_LAZY = """
    array_api_compat cupy jax jaxlib matplotlib ml_dtypes optree pyclesperanto pyclesperanto_opencl
    pyclesperanto_prototype psutil pynvml pyopencl rich skimage tensorflow torch typer
"""
LAZY = frozenset(_LAZY.split())


def loaded_after_import(*modules: str, **env: str) -> set[str]:
    """Return the top-level packages that a fresh interpreter holds after importing these modules."""
    done = run_script("loaded_after_import.py", *modules, env=env)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_importing_arraybridge_loads_numpy_and_nothing_else() -> None:
    loaded = loaded_after_import("arraybridge")
    assert {"arraybridge", "numpy"} <= loaded
    assert not loaded & LAZY


# What a first conversion does not need, and what together took a third of the time of the import.
LATER = frozenset(
    {"hashlib", "json", "logging", "multiprocessing", "pickle", "subprocess", "traceback", "uuid"}
)
LATER_ROOMS = ("cli", "functions.gradients", "frameworks.torch", "offload.call")


def test_importing_arraybridge_takes_only_what_it_needs() -> None:
    """A quarter of NumPy's import at most, says benchmarks/conversion.py; this is what keeps it there."""
    code = (
        "import sys, numpy; before = set(sys.modules); import arraybridge; print(set(sys.modules) - before)"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    loaded = set(ast.literal_eval(done.stdout))
    assert "arraybridge.conversion.convert" in loaded
    assert not loaded & LATER
    assert not loaded & {f"arraybridge.{room}" for room in LATER_ROOMS}


def test_the_laziness_test_can_fail(tmp_path: Path) -> None:
    """The check above sees each of these packages; empty ones, for TensorFlow takes seconds."""
    for name in LAZY:
        (tmp_path / f"{name}.py").touch()
    path = os.pathsep.join([str(tmp_path), str(Path(arraybridge.__file__).parent.parent)])
    assert loaded_after_import("arraybridge", *LAZY, PYTHONPATH=path) >= LAZY


# Not in `__all__`, but importable: errors, what comes out of calls, and what few need.
_BESIDE = """
    ArrayNotSupportedError CannotSplitError CopyRequiredError DeviceNotFoundError DtypeNotSupportedError
    FrameworkNotInstalledError GradientError MissingGpuWarning SourceMismatchError UnknownArrayError
    UnknownFrameworkError MemoryType Route TraceLog Timing Comparison SizeComparison PipelineReport
    StageReport FoundDevice MemoryStats MemoryCollector Coexistence SharedPoolError PoolLimitError
    DeviceMismatchError least_used_gpu gpu_utilization share_gpu_memory memory_peak stay_on_gpu mlx paddle
    to_mlx to_paddle
    cleanup_all_gpu_frameworks cleanup_cupy_gpu cleanup_jax_gpu cleanup_pyclesperanto_gpu
    cleanup_tensorflow_gpu cleanup_torch_gpu
"""
BESIDE = _BESIDE.split()


def test_the_public_names_are_few_and_every_one_is_there() -> None:
    names = arraybridge.__all__
    assert names[0] == "convert"
    assert len(names) == len(set(names)) <= 60
    assert not set(BESIDE) & set(names)
    assert [name for name in (*names, *BESIDE) if not hasattr(arraybridge, name)] == []
    assert set(BESIDE) <= set(dir(arraybridge))
    assert arraybridge.convert is arraybridge.convert_memory


def test_pipelines_and_pools_are_loaded_when_asked_for() -> None:
    code = (
        "import sys, arraybridge; {}; print([m for m in sys.modules if m.startswith('arraybridge.lines.')])"
    )
    before = run_python("-c", code.format("None"))
    assert before.stdout.strip() == "[]", before.stderr
    after = run_python("-c", code.format("arraybridge.Pipeline"))
    assert "arraybridge.lines.pipeline" in after.stdout, after.stderr
    with pytest.raises(AttributeError, match="no attribute 'pipelnie'"):
        arraybridge.pipelnie  # type: ignore[attr-defined]  # noqa: B018
    assert set(arraybridge.__all__) <= set(dir(arraybridge))


def test_a_plug_in_author_reads_the_core_in_one_screen() -> None:
    """What goes beyond stands in parts, each of them an object."""
    names = {name for name in (*dir(Framework), *Framework.__annotations__) if not name.startswith("_")}
    assert len(names) <= 70, sorted(names)
    assert Framework.__abstractmethods__ == {"owns"}


def test_no_submodule_hides_a_decorator() -> None:
    """A file arraybridge/torch.py would, once imported, replace the decorator arraybridge.torch."""
    installed = Path(arraybridge.__file__).parent
    for name in ("numpy", "cupy", "torch", "jax", "tensorflow", "pyclesperanto", "mlx", "paddle"):
        assert not (installed / f"{name}.py").exists()
        assert not (installed / name).exists()
    assert (installed / "py.typed").is_file()


def test_version_is_that_of_the_distribution() -> None:
    try:
        version = importlib.metadata.version("arraybridge")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("arraybridge runs from the checkout, not installed")
    assert version == arraybridge.__version__
    assert version in (CHECKOUT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\nversion: {version}\n" in (CHECKOUT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_workflow_runs_the_environments_of_tox() -> None:
    workflow = CHECKOUT / ".github" / "workflows" / "ci.yml"
    if not workflow.is_file():
        pytest.skip("the workflow is not beside these tests")
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(CHECKOUT / "tox.ini", encoding="utf-8")
    assert f"environment: [{tox['tox']['env_list']}]" in workflow.read_text(encoding="utf-8")


def test_ci_runs_the_test_command_of_the_readme() -> None:
    """And fails where an interpreter is missing; `tox` by itself passes over its environments."""
    script = (CHECKOUT / ".ci" / "run").read_text(encoding="utf-8")
    command = script.splitlines()[-1]
    assert command.endswith("/tox")
    assert command in (CHECKOUT / "README.md").read_text(encoding="utf-8").splitlines()
    assert re.search(r"^export .*\bTOX_SKIP_MISSING_INTERPRETERS=false\b", script, re.MULTILINE)


def test_the_emulated_card_runs_every_file_with_tests_for_a_card() -> None:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(CHECKOUT / "tox.ini")
    places = [CHECKOUT / place for place in tox["tests"]["gpu"].split()]
    assert all(place.exists() for place in places)
    mark = "pytest.mark." + "gpu"
    for file in sorted((CHECKOUT / "tests").rglob("test_*.py")):
        listed = file in places or any(place in file.parents for place in places)
        assert listed or mark not in file.read_text(encoding="utf-8"), file


def test_the_lowest_environment_has_the_lower_bounds_of_the_project() -> None:
    """What tox.ini pins in `lowest` is what pyproject.toml promises; torch has no old CPU builds."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = ("cli", "jax", "pyclesperanto", "plot", "dask", "cpu")
    lines = [*project["dependencies"], *(line for extra in names for line in extras[extra])]
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(CHECKOUT / "tox.ini")
    pinned = {
        requirement.name: requirement
        for line in tox["testenv:lowest"]["deps"].splitlines()
        if line and not line.startswith("#")
        for requirement in [Requirement(line)]
    }
    checked = 0
    for requirement in map(Requirement, lines):
        if requirement.name in ("arraybridge", "torch"):
            continue
        (bound,) = requirement.specifier
        (pin,) = pinned[requirement.name].specifier
        assert bound.operator == ">=", str(requirement)
        assert pin.operator == "==", str(pin)
        assert Version(pin.version) == Version(bound.version), f"{requirement} and {pinned[requirement.name]}"
        checked += 1
    assert checked >= 10


def test_no_file_of_the_package_is_long() -> None:
    """A file has one subject, which a newcomer reads in one sitting."""
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert len(lengths) > 50
    assert [str(path) for path, lines in lengths.items() if lines > 600] == []


def test_the_drawing_shows_the_house() -> None:
    """Each floor that pyproject.toml knows is in the drawing, and in the words that stand for it."""
    contracts = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "importlinter"
    ]
    drawing = (CHECKOUT / "docs" / "_static" / "house.svg").read_text(encoding="utf-8")
    page = (CHECKOUT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    words = re.search(r":alt: (Floors.*)", page)
    assert words is not None
    floors = {part for layer in contracts["contracts"][0]["layers"] for part in layer.split(" : ")} - {
        "__main__"
    }
    assert [floor for floor in sorted(floors) if floor not in words[1]] == []
    assert [floor for floor in sorted(floors) if not re.search(rf">[^<]*\b{floor}\b", drawing)] == []
