"""Architecture rules: imports of each module, and files that must agree with the package."""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import importlib.util
import os
import shutil
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import arraybridge
from tests.helpers import SCRIPTS, output_of, require, run_python

CHECKOUT = Path(__file__).parent.parent

# Packages that `import arraybridge` must not load: the frameworks, and dependencies of optional parts.
_LAZY = """
    array_api_compat cupy jax jaxlib matplotlib ml_dtypes optree pyclesperanto pyclesperanto_opencl
    pyclesperanto_prototype psutil pynvml pyopencl rich skimage tensorflow torch typer
"""
LAZY = frozenset(_LAZY.split())
# Modules that a first conversion does not need, and that together took a third of the import time.
_LATER = """
    hashlib json logging multiprocessing pathlib pickle subprocess traceback urllib uuid arraybridge.cli
    arraybridge.decorators.decorated_call arraybridge.decorators.gradient_flow arraybridge.frameworks.torch
    arraybridge.hardware arraybridge.memory.oom_recovery arraybridge.memory.stats
    arraybridge.offload.decision arraybridge.offload.offloaded_call arraybridge.offload.gpu_search
"""

# Importable, but not in `__all__`: decorators named after a framework, results of calls, rarely needed names.
_NOT_IN_ALL = """
    numpy torch jax tensorflow cupy pyclesperanto mlx paddle MemoryType Route TraceLog Timing Comparison
    PipelineReport StageReport FoundDevice MemoryStats MemoryCollector Coexistence
    SharedPoolError PoolLimitError least_used_gpu gpu_utilization share_gpu_memory memory_peak
    to_mlx to_paddle Reason SharedMemoryGoneError ProcessDiedError
    cleanup_all_gpu_frameworks cleanup_cupy_gpu cleanup_jax_gpu cleanup_pyclesperanto_gpu
    cleanup_tensorflow_gpu cleanup_torch_gpu
"""
NOT_IN_ALL = _NOT_IN_ALL.split()


def read(*parts: str) -> str:
    return CHECKOUT.joinpath(*parts).read_text(encoding="utf-8")


def tox() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(read("tox.ini"))
    return parser


# -- the package -------------------------------------------------------------------------------------------


def test_import_loads_only_required_modules(tmp_path: Path) -> None:
    """Check which modules the import loads, since it must take at most a quarter of NumPy's import time."""
    lines = "import sys, numpy; before = set(sys.modules)", "import arraybridge; print(*sys.modules)"
    more = "print(*set(sys.modules) - before)", "arraybridge.Pipeline; print(*sys.modules)"
    loaded, own, later = (set(line.split()) for line in output_of(*lines, *more).splitlines())
    assert {"arraybridge", "numpy", "arraybridge.conversion.convert"} <= loaded
    assert not loaded & LAZY
    assert not own & {*_LATER.split()}
    assert "arraybridge.parallel.pipeline" in later - loaded
    # Prove that the check can fail, with empty fake packages, since importing TensorFlow takes seconds.
    for name in LAZY:
        (tmp_path / f"{name}.py").touch()
    path = os.pathsep.join([str(tmp_path), str(Path(arraybridge.__file__).parent.parent)])
    every = output_of(f"import sys, {', '.join(LAZY)}", "print(*sys.modules)", env={"PYTHONPATH": path})
    assert set(every.split()) >= LAZY


def test_framework_independent_functions_import_no_framework() -> None:
    """Check devices, memory, and @gpu with small arrays."""
    done = run_python(str(SCRIPTS / "imports_nothing.py"))
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


# Parts that no other part needs: without one of them, only its own names are missing.
PARTS = (
    "tracing/interception.py",
    "decorators/gradient*",
    "dask",
    "offload",
    "cli",
    "memory/shared_memory.py",
)


def test_each_optional_part_can_be_deleted(tmp_path: Path) -> None:
    require("torch")
    package = Path(arraybridge.__file__).parent
    shutil.copytree(package, tmp_path / "arraybridge", ignore=shutil.ignore_patterns("__pycache__"))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run_python(str(SCRIPTS / "independent_parts.py"), str(tmp_path), *PARTS, env={"PYTHONPATH": path})
    assert done.stdout.splitlines() == list(PARTS), done.stderr


