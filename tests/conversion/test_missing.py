"""A framework that is not there, in whatever way it is made to be missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from arraybridge.frameworks import presence
from tests.helpers import run_python

SCRIPT = Path(__file__).with_name("scripts") / "ways_to_be_missing.py"
EXTRAS = {
    "cupy": "cupy-cuda13x",
    **{name: name for name in ("torch", "jax", "tensorflow", "pyclesperanto", "mlx", "paddle")},
}


@pytest.mark.parametrize("how", ["none", "finder", "import"])
def test_what_is_hidden_is_not_installed_and_harms_nothing_else(how: str) -> None:
    done = run_python(str(SCRIPT), how)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    for name, extra in EXTRAS.items():
        for what, answer in report["asked"][name].items():
            assert answer.get("class") == "FrameworkNotInstalledError", (name, what, answer)
            assert f'".[{extra}]" in a checkout' in answer["message"], (name, what, answer)
            assert answer["message"].startswith(f"{name} is not installed; run pip install"), answer
            assert "Error(" in answer["cause"], (name, what, answer)
    goes_on = report["goes on"]
    assert {what: answer for what, answer in goes_on.items() if "result" not in answer} == {}
    assert goes_on["convert_memory"]["result"] is True
    assert goes_on["devices"]["result"] == ["cpu"]
    assert goes_on["is_oom_error"]["result"] == [True, False]
    assert goes_on["gpu"]["result"] == [[2, 2], [2, 2]]
    assert goes_on["large transposed copy"]["result"] == [200, 300]


BROKEN = {
    "torch": "raise ImportError('libtorch.so: cannot open shared object file')",
    "jax": "import jaxlib_that_is_not_there",
    "cupy": "raise OSError('no driver')",
    "tensorflow": "raise SystemExit(3)",
    "paddle": "",  # a file of somebody's own, and no package
}


def test_what_is_there_but_broken_is_called_so(tmp_path: Path) -> None:
    for name, code in BROKEN.items():
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import json, numpy as np, arraybridge as ab\n"
        "report = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try: ab.convert_memory(np.ones(2), name)\n"
        "    except ab.FrameworkNotInstalledError as error:\n"
        "        report[name] = [str(error), type(error.__cause__).__name__]\n"
        "print(json.dumps([report, [str(device) for device in ab.devices('numpy')]]))"
    )
    done = run_python("-c", program, *BROKEN)
    assert done.returncode == 0, done.stderr
    report, devices = json.loads(done.stdout)
    assert devices == ["cpu"]
    assert {name: cause for name, (_, cause) in report.items()} == {
        "torch": "ImportError",
        "jax": "ModuleNotFoundError",
        "cupy": "OSError",
        "tensorflow": "SystemExit",
        "paddle": "ModuleNotFoundError",
    }
    for name, (message, _) in report.items():
        assert message.startswith(f"{name} is installed, but importing it failed: "), message
        assert "pip install --force-reinstall " in message
        assert f'".[{EXTRAS[name]}]" in a checkout' in message
    assert "libtorch.so" in report["torch"][0]


def test_whatever_an_import_raises_is_said_and_harms_nobody_else(tmp_path: Path) -> None:
    raised = ["NameError", "SyntaxError", "KeyError", "AssertionError", "IndexError", "ZeroDivisionError"]
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.dont_write_bytecode = True\n"
        "import importlib, json, pathlib, numpy as np, arraybridge as ab\n"
        "report = {}\n"
        f"for raised in {[*raised, 'ExceptionGroup']}:\n"
        "    planted = \"'two', [KeyError(1)]\" if raised == 'ExceptionGroup' else \"'planted'\"\n"
        f"    pathlib.Path({str(tmp_path / 'paddle.py')!r}).write_text(f'raise {{raised}}({{planted}})')\n"
        "    importlib.invalidate_caches()\n"
        "    try: ab.convert_memory(np.ones(2), 'paddle')\n"
        "    except ab.FrameworkNotInstalledError as error:\n"
        "        report[raised] = [str(error), type(error.__cause__).__name__]\n"
        "    assert 'cpu' in [str(device) for device in ab.devices()]\n"
        "print(json.dumps(report))"
    )
    hidden = {name: None for name in EXTRAS if name != "paddle"}
    done = run_python("-c", f"import sys; sys.modules.update({hidden})\n{program}")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {name: cause for name, (_, cause) in report.items()} == {
        name: name for name in (*raised, "ExceptionGroup")
    }
    for name, (message, _) in report.items():
        assert message.startswith(f"paddle is installed, but importing it failed: {name}: "), message


def test_a_folder_of_that_name_is_no_package(tmp_path: Path) -> None:
    """Python imports it all the same, as an empty namespace."""
    for name in ("mlx", "paddle"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.py").write_text("", encoding="utf-8")
    program = (
        f"import sys; sys.path[:] = [{str(tmp_path)!r}, *(p for p in sys.path if 'packages' not in p), *"
        "(p for p in sys.path if 'packages' in p)]\n"
        "import numpy as np, arraybridge as ab\n"
        "from arraybridge.frameworks import registry\n"
        "for name in ('mlx', 'paddle'):\n"
        "    print(registry.is_installed(name))\n"
        "    for _ in range(2):\n"
        "        try: ab.convert_memory(np.ones(2), name)\n"
        "        except ab.FrameworkNotInstalledError as error: print(error)\n"
    )
    if presence.can_find("mlx") or presence.can_find("paddle"):
        pytest.skip("they are there")
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert (lines[0], lines[3], len(lines)) == ("False", "False", 6)
    assert all(line.startswith("mlx is not installed; run pip install") for line in lines[1:3]), lines
    assert all(line.startswith("paddle is not installed; run pip install") for line in lines[4:]), lines


def test_a_namespace_that_holds_mlx_is_mlx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlx").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlx"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "mlx" / "core.py").write_text("", encoding="utf-8")
    assert presence.can_find("mlx")
    assert "mlx" not in sys.modules


def test_whoever_can_read_it_may_be_broken(tmp_path: Path) -> None:
    """CuPy, which could read this array of a card, does not import, and PyTorch is missing."""
    (tmp_path / "cupy.py").write_text("raise OSError('no driver')", encoding="utf-8")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.modules['torch'] = None\n"
        "import arraybridge as ab\n"
        "class OnCard:\n"
        "    __cuda_array_interface__ = {'shape': (2,), 'typestr': '<f4', 'data': (64, True)}\n"
        "try: ab.convert_memory(OnCard(), 'numpy')\n"
        "except ab.MemoryConversionError as error: print(type(error).__name__, error)\n"
        "try: ab.array_namespace(OnCard())\n"
        "except ab.MemoryConversionError as error: print(type(error).__name__, error)\n"
    )
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("ArrayNotSupportedError")
    assert "install cupy or torch" in first
    assert not second.startswith("FrameworkNotInstalledError")


def test_a_package_is_asked_for_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert presence.can_find("json")
    assert presence.is_imported("json")
    assert presence.can_find("antigravity")  # which opens a browser
    assert not presence.is_imported("antigravity")
    assert not presence.can_find("no_such_package")
    monkeypatch.setitem(sys.modules, "json", None)
    assert not presence.can_find("json")
    assert not presence.is_imported("json")
