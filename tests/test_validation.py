"""Checks of numbers, bools and file names that callers pass."""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraybridge as ab
from arraybridge.testing import inject_oom
from arraybridge.validation import add_hints, bool_option, whole_number
from tests.helpers import require


def test_a_whole_number_is_returned() -> None:
    assert whole_number("axis", -1) == -1
    assert whole_number("depth", 1, least=1) == 1
    for value in (np.int8(3), np.uint64(3), np.asarray(3)):
        assert type(whole_number("depth", value)) is int
        assert whole_number("depth", value) == 3


def test_integers_of_frameworks_are_whole_numbers() -> None:
    torch = require("torch")
    assert whole_number("depth", torch.tensor(3)) == 3
    with pytest.raises(TypeError, match=r"depth=tensor\(True\) must be an int"):
        whole_number("depth", torch.tensor(True))


@pytest.mark.parametrize("value", [True, 1.0, "1", None, np.True_, np.float64(1), np.asarray(True)])
def test_other_types_raise_an_error_that_names_option_and_value(value: Any) -> None:
    with pytest.raises(TypeError) as caught:
        whole_number("depth", value, least=1)
    assert str(caught.value) == f"depth={value!r} must be an int, at least 1."
    with pytest.raises(ValueError, match="depth="):
        whole_number("depth", value, type_error=ValueError)


def test_smaller_numbers_raise_an_error_that_names_option_and_value() -> None:
    with pytest.raises(ValueError, match=r"^depth=0 must be at least 1\.$"):
        whole_number("depth", 0, least=1)


def test_a_bool_is_returned() -> None:
    assert bool_option("ordered", False) is False
    assert bool_option("ordered", np.bool_(True)) is True
    assert bool_option("gpus", None, optional=True) is None


def test_other_values_of_a_bool_option_raise_an_error_that_names_option_and_value() -> None:
    with pytest.raises(TypeError, match=r"^ordered='no' must be True or False\.$"):
        bool_option("ordered", "no")
    with pytest.raises(TypeError, match=r"^ordered=None must be True or False\.$"):
        bool_option("ordered", None)
    with pytest.raises(TypeError, match=r"^gpus=1 must be None, True or False\.$"):
        bool_option("gpus", 1, optional=True)


def test_an_unknown_option_of_gpu_gets_a_suggestion() -> None:
    with pytest.raises(TypeError) as caught:
        ab.gpu(backends="torch")
    assert str(caught.value) == (
        "@gpu has no option 'backends' (did you mean 'backend'?). Its options are gpu_id and backend."
    )
    with pytest.raises(TypeError, match=r"Select the GPU by its number, as in gpu_id=0\.$"):
        ab.gpu(device="gpu:0")


# Calls with a bool option.
BOOL_OPTIONS: dict[str, Callable[[Any], Any]] = {
    "foreign": lambda value: ab.trace(foreign=value).__enter__(),
    "libraries": lambda value: ab.TraceLog().hotspots(libraries=value),
    "ordered": lambda value: ab.device_map(np.sum, [], devices=["cpu"], ordered=value),
    "progress": lambda value: ab.device_map(np.sum, [], devices=["cpu"], progress=value),
    "processes": lambda value: ab.device_map(np.sum, [], devices=["cpu"], processes=value),
    "Pipeline processes": lambda value: ab.Pipeline(np.sum, processes=value),
    "prefetch progress": lambda value: ab.prefetch([], "numpy", progress=value),
    "compiled": lambda value: ab.free_memory("numpy", compiled=value),
    "replace": lambda value: ab.register(ab.framework("numpy"), replace=value),
    "strict": lambda value: ab.numpy(strict=value, input_type="numpy"),
    "slice_by_slice": lambda value: ab.numpy(slice_by_slice=value),
    "stream": lambda value: ab.numpy(stream=value),
    "split": lambda value: ab.run_with_oom_recovery(np.sum, np.ones(2), split=value),
    "oom_recovery": lambda value: ab.numpy(oom_recovery=value),
    "copy": lambda value: ab.convert_memory(np.ones(2), "numpy", copy=value),
    "tree copy": lambda value: ab.convert_tree([], "numpy", copy=value),
    "explain copy": lambda value: ab.explain(np.ones(2), "numpy", copy=value),
}


