"""Checks of numbers, bools and file names that callers pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraybridge as ab
from arraybridge.validation import bool_option, whole_number


def test_a_whole_number_is_returned() -> None:
    assert whole_number("axis", -1) == -1
    assert whole_number("depth", 1, least=1) == 1


@pytest.mark.parametrize("value", [True, 1.0, "1", None])
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
        "@gpu has no option 'backends' (did you mean 'backend'?). Its options are gpu_id, backend and"
        " split_axis."
    )
    with pytest.raises(TypeError, match=r"Select the GPU by its number, as in gpu_id=0\.$"):
        ab.gpu(device="gpu:0")


@pytest.mark.parametrize(
    ("option", "call"),
    [
        ("foreign", lambda: ab.trace(foreign="no").__enter__()),
        ("libraries", lambda: ab.tracing.trace_log.TraceLog().hotspots(libraries="no")),
        ("ordered", lambda: ab.device_map(np.sum, [], devices=["cpu"], ordered="no")),
        ("progress", lambda: ab.device_map(np.sum, [], devices=["cpu"], progress="no")),
        ("processes", lambda: ab.device_map(np.sum, [], devices=["cpu"], processes="no")),
        ("processes", lambda: ab.Pipeline(np.sum, processes="no")),
        ("progress", lambda: ab.prefetch([], "numpy", progress="no")),
        ("compiled", lambda: ab.free_memory("numpy", compiled="no")),
        ("strict", lambda: ab.numpy(strict="no", input_type="numpy")),
        ("slice_by_slice", lambda: ab.numpy(slice_by_slice="no")),
        ("stream", lambda: ab.numpy(stream="no")),
    ],
)
def test_public_bool_options_reject_texts(option: str, call: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match=f"^{option}='no' must be True or False"):
        call()


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
