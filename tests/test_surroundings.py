"""Conversions do not depend on settings and contexts of Python, NumPy, PyTorch, JAX and TensorFlow.

Each test enters one of them and converts the arrays of `arrays` to every framework, by several forms of call
(see `cases`). Values, dtype, shape, device, sharing, routes and errors must equal those outside of it. To add
a setting, add a line to one of the tables at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import decimal
import functools
import gc
import importlib
import importlib.util
import itertools
import locale
import os
import sys
import tempfile
import threading
import tracemalloc
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraybridge as ab
from arraybridge import caches
from arraybridge.decorators.framework_decorators import decorator_of
from tests import matrix_data
from tests.helpers import output_of, require

FRAMEWORKS = ("numpy", "torch", "jax", "tensorflow")
PRESENT = tuple(name for name in FRAMEWORKS if importlib.util.find_spec(name) is not None)


def _imported(name: str) -> Any:
    return importlib.import_module(name) if name in PRESENT else None


torch, jax, tf = (_imported(name) for name in FRAMEWORKS[1:])

# -- arrays ------------------------------------------------------------------------------------------------


class Producer:
    """An array of an unknown library that supports only DLPack."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


#: Most arrays have this shape, because JAX compiles operations for each shape and each setting.
_GRID = np.arange(6.0).reshape(2, 3)


def aligned(values: Any) -> Any:
    array = ab.aligned(np.shape(values), "float32")
    array[...] = values
    return array


def _of_numpy() -> dict[str, Any]:
    frozen = aligned(_GRID)
    frozen.flags.writeable = False
    return {
        "numpy": aligned(_GRID + 0.5),
        "numpy with nan": np.array([[np.nan, 0.5, 0], [np.inf, -2.5, 1]]),
        "numpy read-only": frozen,
        "numpy strided": np.arange(24.0).reshape(4, 6)[::2, ::-2],
        "numpy 0-d": np.array(2**40 + 1),
        "numpy empty": np.zeros((0, 3)),
        "numpy bytes as bool": np.array([255, 1, 0], np.uint8).view(bool),
        "numpy scalar": np.float64(1e300),
        "masked": np.ma.array(_GRID, mask=_GRID > 2),
        "producer": Producer(_GRID.copy()),
    }


def _of_packages() -> dict[str, Any]:
    """Return arrays that need packages other than the frameworks."""
    arrays: dict[str, Any] = {}
    with contextlib.suppress(ImportError):
        import ml_dtypes

        arrays["numpy bfloat16"] = _GRID.astype(ml_dtypes.bfloat16)
    with contextlib.suppress(ImportError):
        import xarray

        arrays["xarray"] = xarray.DataArray(_GRID.copy(), dims=("y", "x"))
    if importlib.util.find_spec("scipy") is not None:
        for framework, layout in (("numpy", "csr"), ("torch", "csr"), ("jax", "coo"), ("tensorflow", "coo")):
            if framework in PRESENT:
                arrays[f"{framework} {layout}"] = _sparse(framework, layout)
    return arrays


def _sparse(framework: str, layout: str) -> Any:
    """Return a sparse array with sorted, unique indices, as PyTorch's invariants require."""
    from tests.sparse import arrays

    indices = np.array([[0, 1], [1, 0], [1, 2]]) if layout == "coo" else np.array([1, 0, 2])
    pointers = () if layout == "coo" else (np.array([0, 1, 3]),)
    return arrays.made(framework, arrays.Contents(layout, (2, 3), np.arange(1.0, 4), (indices, *pointers)))


def _of_torch() -> dict[str, Any]:
    return {
        "torch": torch.arange(6.0).reshape(2, 3),
        "torch strided": torch.arange(24.0).reshape(4, 6)[::2, ::2],
        "torch bfloat16": torch.arange(6.0).reshape(2, 3).to(torch.bfloat16),
        "torch 0-d": torch.tensor(2.5, dtype=torch.float64),
        "torch conjugate": torch.tensor([1 + 2j, 3j]).conj(),
        "torch with grad": torch.ones(2, 3, requires_grad=True),
    }