@pytest.mark.parametrize("wrong", ["no", 1])
@pytest.mark.parametrize("option", BOOL_OPTIONS)
def test_bool_options_reject_other_truthy_values(option: str, wrong: Any) -> None:
    name = option.rsplit(maxsplit=1)[-1]
    with pytest.raises((TypeError, ValueError), match=f"^{name}={wrong!r} must be (None, |one of |)True"):
        BOOL_OPTIONS[option](wrong)


def times_two(x: Any) -> Any:
    return x * 2


X = np.arange(12.0).reshape(6, 2)
# Calls with an integer option. Each returns a value that depends on the option, if there is one.
INTEGER_OPTIONS: dict[str, Callable[[Any], Any]] = {
    "convert_memory gpu_id": lambda n: ab.convert_memory(X, "numpy", gpu_id=n) is X,
    "to_numpy gpu_id": lambda n: ab.to_numpy(X, n) is X,
    "convert_tree gpu_id": lambda n: ab.convert_tree([X], "numpy", gpu_id=n)[0] is X,
    "decorator gpu_id": lambda n: ab.torch(gpu_id=n)(times_two).gpu_id,
    "@gpu gpu_id": lambda n: ab.gpu(gpu_id=n)(times_two).gpu_id,
    "max_retries": lambda n: ab.numpy(max_retries=n, oom_recovery=True)(times_two)(X).tolist(),
    "split_axis": lambda n: ab.numpy(split_axis=n, oom_recovery="split")(times_two)(X).tolist(),
    "min_split": lambda n: ab.numpy(min_split=n, oom_recovery="split")(times_two)(X).tolist(),
    "run max_retries": lambda n: ab.run_with_oom_recovery(times_two, X, max_retries=n).tolist(),
    "run split_axis": lambda n: recover(split_axis=n),
    "run min_split": lambda n: recover(min_split=n),
    "split_and_retry axis": lambda n: ab.split_and_retry(times_two, X, axis=n).tolist(),
    "split_and_retry min_split": lambda n: ab.split_and_retry(times_two, X, min_split=n).tolist(),
    "inject_oom skip": lambda n: recover(skip=n),
    "inject_oom count": lambda n: recover(count=n),
    "inject_oom above_rows": lambda n: recover(above_rows=n),
    "free_memory gpu_id": lambda n: free(n),
    "microbatches": lambda n: ab.Pipeline(times_two, microbatches=n)(X).tolist(),
    "queue_size": lambda n: ab.Pipeline(times_two, queue_size=n)(X).tolist(),
    "Pipeline axis": lambda n: ab.Pipeline(times_two, axis=n, microbatches=2)(X).tolist(),
    "per_device": lambda n: [y.tolist() for y in ab.device_map(times_two, [X], ["cpu"], per_device=n)],
    "depth": lambda n: [y.tolist() for y in ab.prefetch([X], "numpy", depth=n)],
    "prefetch gpu_id": lambda n: [y.tolist() for y in ab.prefetch([X], "numpy", n)],
    "runs": lambda n: ab.benchmark(times_two, X, runs=n).runs,
    "warmup": lambda n: ab.benchmark(times_two, X, warmup=n, runs=1).runs,
    "max_bytes": lambda n: ab.BufferPool(n).max_bytes,
    "limit": lambda n: len(ab.TraceLog(n).events),
    "top": lambda n: len(ab.TraceLog().hotspots(n)),
    "Device index": lambda n: str(ab.Device("gpu", n)),
}


def free(gpu_id: Any) -> int:
    with ab.settings(missing_gpu="host"):
        return ab.free_memory("numpy", gpu_id)


