"""Frameworks of others: offered by a package, registered by hand, and on accelerators of their own."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import (
    CopyRequiredError,
    Device,
    DeviceNotFoundError,
    MissingGpuWarning,
    convert_memory,
    convert_tree,
    detect_memory_type,
    device_of,
    explain,
    register,
    settings,
    trace,
)
from arraybridge.frameworks import registry
from arraybridge.frameworks.parts import Pool
from tests import matrix_data as data
from tests.cards import CardArray, CardFramework
from tests.cli.programs import PLANTED
from tests.helpers import registry_kept, require, run_python

PLUGIN = Path(__file__).parent / "plugin"
BUILT_IN = ("numpy", "torch", "jax", "tensorflow", "pyclesperanto")


# ---- an installed package --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path on which the package and its metadata are found, as an installer would lay them out."""
    site = tmp_path_factory.mktemp("site")
    (site / "tapeworks").symlink_to(PLUGIN / "src" / "tapeworks")
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = site / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n", encoding="utf-8"
    )
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    return str(site)


def run_with(site: str, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script of tests/plugin with the package installed."""
    paths = [site, str(Path(arraybridge.__file__).parent.parent)]
    return subprocess.run(
        [sys.executable, "-P", str(PLUGIN / script), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "error"},
    )


def test_a_package_offers_a_framework(installed: str) -> None:
    # All the others are converted with below, in this process: TensorFlow's import takes seconds.
    there = [name for name in ("numpy", "jax") if importlib.util.find_spec(name) is not None]
    done = run_with(installed, "use_it.py", *there)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    packed = values.tobytes().hex()
    assert not report["imported early"]
    assert report["imported when needed"]
    assert report["type"] == "Tape"
    assert report["bytes"] == packed
    assert report["detected"] == "tapeworks"
    assert report["same"]
    assert not report["copy"]
    assert report["device"] == "cpu"
    assert report["route"].startswith("tapeworks → numpy on cpu: shared")
    assert report["shares"]
    for name in there:
        assert report[name] == [name, "float32", [2, 3], packed, name]
    assert report["tree"] == ["Tape", True, "text"]
    assert report["tree back"] == [values.tolist(), values.tolist()]
    assert "float16" in report["refused"]
    assert "float32" in report["refused"]
    assert report["cast"] == packed
    assert "did you mean 'tapeworks'" in report["suggested"]
    assert "numpy, cupy" in report["suggested"]


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_framework_of_a_package_meets_every_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require(name)
    monkeypatch.syspath_prepend(PLUGIN / "src")
    bridge = importlib.import_module("tapeworks.bridge")
    register(bridge.TapeFramework())
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    tape = bridge.Tape(bytearray(values.tobytes()), "float32", (2, 3))
    there = convert_memory(tape, name)
    assert detect_memory_type(there) == name
    assert data.bits(there) == values.tobytes()
    assert explain(there, "tapeworks").source == name
    back = convert_memory(there, "tapeworks")
    assert (back.dtype, back.shape, back.memory) == ("float32", (2, 3), tape.memory)


def test_an_array_is_enough_to_find_the_framework_of_a_package(installed: str) -> None:
    done = run_with(installed, "detect_it.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["tapeworks", "[0.0, 1.0, 2.0]"]


def test_without_the_package_its_framework_is_unknown() -> None:
    done = run_python(str(PLUGIN / "use_it.py"))
    assert done.returncode != 0
    assert "UnknownFrameworkError" in done.stderr


def test_the_package_installs(tmp_path: Path) -> None:
    """With pip and without the network, where the build backend is at hand."""
    for module in ("pip", "hatchling"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(tmp_path), str(PLUGIN)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert run_with(str(tmp_path), "detect_it.py").stdout.splitlines()[0] == "tapeworks"


# ---- a whole framework in one file -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def slates(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path on which one file and its entry point are found."""
    site = tmp_path_factory.mktemp("whole")
    (site / "slates.py").symlink_to(PLUGIN / "whole" / "slates.py")
    info = site / "slates_dist-3.2.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: slates-dist\nVersion: 3.2.1\n", encoding="utf-8"
    )
    points = "[arraybridge.frameworks]\nslates = slates:SlatesFramework\n"
    (info / "entry_points.txt").write_text(points, encoding="utf-8")
    return str(site)


