"""Frameworks that other packages offer: found by name and by array; a broken one harms nobody else."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import arraybridge
from arraybridge.frameworks import plugins
from tests.cli.programs import PLANTED
from tests.helpers import run_python

PLUGIN = Path(__file__).parents[1] / "plugin"
CHECKOUT = Path(arraybridge.__file__).parents[1]


def lay_out(site: Path, name: str, version: str, points: str) -> None:
    """The metadata of a distribution, as an installer would write them."""
    folder = name.replace("-", "_")
    info = site / f"{folder}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "utf-8")
    (info / "entry_points.txt").write_text(f"[{plugins.GROUP}]\n{points}\n", encoding="utf-8")


def run_with(site: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program with a package installed."""
    path = os.pathsep.join([site, str(CHECKOUT)])
    return run_python(*arguments, env={"PYTHONPATH": path}, timeout=240)


# ---- one that works --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slates(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path on which one file and its entry point are found."""
    site = tmp_path_factory.mktemp("whole")
    (site / "slates.py").symlink_to(PLUGIN / "whole" / "slates.py")
    lay_out(site, "slates-dist", "3.2.1", "slates = slates:SlatesFramework")
    return str(site)


def test_one_file_is_found_by_the_library(slates: str) -> None:
    dask = ["dask"] if importlib.util.find_spec("dask") is not None else []
    done = run_with(slates, str(PLUGIN / "find_it.py"), *dask)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    for words in ("did you mean 'slates'", "numpy, cupy"):
        assert words in report["suggested"]
    del report["suggested"]
    assert report.pop("route").startswith("slates → numpy on cpu: shared")
    devices = report.pop("devices")
    assert devices.pop("cpu")[0] == ["numpy", "slates"]
    assert devices == {"gpu:0": [["slates"], "a slate", 1 << 30]}
    doubled = [0, 2, 4, 6, 8, 10]
    assert report == {
        "installed": True,
        "early": False,
        "value": ["Slate", "gpu:0", [0, 1, 2, 3, 4, 5]],
        "same": True,
        "shared": True,
        "tree": [[0, 1, 2, 3, 4, 5], "text"],
        "info": "3.2.1",
        "memory": ["slates", 100, 20, 300],
        "chosen by name": doubled,
        "decorated": doubled,
        **dict.fromkeys(dask, doubled),
    }


def test_an_array_is_enough_to_find_the_framework_of_a_package(slates: str) -> None:
    program = (
        "import numpy as np, slates, arraybridge as ab\n"
        "slate = slates.Slate(np.arange(3.0), ab.Device('cpu'))\n"
        "print(ab.detect_memory_type(slate), ab.to_numpy(slate).tolist())"
    )
    assert run_with(slates, "-c", program).stdout == "slates [0.0, 1.0, 2.0]\n"


# ---- one that does not load ------------------------------------------------------------------------------

# What is wrong → the code of the plug-in's module, and the error that its author sees.
BROKEN: dict[str, tuple[str | None, str]] = {
    "module missing": (None, "ModuleNotFoundError"),
    "exits": ("raise SystemExit(3)", "SystemExit"),
    "syntax": ("def f(:", "SyntaxError"),
    "class missing": ("class Other: pass", "AttributeError"),
    "no framework": ("class Bridge: pass", "TypeError"),
    "abstract": (
        "from arraybridge import Framework\nclass Bridge(Framework):\n    name = 'myarr'",
        "TypeError",
    ),
    "misnamed": (
        "from arraybridge.frameworks import numpy\nclass Bridge(numpy.NumpyFramework):\n    pass",
        "TypeError",
    ),
}
ENTRY = "myarr = brokenplug.bridge:Bridge"


def plant(folder: Path, code: str | None, entry: str = ENTRY) -> str:
    """A folder in which a distribution, its package and its entry point are found."""
    lay_out(folder, "plug-dist", "1.0", entry)
    package = folder / "brokenplug"
    package.mkdir()
    # Beside the module that is broken, the package has arrays.
    (package / "__init__.py").write_text("class Array:\n    shape, dtype = (2,), 'float32'\n", "utf-8")
    if code is not None:
        (package / "bridge.py").write_text(code, encoding="utf-8")
    return str(folder)


