"""The small types that every part of the package speaks: framework names and devices."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np

if TYPE_CHECKING:
    import cupy
    import jax
    import torch

K = TypeVar("K")
V = TypeVar("V")


class Hooks:
    """Functions of higher layers that lower layers call, since imports go down only.

    The module that defines a function sets the attribute when it is imported.

    Attributes:
        native_device: Returns the object of a framework for a device. Set in frameworks/registry.py.
        read_device: Returns the device of an object of a framework; None for other objects. Set in
            frameworks/registry.py.
        user_line: Returns the file and line of the user's code. Set in timeline/events.py.
        annotate: Opens a context in which a profiler shows the names of operations. Set in
            conversion/trace.py.
        decorator_of: Returns the decorator of a framework. Set in functions/decorators.py.
    """

    __slots__ = ("annotate", "decorator_of", "native_device", "read_device", "user_line")

    native_device: Callable[[Device, FrameworkLike], Any]
    read_device: Callable[[Any], Device | None]
    user_line: Callable[[], tuple[str, int]]
    annotate: Callable[[str], AbstractContextManager[None]]
    decorator_of: Callable[[str], Any]


hooks = Hooks()


class MemoryType(StrEnum):
    """The built-in frameworks by name; a member may stand wherever a framework's name may.

    >>> MemoryType.TORCH == "torch"
    True
    """

    NUMPY = "numpy"
    CUPY = "cupy"
    TORCH = "torch"
    JAX = "jax"
    TENSORFLOW = "tensorflow"
    PYCLESPERANTO = "pyclesperanto"

    # Enum hashes a member by its name; hashing it as the string that it is lets a member find
    # an entry stored under the plain string, without a conversion on every call.
    __hash__ = str.__hash__


_WORDS = r"(cpu|gpu|opencl|cuda|rocm|hip|mps|xpu|tpu)(?::(\d+))?"
_TENSORFLOW_NAME = r"(?:/job:\w+/replica:\d+/task:\d+)?/(?:device:)?(CPU|GPU):(\d+)"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Device:
    """A place where arrays live: ``cpu``, ``cpu:3``, ``gpu:0`` or ``opencl:1``.

    ``kind`` is ``"cpu"``, ``"gpu"`` (any accelerator: CUDA, ROCm, XPU, MPS, TPU) or ``"opencl"``.
    Two devices are equal when kind and index are; a device also equals the words that name it.

    >>> Device.parse("cuda:1"), Device.parse("cpu")
    (Device('gpu:1'), Device('cpu'))
    >>> Device("gpu", 0) == "gpu:0"
    True
    """

    kind: str
    index: int = 0
    #: What the device is called, e.g. ``"NVIDIA H200"``; empty where nobody asked.
    name: str = field(default="", repr=False)
    #: The kind of accelerator that a device string names, such as ``"cuda"``; empty for any kind.
    accelerator: str = field(default="", repr=False, kw_only=True)

    @classmethod
    def parse(cls, words: DeviceLike) -> Device:
        """The device that ``words`` name, or that a framework's own device object is.

        Words are ``"cpu"``, ``"cpu:1"``, ``"gpu"``, ``"gpu:0"``, ``"opencl:0"``, and TensorFlow's names, as
        ``"/device:GPU:0"``. ``"cuda"``, ``"rocm"``, ``"mps"``, ``"xpu"`` and ``"tpu"``, with or without a
        number, name an accelerator of that kind.

        Raises:
            ValueError: ``words`` is no device.
        """
        if isinstance(words, Device):
            return words
        if isinstance(words, str):
            match = re.fullmatch(_WORDS, words) or re.fullmatch(_TENSORFLOW_NAME, words)
            if match is not None:
                kind, index = match.groups()
                kind = kind.lower()
                if kind in ("cpu", "gpu", "opencl"):
                    return cls(kind, int(index or 0))
                return cls("gpu", int(index or 0), accelerator="rocm" if kind == "hip" else kind)
        else:
            device = hooks.read_device(words)
            if device is not None:
                return device
        raise ValueError(
            f"{words!r} is not a device; write it as 'cpu', 'cpu:1', 'gpu', 'gpu:0', 'cuda:0', 'rocm', 'mps',"
            " 'xpu', 'tpu' or 'opencl:0', or pass the device object of a framework"
        )

    def native(self, framework: FrameworkLike) -> Any:
        """This device as the framework itself has it: ``model.to(get_device().native("torch"))``.

        Args:
            framework: the name of one that is installed.

        Returns:
            a ``torch.device``, ``jax.Device``, ``cupy.cuda.Device``, the device object of pyclesperanto, the
            name that TensorFlow gives it, or where a framework has no such thing the words of `str`.

        Raises:
            DeviceNotFoundError: the framework has no such device. Under ``settings(missing_gpu="host")`` its
                CPU comes back instead, with a warning, where it has one.
            UnknownFrameworkError, FrameworkNotInstalledError: there is no such framework.

        >>> Device("cpu").native("torch")
        device(type='cpu')
        """
        return hooks.native_device(self, framework)

    def __str__(self) -> str:
        return "cpu" if self.kind == "cpu" and self.index == 0 else f"{self.kind}:{self.index}"

    def __repr__(self) -> str:
        return f"Device({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Device):
            return self.kind == other.kind and self.index == other.index
        if isinstance(other, str):
            try:
                return self == Device.parse(other)
            except ValueError:
                return False
        return NotImplemented

    def __hash__(self) -> int:
        return hash(str(self))


DeviceLike: TypeAlias = "Device | str | torch.device | jax.Device | cupy.cuda.Device"
FrameworkLike: TypeAlias = "str | MemoryType"
GpuId: TypeAlias = "int | Literal['auto'] | None"


#: The most entries of a cache: classes that are made in a loop must not pile up.
MOST_ENTRIES = 512
_caches: list[dict[Any, Any]] = []


def new_cache() -> dict[Any, Any]:
    """A dict for what is found out once; emptied whenever a framework is added or removed.

    Plain, since Python looks into a dict of another class later.

    >>> sizes: dict[type, int] = new_cache()
    >>> remember(sizes, float, 8), sizes
    (8, {<class 'float'>: 8})
    """
    _caches.append({})
    return _caches[-1]


def remember(cache: dict[K, V], key: K, value: V) -> V:
    """Put it into a cache, which is emptied where it is full; returns the value."""
    if len(cache) >= MOST_ENTRIES:
        cache.clear()
    cache[key] = value
    return value


def empty_caches() -> None:
    """Forget what was found out of frameworks and types."""
    for cache in _caches:
        cache.clear()


def exact_key(value: Any) -> Any:
    """Return a cache key that differs for 0.0 and -0.0 and for 1, 1.0 and True, and that matches NaN."""
    if issubclass(type(value), np.generic):
        return type(value), value.dtype.str, value.tobytes()
    if issubclass(type(value), float):
        return type(value), np.float64(value).tobytes()
    if issubclass(type(value), complex):
        return type(value), np.complex128(value).tobytes()
    return type(value), value
