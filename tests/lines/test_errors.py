"""Errors of somebody else come out as they are, also those that take no note."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from arraybridge import Pipeline, device_map, prefetch
from tests.helpers import require


@dataclass(frozen=True)
class FrozenError(Exception):
    code: int


class TupleError(Exception):
    __notes__ = ("one",)  # type: ignore[assignment]  # a list is what Python wants


class NoNotesError(Exception):
    def add_note(self, note: str, /) -> None:
        raise NotImplementedError(note)


class SealedError(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise RuntimeError("sealed")


ERRORS = [FrozenError(404), TupleError("kept"), NoNotesError("kept"), SealedError("kept")]
WAYS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "device_map": lambda fail: list(device_map(fail, [1], ["cpu"])),
    "its setup": lambda fail: list(device_map(lambda made, x: x, [1], ["cpu"], setup=lambda: fail(1))),
    "its source": lambda fail: list(device_map(abs, map(fail, [1]), ["cpu"])),
    "Pipeline.map": lambda fail: list(Pipeline(fail).map([1])),
    "Pipeline": lambda fail: Pipeline(fail)(np.ones(4)),
    "prefetch": lambda fail: list(prefetch(map(fail, [1]), "numpy")),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_that_takes_no_note_comes_out_as_it_is(error: Exception, way: str) -> None:
    def fail(x: Any) -> Any:
        raise error

    if way == "its setup" and isinstance(error, (FrozenError, SealedError)):
        pytest.skip("Python's contextlib cannot pass on an error that takes no traceback")
    with pytest.raises(type(error)) as caught:
        WAYS[way](fail)
    assert caught.value is error


def test_a_source_that_fails_late_gives_what_came_before() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise FrozenError(1)

    results = device_map(abs, source(), ["cpu"])
    assert next(results) == 1
    with pytest.raises(FrozenError):
        next(results)


@pytest.mark.parametrize("way", ["device_map", "Pipeline.map"])
def test_an_item_that_jax_has_deleted_fails_in_its_turn(way: str) -> None:
    jnp = require("jax").numpy
    gone = jnp.ones(3)
    gone.delete()
    items = iter([1, 2, gone, 4])
    results = device_map(str, items, ["cpu"]) if way == "device_map" else Pipeline(str).map(items)
    assert [next(results), next(results)] == ["1", "2"]
    with pytest.raises(RuntimeError, match="deleted") as caught:
        next(results)
    assert caught.value.__notes__ == ["while reading item 2 of the input"]