def command(site: str, *arguments: str) -> Any:
    """What a command says in JSON where this framework and NumPy are the only ones."""
    paths = os.pathsep.join([str(PLANTED), site, str(Path(arraybridge.__file__).parent.parent)])
    done = run_python("-m", "arraybridge", *arguments, "--json", env={"PYTHONPATH": paths}, timeout=240)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def test_one_file_is_found_by_the_library(slates: str) -> None:
    for module in ("dask.array", "optree"):
        pytest.importorskip(module)
    done = run_with(slates, "find_it.py")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["installed"]
    assert report["devices"]["cpu"][0] == ["numpy", "slates"]
    assert report["devices"]["gpu:0"] == [["slates"], "a slate", 1 << 30]
    assert report["info"] == "3.2.1"
    assert report["memory"] == ["slates", 100, 20, 300]
    assert report["value"] == ["Slate", "gpu:0", [0, 1, 2, 3, 4, 5]]
    assert report["chosen by name"] == [0, 2, 4, 6, 8, 10]
    assert report["dask"] == [0, 2, 4, 6, 8, 10]


def test_one_file_is_found_by_doctor(slates: str) -> None:
    pytest.importorskip("typer")
    rows = command(slates, "doctor")["frameworks"]
    assert rows["slates"]["state"] == "works"
    assert rows["slates"]["version"] == "3.2.1"
    assert [name for name in rows if rows[name]["state"] == "works"] == ["numpy", "slates"]


@pytest.mark.parametrize("name", ["matrix", "bench"])
def test_one_file_is_found_by_the_tables_of_the_commands(slates: str, name: str) -> None:
    pytest.importorskip("typer")
    report = command(slates, name, "--frameworks", "numpy,slates", "--size", "64KiB")
    assert "slates" in json.dumps(report)


def test_one_file_has_a_row_and_a_column_in_the_documentation() -> None:
    tool = runpy.run_path(str(Path(__file__).parent.parent / "tools" / "conversion_table.py"))
    lines = tool["markdown"](("numpy", "slates")).splitlines()
    assert lines[0] == "| from \\ to | numpy | slates |"
    assert lines[2] == "| **numpy** | – | shared (`view`) |"
    assert lines[3] == "| **slates** | shared (`view`) | – |"


# ---- register --------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    """Forget afterwards what a test has registered."""
    with registry_kept():
        yield