def recover(*, split_axis: Any = 0, min_split: Any = 1, **failures: Any) -> Any:
    with inject_oom("numpy", **failures):
        return ab.run_with_oom_recovery(
            times_two, X, split=True, split_axis=split_axis, min_split=min_split
        ).tolist()


@pytest.mark.parametrize("option", INTEGER_OPTIONS)
def test_integer_options_accept_every_integer_and_no_bool_or_float(option: str) -> None:
    call = INTEGER_OPTIONS[option]
    expected = call(1)
    for value in (np.int64(1), np.uint8(1)):
        result = call(value)
        assert result == expected
        assert type(result) is type(expected)
    for wrong in (True, np.True_, 1.0, np.float32(1), "one"):
        with pytest.raises((TypeError, ValueError), match=re.escape(repr(wrong))):
            call(wrong)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda log: ab.MemoryCollector(None), "path=None must be the name"),
        (lambda log: log.save(5), "path=5 must be the name of a file, as a string or pathlib.Path"),
        (lambda log: log.plot(5), "path=5 must be the name of a file"),
    ],
)
def test_file_names_of_another_type_are_named(call: Any, message: str) -> None:
    with ab.trace() as log, pytest.raises(TypeError, match=message):
        call(log)


# -- misspelled options and swapped arguments ----------------------------------------------------------


X = np.ones((2, 3))
STACK = np.ones((2, 2, 2))


def double(x: Any) -> Any:
    return x * 2


#: A call with a misspelled option, and the option that the message names.
MISSPELLED: dict[str, tuple[Callable[[], Any], str]] = {
    "convert_memory": (lambda: ab.convert_memory(X, "numpy", gpu=0), "gpu_id"),
    "convert": (lambda: ab.convert(X, "numpy", dtyp="f4"), "dtype"),
    "explain": (lambda: ab.explain(X, "numpy", divice="cpu"), "device"),
    "to_numpy": (lambda: ab.to_numpy(X, copie=True), "copy"),
    "to_torch": (lambda: ab.to_torch(X, gpu=0), "gpu_id"),
    "to_cpu": (lambda: ab.to_cpu(X, kopy=True), "copy"),
    "to_gpu": (lambda: ab.to_gpu(X, gpu=0), "gpu_id"),
    "convert_tree": (lambda: ab.convert_tree([X], "numpy", gradient="detach"), "grad"),
    "aligned": (lambda: ab.aligned((2,), dtyp="f4"), "dtype"),
    "trace": (lambda: ab.trace(limits=3), "limit"),
    "settings": (lambda: ab.settings(missing_gpus="host"), "missing_gpu"),
    "numpy": (lambda: ab.numpy(gpuid=0), "gpu_id"),
    "gpu": (lambda: ab.gpu(backends="torch"), "backend"),
    "memory_types": (lambda: ab.memory_types("numpy", "numpy", kontract=bool), "contract"),
    "stack_slices": (lambda: ab.stack_slices([X], "numpy", gpu=0), "gpu_id"),
    "unstack_slices": (lambda: ab.unstack_slices(STACK, "numpy", gpu=0), "gpu_id"),
    "devices": (lambda: ab.devices(frameworks="numpy"), "framework"),
    "device_map": (lambda: ab.device_map(double, [X], device="cpu"), "devices"),
    "prefetch": (lambda: ab.prefetch([X], "numpy", deep=3), "depth"),
    "Pipeline": (lambda: ab.Pipeline(double, microbatch=2), "microbatches"),
    "BufferPool": (lambda: ab.BufferPool(max_byte=3), "max_bytes"),
    "shared": (lambda: ab.shared(X, dtyp="f4"), "dtype"),
    "benchmark": (lambda: ab.benchmark(double, X, second=1), "seconds"),
    "compare": (lambda: ab.compare(double, X, second=1), "seconds"),
    "run_with_oom_recovery": (lambda: ab.run_with_oom_recovery(double, X, max_retry=3), "max_retries"),
    "split_and_retry": (lambda: ab.split_and_retry(double, X, axes=1), "axis"),
    "free_memory": (lambda: ab.free_memory(frameworks="numpy"), "framework"),
    "coexist": (lambda: ab.coexist(fractions=0.5), "fraction"),
    "register": (lambda: ab.register(ab.framework("numpy"), replaces=True), "replace"),
    "load_safetensors": (lambda: ab.load_safetensors("x", mmapmode=None), "mmap_mode"),
    "save_safetensors": (lambda: ab.save_safetensors("x", {}, meta={}), "metadata"),
}
#: Public functions without optional parameters, whose errors come from Python.
WITHOUT_OPTIONS = (
    *("detect_memory_type", "process_slices", "device_of", "use_device", "set_device", "get_device"),
    *("gpu_available", "device_info", "array_namespace", "chunks", "is_oom_error", "memory_stats"),
    *("gpu_context", "pinned", "framework", "register_carrier"),
    *("to_jax", "to_tensorflow", "to_cupy", "to_pyclesperanto"),  # the same as to_torch
)


