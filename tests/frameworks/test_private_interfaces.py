"""Workarounds for other libraries and their private names: every supported release still needs each one.

Each entry quotes the place in the package, where a comment cites the upstream issue. If an entry fails,
remove the workaround or replace the private name, and remove the entry.
"""

from __future__ import annotations

import importlib
import sys
import tomllib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import arraybridge
from arraybridge.host import dlpack_capsules
from arraybridge.interface.framework import NoPlanError
from tests.helpers import require

PACKAGE = Path(arraybridge.__file__).parent
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@dataclass(frozen=True, slots=True)
class Entry:
    """A workaround: its module, a text in this module, its package, and the check of the need."""

    module: str
    text: str
    package: str
    is_needed: Callable[[Any], bool]


_ENTRIES: list[Entry] = []
_Check = Callable[[Any], bool]


def _entry(module: str, text: str, package: str) -> Callable[[_Check], _Check]:
    def register(is_needed: _Check) -> _Check:
        _ENTRIES.append(Entry(module, text, package, is_needed))
        return is_needed

    return register


def _source(module: str) -> str:
    """Return the source of a module with all comments and docstrings unwrapped."""
    lines = (PACKAGE / module).read_text(encoding="utf-8").split("\n")
    return " ".join(line.strip().removeprefix("#:").removeprefix("# ").strip() for line in lines)


def _raises(
    kind: type[Exception] | tuple[type[Exception], ...], fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fn(*args, **kwargs)
        except kind:
            return True
    return False


# PyTorch


@_entry("frameworks/torch/framework.py", "from torch.utils import _pytree", "torch")
def _pytree_is_private(torch: Any) -> bool:
    return not hasattr(torch.utils, "pytree") and not hasattr(torch, "pytree")


@_entry("frameworks/torch/gradients.py", "is_functorch_wrapped_tensor", "torch")
def _only_a_private_name_recognizes_transforms(torch: Any) -> bool:
    is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
    seen = []

    def f(x: Any) -> Any:
        seen.append(is_transformed(x))
        return x.sum()

    torch.func.grad(f)(torch.ones(2))
    is_exact = seen == [True] and not is_transformed(torch.ones(2))
    return is_exact and not hasattr(torch.func, "is_functorch_wrapped_tensor")


@_entry("frameworks/torch/gradients.py", "is_legacy_batchedtensor", "torch")
def _batched_gradients_use_the_old_vmap(torch: Any) -> bool:
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda g: seen.append(torch._C._functorch.is_legacy_batchedtensor(g)))
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True)
    return seen == [True]


@_entry("frameworks/torch/gradients.py", "from torch._subclasses.fake_tensor import FakeTensorMode", "torch")
def _meta_device_does_not_apply_to_constants(torch: Any) -> bool:
    constant = torch.ones(2)
    with torch.device("meta"):
        return _raises(RuntimeError, lambda: torch.ones(2) + constant)


@_entry("frameworks/torch/gradients.py", "x._version", "torch")
def _version_is_private(torch: Any) -> bool:
    x = torch.ones(2)
    before = x._version
    x.add_(1)
    return bool(x._version > before) and not hasattr(torch.Tensor, "version")


@_entry("frameworks/torch/surroundings.py", "peek_interpreter_stack", "torch")
def _only_a_private_name_finds_transforms(torch: Any) -> bool:
    peek = torch._C._functorch.peek_interpreter_stack
    seen = []

    def f(x: Any) -> Any:
        seen.append(peek())
        return x.sum()

    torch.func.grad(f)(torch.ones(2))
    return peek() is None and None not in seen and not hasattr(torch.func, "peek_interpreter_stack")