class Samples:
    """The smallest array type."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values


class SamplesFramework(arraybridge.Framework):
    name = "samples"
    modules = ("tests",)

    def owns(self, x: Any) -> bool:
        return isinstance(x, Samples)

    def host_view(self, x: Samples) -> np.ndarray[Any, Any]:
        return x.values

    def from_host(self, view: np.ndarray[Any, Any], device: Device) -> Samples:
        return Samples(view)

    def dtype_name(self, x: Samples) -> str:
        return x.values.dtype.name

    def shape(self, x: Samples) -> tuple[int, ...]:
        return x.values.shape

    def nbytes(self, x: Samples) -> int:
        return x.values.nbytes


def test_register_an_instance() -> None:
    made = SamplesFramework()
    with pytest.raises(ValueError, match="samples"):
        convert_memory(np.zeros(2), "samples")
    assert register(made) is made
    assert arraybridge.framework("samples") is made
    x = data.aligned_bytes(24).view(np.float64)
    x[:] = [1, 2, 3]
    samples = convert_memory(x, "samples")
    assert detect_memory_type(samples) == "samples"
    assert data.address(samples.values) == data.address(x)
    assert convert_memory(samples, "samples") is samples
    for target in ("numpy", "torch", "jax", "tensorflow"):
        require(target)
        result = convert_memory(samples, target)
        assert data.bits(result) == x.tobytes()
        assert explain(samples, target).shares_memory
        back = convert_memory(result, "samples")
        assert isinstance(back, Samples)
        assert back.values.tobytes() == x.tobytes()
        copied = convert_memory(result, "samples", copy=True)
        assert data.address(copied.values) != data.address(x)
    assert convert_tree({"a": [x]}, "samples")["a"][0].values.tolist() == [1, 2, 3]
    with trace() as log:
        convert_memory(samples, "numpy")
    assert [(r.source, r.target, r.copies) for r in log.records] == [("samples", "numpy", 0)]


def test_register_works_after_its_arrays_were_seen() -> None:
    """A type that was unknown when it was first met."""
    samples = Samples(np.arange(2))
    with pytest.raises(arraybridge.UnknownArrayError):
        detect_memory_type(samples)
    register(SamplesFramework())
    assert detect_memory_type(samples) == "samples"


def test_what_was_registered_can_be_forgotten() -> None:
    made = register(SamplesFramework())
    samples = Samples(np.zeros(2))
    assert detect_memory_type(samples) == "samples"
    registry.unregister("samples")
    assert "samples" not in registry.framework_names()
    assert "tests" not in registry.roots()
    with pytest.raises(arraybridge.UnknownArrayError):
        detect_memory_type(samples)
    with pytest.raises(arraybridge.UnknownFrameworkError):
        registry.unregister("samples")
    register(made)
    assert detect_memory_type(samples) == "samples"


def test_registering_again_replaces() -> None:
    class Doubling(SamplesFramework):
        def host_view(self, x: Samples) -> np.ndarray[Any, Any]:
            return x.values * 2

    register(SamplesFramework())
    samples = Samples(np.array([1, 2]))
    for _ in range(2):
        assert convert_memory(samples, "numpy").tolist() == [1, 2]
    register(Doubling())
    assert convert_memory(samples, "numpy").tolist() == [2, 4]


def test_two_frameworks_of_one_package() -> None:
    class Others:
        values = np.zeros(1)

    class OthersFramework(SamplesFramework):
        name = "others"

        def owns(self, x: Any) -> bool:
            return isinstance(x, Others)

    register(SamplesFramework())
    register(OthersFramework())
    assert detect_memory_type(Others()) == "others"
    assert detect_memory_type(Samples(np.zeros(1))) == "samples"


def test_modules_may_be_named_in_full() -> None:
    class InFull(SamplesFramework):
        modules = ("tests.test_plugins",)

    register(InFull())
    assert detect_memory_type(Samples(np.zeros(1))) == "samples"


@pytest.mark.parametrize("thing", [None, "samples", SamplesFramework, Samples, object(), np, 3])
def test_registering_nonsense_is_a_type_error(thing: Any) -> None:
    with pytest.raises(TypeError, match="Framework"):
        register(thing)


def test_a_framework_needs_a_name() -> None:
    class Nameless(SamplesFramework):
        name = ""

    with pytest.raises(TypeError, match="name"):
        register(Nameless())


@pytest.mark.parametrize("modules", ["tests", ("tests", 3), {"tests": 1}])
def test_the_modules_of_a_framework_are_a_tuple_of_names(modules: Any) -> None:
    class Misdeclared(SamplesFramework):
        pass

    Misdeclared.modules = modules
    before = registry.roots()
    with pytest.raises(TypeError, match=r"modules of Misdeclared are .*; they must be a tuple of names"):
        register(Misdeclared())
    assert registry.roots() == before
    assert "samples" not in registry.framework_names()


def test_the_roots_are_read_while_another_thread_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Growing(dict[str, tuple[str, ...]]):
        """As when a thread adds one at each step of whoever goes through it."""

        def items(self) -> Any:
            for one in super().items():
                self[f"more{len(self)}"] = ()
                yield one

    monkeypatch.setattr(registry, "_ROOTS", Growing({"numpy": ("numpy",), "torch": ("torch",)}))
    assert registry.roots() == {"numpy": ("numpy",), "torch": ("torch",)}


# ---- accelerators: two frameworks with two devices each, which share their memory ------------------------


class CardPool(Pool):
    """The free memory of two cards."""

    def __init__(self) -> None:
        self.free = (100, 900)

    def free_memory_of(self, device: Device) -> int:
        return self.free[device.index]


class PluginCards(CardFramework):
    """What the arrays of a framework with two cards would need."""

    has_host = True

    def __init__(self) -> None:
        super().__init__()
        self.pool: CardPool = CardPool()

    def to_device(self, x: CardArray, device: Device) -> CardArray:
        self.done.append(f"{self.device_of(x)} to {device}")
        return self.array(x.values.copy(), -1 if device.kind == "cpu" else device.index)

    def adopt(self, x: CardArray, source: arraybridge.Framework, device: Device) -> CardArray:
        self.done.append(f"adopt from {source.name}")
        return self.array(x.values, x.card)

    def copy(self, x: CardArray) -> CardArray:
        self.done.append("copy")
        return self.array(x.values.copy(), x.card)

    def cast(self, x: CardArray, dtype: str) -> CardArray:
        return self.array(x.values.astype(dtype), x.card)


class RedCard(CardArray):
    __module__ = "redcards"


class BlueCard(CardArray):
    __module__ = "bluecards"


class LoneCard(CardArray):
    __module__ = "lonecards"


class Red(PluginCards):
    name = "red"
    modules = ("redcards",)
    array = RedCard
    dlpack_device = 99


class Blue(PluginCards):
    name = "blue"
    modules = ("bluecards",)
    array = BlueCard
    dlpack_device = 99

    def cannot_stride(self, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> str:
        return "blue wants no negative strides" if any(step < 0 for step in strides) else ""


class Lone(PluginCards):
    """Cards that no other framework reaches, and no arrays on the host."""

    name = "lone"
    modules = ("lonecards",)
    array = LoneCard
    has_host = False

    def __init__(self) -> None:
        super().__init__()
        self.current = 1


@pytest.fixture
def red() -> Red:
    register(Blue())
    register(Lone())
    return register(Red())  # type: ignore[return-value]


def done_by(name: str) -> list[str]:
    return arraybridge.framework(name).done  # type: ignore[attr-defined]


def values() -> np.ndarray[Any, Any]:
    return np.arange(6.0).reshape(2, 3)


def check_route(route: Any, wanted: str) -> None:
    """``"method device copies"``; it shares memory when it makes no copies."""
    assert f"{route.method} {route.device} {route.copies}" == wanted
    assert route.shares_memory == (route.copies == 0)
    assert route.nbytes == 48


@pytest.mark.parametrize("gpu_id", [0, 1])
def test_from_the_host_to_a_card(red: Red, gpu_id: int) -> None:
    x = values()
    check_route(explain(x, "red", gpu_id), f"device gpu:{gpu_id} 1")
    assert red.done == []
    card = convert_memory(x, "red", gpu_id)
    assert type(card) is RedCard
    assert device_of(card) == f"gpu:{gpu_id}"
    x[...] = 0
    assert card.values.tolist() == values().tolist()
    assert red.done == [f"to gpu:{gpu_id}"]
    with pytest.raises(CopyRequiredError, match="memory of its own"):
        convert_memory(x, "red", gpu_id, copy=False)


def test_words_for_a_card(red: Red) -> None:
    for words in ("gpu:1", "cuda:1", Device("gpu", 1)):
        assert device_of(convert_memory(values(), "red", device=words)) == "gpu:1"
    for words in ("gpu", "cuda", "gpu:0"):
        assert device_of(convert_memory(values(), "red", device=words)) == "gpu:0"
    with pytest.raises(DeviceNotFoundError, match=r"cpu, gpu:0, gpu:1"):
        convert_memory(values(), "red", 2)
    with settings(missing_gpu="host"), pytest.warns(MissingGpuWarning):
        assert device_of(convert_memory(values(), "red", 2)) == "cpu"


def test_auto_is_the_card_with_the_most_free_memory(red: Red) -> None:
    assert explain(values(), "red", "auto").device == "gpu:1"
    assert device_of(convert_memory(values(), "red", gpu_id="auto")) == "gpu:1"
    red.pool.free = (901, 900)
    assert device_of(convert_memory(values(), "red", "auto")) == "gpu:0"


def test_from_a_card_to_the_host(red: Red) -> None:
    card = RedCard(values(), 1)
    for target in ("numpy", "torch", "jax", "tensorflow"):
        require(target)
        check_route(explain(card, target), "host cpu 1")
        result = convert_memory(card, target)
        assert data.bits(result) == values().tobytes()
        assert device_of(result) == "cpu"
        with pytest.raises(CopyRequiredError):
            convert_memory(card, target, copy=False)


def test_nothing_given_data_stays_on_its_card(red: Red) -> None:
    card = RedCard(values(), 1)
    assert convert_memory(card, "red") is card
    assert convert_memory(card, "red", 1) is card
    check_route(explain(card, "blue"), "dlpack gpu:1 0")
    check_route(explain(values(), "red"), "view cpu 0")
    # A framework without host arrays takes what comes from the host to its current device.
    check_route(explain(values(), "lone"), "device gpu:1 1")


def test_two_frameworks_share_the_memory_of_a_card(red: Red) -> None:
    card = RedCard(values(), 1)
    for _ in range(2):
        other = convert_memory(card, "blue", copy=False)
        assert type(other) is BlueCard
        assert other.values is card.values
        assert other.card == 1
    assert done_by("blue") == ["adopt from red"] * 2
    assert red.done == []
    back = convert_memory(other, "red", 1)
    assert back.values is card.values


def test_a_copy_on_the_card_is_made_once(red: Red) -> None:
    card = RedCard(values(), 0)
    check_route(explain(card, "blue", copy=True), "device gpu:0 1")
    other = convert_memory(card, "blue", copy=True)
    assert not np.shares_memory(other.values, card.values)
    check_route(explain(card, "red", copy=True), "device gpu:0 1")
    same = convert_memory(card, "red", copy=True)
    assert not np.shares_memory(same.values, card.values)
    assert red.done == ["copy", "copy"]


def test_strides_that_the_other_framework_lacks(red: Red) -> None:
    card = RedCard(values()[::-1], 0)
    route = explain(card, "blue")
    check_route(route, "device gpu:0 1")
    assert "negative strides" in route.reason
    other = convert_memory(card, "blue")
    assert other.values.tolist() == values()[::-1].tolist()
    assert not np.shares_memory(other.values, card.values)
    with pytest.raises(CopyRequiredError, match="negative strides"):
        convert_memory(card, "blue", copy=False)
    # The other way round they are welcome.
    check_route(explain(BlueCard(values()[::-1], 0), "red"), "dlpack gpu:0 0")


def test_from_one_card_to_another(red: Red) -> None:
    card = RedCard(values(), 0)
    check_route(explain(card, "red", 1), "device gpu:1 1")
    moved = convert_memory(card, "red", 1)
    assert moved.card == 1
    assert moved.values.tolist() == values().tolist()
    assert red.done == ["gpu:0 to gpu:1"]
    with pytest.raises(CopyRequiredError):
        convert_memory(card, "red", 1, copy=False)
    check_route(explain(card, "blue", 1), "device gpu:1 1")
    other = convert_memory(card, "blue", 1)
    assert (type(other), other.card) == (BlueCard, 1)
    assert not np.shares_memory(other.values, card.values)
    assert done_by("blue") == ["adopt from red", "gpu:0 to gpu:1"]


def test_between_cards_that_share_nothing(red: Red) -> None:
    card = RedCard(values(), 1)
    check_route(explain(card, "lone"), "host gpu:1 2")
    there = convert_memory(card, "lone")
    assert type(there) is LoneCard
    assert there.values.tolist() == values().tolist()
    check_route(explain(there, "lone", 0), "host gpu:0 2")
    assert convert_memory(there, "lone", 0).card == 0
    check_route(explain(there, "red"), "host cpu 1")
    check_route(explain(there, "red", 1), "host gpu:1 2")
    assert device_of(convert_memory(there, "red")) == "cpu"


def test_to_cpu_and_to_gpu_on_cards(red: Red) -> None:
    card = RedCard(values(), 0)
    assert arraybridge.to_gpu(card) is card
    assert arraybridge.to_gpu(card, 1).card == 1
    assert arraybridge.to_gpu(card, "auto").card == 1
    home = arraybridge.to_cpu(card)
    assert type(home) is RedCard
    assert home.card == -1
    assert arraybridge.to_gpu(home, 1).card == 1
    assert arraybridge.to_cpu(home) is home
    with pytest.raises(DeviceNotFoundError, match="to_numpy"):
        arraybridge.to_cpu(LoneCard(values(), 0))


def test_casts_on_cards(red: Red) -> None:
    card = RedCard(values(), 0)
    for target, gpu_id, copies in (("red", None, 1), ("blue", None, 1), ("red", 1, 2), ("numpy", None, 2)):
        route = explain(card, target, gpu_id, dtype="float32")
        assert route.copies == copies
        assert "cast" in route.reason
        result = convert_memory(card, target, gpu_id, dtype="float32")
        got = result if target == "numpy" else result.values
        assert got.dtype == np.float32
        assert got.tolist() == values().tolist()
        with pytest.raises(CopyRequiredError):
            convert_memory(card, target, gpu_id, dtype="float32", copy=False)
    assert card.values.dtype == np.float64


def test_trees_and_traces_with_cards(red: Red) -> None:
    with trace() as log:
        tree = convert_tree({"a": values(), "b": (RedCard(values(), 0), 1)}, "red", 1)
    assert [tree["a"].card, tree["b"][0].card, tree["b"][1]] == [1, 1, 1]
    assert log.total_bytes_copied == 96
    assert [str(record.device) for record in log.records] == ["gpu:1", "gpu:1"]