def _of_jax() -> dict[str, Any]:
    devices = jax.devices("cpu")
    mesh = jax.sharding.Mesh(np.array(devices), ("all",))
    sharded, whole = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in (("all",), ())
    )
    deleted = jax.numpy.arange(3)
    deleted.delete()
    with matrix_data.x64(jax):
        return {
            "jax": jax.numpy.arange(6, dtype="float32").reshape(2, 3),
            "jax with nan": jax.numpy.array([[np.nan, np.inf, 1.0]] * 2),
            "jax committed": jax.device_put(_GRID, devices[-1]),
            "jax bfloat16": jax.numpy.asarray(_GRID, "bfloat16"),
            "jax sharded": jax.device_put(np.arange(8.0), sharded),
            "jax replicated": jax.device_put(_GRID, whole),
            "jax deleted": deleted,
        }


def _of_tensorflow() -> dict[str, Any]:
    require("tensorflow")  # with two CPU devices
    return {
        "tensorflow": tf.constant(_GRID),
        "tensorflow bfloat16 0-d": tf.constant(2.5, tf.bfloat16),
        "tensorflow float8": tf.cast([1.0, 2.0], tf.experimental.float8_e5m2),
        "tensorflow variable": tf.Variable(_GRID),
        "tensorflow string": tf.constant(["a"]),
    }


@functools.cache
def arrays() -> dict[str, Any]:
    makers = {"torch": _of_torch, "jax": _of_jax, "tensorflow": _of_tensorflow}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = _of_numpy()
        for name, make in makers.items():
            if name in PRESENT:
                result |= make()
        return result | _of_packages()


# -- forms of call -----------------------------------------------------------------------------------------


def _decorate(target: str, **options: Any) -> Callable[[Any], Any]:
    def unchanged(array: Any) -> Any:
        return array

    decorated: Callable[[Any], Any] = getattr(ab, target)(**options)(unchanged)
    return decorated


def _record(x: Any, target: str) -> Any:
    with ab.trace() as log:
        ab.convert_memory(x, target)
    return log.records[0]


def _stack(x: Any, target: str) -> Any:
    is_plane = len(getattr(x, "shape", ())) == 2 and not _is_sparse(x)
    return ab.stack_slices([x, x], target) if is_plane else None


def _rows(x: Any, target: str) -> Any:
    """Split an array along its first axis and join the parts, as split recovery and pipelines do."""
    array = ab.convert_memory(x, target, grad="detach")
    if _is_sparse(array) or not array.shape:
        return None
    batching = ab.framework(target).batching
    parts = [batching.slice_axis(array, 0, 0, 1), batching.slice_axis(array, 0, 1, array.shape[0])]
    return batching.concatenate(parts, 0)


@functools.cache
def _output(name: str, target: str) -> tuple[Any, Any]:
    """Return a buffer for the values of an array, made outside of the surroundings, and its memory."""
    buffer = ab.convert_memory(arrays()[name], target, copy=True, grad="detach")
    if getattr(buffer, "requires_grad", False):
        buffer = buffer.detach()
    return buffer, None if _is_sparse(buffer) else ab.to_numpy(buffer)


def _into_output(x: Any, target: str) -> Any:
    """Return the values that are written to a buffer without and with a plan."""
    if not ab.framework(target).mutable:
        return None
    buffer, memory = _output(next(name for name, array in arrays().items() if array is x), target)
    if memory is None:
        return None
    written = []
    for _ in range(2):
        memory[...] = 0
        ab.convert_memory(x, out=buffer, grad="detach")
        written.append(memory.copy())
    return np.stack(written)


