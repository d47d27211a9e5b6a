"""A plug-in of somebody else that does not load breaks the calls that need it, and no others."""

from __future__ import annotations

import json
import os
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import arraybridge
from arraybridge.frameworks import plugins
from tests.cli.programs import PLANTED
from tests.helpers import run_python

SCRIPT = Path(__file__).parent / "plugin" / "break_it.py"
# What is wrong → the code of the plug-in's module, and the error that its author sees.
BROKEN: dict[str, tuple[str | None, str]] = {
    "module missing": (None, "ModuleNotFoundError"),
    "raises": ("raise RuntimeError('no lamp')", "RuntimeError"),
    "exits": ("raise SystemExit(3)", "SystemExit"),
    "syntax": ("def f(:", "SyntaxError"),
    "dependency missing": ("import no_such_dependency", "ModuleNotFoundError"),
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
# Beside the module that is broken, the package has arrays and other things.
PACKAGE = """
class Array:
    shape, dtype = (2,), "float32"

class Odd:
    '''An array in which nothing tells that it is one, or no array.'''
"""
ENTRY = "myarr = brokenplug.bridge:Bridge"


def plant(folder: Path, code: str | None, entry: str = ENTRY) -> str:
    """A folder in which a distribution, its package and its entry point are found."""
    package, info = folder / "brokenplug", folder / "plug_dist-1.0.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text(PACKAGE, encoding="utf-8")
    if code is not None:
        (package / "bridge.py").write_text(code, encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plug-dist\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[{plugins.GROUP}]\n{entry}\n", encoding="utf-8")
    return str(folder)


def paths(*folders: str) -> str:
    """For a process in which NumPy is the only framework that there is."""
    return os.pathsep.join(
        [str(PLANTED), *folders, str(Path(arraybridge.__file__).parents[1]), str(SCRIPT.parents[2])]
    )


def report(site: str, *arguments: str) -> Any:
    done = run_python(str(SCRIPT), *arguments, env={"PYTHONPATH": paths(site)})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_words(answers: dict[str, list[str]], cause: str) -> None:
    for what, (cls, message, chained) in answers.items():
        assert cls == "FrameworkNotInstalledError", (what, cls, message)
        assert "plug-dist" in message, (what, message)
        assert ENTRY in message, (what, message)
        assert "pip install --upgrade plug-dist" in message, (what, message)
        assert "pip uninstall plug-dist" in message, (what, message)
        assert chained == cause, (what, chained)


@pytest.mark.parametrize("imported", [False, True])
@pytest.mark.parametrize("wrong", BROKEN)
def test_only_who_names_it_or_passes_its_arrays_is_told(tmp_path: Path, wrong: str, imported: bool) -> None:
    code, cause = BROKEN[wrong]
    found = report(plant(tmp_path, code), *(["imported"] if imported else []))
    check_words(found["named"], cause)
    if imported:
        check_words(found["its arrays"], cause)
        assert found["setting"] is True
    for answers in (found["others"], found["again"]):
        assert "cpu" in answers.pop("devices")
        assert answers.pop("device_info") in (True, False)
        assert answers.pop("free_memory") == 0
        assert answers == {
            "convert_memory": [1, 1],
            "list": "UnknownArrayError",
            "object": "UnknownArrayError",
            "exporting": [1, 1],
            "convert_tree": True,
            "decorated": [2],
            "result": True,
            "memory_stats": "device",
            "is_oom_error": [True, False],
            "benchmark": True,
            "gpu": [2],
            "unknown": True,
        }
    (warning,) = found["warnings"]
    assert warning.startswith(f"{SCRIPT}: RuntimeWarning: the framework myarr is offered by")
    assert "plug-dist" in warning


def test_an_entry_point_that_leads_nowhere(tmp_path: Path) -> None:
    found = report(plant(tmp_path, "", entry="myarr = not-a-module:Bridge"))
    assert {cls for cls, _, _ in found["named"].values()} == {"FrameworkNotInstalledError"}
    assert found["others"]["convert_tree"] is True
    assert found["again"]["object"] == "UnknownArrayError"


@pytest.mark.parametrize("line", ["myarr", "myarr = \udcff"])
def test_metadata_that_cannot_be_read(tmp_path: Path, line: str) -> None:
    """Python cannot list the entry points of any package then."""
    site = plant(tmp_path / "one", "")
    info = tmp_path / "one" / "plug_dist-1.0.dist-info" / "entry_points.txt"
    info.write_bytes(f"[{plugins.GROUP}]\n{line}\n".encode(errors="surrogateescape"))
    sound = tmp_path / "two" / "sound-1.0.dist-info"
    sound.mkdir(parents=True)
    (sound / "METADATA").write_text("Metadata-Version: 2.1\nName: sound\nVersion: 1.0\n", encoding="utf-8")
    (sound / "entry_points.txt").write_text(f"[{plugins.GROUP}]\nsound = a:B\n", encoding="utf-8")
    found = report(os.pathsep.join([site, str(sound.parent)]))
    assert {cls for cls, _, _ in found["named"].values()} == {"UnknownFrameworkError"}
    assert all("sound" in message for _, message, _ in found["named"].values())
    assert found["others"]["object"] == "UnknownArrayError"
    assert "cpu" in found["others"]["devices"]
    first, second = found["warnings"]
    assert "the entry points of plug-dist are malformed" in first
    assert "the package sound" in second  # which does not load, and is known


def test_metadata_that_do_not_name_the_package(tmp_path: Path) -> None:
    site = plant(tmp_path, "raise RuntimeError")
    (tmp_path / "plug_dist-1.0.dist-info" / "METADATA").unlink()
    found = report(site)
    for cls, message, _ in found["named"].values():
        assert cls == "FrameworkNotInstalledError", message
        assert ENTRY in message
        assert "uninstall" in message
    assert "cpu" in found["others"]["devices"]


def test_what_a_plug_in_says_itself_is_passed_on(tmp_path: Path) -> None:
    """As the built-in frameworks do where a driver is missing; nobody is warned of it."""
    code = (
        "import arraybridge\n"
        "class Bridge:\n"
        "    def __init__(self):\n"
        "        raise arraybridge.FrameworkNotInstalledError('myarr finds no lamp', target_type='myarr')\n"
    )
    found = report(plant(tmp_path, code), "imported")
    for answers in (found["named"], found["its arrays"]):
        for cls, message, _ in answers.values():
            assert (cls, "myarr finds no lamp" in message) == ("FrameworkNotInstalledError", True)
    assert "cpu" in found["others"]["devices"]
    assert found["warnings"] == []


def test_a_plug_in_that_uses_the_library_while_it_is_imported_is_not_broken(tmp_path: Path) -> None:
    site = plant(tmp_path, "from brokenplug import Bridge")
    (tmp_path / "brokenplug" / "__init__.py").write_text(
        "import arraybridge\n"
        "class Array: pass\n"
        "early = arraybridge.convert_tree([Array()], 'numpy')\n"
        "class Bridge(arraybridge.Framework):\n"
        "    name, modules = 'myarr', ('brokenplug',)\n"
        "    owns = lambda self, x: isinstance(x, Array)\n"
        "    host_view = from_host = dtype_name = shape = nbytes = None\n",
        encoding="utf-8",
    )
    program = "import brokenplug, arraybridge; print(arraybridge.detect_memory_type(brokenplug.early[0]))"
    done = run_python("-c", program, env={"PYTHONPATH": paths(site)})
    assert (done.returncode, done.stdout) == (0, "myarr\n"), done.stderr


def test_a_plug_in_cannot_replace_a_built_in_framework(tmp_path: Path) -> None:
    found = report(plant(tmp_path, "raise RuntimeError", entry="numpy = brokenplug.bridge:Bridge"))
    assert found["others"]["convert_memory"] == [1, 1]
    assert found["warnings"] == []
    assert {cls for cls, _, _ in found["named"].values()} == {"UnknownFrameworkError"}


def test_doctor_shows_it_and_the_tables_do_without(tmp_path: Path) -> None:
    pytest.importorskip("typer")
    site = plant(tmp_path, "raise RuntimeError('no lamp')")

    def command(*arguments: str) -> Any:
        done = run_python(
            *("-m", "arraybridge", *arguments, "--json"),
            env={"PYTHONPATH": paths(site), "PYTHONWARNINGS": ""},
            timeout=240,
        )
        assert done.stdout, done.stderr
        return json.loads(done.stdout)

    found = command("doctor")
    assert found["frameworks"]["myarr"]["state"] == "broken"
    assert found["frameworks"]["numpy"]["state"] == "works"
    (problem,) = [one for one in found["problems"] if one["framework"] == "myarr"]
    assert "plug-dist" in problem["message"]
    assert "no lamp" in problem["message"]
    assert "pip uninstall plug-dist" in " ".join([problem["message"], *problem["fix"]])
    assert "numpy" in json.dumps(command("matrix", "--size", "64KiB"))
    assert command("monitor", "--once")["devices"][0]["device"] == "cpu"


def test_the_package_of_an_entry_point() -> None:
    for value, package in (("a.b:C", "a"), ("a", "a"), ("a:C.d [extra]", "a"), ("a-b.c:D", "a-b")):
        assert plugins.package_of(EntryPoint("one", value, plugins.GROUP)) == package