@_entry("frameworks/torch/framework.py", "DisableTorchFunction", "torch")
def _public_context_managers_call_function_modes(torch: Any) -> bool:
    calls = []

    class Recorder(torch.overrides.TorchFunctionMode):  # type: ignore[misc]  # torch is Any
        def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(fn)
            return fn(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Recorder():
        with torch._C.DisableTorchFunction():
            _ = x.nbytes
        is_silent = not calls
        with torch._C.DisableTorchFunctionSubclass():
            _ = x.nbytes
    return is_silent and bool(calls)


@_entry("compilers.py", "get_eval_frame_callback", "torch")
def _hook_of_the_compiler_is_private(torch: Any) -> bool:
    hook = importlib.import_module("torch._C._dynamo.eval_frame").get_eval_frame_callback()
    return hook is None and not hasattr(torch.compiler, "get_eval_frame_callback")


@_entry("frameworks/torch/sparse.py", "x._values()", "torch")
def _uncoalesced_parts_are_private(torch: Any) -> bool:
    x = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,), check_invariants=True)
    return x._values().tolist() == [1, 2] and _raises(RuntimeError, x.values)


@_entry("frameworks/torch/sparse.py", "only through COO", "torch")
def _block_layouts_are_not_converted(torch: Any) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        blocks = torch.eye(4).to_sparse_bsr((2, 2))
    return _raises(RuntimeError, blocks.to_sparse_csr)


@_entry("frameworks/torch/framework.py", "no copy kernel for sub-byte dtypes", "torch")
def _sub_byte_dtypes_cannot_be_copied(torch: Any) -> bool:
    bits = torch.zeros(2, dtype=torch.uint8).view(torch.uint1)
    return _raises(NotImplementedError, bits.clone)


@_entry("frameworks/torch/framework.py", "records conjugation and negation as bits", "torch")
def _exports_lack_lazy_values(torch: Any) -> bool:
    x = torch.full((2,), 1j, dtype=torch.complex64).conj()
    negated = x.imag
    is_wrong = torch.from_dlpack(negated).tolist() != negated.tolist()
    return _raises(BufferError, x.__dlpack__) and is_wrong


@_entry("frameworks/torch/framework.py", "PyTorch has no read-only tensors", "torch")
def _tensors_of_read_only_memory_are_writable(torch: Any) -> bool:
    memory = np.ones(2)
    memory.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bool(torch.from_numpy(memory).numpy().flags.writeable)


# JAX


@_entry("frameworks/jax/framework.py", "dlpack_managed_tensor_to_buffer", "jax")
def _public_import_narrows(jax: Any) -> bool:
    from arraybridge.frameworks.jax import framework as module

    narrowed = jax.dlpack.from_dlpack(arraybridge.aligned((16,), "float64")).dtype == "float32"
    return module._import_capsule is not None and narrowed


@_entry("frameworks/jax/framework.py", "from jax._src import xla_bridge", "jax")
def _public_queries_start_jax(jax: Any) -> bool:
    import jax.extend.backend
    from jax._src import xla_bridge

    jax.devices()
    is_public = hasattr(jax, "backends_are_initialized")
    is_public |= hasattr(jax.extend.backend, "backends_are_initialized")
    return bool(xla_bridge.backends_are_initialized()) and not is_public


@_entry("frameworks/jax/framework.py", "from jax._src import core", "jax")
def _transformations_are_reported_privately(jax: Any) -> bool:
    from jax._src import core

    seen = []
    jax.make_jaxpr(lambda x: seen.append(core.trace_state_clean()) or x)(1.0)
    return [*seen, core.trace_state_clean()] == [False, True] and not hasattr(jax, "trace_state_clean")


@_entry("frameworks/jax/framework.py", "jax.Array.__subclasses__()", "jax")
def _class_of_arrays_is_private(jax: Any) -> bool:
    cls = type(jax.numpy.zeros(()))
    is_public = any(cls is one for module in (jax, jax.numpy) for one in vars(module).values())
    return cls in jax.Array.__subclasses__() and not is_public