FORMS: dict[str, Callable[[Any, str], Any]] = {
    "convert_memory": lambda x, target: ab.convert_memory(x, target),
    "with a plan": lambda x, target: ab.convert_memory(x, target),
    "to_*": lambda x, target: getattr(ab, f"to_{target}")(x),
    "convert_tree": lambda x, target: ab.convert_tree({"a": [x]}, target)["a"][0],
    "decorated": lambda x, target: _decorate(target)(x),
    "decorated, restored": lambda x, target: _decorate(target, output_type="input")(x),
    "explain": lambda x, target: ab.explain(x, target),
    "trace": _record,
    "dtype": lambda x, target: ab.convert_memory(x, target, dtype="float32"),
    "copy": lambda x, target: ab.convert_memory(x, target, copy=True),
    "copy with a plan": lambda x, target: ab.convert_memory(x, target, copy=True),
    "copy=False": lambda x, target: ab.convert_memory(x, target, copy=False),
    "grad": lambda x, target: ab.convert_memory(x, target, grad="detach"),
    "out": _into_output,
    "device": lambda x, target: ab.convert_memory(x, target, device="cpu:1"),
    "stack_slices": _stack,
    "rows": _rows,
}
#: Forms that do the same with all arrays, apart from the conversion by `convert_memory`. They run only for
#: the arrays in `RECOGNIZED`.
PASSING_ON = frozenset(("to_*", "convert_tree", "decorated", "decorated, restored", "trace", "grad"))
#: Arrays that decorators and trees recognize in different ways.
RECOGNIZED = frozenset(
    (
        *("numpy", "numpy strided", "numpy scalar", "masked", "producer", "xarray", "numpy csr", "torch"),
        *("torch with grad", "torch csr", "jax", "jax committed", "jax coo", "tensorflow"),
        "tensorflow variable",
    )
)
#: The name of an array, the target, and the form of call.
Case = tuple[str, str, str]


def cases() -> Iterator[Case]:
    """Return the conversions of most tests; `FEW` and `EXCEPT` have those that some tests omit."""
    for case in itertools.product(arrays(), PRESENT, FORMS):
        if case[0] in RECOGNIZED or case[2] not in PASSING_ON:
            yield case


def convert_all(cases: Iterable[Case]) -> dict[Case, Any]:
    """Return the result or the exception of each case."""
    results: dict[Case, Any] = {}
    for name, target, form in cases:
        # A cast from complex to real dtypes warns by the rules of the target framework.
        if form == "dtype" and name == "torch conjugate":
            continue
        try:
            results[name, target, form] = FORMS[form](arrays()[name], target)
        except Exception as error:  # noqa: BLE001  # errors are outcomes, too
            results[name, target, form] = type(error), str(error)  # without references to frames
    return results


# -- outcomes ----------------------------------------------------------------------------------------------


def _name_of_class(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__name__}".lower()


def describe(result: Any, source: Any) -> Any:
    """Return the properties of a result that must not depend on surroundings."""
    if result is None or isinstance(result, (tuple, ab.Route)):  # a tuple describes an exception
        return result
    if result is source:
        return "the same object"
    if "xarray" in _name_of_class(result):
        return "xarray", describe(result.data, source.data)
    if _is_sparse(result):
        return _describe_sparse(result)
    return _describe_dense(result, source)


def _is_sparse(x: Any) -> bool:
    return "sparse" in _name_of_class(x) or "sparse" in str(getattr(x, "layout", ""))


def _describe_sparse(result: Any) -> Any:
    from tests.sparse import arrays

    parts = (result.data, result.indices) if "jax" in _name_of_class(result) else (result,)
    places = [str(getattr(part, "sharding", getattr(part, "device", ""))) for part in parts]
    return type(result), places, arrays.read(result).bits()


def _describe_dense(result: Any, source: Any) -> Any:
    framework = matrix_data.framework_of(result)
    place = getattr(result, "sharding", getattr(result, "device", ""))
    flags: Any = None
    if framework == "numpy":
        flags = result.flags.writeable
    if framework == "torch":  # the graph depends on no_grad, whose purpose this is
        flags = result.requires_grad and not getattr(source, "requires_grad", False), result.is_conj()
    if framework == "jax":
        flags = result.committed
    shares = _address(result) is not None and _address(result) == _address(source)
    return type(result), str(result.dtype), tuple(result.shape), _bits(result), str(place), flags, shares


def _bits(x: Any) -> bytes:
    name = matrix_data.framework_of(x)
    if name == "torch":
        return matrix_data.bits(x.resolve_conj())
    if name == "jax":
        return np.asarray(x).tobytes()
    return matrix_data.bits(x.value() if "Variable" in type(x).__name__ else x)


def _address(x: Any) -> int | None:
    """Return the address of the first element; None if it is unknown, or there is no element."""
    x = (
        getattr(x, "array", getattr(x, "data", x))
        if type(x) is Producer or "xarray" in _name_of_class(x)
        else x
    )
    if not isinstance(x, np.ndarray) and matrix_data.framework_of(x).startswith("no framework"):
        return None
    is_scattered = hasattr(x, "sharding") and (len(x.sharding.device_set) > 1 or x.is_deleted())
    if _is_sparse(x) or is_scattered or "string" in str(x.dtype) or 0 in x.shape:
        return None
    return matrix_data.address(x)


