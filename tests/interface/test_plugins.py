"""Frameworks from other packages: found by name and by array; broken ones do not affect others."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest

import arraybridge
from arraybridge.interface import registry
from tests.cli.programs import PLANTED
from tests.helpers import run_python

PLUGIN = Path(__file__).parents[1] / "plugin"
CHECKOUT = Path(arraybridge.__file__).parents[1]


def lay_out(site: Path, name: str, version: str, points: str) -> None:
    """Write the metadata of a distribution, as an installer does."""
    folder = name.replace("-", "_")
    info = site / f"{folder}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "utf-8")
    (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{points}\n", encoding="utf-8")


def run_with(site: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program with a package installed."""
    path = os.pathsep.join([site, str(CHECKOUT)])
    return run_python(*arguments, env={"PYTHONPATH": path}, timeout=240)


# ---- a working plug-in -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slates(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Install a plug-in that is a single file with an entry point, and return its folder."""
    site = tmp_path_factory.mktemp("whole")
    (site / "slates.py").symlink_to(PLUGIN / "whole" / "slates.py")
    lay_out(site, "slates-dist", "3.2.1", "slates = slates:SlatesFramework")
    return str(site)


def test_single_file_plugins_are_found(slates: str) -> None:
    dask = ["dask"] if importlib.util.find_spec("dask") is not None else []
    done = run_with(slates, str(PLUGIN / "find_it.py"), *dask)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    for words in ("did you mean 'slates'", "'numpy', 'cupy'"):
        assert words in report["suggested"]
    del report["suggested"]
    assert report.pop("route").startswith("slates → numpy on cpu: shared")
    devices = report.pop("devices")
    assert devices.pop("cpu")[0] == ["numpy", "slates"]
    assert devices == {"gpu:0": [["slates"], "a slate", 1 << 30]}
    doubled = [0, 2, 4, 6, 8, 10]
    assert report == {
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


def test_arrays_identify_the_framework_of_a_package(slates: str) -> None:
    program = (
        "import numpy as np, slates, arraybridge as ab\n"
        "slate = slates.Slate(np.arange(3.0), ab.Device('cpu'))\n"
        "print(ab.detect_memory_type(slate), ab.to_numpy(slate).tolist())"
    )
    assert run_with(slates, "-c", program).stdout == "slates [0.0, 1.0, 2.0]\n"


def test_packages_may_register_their_framework(tmp_path: Path) -> None:
    """The entry point has the framework's name, and the instance registered by the module is used."""
    code = (PLUGIN / "whole" / "slates.py").read_text("utf-8")
    registers = "import arraybridge\nmade = arraybridge.register(SlatesFramework())\n"
    (tmp_path / "slates.py").write_text(f"{code}\n{registers}", encoding="utf-8")
    lay_out(tmp_path, "slates-dist", "3.2.1", "slates = slates:SlatesFramework")
    shown = "print(ab.framework('slates') is sys.modules['slates'].made)"
    for first in ("import slates", "ab.framework('slates')"):
        done = run_with(str(tmp_path), "-c", f"import sys, arraybridge as ab\n{first}\n{shown}")
        assert (done.stdout, done.stderr) == ("True\n", "")


def test_another_package_cannot_take_the_name_of_an_entry_point(slates: str) -> None:
    program = (
        "import arraybridge as ab, slates\n"
        "class Mine(slates.SlatesFramework): pass\n"
        "try: ab.register(Mine())\n"
        "except ValueError as error: print(error)\n"
        "print(ab.register(Mine(), replace=True) is ab.framework('slates'))"
    )
    done = run_with(slates, "-c", program)
    refusal, replaced = done.stdout.splitlines()
    assert refusal == (
        "Cannot register Mine: the name 'slates' belongs to the installed package slates-dist."
        " Choose another name, or pass replace=True to replace that framework."
    )
    assert replaced == "True"


# ---- plug-ins that fail to load --------------------------------------------------------------------------

WITHOUT_COMPONENT = """
from arraybridge import Framework
from arraybridge.interface.memory import Memory

class Bridge(Framework):
    name, modules, memory = "component", ("componentplug",), Memory

    def owns(self, x): return False
    def to_host(self, x): return x
    def from_host(self, view, device): return view
"""

# Name → the code of the plug-in's module, and the error that its author sees.
BROKEN: dict[str, tuple[str | None, str]] = {
    "missing": (None, "ModuleNotFoundError"),
    "exits": ("raise SystemExit(3)", "SystemExit"),
    "other": ("class Bridge: pass", "TypeError"),
    "component": (WITHOUT_COMPONENT, "ValueError"),
}


def install_plugin(site: Path, name: str, code: str | None) -> None:
    """Create a distribution whose entry point leads to a broken module of its package."""
    lay_out(site, f"{name}-dist", "1.0", f"{name} = {name}plug.bridge:Bridge")
    package = site / f"{name}plug"
    package.mkdir()
    (package / "__init__.py").touch()
    if code is not None:
        (package / "bridge.py").write_text(code, encoding="utf-8")


def test_broken_plugins_do_not_affect_other_frameworks(tmp_path: Path) -> None:
    for name, (code, _) in BROKEN.items():
        install_plugin(tmp_path, name, code)
    install_plugin(tmp_path, "numpy", "raise RuntimeError")  # a plug-in cannot replace a built-in framework
    paths = os.pathsep.join([str(PLANTED), str(tmp_path), str(CHECKOUT)])
    done = run_python(str(PLUGIN / "break_it.py"), *BROKEN, env={"PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert answers["others"] == answers["again"]
    assert answers["others"] == {
        "devices": ["cpu"],
        "object": "UnknownArrayError",
        "decorated": [2],
        "is_oom_error": [True, False],
    }
    assert len(answers["warnings"]) == len(BROKEN)
    for name, error_text in answers["named"].items():
        start = f"{PLUGIN / 'break_it.py'}: RuntimeWarning: The framework {name} is provided by"
        assert any(warning.startswith(start) for warning in answers["warnings"])
        for cls, message, chained in error_text.values():
            assert (cls, chained) == ("FrameworkNotInstalledError", BROKEN[name][1]), message
            entry = f"{name} = {name}plug.bridge:Bridge"
            for words in (entry, f"pip install --upgrade {name}-dist", f"pip uninstall {name}-dist"):
                assert words in message