def test_public_names_are_few_and_exist() -> None:
    names = arraybridge.__all__
    assert names[0] == "convert"
    assert len(names) == len(set(names)) <= 68
    assert not set(NOT_IN_ALL) & set(names)
    assert [name for name in (*names, *NOT_IN_ALL) if not hasattr(arraybridge, name)] == []
    assert {*names, *NOT_IN_ALL} <= set(dir(arraybridge))
    assert arraybridge.convert is arraybridge.convert_memory
    with pytest.raises(AttributeError, match="no attribute 'pipelnie'"):
        arraybridge.pipelnie  # type: ignore[attr-defined]  # noqa: B018


def test_a_star_import_brings_the_errors_and_replaces_no_framework() -> None:
    names = [name for name in ("numpy", "torch", "jax") if importlib.util.find_spec(name)]
    lines = (
        f"import {', '.join(names)}, sys",
        "from arraybridge import *",
        f"print(all(globals()[name] is sys.modules[name] for name in {names}))",
        "import arraybridge.errors as errors",
        "exceptions = [x for x in vars(errors).values() if isinstance(x, type) and issubclass(x, Exception)]",
        "own = [x.__name__ for x in exceptions if x.__module__ == errors.__name__]",
        "print(len(own) >= 12, [name for name in own if globals().get(name) is not getattr(errors, name)])",
    )
    assert output_of(*lines) == "True\nTrue []"


def test_dir_lists_public_names_only() -> None:
    """Internal modules are attributes of the package once they are imported, and are not listed."""
    listed = set(dir(arraybridge))
    assert listed == {*arraybridge.__all__, *NOT_IN_ALL, "dask", "interface", "testing"}
    modules = {name for name in listed if isinstance(getattr(arraybridge, name), ModuleType)}
    assert modules == {"dask", "interface", "testing"}
    assert output_of("import arraybridge", "print(arraybridge.dask.__all__[0])") == "BlockError"


def test_submodules_do_not_hide_decorators() -> None:
    """Once imported, a file arraybridge/torch.py would replace the decorator arraybridge.torch."""
    installed = Path(arraybridge.__file__).parent
    for name in ("numpy", "cupy", "torch", "jax", "tensorflow", "pyclesperanto", "mlx", "paddle"):
        assert not (installed / f"{name}.py").exists()
        assert not (installed / name).exists()
    assert (installed / "py.typed").is_file()


# -- files around the package ------------------------------------------------------------------------------


def test_version_is_that_of_the_distribution() -> None:
    try:
        version = importlib.metadata.version("arraybridge")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("arraybridge runs from the checkout, and has no metadata")
    assert version == arraybridge.__version__
    assert version in read("CHANGELOG.md")
    assert f"\nversion: {version}\n" in read("CITATION.cff")


def test_emulated_gpu_runs_every_file_with_gpu_tests() -> None:
    places = [CHECKOUT / place for place in tox()["tests"]["gpu"].split()]
    assert all(place.exists() for place in places)
    mark = "pytest.mark." + "gpu"
    for file in sorted((CHECKOUT / "tests").rglob("test_*.py")):
        listed = file in places or any(place in file.parents for place in places)
        assert listed or mark not in file.read_text(encoding="utf-8"), file


def test_the_lowest_environment_has_the_lower_bounds_of_the_project() -> None:
    """Check that the pins of `lowest` in tox.ini match pyproject.toml.

    PyTorch is an exception, because its oldest supported release has no CPU build.
    """
    project = tomllib.loads(read("pyproject.toml"))["project"]
    extras = project["optional-dependencies"]
    names = ("cli", "jax", "pyclesperanto", "plot", "dask", "cpu")
    lines = [*project["dependencies"], *(line for extra in names for line in extras[extra])]
    pins = [line for line in tox()["testenv:lowest"]["deps"].splitlines() if line and line[0] != "#"]
    pinned = {pin.name: str(pin.specifier) for pin in map(Requirement, pins)}
    bounds = [one for one in map(Requirement, lines) if one.name not in ("arraybridge", "torch")]
    assert len(bounds) >= 10
    for bound in bounds:
        lowest = Version(pinned[bound.name].removeprefix("=="))
        assert str(bound.specifier).startswith(">=")
        assert Version(str(bound.specifier).removeprefix(">=")) == lowest, bound


def test_type_checkers_see_the_names_that_are_loaded_later() -> None:
    source = Path(arraybridge.__file__).read_text(encoding="utf-8")
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    (block,) = (node for node in blocks if ast.unparse(node.test) == "_TYPE_CHECKING")
    seen = {
        name.asname or name.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert seen == {name: f"arraybridge.{module}" for name, module in arraybridge._LATER.items()}