@functools.cache
def expected() -> dict[Case, Any]:
    results = convert_all(cases())
    return {case: describe(result, arrays()[case[0]]) for case, result in results.items()}


def check(results: dict[Case, Any]) -> None:
    """Fail if a result differs from that outside of the surroundings."""
    wrong = []
    for case, result in results.items():
        try:
            found = describe(result, arrays()[case[0]])
        except Exception as error:  # noqa: BLE001  # such as a traced value, which cannot be read
            found = f"{type(result)}, which cannot be read: {error}"
        if found != expected()[case]:
            wrong.append(f"{case}: {str(found)[:200]}, not {str(expected()[case])[:200]}")
    assert not wrong, "\n".join((f"{len(wrong)} of {len(results)} results differ:", *wrong[:20]))


def forget_everything() -> None:
    """Empty the caches of the library, so that it decides within the surroundings, as in a new process."""
    caches.empty_caches()
    modules = [module for name, module in sys.modules.items() if name.startswith("arraybridge")]
    for value in [value for module in modules for value in vars(module).values()]:
        if hasattr(value, "cache_clear") and value is not decorator_of:  # each framework has one decorator
            value.cache_clear()


# -- surroundings ------------------------------------------------------------------------------------------

Work = Callable[[], None]


def within(make: Callable[[], AbstractContextManager[Any]]) -> Callable[[Work], None]:
    """Return a function that runs the work within a context manager."""

    def run(work: Work) -> None:
        with make():
            work()

    return run


def during(transform: Callable[[Callable[[Any], Any]], Any]) -> Callable[[Work], None]:
    """Return a function that runs the work in a function that a framework transforms and calls."""

    def run(work: Work) -> None:
        def body(x: Any) -> Any:
            work()
            return (x * x).sum() if hasattr(x, "sum") else x

        transform(body)

    return run


@contextlib.contextmanager
def changed(set_value: Callable[[Any], object], old: Any, new: Any) -> Iterator[None]:
    set_value(new)
    try:
        yield
    finally:
        set_value(old)


