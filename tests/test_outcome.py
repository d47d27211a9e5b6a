"""Outcomes return the value or raise the exception, without reference cycles."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from arraybridge.outcome import ask, attempt


class Box:
    """An object that can be referred to weakly."""


def fail(error: BaseException) -> None:
    raise error


def test_the_result_is_the_value_or_the_exception_is_raised() -> None:
    assert attempt(divmod, 7, 2).result() == (3, 1)
    assert attempt(fail, StopIteration("end")).error.args == ("end",)  # type: ignore[union-attr]
    for error in (KeyboardInterrupt(), ValueError("wrong")):
        with pytest.raises(type(error)) as caught:
            attempt(fail, error).result()
        assert caught.value is error


def test_asking_returns_none_for_exceptions_of_other_libraries() -> None:
    assert ask(divmod, 7, 2) == (3, 1)
    assert ask(fail, ValueError("wrong")) is None
    with pytest.raises(KeyboardInterrupt):
        ask(fail, KeyboardInterrupt())


def test_raising_the_exception_leaves_no_reference_cycle() -> None:
    references: list[weakref.ref[Any]] = []

    def fail_with_a_variable() -> None:
        box = Box()
        references.append(weakref.ref(box))
        raise ValueError

    gc.disable()
    try:
        with pytest.raises(ValueError, match=r"^$") as caught:
            attempt(fail_with_a_variable).result()
        assert references[0]() is not None
        del caught
        assert references[0]() is None
    finally:
        gc.enable()
