"""Decorated functions that other processes import, and helpers for the tests in this folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

import arraybridge
from arraybridge import convert_memory, detect_memory_type
from arraybridge.interface import registry
from arraybridge.interface.framework import Framework

#: Every framework that computes without a GPU.
FRAMEWORKS = ("numpy", "torch", "jax", "tensorflow", "pyclesperanto")
HOST = ("numpy", "torch", "jax", "tensorflow")

IMAGE = np.array([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], np.float32)


def identity(x: Any, *_: Any, **__: Any) -> Any:
    return x


def decorator(name: str) -> Any:
    """Return the decorator of that name, as users import it."""
    return getattr(arraybridge, name)


def image(framework: str) -> Any:
    """Return `IMAGE` as an array of a framework."""
    return convert_memory(IMAGE, framework)


def values(x: Any) -> list[Any]:
    """Return the elements of an array of any framework, nested as in NumPy."""
    nested: list[Any] = convert_memory(x, "numpy").tolist()
    return nested


def framework_of(x: Any) -> str:
    return detect_memory_type(x)


@arraybridge.torch(output_type="numpy")
def doubled(x: Any) -> Any:
    """Double the values in PyTorch."""
    assert detect_memory_type(x) == "torch"
    return x + x


@arraybridge.numpy
def halved(x: Any) -> Any:
    return x / 2


class Model:
    @arraybridge.torch(output_type="input")
    def doubled(self, x: Any) -> Any:
        assert detect_memory_type(x) == "torch"
        return x * 2


def run_in_worker(x: Any) -> Any:
    """Run in a spawned worker: a function pickled by reference and a method."""
    return doubled(x), Model().doubled(x)


@arraybridge.torch(grad="flow")
def squared(x: Any) -> Any:
    """Return the square, which supports gradients."""
    return x * x


class Box:
    """An array of a framework that only these tests know."""

    def __init__(self, memory: np.ndarray[Any, Any]) -> None:
        self.memory = memory
        self.dtype, self.shape, self.nbytes = memory.dtype, memory.shape, memory.nbytes

    def __getitem__(self, key: Any) -> Box:
        return Box(self.memory[key])


class BoxFramework(Framework):
    name = "boxes"
    modules = ("tests",)

    def owns(self, x: Any) -> bool:
        return isinstance(x, Box)

    def host_view(self, x: Box) -> np.ndarray[Any, Any]:
        return x.memory

    def from_host(self, view: np.ndarray[Any, Any], device: Any) -> Box:
        return Box(view)


@contextlib.contextmanager
def registered(framework: Framework) -> Iterator[Framework]:
    """Register the framework inside a with block."""
    yield arraybridge.register(framework)
    registry.unregister(framework.name)