def report(site: str, *arguments: str) -> Any:
    paths = os.pathsep.join([str(PLANTED), site, str(CHECKOUT), str(PLUGIN.parents[1])])
    done = run_python(str(PLUGIN / "break_it.py"), *arguments, env={"PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("wrong", BROKEN)
def test_only_who_names_it_or_asks_for_its_arrays_is_told(tmp_path: Path, wrong: str) -> None:
    code, cause = BROKEN[wrong]
    answers = report(plant(tmp_path, code), "imported")
    for cls, message, chained in (answers["named"] | answers["its arrays"]).values():
        assert (cls, chained) == ("FrameworkNotInstalledError", cause), message
        for words in ("plug-dist", ENTRY, "pip install --upgrade plug-dist", "pip uninstall plug-dist"):
            assert words in message
    assert answers["others"] == answers["again"]
    assert answers["others"] == {
        "devices": ["cpu"],
        "convert_memory": [1, 1],
        "list": "UnknownArrayError",
        "object": "UnknownArrayError",
        "exporting": [1, 1],
        "convert_tree": True,
        "decorated": [2],
        "is_oom_error": [True, False],
        "gpu": [2],
        "unknown": True,
    }
    (warning,) = answers["warnings"]
    assert warning.startswith(f"{PLUGIN / 'break_it.py'}: RuntimeWarning: the framework myarr is offered by")
    assert "plug-dist" in warning


def test_what_a_plug_in_says_itself_is_passed_on(tmp_path: Path) -> None:
    """As the built-in frameworks do where a driver is missing; nobody is warned of it."""
    code = (
        "import arraybridge\n"
        "class Bridge:\n"
        "    def __init__(self):\n"
        "        raise arraybridge.FrameworkNotInstalledError('myarr finds no lamp', target_type='myarr')\n"
    )
    answers = report(plant(tmp_path, code), "imported")
    for cls, message, _ in (answers["named"] | answers["its arrays"]).values():
        assert (cls, "myarr finds no lamp" in message) == ("FrameworkNotInstalledError", True)
    assert answers["warnings"] == []


def test_a_plug_in_cannot_replace_a_built_in_framework(tmp_path: Path) -> None:
    answers = report(plant(tmp_path, "raise RuntimeError", entry="numpy = brokenplug.bridge:Bridge"))
    assert answers["others"]["convert_memory"] == [1, 1]
    assert answers["warnings"] == []
    assert {cls for cls, _, _ in answers["named"].values()} == {"UnknownFrameworkError"}


def test_the_commands_show_it_or_do_without(slates: str, tmp_path: Path) -> None:
    pytest.importorskip("typer")
    broken = plant(tmp_path, "raise RuntimeError('no lamp')")
    paths = os.pathsep.join([str(PLANTED), slates, broken, str(CHECKOUT)])

    def command(*arguments: str) -> Any:
        """What a command says in JSON, where NumPy is the only other framework."""
        env = {"PYTHONPATH": paths, "PYTHONWARNINGS": ""}
        done = run_python("-m", "arraybridge", *arguments, "--json", env=env, timeout=240)
        assert done.stdout, done.stderr
        return json.loads(done.stdout)

    rows = command("doctor")["frameworks"]
    states = {name: row["state"] for name, row in rows.items() if row["state"] in ("works", "broken")}
    assert states == {"numpy": "works", "slates": "works", "myarr": "broken"}
    assert rows["slates"]["version"] == "3.2.1"
    assert all(words in json.dumps(rows) for words in ("plug-dist", "no lamp"))
    assert "slates" in json.dumps(command("matrix", "--frameworks", "numpy,slates", "--size", "64KiB"))
    assert command("monitor", "--once")["devices"][0]["device"] == "cpu"
