"""When a framework is loaded: after a stand-in for it, in the midst of its import, by two threads at once."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from arraybridge.frameworks import registry
from arraybridge.frameworks.numpy import NumpyFramework
from tests.helpers import registry_kept, require, run_python
from tests.test_broken_plugins import paths, plant

STAND_IN = """
import sys, types
import numpy as np
import arraybridge as ab
for name in ("torch", "cupy"):
    sys.modules[name] = types.ModuleType(name)  # as a test does
ab.memory_stats()
try:
    ab.convert_memory(np.ones(2), "cupy")
except ab.FrameworkNotInstalledError:
    print("refused")
large = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
print(bool((ab.convert_memory(large.T, "numpy", copy=True) == large.T).all()))
for name in ("torch", "cupy"):
    del sys.modules[name]
import torch
print(ab.is_oom_error(torch.OutOfMemoryError("CUDA out of memory.")))
with torch.no_grad():
    print(list(ab.device_map(lambda i: torch.is_grad_enabled(), [1], ["cpu"])))
print(bool((ab.convert_memory(large.T, "numpy", copy=True) == large.T).all()))
import cupy
print(ab.framework("cupy").name)
"""

IN_THE_MIDST = """
import sys
import arraybridge as ab
class Hook:
    asked = 0
    def find_spec(self, name, path=None, target=None):
        if name == "torch.nn":
            Hook.asked += 1
            ab.memory_stats()
sys.meta_path.insert(0, Hook())
import torch
print(Hook.asked)
print(ab.is_oom_error(torch.OutOfMemoryError("CUDA out of memory.")))
"""

AT_ITS_IMPORT = """
import threading
import arraybridge as ab
from arraybridge.frameworks import registry

importing, asked = threading.Event(), threading.Event()
load = registry.load

def noticed(point):
    asked.set()
    return load(point)

registry.load = noticed
thread = threading.Thread(target=lambda: __import__("brokenplug"), daemon=True)
thread.start()
assert importing.wait(60)
print(ab.framework("myarr").name)
thread.join()
"""

PACKAGE = """
import __main__
import arraybridge
__main__.importing.set()
assert __main__.asked.wait(60)  # the other thread asks for this framework
arraybridge.register(arraybridge.framework("numpy"))
from arraybridge.frameworks.numpy import NumpyFramework
class Bridge(NumpyFramework):
    name, modules = "myarr", ("brokenplug",)
"""


def test_a_stand_in_says_nothing_of_what_comes_after_it() -> None:
    require("torch")
    require("cupy")
    done = run_python("-c", STAND_IN, env={"PYTHONWARNINGS": ""})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["refused", "True", "True", "[False]", "True", "cupy"]


def test_what_is_no_module_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Anything:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"asked for {name}")

    monkeypatch.setitem(sys.modules, "mlx", Anything())  # type: ignore[arg-type]
    monkeypatch.delitem(registry._instances, "mlx", raising=False)
    assert "mlx" not in [one.name for one in registry.loaded()]


def test_a_framework_is_left_alone_until_its_import_has_ended() -> None:
    require("torch")
    done = run_python("-c", IN_THE_MIDST, env={"PYTHONWARNINGS": ""})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "True"]


def test_one_that_does_not_load_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    load = registry._load

    def counted(name: str) -> Any:
        tried.append(name)
        return load(name)

    monkeypatch.setattr(registry, "_load", counted)
    monkeypatch.delitem(registry._instances, "mlx", raising=False)
    for count in (1, 2):
        monkeypatch.setitem(sys.modules, "mlx", ModuleType("mlx"))
        assert registry.loaded("mlx") == registry.loaded("mlx") == []
        assert tried == ["mlx"] * count


def test_a_package_at_its_import_and_who_asks_for_its_framework_do_not_wait_for_each_other(
    tmp_path: Path,
) -> None:
    site = plant(tmp_path, None, entry="myarr = brokenplug:Bridge")
    (tmp_path / "brokenplug" / "__init__.py").write_text(PACKAGE, encoding="utf-8")
    done = run_python("-c", AT_ITS_IMPORT, env={"PYTHONPATH": paths(site)}, timeout=60)
    assert (done.returncode, done.stdout) == (0, "myarr\n"), done.stderr


@pytest.mark.parametrize("name", ["mlx", "twice"])
def test_two_threads_that_load_it_at_once_get_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=60)

    class Twice(NumpyFramework):
        modules = ("twice",)

        def __init__(self) -> None:
            super().__init__()
            both.wait()

    Twice.name = name
    room = ModuleType("arraybridge.frameworks.mlx.arrays")
    room.MlxFramework = Twice  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, room.__name__, room)
    monkeypatch.setattr(registry, "plugins", lambda: {"twice": None})
    monkeypatch.setattr(registry, "load", lambda point: Twice())
    got: list[Any] = []
    with registry_kept():
        registry._instances.pop(name, None)
        threads = [threading.Thread(target=lambda: got.append(registry.framework(name))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == [registry.framework(name)] * 2
