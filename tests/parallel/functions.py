"""Functions that worker processes import, for tests with ``processes=True``."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import arraybridge


def same(x: Any) -> Any:
    return x


def square(x: Any) -> Any:
    return x * x


def die(x: int) -> int:
    os._exit(7)


def with_process(x: Any) -> tuple[Any, int]:
    return x, os.getpid()


@arraybridge.jax(output_type="numpy")
def device_number(x: Any) -> Any:
    (device,) = x.devices()
    return x * 0 + device.id


def make_model() -> tuple[int, str]:
    """Return a model: the ID of its process, and the device that it was made for."""
    return os.getpid(), str(arraybridge.get_device())


def apply_model(model: tuple[int, str], x: int) -> tuple[int, str, int, str]:
    return *model, x, str(arraybridge.get_device())


def fail_to_make() -> None:
    raise LookupError("no model here")


@arraybridge.jax(gpu_id=97, output_type="numpy")
def on_a_missing_gpu(x: Any) -> Any:
    return x + 1


def with_graph_inside(x: Any) -> Any:
    return partial(abs, x * 1)


# -- shared memory -----------------------------------------------------------------------------------


def fill(x: Any, value: int) -> None:
    x[...] = value


def filled(x: Any) -> Any:
    x[...] = 1
    return x


def scribbled(x: Any) -> Any:
    """Overwrite the argument, and return its previous value."""
    before = x.ravel()[0]
    x[...] = 7
    return x, before


class Taking:
    """A function of a shape that calls `BufferPool.take`."""

    def __init__(self, pool: arraybridge.BufferPool) -> None:
        self.pool = pool

    def __call__(self, shape: Any) -> Any:
        return self.pool.take(shape, "float32", "numpy")


def make_shared(value: int) -> Any:
    return arraybridge.shared(np.full(3, value))


def kept_by_loky(value: int) -> int:
    """Serialize an array for a joblib worker and another for a cache, and return how many are kept alive."""
    from joblib.externals.loky.backend import reduction

    from arraybridge.memory import segments as module

    before = {*module._segments}
    reduction.dumps(make_shared(value))
    pickle.dumps(make_shared(value))
    return len({*module._segments} - before)


# -- values that cannot be sent ----------------------------------------------------------------------


def made_here(pid: int) -> str:
    if os.getpid() != pid:
        raise FileNotFoundError("not made here")  # a pipe may raise the same class
    return "made here"


class UnpicklableElsewhere:
    """An object that only the process that made it can unpickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return made_here, (os.getpid(),)


class StubbornError(Exception):
    """An exception that cannot be pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        raise KeyError("not pickled")


class Unwelcome:
    """An object that no process can unpickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return raise_it, ((KeyError, ("unwelcome",)),)


class Raising:
    """A function that raises an exception."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *_: Any) -> Any:
        raise self.error


def make_unpicklable_elsewhere(_: Any) -> UnpicklableElsewhere:
    return UnpicklableElsewhere()


def be_stubborn(_: Any) -> None:
    raise StubbornError("stubborn")


def make_function(_: Any) -> Callable[[], int]:
    return lambda: 1


def raise_it(arguments: tuple[type[Exception], tuple[Any, ...]]) -> None:
    cls, rest = arguments
    raise cls(*rest)