def test_every_public_function_with_options_is_tested() -> None:
    functions = {name for name in ab.__all__ if not isinstance(getattr(ab, name), type)}
    functions |= {"Pipeline", "BufferPool", "numpy"}
    assert functions == {*MISSPELLED, *WITHOUT_OPTIONS}
    for name in WITHOUT_OPTIONS[:-4]:
        parameters = inspect.signature(getattr(ab, name)).parameters.values()
        assert all(one.default is one.empty for one in parameters), name


@pytest.mark.parametrize("name", MISSPELLED)
def test_misspelled_options_name_the_nearest_one(name: str) -> None:
    call, option = MISSPELLED[name]
    if name == "to_torch":
        require("torch")
    message = rf"(has no option|keyword argument) '\w+' \(did you mean '{option}'\?\)\. Its options are"
    with pytest.raises(TypeError, match=message):
        call()


#: A call with swapped arguments, and the call that the message shows.
SWAPPED: dict[str, tuple[Callable[[], Any], str]] = {
    "convert_memory": (lambda: ab.convert_memory("numpy", X), "convert_memory(data, 'numpy')"),
    "convert_memory, GPU": (lambda: ab.convert_memory(X, 0, "numpy"), "convert_memory(data, 'numpy', 0)"),
    "explain": (lambda: ab.explain("numpy", X), "explain(data, 'numpy')"),
    "to_numpy": (lambda: ab.to_numpy(0, X), "the array as the first argument"),
    "to_gpu": (lambda: ab.to_gpu(0, X), "to_gpu(x, gpu_id)"),
    "convert_tree": (lambda: ab.convert_tree("numpy", [X]), "convert_tree(tree, target)"),
    "aligned": (lambda: ab.aligned("f4", (2, 3)), "aligned(shape, dtype)"),
    "shared": (lambda: ab.shared("f4", (2, 3)), "shared(x, dtype)"),
    "stack_slices": (lambda: ab.stack_slices("numpy", [X]), "stack_slices(slices, memory_type)"),
    "unstack_slices": (lambda: ab.unstack_slices("numpy", STACK), "unstack_slices(array, memory_type)"),
    "process_slices": (lambda: ab.process_slices(double, STACK), "process_slices(array, fn)"),
    "device_map": (lambda: ab.device_map([X], double), "device_map(fn, items)"),
    "prefetch": (lambda: ab.prefetch("numpy", [X]), "prefetch(items, framework)"),
    "split_and_retry": (lambda: ab.split_and_retry(X, double), "split_and_retry(fn, batch)"),
    "free_memory": (lambda: ab.free_memory(0, "numpy"), "free_memory(framework, gpu_id)"),
}