@contextlib.contextmanager
def configured(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute, or a flag of ``jax.config``."""
    before = getattr(owner, name)
    update = owner.update if hasattr(owner, "update") else functools.partial(setattr, owner)
    with changed(functools.partial(update, name), before, value):
        yield


def _passing_mode(kind: str) -> Any:
    """Return a mode of PyTorch that passes every call on."""
    module = importlib.import_module(
        "torch.overrides" if kind == "TorchFunctionMode" else "torch.utils._python_dispatch"
    )

    def pass_on(_: Any, func: Any, __: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))

    method = f"__{kind.removesuffix('Mode').replace('Torch', 'torch_').lower()}__"
    return type("Passing", (getattr(module, kind),), {method: pass_on})()


def _fake_mode() -> Any:
    return importlib.import_module("torch._subclasses.fake_tensor").FakeTensorMode()


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    with (
        changed(torch.use_deterministic_algorithms, False, True),
        configured(torch.utils.deterministic, "fill_uninitialized_memory", True),
    ):
        yield


def in_torch(name: str) -> Callable[[Work], None]:
    return during(lambda body: getattr(torch.func, name)(body)(torch.ones(2)))


def _make_fx(body: Callable[[Any], Any]) -> None:
    importlib.import_module("torch.fx.experimental.proxy_tensor").make_fx(body)(torch.ones(2))


def in_jax(name: str, **options: Any) -> Callable[[Work], None]:
    return during(lambda body: getattr(jax, name)(body, **options)(jax.numpy.ones(2)))


def _scan(body: Callable[[Any], Any]) -> None:
    jax.lax.scan(lambda carry, x: (carry, body(x)), 0.0, jax.numpy.ones(2))


def _shard_map(body: Callable[[Any], Any]) -> None:
    mapped = (
        getattr(jax, "shard_map", None) or importlib.import_module("jax.experimental.shard_map").shard_map
    )
    along = jax.sharding.PartitionSpec("m")
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("m",))
    mapped(lambda x: x + body(x), mesh=mesh, in_specs=along, out_specs=along)(jax.numpy.ones(8))


def _mesh(kind: str) -> Any:
    """Return a context with a mesh whose axes are of this kind."""
    if kind == "Explicit" and not hasattr(jax, "set_mesh"):
        pytest.skip("JAX 0.7.0 has no jax.set_mesh")
    axes = {} if kind == "Auto" else {"axis_types": (jax.sharding.AxisType.Explicit,)}
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("m",), **axes)
    return (jax.set_mesh if hasattr(jax, "set_mesh") else jax.sharding.use_mesh)(mesh)


def _jit_within_a_mesh(work: Work) -> None:
    with _mesh("Auto"):
        in_jax("jit")(work)


def _leak_check(work: Work) -> None:
    with jax.checking_leaks():
        in_jax("jit")(work)


def _tf_function(body: Callable[[Any], Any]) -> None:
    @tf.function(autograph=False)  # type: ignore[untyped-decorator]  # tf is Any here
    def call(x: Any) -> Any:
        body(x)
        return x

    call(tf.ones(2))


@contextlib.contextmanager
def _check_numerics() -> Iterator[None]:
    tf.debugging.enable_check_numerics()
    try:
        yield
    finally:
        tf.debugging.disable_check_numerics()


@contextlib.contextmanager
def _mixed_precision() -> Iterator[None]:
    precision = tf.keras.mixed_precision
    with changed(precision.set_global_policy, precision.global_policy(), "mixed_bfloat16"):
        yield


def _strategy_run(work: Work) -> None:
    tf.distribute.OneDeviceStrategy("/cpu:0").run(tf.autograph.experimental.do_not_convert(work))


def _in_thread(work: Work) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _in_task(work: Work) -> None:
    async def call() -> None:
        work()

    asyncio.run(call())


def _ignore(*_: Any) -> None:
    return None


@contextlib.contextmanager
def _warnings_as_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextlib.contextmanager
def _other_locale() -> Iterator[None]:
    before = locale.setlocale(locale.LC_ALL)
    for name in ("de_DE.UTF-8", "fr_FR.UTF-8", "C"):  # with a decimal comma, if installed
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_ALL, name)
            break
    try:
        yield
    finally:
        locale.setlocale(locale.LC_ALL, before)


@contextlib.contextmanager
def _little_recursion() -> Iterator[None]:
    depth = 0
    frame: Any = sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    with changed(sys.setrecursionlimit, sys.getrecursionlimit(), depth + 100):
        yield


@contextlib.contextmanager
def _deleted_folder() -> Iterator[None]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def _traced_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


# The values are functions that run the work in a setting or a context. torch.compile has its own tests.
OF_TORCH = {
    "torch.device": within(lambda: torch.device("meta")),
    "set_default_device": within(lambda: changed(torch.set_default_device, None, "meta")),
    "set_default_dtype": within(lambda: changed(torch.set_default_dtype, torch.float32, torch.float16)),
    "inference_mode": within(lambda: torch.inference_mode()),
    "no_grad": within(lambda: torch.no_grad()),
    "torch.autocast": within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "TorchFunctionMode": within(lambda: _passing_mode("TorchFunctionMode")),
    "TorchDispatchMode": within(lambda: _passing_mode("TorchDispatchMode")),
    "FakeTensorMode": within(_fake_mode),
    "fill_uninitialized_memory": within(_deterministic),
    "check_sparse_tensor_invariants": within(lambda: torch.sparse.check_sparse_tensor_invariants()),
    "detect_anomaly": within(lambda: torch.autograd.detect_anomaly(check_nan=True)),
    "saved_tensors_hooks": within(lambda: torch.autograd.graph.saved_tensors_hooks(str, str)),
    "dual_level": within(lambda: torch.autograd.forward_ad.dual_level()),
    "set_warn_always": within(lambda: changed(torch.set_warn_always, False, True)),
    "autograd.profiler": within(lambda: torch.autograd.profiler.profile()),
    "torch.func.grad": in_torch("grad"),
    "torch.func.vmap": in_torch("vmap"),
    "torch.func.jacrev": in_torch("jacrev"),
    "make_fx": during(_make_fx),
}
OF_JAX = {
    "mesh with Auto axes": within(lambda: _mesh("Auto")),
    "mesh with Explicit axes": within(lambda: _mesh("Explicit")),
    "jax.default_device": within(lambda: jax.default_device(jax.devices()[1])),
    "jax.default_device by name": within(lambda: jax.default_device("cpu")),
    "enable_x64": within(lambda: matrix_data.x64(jax)),
    "default_matmul_precision": within(lambda: jax.default_matmul_precision("bfloat16")),
    "debug_nans": within(lambda: jax.debug_nans(True)),
    "debug_infs": within(lambda: jax.debug_infs(True)),
    "transfer_guard": within(lambda: jax.transfer_guard("disallow")),
    "disable_jit": within(lambda: jax.disable_jit()),
    "numpy_rank_promotion": within(lambda: jax.numpy_rank_promotion("raise")),
    "numpy_dtype_promotion": within(lambda: jax.numpy_dtype_promotion("strict")),
    "ensure_compile_time_eval": within(lambda: jax.ensure_compile_time_eval()),
    "jax_enable_checks": within(lambda: configured(jax.config, "jax_enable_checks", True)),
    "checking_leaks": _leak_check,
    "jax.jit": in_jax("jit"),
    "jax.vmap": in_jax("vmap"),
    "jax.vmap with axis_name": in_jax("vmap", axis_name="i"),
    "jax.grad": in_jax("grad"),
    "jax.lax.scan": during(_scan),
    "jax.shard_map": during(_shard_map),
    "jax.jit within a mesh": _jit_within_a_mesh,
}
OF_TENSORFLOW = {
    "tf.device": within(lambda: tf.device("/cpu:1")),
    "tf.Graph": within(lambda: tf.Graph().as_default()),
    "tf.function": during(_tf_function),
    "tf.GradientTape": within(lambda: tf.GradientTape()),
    "tf.init_scope": within(lambda: tf.init_scope()),
    "tf.name_scope": within(lambda: tf.name_scope("a")),
    "run_functions_eagerly": within(lambda: changed(tf.config.run_functions_eagerly, False, True)),
    "enable_check_numerics": within(_check_numerics),
    "set_soft_device_placement": within(lambda: changed(tf.config.set_soft_device_placement, True, False)),
    "mixed_precision": within(_mixed_precision),
    "Strategy.scope": within(lambda: tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"]).scope()),
    "Strategy.run": _strategy_run,
}
OF_PYTHON = {
    "np.errstate": within(lambda: np.errstate(all="raise")),
    "np.printoptions": within(lambda: np.printoptions(precision=1, threshold=1)),
    "warnings as errors": within(_warnings_as_errors),
    "no garbage collection": within(_no_collection),
    "frequent garbage collection": within(lambda: changed(gc.set_threshold, gc.get_threshold()[0], 50)),
    "recursion limit": within(_little_recursion),
    "thread": _in_thread,
    "asyncio task": _in_task,
    "empty context": lambda work: contextvars.Context().run(work),
    "sys.setprofile": within(lambda: changed(sys.setprofile, sys.getprofile(), _ignore)),
    "sys.settrace": within(lambda: changed(sys.settrace, sys.gettrace(), _ignore)),
    "tracemalloc": within(_traced_memory),
    "locale": within(_other_locale),
    "decimal": within(lambda: decimal.localcontext(decimal.Context(prec=2))),
    "deleted folder": within(_deleted_folder),
    "no standard output": within(lambda: configured(sys, "stdout", None)),
}
TABLES = {"torch": OF_TORCH, "jax": OF_JAX, "tensorflow": OF_TENSORFLOW, "numpy": OF_PYTHON}

# Every new tensor belongs to these transforms of PyTorch, and has no separate memory after them.
_OF_TRANSFORM = (("", "torch", ""), ("torch", "", "restored"))
#: Conversions that depend on these surroundings: parts of the names of the array, the target, and the form of
#: call. Two surroundings are missing: torch.func.functionalize wraps every tensor, and
#: torch.set_flush_denormal affects all casts of the process.
EXCEPT: dict[str, tuple[tuple[str, str, str], ...]] = {
    "torch.func.grad": _OF_TRANSFORM,
    "torch.func.jacrev": _OF_TRANSFORM,
    "make_fx": (*_OF_TRANSFORM, ("csr", "", "")),  # it does not support compressed sparse tensors
    "tf.function": (("variable", "", ""),),  # a variable has no value while a function is traced
    # TensorFlow has no function that returns whether numerics are checked.
    "enable_check_numerics": (("nan", "tensorflow", ""), ("scalar", "tensorflow", "")),
    "Strategy.scope": (("variable", "tensorflow", ""),),  # a copied variable belongs to the strategy
}
#: Surroundings for which few arrays suffice, because each operation within them is slow.
FEW = {"checking_leaks": ("numpy", "torch", "jax", "jax committed", "tensorflow")}

#: Conversions never depended on these. In all others, they did before the package left the caller's contexts.
ALWAYS_PASSED = frozenset(
    (
        *("set_default_dtype", "inference_mode", "no_grad", "TorchFunctionMode", "TorchDispatchMode"),
        *("fill_uninitialized_memory", "check_sparse_tensor_invariants", "detect_anomaly", "dual_level"),
        *("saved_tensors_hooks", "set_warn_always", "autograd.profiler", "torch.func.vmap", "make_fx"),
        *("jax.default_device by name", "enable_x64", "default_matmul_precision", "disable_jit"),
        *("numpy_rank_promotion", "numpy_dtype_promotion", "ensure_compile_time_eval"),
        *("jax_enable_checks", "jax.vmap", "jax.vmap with axis_name", "jax.grad"),
        *("tf.GradientTape", "tf.init_scope", "tf.name_scope", "run_functions_eagerly"),
        *("enable_check_numerics", "set_soft_device_placement", "mixed_precision"),
        *("Strategy.scope", "Strategy.run"),
        *(OF_PYTHON.keys() - {"np.errstate", "warnings as errors"}),
    )
)


def test_lists_name_surroundings() -> None:
    names = {name for table in TABLES.values() for name in table}
    assert names >= ALWAYS_PASSED | EXCEPT.keys() | FEW.keys()
    assert FORMS.keys() >= PASSING_ON


def test_lists_name_arrays() -> None:
    for name in FRAMEWORKS:
        require(name)
    for package in ("scipy", "xarray"):
        pytest.importorskip(package)
    assert arrays().keys() >= RECOGNIZED.union(*FEW.values())


@pytest.fixture(scope="module", autouse=True)
def _compile_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let JAX compile each operation once for all surroundings, instead of once in each."""
    if jax is None:
        yield
        return
    from jax.experimental.compilation_cache import compilation_cache

    options = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("jax")),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    with contextlib.ExitStack() as stack:
        stack.callback(compilation_cache.reset_cache)
        for name, value in options.items():
            stack.enter_context(configured(jax.config, name, value))
        compilation_cache.reset_cache()
        yield


