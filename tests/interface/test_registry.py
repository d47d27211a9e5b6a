"""Names of frameworks and detection of arrays, without imports and with loading on demand."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import arraybridge
from arraybridge import MemoryType, convert_memory, detect_memory_type, is_oom_error, register
from arraybridge.conversion import convert
from arraybridge.conversion.table import FRAMEWORKS
from arraybridge.decorators import framework_decorators
from arraybridge.interface import registry
from arraybridge.interface.autodiff import NOT_DIFFERENTIABLE
from arraybridge.interface.component import component
from arraybridge.interface.devices import Devices
from arraybridge.interface.memory import Memory
from arraybridge.interface.sparse import SparseArrays
from arraybridge.interface.streams import Streams
from arraybridge.memory import cleanup
from tests.fake_gpu import FakeGpuArray, FakeGpuFramework
from tests.helpers import registry_kept, require, run_python

SCRIPTS = Path(__file__).parents[1] / "conversion" / "scripts"
EXTRAS = {
    "cupy": "cupy-cuda13x",
    **{name: name for name in ("torch", "jax", "tensorflow", "pyclesperanto", "mlx", "paddle")},
}


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    """Restore the registry after the test."""
    with registry_kept():
        yield


# ---- missing or broken frameworks ------------------------------------------------------------------------


def test_missing_frameworks_raise_and_do_not_affect_others() -> None:
    done = run_python(str(SCRIPTS / "ways_to_be_missing.py"))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    for name, extra in EXTRAS.items():
        for what, answer in report["answers"][name].items():
            assert answer.get("class") == "FrameworkNotInstalledError", (name, what, answer)
            assert f'".[{extra}]" in a checkout' in answer["message"], (name, what, answer)
            assert answer["message"].startswith(f"{name} is not installed. Run pip install")
            assert "Error(" in answer["cause"], (name, what, answer)
    goes_on = report["goes on"]
    assert {what: answer for what, answer in goes_on.items() if "result" not in answer} == {}
    assert goes_on["convert_memory"]["result"] is True
    assert goes_on["devices"]["result"] == ["cpu"]
    assert goes_on["is_oom_error"]["result"] == [True, False]
    assert goes_on["gpu"]["result"] == [[2, 2], [2, 2]]


BROKEN = {
    "torch": ("raise ImportError('libtorch.so: cannot open shared object file')", "ImportError"),
    "cupy": ("raise OSError('no driver')", "OSError"),
    "tensorflow": ("raise SystemExit(3)", "SystemExit"),
    "mlx": ("def f(:", "SyntaxError"),
}


def test_broken_frameworks_raise_a_specific_error(tmp_path: Path) -> None:
    for name, (code, _) in BROKEN.items():
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    (tmp_path / "mlx.py").unlink()
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "core.py").write_text(BROKEN["mlx"][0], encoding="utf-8")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import json, numpy as np, arraybridge as ab\n"
        "report = {}\n"
        "for name in sys.argv[1:]:\n"
        "    for _ in range(2):\n"
        "        try: ab.convert_memory(np.ones(2), name)\n"
        "        except ab.FrameworkNotInstalledError as error:\n"
        "            report[name] = [str(error), type(error.__cause__).__name__]\n"
        "print(json.dumps([report, [str(device) for device in ab.devices('numpy')]]))"
    )
    done = run_python("-c", program, *BROKEN)
    assert done.returncode == 0, done.stderr
    report, devices = json.loads(done.stdout)
    assert devices == ["cpu"]
    for name, (_, cause) in BROKEN.items():
        message, raised = report[name]
        assert raised == cause
        assert message.startswith(f"{name} is installed, but importing it failed: {cause}"), message
        assert "pip install --force-reinstall " in message
        assert f'".[{EXTRAS[name]}]" in a checkout' in message
    assert "libtorch.so" in report["torch"][0]


# ---- detection -------------------------------------------------------------------------------------------


def test_subclasses_belong_to_the_framework_of_their_base(tmp_path: Path) -> None:
    torch, tf, jax = require("torch"), require("tensorflow"), require("jax")
    my_array = type("MyArray", (np.ndarray,), {})  # as users write them
    my_tensor = type("MyTensor", (torch.Tensor,), {})
    arrays: dict[str, list[Any]] = {
        "numpy": [
            *(np.array([object()]), np.zeros(3).view(my_array), np.ma.masked_array([1], [True])),
            *(np.memmap(tmp_path / "values", "f4", "w+", shape=4), np.rec.array([(1, 2.0)], dtype="i4, f8")),
        ],
        "torch": [
            *(torch.nn.Parameter(torch.ones(2)), torch.nn.Buffer(torch.ones(2)), torch.eye(2).to_sparse()),
            *(torch.ones(2).as_subclass(my_tensor), torch.ones(2, device="meta")),
        ],
        "tensorflow": [
            *(tf.Variable([1.0]), tf.constant("a"), tf.ragged.constant([[1], [2, 3]])),
            tf.sparse.from_dense([[0, 1]]),
        ],
        "jax": [jax.random.key(0)],
    }
    for name, values in arrays.items():
        for value in values:
            assert detect_memory_type(value) == name, type(value)
    seen: list[str] = []
    jax.jit(lambda x: seen.append(detect_memory_type(x)))(jax.numpy.ones(2))
    assert seen == ["jax"]


def test_detection_does_not_import_frameworks() -> None:
    """Detect arrays before and after an import of PyTorch and JAX."""
    for name in ("torch", "jax"):
        require(name)
    done = run_python(str(SCRIPTS / "detect_imports_nothing.py"), "torch", "jax")
    assert done.returncode == 0, done.stderr
    alone, other = map(set, json.loads(done.stdout))
    assert alone == set()
    assert not other & {"cupy", "tensorflow", "pyclesperanto", "pyclesperanto_prototype", "pyopencl"}


# ---- register --------------------------------------------------------------------------------------------


def test_registered_frameworks_are_found_replaced_and_removed() -> None:
    class Doubling(FakeGpuFramework):
        modules = ("tests",)

        def to_host(self, x: FakeGpuArray) -> np.ndarray[Any, Any]:
            return x.values * 2

    made, x = FakeGpuFramework(), FakeGpuArray(np.array([1, 2]))
    with pytest.raises(ValueError, match="cards"):
        convert_memory(np.ones(2), "cards")
    with pytest.raises(arraybridge.UnknownArrayError):
        detect_memory_type(x)
    assert register(made) is arraybridge.framework("cards") is made
    assert detect_memory_type(x) == "cards"
    assert convert_memory(x, "cards") is x
    assert convert_memory(x, "numpy").tolist() == [1, 2]
    register(Doubling(), replace=True)
    assert convert_memory(x, "numpy").tolist() == [2, 4]
    registry.unregister("cards")
    assert "cards" not in registry.framework_names()
    assert "tests" not in registry.names_by_module()
    with pytest.raises(arraybridge.UnknownArrayError):
        detect_memory_type(x)
    with pytest.raises(arraybridge.UnknownFrameworkError):
        registry.unregister("cards")


def test_existing_names_are_replaced_only_on_request() -> None:
    require("torch")
    fix = r"\. Choose another name, or pass replace=True to replace that framework\.$"
    for name in ("numpy", "torch", "mlx"):
        taken = type("Taken", (FakeGpuFramework,), {"name": name})()
        problem = f"^Cannot register Taken: the name '{name}' belongs to a built-in framework"
        with pytest.raises(ValueError, match=problem + fix):
            register(taken)
        assert registry.instances().get(name) is not taken
    with pytest.raises(ValueError, match=r"^Cannot register TorchFramework: it is already registered as"):
        register(registry.framework("torch"))
    first = register(FakeGpuFramework())
    second = FakeGpuFramework()
    with pytest.raises(ValueError, match="already registered") as caught:
        register(first)
    assert str(caught.value) == (
        "Cannot register FakeGpuFramework: it is already registered as 'cards'. Remove this call, since"
        " framework('cards') returns it, or pass replace=True."
    )
    problem = "^Cannot register FakeGpuFramework: the name 'cards' belongs to a registered FakeGpuFramework"
    with pytest.raises(ValueError, match=problem + fix):
        register(second)
    assert arraybridge.framework("cards") is first
    assert register(second, replace=True) is second
    assert arraybridge.framework("cards") is second
    registry.unregister("cards")
    assert register(first) is first  # the name is free again


def test_objects_that_are_not_instances_of_a_subclass_raise() -> None:
    with pytest.raises(TypeError) as caught:
        register(FakeGpuFramework)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "register() expected an instance of a subclass of Framework, got the class FakeGpuFramework."
        " Pass an instance, as in register(FakeGpuFramework())."
    )
    with pytest.raises(TypeError, match=r"got an object of type int\. .* as in register\(MyFramework\(\)\)"):
        register(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^replace='yes' must be True or False\.$"):
        register(FakeGpuFramework(), replace="yes")  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"got the class Carrier\. .* as in register_carrier\(MyCarrier\(\)\)"
    ):
        arraybridge.register_carrier(arraybridge.Carrier)  # type: ignore[arg-type]


def test_incomplete_classes_raise() -> None:
    def owns(self: Any, x: Any) -> bool:
        return False

    def read(self: Any, x: Any) -> Any:
        return x

    def make(self: Any, view: Any, device: Any) -> Any:
        return view

    complete = {"name": "partial", "modules": ("partial",), "owns": owns, "from_host": make, "to_host": read}
    for left_out, words in {
        "modules": "modules",
        "from_host": "from_host",
        "to_host": "host_view or to_host",
    }.items():
        some = {key: value for key, value in complete.items() if key != left_out}
        with pytest.raises(ValueError, match=words):
            register(type("Partial", (arraybridge.Framework,), some)())
    for modules in ("partial", (), (3,)):
        with pytest.raises(ValueError, match="modules"):
            register(type("Partial", (arraybridge.Framework,), {**complete, "modules": modules})())
    assert "partial" not in registry.framework_names()
    for reader in ("to_host", "host_view"):
        some = {key: value for key, value in complete.items() if key != "to_host"}
        register(type("Partial", (arraybridge.Framework,), {**some, reader: read})())
        registry.unregister("partial")


class OwnMemory(Memory):
    """A component of a test framework."""


class OwnStreams(Streams):
    """Streams of a test framework."""


_IMPORT = r" Import with: from arraybridge\.interface import component\.$"
_DERIVE = (
    r"Derive MyMemory from Memory and write memory = component\(MyMemory\)\."
    r" Import with: from arraybridge\.interface import Memory, component\.$"
)
_WRONG_COMPONENTS: dict[str, tuple[str, Any, str]] = {
    "class": (
        "memory",
        OwnMemory,
        r"the class OwnMemory\. Write memory = component\(OwnMemory\)\." + _IMPORT,
    ),
    "instance": (
        "memory",
        OwnMemory(None),  # type: ignore[arg-type]
        r"of type OwnMemory\. Write memory = component\(OwnMemory\)\." + _IMPORT,
    ),
    "other class": ("memory", dict, r"the class dict\. " + _DERIVE),
    "None": ("memory", None, r"of type NoneType\. " + _DERIVE),
    "other component": (
        "memory",
        component(Devices),
        r"the class Devices\. " + _DERIVE,
    ),
    "streams": ("streams", OwnStreams, r"the class OwnStreams\. Write streams = OwnStreams\(\)\.$"),
    "no autodiff": (
        "autodiff",
        None,
        r"of type NoneType\. Derive MyAutodiff from Autodiff and write autodiff = MyAutodiff\(\)\. Import",
    ),
    "sparse": (
        "sparse",
        SparseArrays,
        r"the class SparseArrays\. Write sparse = SparseArrays\(\)\.$",
    ),
}


@pytest.mark.parametrize("kind", _WRONG_COMPONENTS)
def test_components_that_are_assigned_in_another_way_raise(kind: str) -> None:
    name, value, message = _WRONG_COMPONENTS[kind]
    wrong = type("Wrong", (FakeGpuFramework,), {name: value})
    with pytest.raises(ValueError, match=f"^Cannot register Wrong: its attribute '{name}' is {message}"):
        register(wrong())
    assert "cards" not in registry.framework_names()


@pytest.mark.parametrize("base", [Devices, Memory, Streams, SparseArrays])
def test_imports_in_the_advice_for_components_work(base: type) -> None:
    name = {"SparseArrays": "sparse"}.get(base.__name__, base.__name__.lower())
    with pytest.raises(ValueError, match="Import with") as caught:
        register(type("Wrong", (FakeGpuFramework,), {name: 5})())
    scope: dict[str, Any] = {}
    exec(str(caught.value).partition("Import with: ")[2].removesuffix("."), scope)  # noqa: S102
    assert scope[base.__name__] is base


def test_components_that_the_constructor_assigns_are_accepted() -> None:
    class Right(FakeGpuFramework):
        streams = OwnStreams()

        def __init__(self) -> None:
            self.memory = OwnMemory(self)

    try:
        assert type(register(Right()).memory) is OwnMemory
        assert is_oom_error(MemoryError())
    finally:
        registry.unregister("cards")


class Faulty:
    """An object of a plug-in whose method `owns` raises."""


def test_a_plug_in_whose_owns_raises_is_reported() -> None:
    class Faults(arraybridge.Framework):
        name, modules = "faults", (Faulty.__module__.partition(".")[0],)
        to_host = from_host = None  # type: ignore[assignment]

        def owns(self, x: Any) -> bool:
            raise KeyError("no such dtype")

    register(Faults())
    try:
        with (
            pytest.raises(arraybridge.UnknownArrayError),
            pytest.warns(RuntimeWarning, match=r"Faults\.owns\(\) failed.*Faulty: KeyError: .*no such dtype"),
        ):
            arraybridge.to_numpy(Faulty())
    finally:
        registry.unregister("faults")


def test_a_module_with_from_dlpack_needs_no_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("partial")
    module.from_dlpack = np.from_dlpack
    monkeypatch.setitem(sys.modules, "partial", module)

    class Partial(arraybridge.Framework):
        name, modules = "partial", ("partial",)

        def owns(self, x: Any) -> bool:
            return False

    register(Partial())
    registry.unregister("partial")


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_static_metadata_agrees_with_the_frameworks(name: str) -> None:
    require(name)
    facts = registry.metadata_of(name)
    framework = arraybridge.framework(name)
    assert facts.has_only_host == framework.devices.has_only_host == (name == "numpy")
    assert facts.accelerator_kind == framework.devices.accelerator(0).kind
    assert facts.loads_first == (name == "pyclesperanto")
    assert facts.is_differentiable == (framework.autodiff is not NOT_DIFFERENTIABLE)


def test_every_built_in_framework_has_a_class_to_load() -> None:
    for name, metadata in registry.BUILT_IN.items():
        place = importlib.util.find_spec(f"arraybridge.frameworks.{name}.framework")
        assert place is not None
        source = ast.parse(Path(str(place.origin)).read_text("utf-8"))
        defined = {one.name for one in source.body if isinstance(one, ast.ClassDef | ast.FunctionDef)}
        assert metadata.factory in defined, name


def test_names_that_are_spelled_out_for_type_checkers_are_those_of_the_table() -> None:
    names = set(registry.BUILT_IN)
    assert set(framework_decorators.__all__) == names | {"memory_types"}
    assert {one for one in dir(arraybridge) if one.startswith("to_")} == {
        *(f"to_{name}" for name in names),
        "to_cpu",
        "to_gpu",
    }
    plug_ins = {"mlx", "paddle"}
    assert (
        list(MemoryType) == list(FRAMEWORKS) == [name for name in registry.BUILT_IN if name not in plug_ins]
    )
    literals = [convert._Numpy, convert._Cupy, convert._Torch, convert._Jax, convert._Tensorflow]
    assert {value for literal in literals for value in get_args(literal)} == names - plug_ins - {
        "pyclesperanto"
    }
    cleanups = [f"cleanup_{name}_gpu" for name in names - plug_ins - {"numpy"}]
    assert sorted(cleanup.__all__) == sorted(["free_memory", "cleanup_all_gpu_frameworks", *cleanups])


def test_the_linter_knows_the_packages_of_each_framework() -> None:
    """Check that only the package of a framework may import it."""
    text = Path(arraybridge.__file__).parents[1].joinpath("pyproject.toml").read_text("utf-8")
    contracts = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    (forbidden,) = [one["forbidden_modules"] for one in contracts if one["type"] == "forbidden"]
    packages = {package for one in registry.BUILT_IN.values() for package in one.packages}
    assert packages - {"numpy"} <= set(forbidden)


def test_registering_an_invalid_object_raises_type_error() -> None:
    class Nameless(FakeGpuFramework):
        name = ""

    before = registry.names_by_module()
    for thing in (None, "cards", FakeGpuFramework, np, Nameless()):
        with pytest.raises(TypeError, match=r"Framework|name"):
            register(thing)  # type: ignore[arg-type]
    assert registry.names_by_module() == before
    assert "cards" not in registry.framework_names()


def test_framework_has_at_most_31_public_names() -> None:
    """A plug-in author has to read all of them. Components have the other names."""
    assert len([name for name in dir(arraybridge.Framework) if not name.startswith("_")]) <= 31


def test_a_class_without_a_framework_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain:
        pass

    searched: list[type] = []
    candidates = registry._candidates
    monkeypatch.setattr(registry, "_candidates", lambda cls: searched.append(cls) or candidates(cls))
    for value in (Plain(), 1.5j, Plain(), 1.5j):
        assert registry.find_owner(value) is None
    assert searched.count(Plain) == 1
    assert searched.count(complex) <= 1


def test_numpy_code_is_run_on_frameworks_with_the_functions_of_numpy() -> None:
    """Neither TensorFlow nor pyclesperanto has them: `gpu` and `array_namespace` must not choose these."""
    assert [name for name in registry.numpy_like_names() if name in FRAMEWORKS] == ["cupy", "torch", "jax"]