@pytest.mark.parametrize("name", SWAPPED)
def test_swapped_arguments_are_recognized(name: str) -> None:
    call, right = SWAPPED[name]
    with pytest.raises(TypeError) as caught:
        call()
    assert f"Did you swap the arguments? Use {right}." in str(caught.value)


def test_errors_of_explain_name_explain() -> None:
    with pytest.raises(TypeError, match=r'as in explain\(data, "torch"\)'):
        ab.explain(X)


@add_hints
def halve(x: Any, /, *, by: int = 2) -> Any:
    """Return a part of ``x``."""
    return x / by


def test_functions_with_hints_keep_their_identity() -> None:
    assert pickle.loads(pickle.dumps(halve)) is halve
    assert str(inspect.signature(halve)) == "(x: 'Any', /, *, by: 'int' = 2) -> 'Any'"
    assert (halve.__name__, halve.__doc__) == ("halve", "Return a part of ``x``.")
    with pytest.raises(TypeError, match="unsupported operand"):
        halve("text")
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        halve()
    names = list(inspect.signature(ab.convert_memory).parameters)
    expected = ["data", "source_type", "target_type", "gpu_id", "target", "copy", "dtype", "grad", "device"]
    assert names[: len(expected)] == expected


# -- values that are checked at the call ---------------------------------------------------------------


def test_context_managers_check_their_options_at_the_call() -> None:
    for call in (
        lambda: ab.settings(missing_gpu="cpu"),
        lambda: ab.settings(annotate="nsys"),
        lambda: ab.use_device("gpu:x"),
        lambda: ab.use_device("opencl:99"),
        lambda: ab.trace(limit=0),
        lambda: ab.gpu_context(-1),
    ):
        with pytest.raises(ValueError):  # noqa: PT011  # the messages differ
            call()

    @ab.settings(missing_gpu="host")
    @ab.use_device("cpu")
    def device() -> str:
        return str(ab.get_device())

    assert [device(), device()] == ["cpu", "cpu"]


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"max_retries": 3}, "oom_recovery=True"),
        ({"max_retries": 3, "oom_recovery": False}, "oom_recovery=True"),
        ({"split_axis": 1}, "oom_recovery='split'"),
        ({"min_split": 2, "oom_recovery": True}, "oom_recovery='split'"),
    ],
)
def test_options_without_effect_raise(options: dict[str, Any], needed: str) -> None:
    with pytest.raises(ValueError, match=f"has no effect without {needed}"):
        ab.numpy(**options)
    ab.numpy(max_retries=3, split_axis=1, min_split=2, oom_recovery="split")
    ab.numpy(max_retries=3, oom_recovery=True)


def test_options_are_checked_before_the_array() -> None:
    masked = np.ma.masked_equal(X, 1)
    endless: list[Any] = []
    endless.append(endless)
    for data in (masked, [X], object(), np.array([None])):
        for options in ({"copy": 3}, {"grad": "no"}, {"gpu_id": -1}, {"device": "cpuu"}, {"dtype": "int"}):
            for call in (ab.convert_memory, ab.explain):
                with pytest.raises(ValueError, match=next(iter(options)) + "|is not a device"):
                    call(data, "numpy", **options)
    for options in ({"copy": 3}, {"dtype": "float31"}):
        for tree in ({}, 1, endless):
            with pytest.raises(ValueError, match=next(iter(options))):
                ab.convert_tree(tree, "numpy", **options)
    for call in (ab.to_cpu, ab.to_gpu):
        with pytest.raises(ValueError, match="copy=3"):
            call(object(), copy=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("int", "'int64' or 'int32'"),
        ("uint", "'uint64' or 'uint8'"),
        ("float", "'float32' or 'float64'"),
        ("complex", "'complex64' or 'complex128'"),
        ("double", "'float64'"),
    ],
)
def test_kinds_of_dtypes_suggest_the_usual_widths(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match="is not a supported dtype") as caught:
        ab.convert_memory(X, "numpy", dtype=name)
    assert str(caught.value).endswith(f"is not a supported dtype. Pass {meant}.")