@pytest.mark.filterwarnings("ignore")  # such as warnings about casts and anomaly detection
@pytest.mark.parametrize(
    ("library", "name"), [(library, name) for library in TABLES for name in TABLES[library]]
)
def test_conversions_do_not_depend_on(library: str, name: str) -> None:
    require(library)
    expected()
    few = FEW.get(name, arrays())
    chosen = [
        case
        for case in cases()
        if case[0] in few
        and (
            # Writing to a tensor creates none. make_fx records some writes, and recorded tensors raise.
            ((library, *case[1:]) == ("torch", "torch", "out") and name != "make_fx")
            or not any(all(map(str.__contains__, case, parts)) for parts in EXCEPT.get(name, ()))
        )
    ]
    within_it: dict[Case, Any] = {}
    forget_everything()
    TABLES[library][name](lambda: within_it.update(convert_all(chosen)))
    assert within_it
    check(within_it)
    # Decisions that were cached within the surroundings also fit outside of them.
    check(convert_all(case for case in chosen if case[2] in ("convert_memory", "dtype", "copy")))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no os.fork")
def test_conversions_in_a_forked_process() -> None:
    """Use only NumPy and PyTorch, because JAX and TensorFlow do not support forks."""
    require("torch")
    output = output_of(
        "import os, numpy as np, torch, arraybridge as ab",
        "x, t = np.arange(6.0), torch.arange(6.0)",
        "def convert():",
        "    shared = ab.to_torch(x).data_ptr() == x.ctypes.data",
        "    return shared, ab.to_numpy(t, dtype='int8').tolist(), ab.to_torch(t, copy=True).tolist()",
        "expected = convert()",
        "child = os.fork()",
        "if not child: os._exit(convert() != expected)",
        "print(expected[0], os.waitpid(child, 0)[1])",
        imported=True,
    )
    assert output == "True 0"