@_entry("frameworks/jax/framework.py", "unpickling narrows 64-bit dtypes", "jax")
def _unpickling_narrows(jax: Any) -> bool:
    from arraybridge.frameworks.jax.surroundings import x64

    with x64(True):  # not by `pickle.dumps`, because `arraybridge.dask` registers a function for it
        build, arguments = jax.numpy.ones(2, "float64").__reduce__()
    with x64(False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bool(build(*arguments).dtype == "float32")


# TensorFlow


@_entry("frameworks/tensorflow/framework.py", "tf.__internal__.EagerTensor", "tensorflow")
def _class_of_eager_tensors_is_private(tensorflow: Any) -> bool:
    cls = tensorflow.__internal__.EagerTensor
    return isinstance(tensorflow.constant(1), cls) and not hasattr(tensorflow, "EagerTensor")


@_entry("frameworks/tensorflow/framework.py", "eager_context.eager_mode", "tensorflow")
def _init_scope_has_no_effect_in_graphs(tensorflow: Any) -> bool:
    with tensorflow.Graph().as_default():
        with tensorflow.init_scope():
            is_eager = tensorflow.executing_eagerly()
        with tensorflow.__internal__.eager_context.eager_mode():
            return not is_eager and bool(tensorflow.executing_eagerly())


@_entry("frameworks/tensorflow/gradients.py", "TFE_Py_TapeSetPossibleGradientTypes", "tensorflow")
def _tapes_are_counted_by_a_private_name(tensorflow: Any) -> bool:
    from tensorflow.python import pywrap_tfe

    x = tensorflow.constant([1.0])
    without = pywrap_tfe.TFE_Py_TapeSetPossibleGradientTypes([x])
    with tensorflow.GradientTape() as tape:
        tape.watch(x)
        return without == 0 != pywrap_tfe.TFE_Py_TapeSetPossibleGradientTypes([x])


@_entry("frameworks/tensorflow/framework.py", "tf.identity may return the same buffer", "tensorflow")
def _identity_shares(tensorflow: Any) -> bool:
    address = arraybridge.framework("tensorflow").interchange.address
    x = tensorflow.constant([1.0, 2.0])
    return bool(address(x) == address(tensorflow.identity(x)))


@_entry("frameworks/tensorflow/framework.py", "__dlpack__ raises for stream=", "tensorflow")
def _exports_reject_streams(tensorflow: Any) -> bool:
    x = tensorflow.constant([1.0])
    # TensorFlow 2.19 has no __dlpack__.
    return not hasattr(x, "__dlpack__") or _raises((RuntimeError, TypeError), x.__dlpack__, stream=1)


@_entry("frameworks/tensorflow/framework.py", "imports only C-contiguous memory", "tensorflow")
def _imports_reject_strides(tensorflow: Any) -> bool:
    transposed = np.ones((3, 4)).T.__dlpack__()
    return _raises(tensorflow.errors.OpError, tensorflow.experimental.dlpack.from_dlpack, transposed)


# Paddle, NumPy and SciPy


@_entry("frameworks/paddle/framework.py", "x._copy_to(place, True)", "paddle")
def _blocking_copies_are_private(paddle: Any) -> bool:
    return bool(paddle.ones([2])._copy_to(paddle.CPUPlace(), True).numpy().tolist() == [1, 1])


@_entry("memory/oom_recognition.py", '"_ArrayMemoryError"', "numpy")
def _memory_error_is_private(numpy: Any) -> bool:
    with pytest.raises(MemoryError, match=r"^Unable to allocate [\d.]+ EiB for an array") as caught:
        numpy.empty(1 << 58)
    exceptions = numpy.exceptions
    return caught.type.__qualname__ == "_ArrayMemoryError" and caught.type not in vars(exceptions).values()


@_entry("host/dlpack_capsules.py", "NumPy does not export extended dtypes", "ml_dtypes")
def _extended_dtypes_are_not_exported(ml_dtypes: Any) -> bool:
    return _raises(BufferError, np.ones(2, ml_dtypes.bfloat16).__dlpack__)


@_entry("frameworks/numpy/sparse.py", "narrows int64 indices to int32", "scipy.sparse")
def _copies_of_matrices_narrow(sparse: Any) -> bool:
    x = sparse.csr_matrix(np.eye(3))
    x.indices, x.indptr = x.indices.astype("int64"), x.indptr.astype("int64")
    return bool(x.copy().indices.dtype == "int32")


@_entry("frameworks/numpy/sparse.py", "but cannot convert them to another layout", "scipy.sparse")
def _half_precision_is_not_converted(sparse: Any) -> bool:
    x = sparse.coo_array(np.eye(3))
    x.data = x.data.astype("float16")
    return _raises(ValueError, x.tocsr)


# Carriers, Dask and Python


@_entry("carriers/tables.py", "no index of dtype float16", "pandas")
def _index_rejects_half_precision(pandas: Any) -> bool:
    return _raises(NotImplementedError, pandas.Index, np.ones(2, "float16"))


@_entry("carriers/tables.py", "the private attribute ``_mgr.blocks``", "pandas")
def _blocks_of_tables_are_private(pandas: Any) -> bool:
    frame = pandas.DataFrame(np.ones((2, 2)))
    is_public = any("block" in name for name in dir(frame) if not name.startswith("_"))
    return len(frame._mgr.blocks) == 1 and not is_public


@_entry("carriers/arrow.py", "Arrow has no complex", "pyarrow")
def _arrow_has_no_complex_dtypes(pyarrow: Any) -> bool:
    return _raises(pyarrow.ArrowNotImplementedError, pyarrow.from_numpy_dtype, "complex64")


@_entry("carriers/images.py", '"_im"', "PIL.Image")
def _closed_images_raise(pillow: Any) -> bool:
    image = pillow.new("L", (2, 2))
    is_open = type(image._im).__name__ != "DeferredError"
    image.close()
    return is_open and type(image._im).__name__ == "DeferredError" and _raises(ValueError, lambda: image.im)


@_entry("carriers/labeled.py", '"_in_memory"', "xarray")
def _only_private_names_show_unread_variables(xarray: Any) -> bool:
    variable = xarray.Variable("x", np.ones(2))
    names = {name for name in dir(variable) if "memory" in name or "lazy" in name or "loaded" in name}
    return names == {"_in_memory"} and variable._in_memory and variable._data is not None


@_entry("dask/block_functions.py", "array._meta", "dask.array")
def _meta_array_is_private(dask_array: Any) -> bool:
    x = dask_array.from_array(np.ones(2))
    return isinstance(x._meta, np.ndarray) and not hasattr(x, "meta")


@_entry("tracing/interception.py", '"_initializing"', "importlib.machinery")
def _running_imports_are_private(machinery: Any) -> bool:
    seen = []

    class Importer:
        def find_spec(self, name: str, *_: Any) -> Any:
            return machinery.ModuleSpec(name, self) if name == "imported_by_this_test" else None

        def create_module(self, spec: Any) -> None:
            return None

        def exec_module(self, module: Any) -> None:
            seen.append(module.__spec__._initializing)

    importer: Any = Importer()
    sys.meta_path.insert(0, importer)
    try:
        spec: Any = importlib.import_module("imported_by_this_test").__spec__
    finally:
        sys.meta_path.remove(importer)
        sys.modules.pop("imported_by_this_test", None)
    return seen == [True] and not spec._initializing and not hasattr(spec, "initializing")


@pytest.mark.parametrize("entry", _ENTRIES, ids=lambda entry: entry.is_needed.__name__.lstrip("_"))
def test_workaround_is_needed(entry: Entry) -> None:
    assert entry.text in _source(entry.module), "remove this entry"
    package = require(entry.package)
    assert entry.is_needed(package), f"{entry.package} no longer needs the workaround in {entry.module}"


#: The place of a workaround for old releases, and the first release that does not need it.
_FIXED_IN = [
    ("frameworks/torch/framework.py", "float8_e8m0fnu: torch >= 2.7", "torch", "2.7"),
    ("compilers.py", "torch 2.6 has no reason=", "torch", "2.7"),
    ("frameworks/torch/framework.py", "torch >= 2.8", "torch", "2.8"),
    ("frameworks/torch/framework.py", "torch >= 2.9", "torch", "2.9"),
    ("frameworks/torch/framework.py", "torch >= 2.12", "torch", "2.12"),
    ("frameworks/jax/surroundings.py", "jax 0.7.0 has jax.sharding.use_mesh", "jax", "0.7.1"),
    ("frameworks/jax/framework.py", "_RESPECTS_ORDER = ", "jax", "0.8"),
    ("frameworks/jax/surroundings.py", "jax >= 0.8 has jax.enable_x64", "jax", "0.8"),
    ("frameworks/jax/sparse.py", "JAX before 0.8 casts 64-bit parts", "jax", "0.8"),
    ("frameworks/jax/gradients.py", "jax < 0.8 does not convert", "jax", "0.8"),
    ("validation.py", "numpy < 2 warns", "numpy", "2"),
    ("frameworks/numpy/sparse.py", "SciPy < 1.15 supports", "scipy", "1.15"),
    ("memory/segments.py", "Python < 3.13", "python", "3.13"),
    ("parallel/stage_chain.py", "Python < 3.14", "python", "3.14"),
]


def _lowest_releases() -> dict[str, Version]:
    """Return the lowest supported release of Python and of each dependency, from pyproject.toml."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    listed = [*project["dependencies"], *chain.from_iterable(extras)]
    lowest = {"python": _lower_bound(SpecifierSet(project["requires-python"]))}
    for requirement in map(Requirement, listed):
        bound = _lower_bound(requirement.specifier)
        lowest[requirement.name] = min(bound, lowest.get(requirement.name, bound))
    return lowest


def _lower_bound(specifier: SpecifierSet) -> Version:
    return max((Version(one.version) for one in specifier if one.operator == ">="), default=Version("0"))


@pytest.mark.skipif(not PYPROJECT.exists(), reason="pyproject.toml is not installed")
@pytest.mark.parametrize(("module", "text", "package", "release"), _FIXED_IN)
def test_a_supported_release_needs_the_workaround(module: str, text: str, package: str, release: str) -> None:
    assert text in _source(module), "remove this entry"
    assert _lowest_releases()[package] < Version(release), "no supported release needs this workaround"


@pytest.mark.parametrize("dtype", ["float64", "int64", "float32", "bool"])
def test_public_import_shares_without_the_private_one(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require("jax")
    from arraybridge.frameworks.jax import framework as module

    memory: Any = arraybridge.aligned((4, 3), dtype)
    memory[...] = np.arange(12).reshape(4, 3)
    monkeypatch.setattr(module, "_import_capsule", None)
    framework = module.JaxFramework()
    with pytest.raises(NoPlanError):  # conversions then take the slow path
        framework.fast_path.fast_import(dlpack_capsules.capsule(memory))
    shared = framework.from_host(memory, arraybridge.Device("cpu", 0))
    assert shared.dtype == dtype
    assert shared.unsafe_buffer_pointer() == memory.ctypes.data
    np.testing.assert_array_equal(np.asarray(shared), memory)


def test_jax_is_queried_without_the_private_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    require("jax")
    from arraybridge.frameworks.jax import framework as module

    monkeypatch.setattr(module, "_xla_bridge", None)
    assert arraybridge.framework("jax").devices.is_started()


def test_pandas_tables_are_converted_without_the_private_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    pandas: Any = pytest.importorskip("pandas", reason="pandas is not installed")
    from arraybridge.carriers import tables

    frame = pandas.DataFrame(np.arange(6.0).reshape(3, 2))
    apart = pandas.DataFrame({"a": [1.0]})
    apart["b"] = 2.0
    mixed = pandas.DataFrame({"a": [1.0], "b": [1]})
    read = tables._open_table
    assert [len(read(x)[1]) for x in (frame, apart, mixed)] == [1, 2, 2]
    # The public attributes are read of subclasses.
    subclass = type("Frame", (pandas.DataFrame,), {})
    assert [read(subclass(x))[1] for x in (frame, apart, mixed)] == [None, None, None]
    for has_blocks in (True, False):
        if not has_blocks:
            monkeypatch.setattr(tables, "_open_table", lambda x: read(subclass(x)))
        assert arraybridge.explain(frame, "numpy").shares_memory
        assert not arraybridge.explain(apart, "numpy").shares_memory
        assert arraybridge.to_numpy(apart).tolist() == [[1.0, 2.0]]
        with pytest.raises(arraybridge.UnknownArrayError):
            arraybridge.to_numpy(mixed)
