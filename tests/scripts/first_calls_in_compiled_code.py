"""Run each case as the first conversion of a process, inside torch.compile.

Prints a line per case: the backend, the name of the case, and the exception if it failed. Each case runs in a
forked copy of this process, which has imported the frameworks, but has not started them.

    python first_calls_in_compiled_code.py
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from types import CodeType
from typing import Any

import numpy as np

import arraybridge as ab

VALUES = [0.0, 1.0, 2.0]
DOUBLED = [0.0, 2.0, 4.0]
#: The results of a case, each with its expected value.
Results = list[tuple[Any, Any]]
#: Cases that run with every backend, and with a full graph, which is not possible.
FEW = ("convert_memory jax torch", "decorators jax jax", "read-only xarray")
#: The cases. A name consists of the public functions that the case calls first, and details.
CASES: dict[str, Any] = {}
Case = Callable[[Any], Results]


def case(name: str) -> Callable[[Case], Case]:
    """Add a case, a function of the samples."""

    def add(fn: Case) -> Case:
        CASES[name] = fn
        return fn

    return add


def double_two_rows(x: Any) -> Any:
    if len(x) > 2:
        raise MemoryError
    return x * 2


class Samples:
    """Arrays and decorated functions. A case reads them once in ordinary code, before the compiled code."""

    @cached_property
    def numpy(self) -> np.ndarray:
        return np.arange(3.0)

    @cached_property
    def frozen(self) -> np.ndarray:
        x = np.arange(3.0)
        x.flags.writeable = False
        return x

    @cached_property
    def torch(self) -> Any:
        return torch.arange(3.0)

    @cached_property
    def weights(self) -> Any:
        return torch.arange(3.0, requires_grad=True)

    @cached_property
    def jax(self) -> Any:
        return jax.numpy.arange(3.0)

    @cached_property
    def tensorflow(self) -> Any:
        return tensorflow.range(3.0)

    @cached_property
    def sparse(self) -> Any:
        return scipy.sparse.csr_array(np.eye(3))

    @cached_property
    def xarray(self) -> Any:
        return xarray.DataArray(self.frozen)

    @cached_property
    def pandas(self) -> Any:
        return pandas.Series(np.arange(3.0))

    @cached_property
    def pool(self) -> Any:
        return ab.BufferPool()

    @cached_property
    def with_numpy(self) -> Any:
        return ab.numpy(output_type="torch")(lambda x: np.where(x > 0, x * 2, 0))

    @cached_property
    def with_torch(self) -> Any:
        return ab.torch(lambda x: torch.where(x > 0, x * 2, 0))

    @cached_property
    def with_jax(self) -> Any:
        return ab.jax(x64=True)(lambda x: jax.numpy.sin(x) * 0 + x * 2)

    @cached_property
    def with_tensorflow(self) -> Any:
        return ab.tensorflow(lambda x: tensorflow.where(x > 0, x * 2, 0 * x))

    def prepare_for(self, code: CodeType) -> None:
        """Make all samples that are named in a code object, or in the functions in it."""
        for name in code.co_names:
            if name in vars(Samples):
                getattr(self, name)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self.prepare_for(constant)


def name_of_error(fn: Callable[[], object]) -> str:
    try:
        fn()
    except Exception as error:  # noqa: BLE001  # its name is compared
        return type(error).__name__
    return ""


# -- conversions ---------------------------------------------------------------------------------------


def convert_each(source: str, target: str) -> Case:
    return lambda s: [(ab.convert_memory(getattr(s, source), target), VALUES)]


def convert_in_tree(source: str) -> Case:
    return lambda s: [(ab.convert_tree({"x": [getattr(s, source)]}, "torch")["x"][0], VALUES)]


def call_decorated(source: str, function: str) -> Case:
    return lambda s: [(getattr(s, function)(getattr(s, source)), DOUBLED)]


for _source in ("numpy", "torch", "jax", "tensorflow", "xarray", "pandas"):
    CASES[f"convert_memory {_source} torch"] = convert_each(_source, "torch")
for _source in ("numpy", "torch", "jax", "tensorflow"):
    for _target in ("jax", "tensorflow"):
        CASES[f"convert_memory {_source} {_target}"] = convert_each(_source, _target)
for _source in ("numpy", "jax", "xarray"):
    CASES[f"convert_tree {_source}"] = convert_in_tree(_source)
    for _function in ("numpy", "torch", "jax", "tensorflow"):
        CASES[f"decorators {_source} {_function}"] = call_decorated(_source, f"with_{_function}")


@case("convert to_torch to_jax to_tensorflow to_numpy")
def _(s: Samples) -> Results:
    converted = [
        ab.convert(s.jax, "torch"),
        ab.to_torch(s.jax),
        ab.to_tensorflow(s.jax),
        ab.to_numpy(s.torch),
    ]
    return [(x, VALUES) for x in (*converted, ab.to_jax(s.numpy))]


@case("to_cpu to_gpu to_cupy to_pyclesperanto")
def _(s: Samples) -> Results:
    error = name_of_error(lambda: ab.to_gpu(s.jax, 9))
    others = {
        name_of_error(lambda: ab.to_cupy(s.sparse)),
        name_of_error(lambda: ab.to_pyclesperanto(s.sparse)),
    }
    return [(ab.to_cpu(s.jax), VALUES), (error, "DeviceNotFoundError"), ("AssertionError" in others, False)]


@case("convert_memory sparse")
def _(s: Samples) -> Results:
    return [(ab.convert_memory(s.sparse, "jax").data, [1.0, 1.0, 1.0])]


@case("convert_memory dtype")
def _(s: Samples) -> Results:
    return [(ab.convert_memory(s.numpy, "jax", dtype="float32"), VALUES)]


@case("detect_memory_type device_of explain")
def _(s: Samples) -> Results:
    names = [ab.detect_memory_type(x) for x in (s.xarray, s.jax, s.pandas)]
    on_host = [ab.device_of(x) == "cpu" for x in (s.pandas, s.jax)]
    copies = [ab.explain(x, "torch").copies for x in (s.jax, s.xarray)]
    return [(names, ["numpy", "jax", "numpy"]), (on_host, [True, True]), (copies, [0, 1])]


@case("trace")
def _(s: Samples) -> Results:
    with ab.trace() as log:
        ab.to_torch(s.jax)
        s.with_jax(s.numpy)
    return [([record.target for record in log.records][:2], ["torch", "jax"])]


# -- decorators ----------------------------------------------------------------------------------------


@case("gpu")
def _(s: Samples) -> Results:
    function = ab.gpu(lambda x: np.where(x > 0, x * 2, 0))
    return [(ab.to_torch(function(s.numpy)), DOUBLED), (function.explain(s.numpy).on_gpu, False)]


@case("memory_types")
def _(s: Samples) -> Results:
    return [(ab.memory_types("jax", "jax")(lambda x: jax.numpy.sin(x) * 0 + x * 2)(s.jax), DOUBLED)]


@case("decorators coroutine")
def _(s: Samples) -> Results:
    @ab.jax(x64=True)
    async def double(x: Any) -> Any:
        await asyncio.sleep(0)
        return jax.numpy.sin(x) * 0 + x * 2

    return [(asyncio.run(double(x)), DOUBLED) for x in (s.numpy, s.jax)]


@case("decorators gradients")
def _(s: Samples) -> Results:
    ab.jax(grad="flow")(lambda x: (jax.numpy.cos(x) * 0 + x * 2).sum())(s.weights).backward()
    return [(s.weights.grad, [2.0, 2.0, 2.0])]


@case("decorators split")
def _(s: Samples) -> Results:
    return [(ab.jax(oom_recovery="split", x64=True)(double_two_rows)(s.numpy), DOUBLED)]


@case("DtypeConversion")
def _(s: Samples) -> Results:
    conversion = ab.DtypeConversion.PRESERVE_INPUT
    decorator = ab.jax(dtype_conversion=conversion, slice_by_slice=True, x64=True, output_type="torch")
    return [(decorator(lambda x: x * 2)(s.numpy[None, None]), [[DOUBLED]])]


@case("stack_slices unstack_slices process_slices")
def _(s: Samples) -> Results:
    row = s.numpy[None]
    processed = ab.process_slices(row[None], s.with_torch)
    results = [ab.stack_slices([row, row], "jax"), ab.unstack_slices(row[None], "jax")[0], processed]
    return list(zip(results, ([[VALUES], [VALUES]], [VALUES], [[DOUBLED]]), strict=True))


# -- devices, memory, and parallel execution -----------------------------------------------------------


@case("devices use_device set_device get_device gpu_available device_info least_used_gpu")
def _(s: Samples) -> Results:
    ab.set_device("cpu")
    with ab.use_device("cpu") as device:
        found = [device == ab.get_device(), device in ab.devices("torch"), bool(ab.device_info())]
    return [(found, [True] * 3), (ab.gpu_available(), ab.least_used_gpu() is not None)]


@case("array_namespace")
def _(s: Samples) -> Results:
    return [(ab.array_namespace(s.jax) is jax.numpy, True), (ab.array_namespace(s.numpy) is None, False)]


@case("device_map prefetch")
def _(s: Samples) -> Results:
    items = [s.numpy, s.jax, s.xarray]
    mapped = [(x, DOUBLED) for x in ab.device_map(s.with_jax, items, devices=["cpu"])]
    return mapped + [(x, VALUES) for x in ab.prefetch(items, "torch")]


@case("Pipeline")
def _(s: Samples) -> Results:
    pipeline = ab.Pipeline(s.with_jax, s.with_torch, microbatches=2)
    return [(x, [0.0, 4.0, 8.0]) for x in (pipeline(s.jax), *pipeline.map([s.numpy, s.tensorflow]))]


@case("shared pinned aligned chunks")
def _(s: Samples) -> Results:
    parts = [part.shape for part in ab.chunks(zarr.array(s.numpy, chunks=(2,)))]
    results = [(ab.shared(s.jax), VALUES), (ab.pinned(s.torch), VALUES), (ab.aligned((3,)).shape, (3,))]
    return [*results, (parts, [(2,), (1,)])]


@case("benchmark compare")
def _(s: Samples) -> Results:
    return [
        (ab.benchmark(s.with_jax, s.jax).median > 0, True),
        (ab.compare(s.with_numpy, s.numpy) is None, False),
    ]


@case("run_with_oom_recovery")
def _(s: Samples) -> Results:
    return [(ab.run_with_oom_recovery(s.with_jax, s.jax), DOUBLED)]


@case("split_and_retry fixed is_oom_error")
def _(s: Samples) -> Results:
    result = ab.split_and_retry(lambda x, _: double_two_rows(x), (s.jax, ab.fixed(s.numpy)))
    return [(result, DOUBLED), (ab.is_oom_error(MemoryError()), True)]


@case("free_memory memory_stats gpu_context coexist")
def _(s: Samples) -> Results:
    with ab.gpu_context(None), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is too late for `coexist`
        ab.coexist()
    return [(ab.free_memory() >= 0, True), (str(ab.memory_stats()) == "", False)]


@case("BufferPool")
def _(s: Samples) -> Results:
    for framework in ("numpy", "torch"):
        s.pool.give(s.pool.take(3, "float32", framework))
    return [(s.pool.clear(), 12)]


@case("settings")
def _(s: Samples) -> Results:
    with ab.settings(missing_gpu="host"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [(ab.convert_memory(s.jax, "torch", 9), VALUES)]


@case("framework register register_carrier")
def _(s: Samples) -> Results:
    errors = [
        name_of_error(lambda: ab.register(s.numpy)),
        name_of_error(lambda: ab.register_carrier(s.numpy)),
    ]
    return [(ab.framework("jax").name, "jax"), (errors, ["TypeError", "TypeError"])]


@case("convert_memory to_numpy convert_tree explain out")
def _(s: Samples) -> Results:
    outs = [np.zeros(3), torch.zeros(3, dtype=torch.float64), np.zeros(3, "float32")]
    ab.convert_memory(s.jax, out=outs[0], dtype="float64")
    ab.convert_tree([s.xarray], out=[outs[1]])
    ab.to_numpy(s.jax, out=outs[2])
    copies = ab.explain(s.numpy, out=s.pandas.to_numpy(copy=True)).copies
    return [*[(x, VALUES) for x in outs], (copies, 1)]


@case("load_safetensors save_safetensors")
def _(s: Samples) -> Results:
    with tempfile.TemporaryDirectory() as folder:
        ab.save_safetensors(f"{folder}/x.safetensors", {"jax": s.jax, "torch": s.torch})
        loaded = ab.load_safetensors(f"{folder}/x.safetensors", mmap_mode=None)
    return [(loaded["jax"], VALUES), (loaded["torch"], VALUES)]


# -- read-only arrays ----------------------------------------------------------------------------------


@case("read-only xarray")
def _(s: Samples) -> Results:
    ab.to_torch(s.xarray).add_(1)
    return [(s.frozen.flags.writeable, False), (s.frozen, VALUES)]


@case("read-only pandas")
def _(s: Samples) -> Results:
    ab.to_torch(s.pandas).add_(1)
    return [(s.pandas, VALUES)]


@case("read-only NumPy")
def _(s: Samples) -> Results:
    s.with_torch(s.frozen)
    ab.convert_tree([s.frozen], "torch")
    ab.convert_memory(s.frozen, "torch")
    ab.convert_memory(s.frozen, "torch", copy=True)
    for convert in (ab.to_numpy, ab.to_torch, ab.to_jax, ab.to_tensorflow, ab.to_cpu):
        convert(s.frozen)
    ab.explain(s.frozen, "torch")
    error = name_of_error(lambda: ab.convert_memory(s.jax, out=s.frozen, dtype="float64"))
    return [(s.frozen.flags.writeable, False), (error, "ValueError")]


# -- running -------------------------------------------------------------------------------------------


def turn_warnings_into_errors() -> None:
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", DeprecationWarning)  # imports of Inductor (torch 2.13)
    warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")  # torch 2.14


def run(name: str, backend: str) -> None:
    """Run a case in compiled code, and compare its results afterwards, in ordinary code."""
    samples = Samples()
    samples.prepare_for(CASES[name].__code__)
    for cell in CASES[name].__closure__ or ():  # the parameters of a case that is made by a function
        getattr(samples, cell.cell_contents, None)
    found: Results = []

    def call() -> (
        None
    ):  # torch.compile does not trace it, because it has no tensor, but runs it with its hook
        found.extend(CASES[name](samples))

    def compiled(x: Any) -> Any:
        call()
        return x * 2

    turn_warnings_into_errors()
    options = {"backend": "eager", "fullgraph": True} if backend == "fullgraph" else {"backend": backend}
    assert torch.compile(compiled, **options)(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
    for value, expected in found:
        is_array = hasattr(value, "shape")
        plain = np.asarray(value).tolist() if is_array else value
        assert plain == expected, f"{plain} instead of {expected}"


def run_in_fork(name: str, backend: str) -> Iterator[str]:
    """Start a forked process that runs a case; on the second step, yield its report."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        problem = ""
        try:
            run(name, backend)
        except BaseException as error:  # noqa: BLE001  # it is reported
            problem = " ".join(f"{type(error).__name__}: {error}".split())
        os.write(writer, problem[:2000].encode())
        os._exit(0)
    os.close(writer)
    yield ""
    with os.fdopen(reader, "rb") as pipe:
        problem = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    yield f"{backend}\t{name}\t{problem if status == 0 else f'exit status {status}'}"


if __name__ == "__main__":
    with suppress(ImportError):  # the compiler of PyTorch's CUDA build, see conftest.py
        import triton  # noqa: F401

    import jax
    import pandas
    import scipy.sparse
    import tensorflow
    import torch
    import torch._dynamo
    import xarray
    import zarr

    # What the packages import late, such as for a call in compiled code, is imported once.
    turn_warnings_into_errors()
    importlib.import_module("torch._inductor.compile_fx")

    torch.compile(lambda x: double_two_rows(x), backend="eager")(torch.ones(2))
    torch.compiler.reset()
    xarray.DataArray(np.ones(2))
    gc.collect()
    gc.freeze()  # a collection of garbage in a child would copy the memory of this process
    runs = [(name, "eager") for name in CASES]
    runs += [(name, backend) for name in FEW for backend in ("aot_eager", "inductor", "fullgraph")]
    running: list[Iterator[str]] = []
    for name, backend in runs:
        running.append(run_in_fork(name, backend))
        next(running[-1])
        if len(running) == 2:  # two at a time
            print(next(running.pop(0)), flush=True)
    for one in running:
        print(next(one), flush=True)
