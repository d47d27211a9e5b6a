"""Types that all layers share: framework names, devices, hooks and caches."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np

from arraybridge.validation import whole_number

if TYPE_CHECKING:
    import cupy
    import jax
    import torch

K = TypeVar("K")
V = TypeVar("V")


class Hooks:
    """Functions of higher layers that lower layers call, because lower layers do not import higher ones.

    A module that defines one of the functions sets the attribute when the module is imported.

    Attributes:
        native_device: Returns a framework's own object for a `Device`. Set in frameworks/registry.py.
        read_device: Returns the `Device` that a framework's own device object denotes; None for other
            objects. Set in frameworks/registry.py.
        user_line: Returns the file and line of the user's code that called this package. Set in
            tracing/events.py.
        annotate: Opens a context in which a profiler shows the names of operations. Set in
            tracing/trace_log.py.
        decorator_of: Returns the decorator of a framework. Set in decorators/framework_decorators.py.
    """

    __slots__ = ("annotate", "decorator_of", "native_device", "read_device", "user_line")

    native_device: Callable[[Device, FrameworkLike], Any]
    read_device: Callable[[Any], Device | None]
    user_line: Callable[[], tuple[str, int]]
    annotate: Callable[[str], AbstractContextManager[None]]
    decorator_of: Callable[[str], Any]


hooks = Hooks()


class MemoryType(StrEnum):
    """The names of the built-in frameworks. Members are accepted wherever a framework name is.

    >>> MemoryType.TORCH == "torch"
    True
    """

    NUMPY = "numpy"
    CUPY = "cupy"
    TORCH = "torch"
    JAX = "jax"
    TENSORFLOW = "tensorflow"
    PYCLESPERANTO = "pyclesperanto"

    # Enum hashes a member by its name. With the hash of the string, a member finds the cache entries that
    # were stored under the plain string.
    __hash__ = str.__hash__


_KINDS = ("cpu", "gpu", "opencl")
_DEVICE_STRING = r"(cpu|gpu|opencl|cuda|rocm|hip|mps|xpu|tpu)(?::(\d+))?"
_TENSORFLOW_NAME = r"(?:/job:\w+/replica:\d+/task:\d+)?/(?:device:)?(CPU|GPU):(\d+)"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Device:
    """A device that holds arrays: ``cpu``, ``cpu:3``, ``gpu:0`` or ``opencl:1``.

    ``kind`` is ``"cpu"``, ``"gpu"`` (any accelerator: CUDA, ROCm, XPU, MPS, TPU) or ``"opencl"``.
    Devices are equal if kind and index are equal. A device also equals its device string.

    Raises:
        ValueError: ``kind`` is none of these, or ``index`` is negative or not an int.

    >>> Device.parse("cuda:1"), Device.parse("cpu")
    (Device('gpu:1'), Device('cpu'))
    >>> Device("gpu", 0) == "gpu:0"
    True
    """

    kind: str
    index: int = 0
    #: The name of the hardware, such as ``"NVIDIA H200"``; empty if it was not queried.
    name: str = field(default="", repr=False)
    #: The kind of accelerator that a device string names, such as ``"cuda"``; empty for any kind.
    accelerator: str = field(default="", repr=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(
                f"kind={self.kind!r} must be 'cpu', 'gpu' or 'opencl'. For a device string such as 'cuda:1',"
                " use Device.parse()."
            )
        index = self.index
        if index.__class__ is not int or index < 0:
            # NumPy integers are accepted, too, and stored as int.
            index = int(index) if isinstance(index, np.integer) else index
            object.__setattr__(self, "index", whole_number("index", index, least=0, type_error=ValueError))

    @classmethod
    def parse(cls, device: DeviceLike) -> Device:
        """Return the device that a device string or a device object of a framework names.

        Args:
            device: ``"cpu"``, ``"cpu:1"``, ``"gpu"``, ``"gpu:0"``, ``"opencl:0"``, or a TensorFlow device
                name, such as ``"/device:GPU:0"``. ``"cuda"``, ``"rocm"``, ``"mps"``, ``"xpu"`` and ``"tpu"``,
                with or without a number, name an accelerator of that kind. A `Device` or a device object of a
                framework, such as ``torch.device("cuda:1")``, is accepted as well.

        Raises:
            ValueError: ``device`` is not a device.
        """
        if isinstance(device, Device):
            return device
        found = _device_of_string(device) if isinstance(device, str) else hooks.read_device(device)
        if found is not None:
            return found
        raise ValueError(
            f"{device!r} is not a device. Pass 'cpu', 'cpu:1', 'gpu', 'gpu:0', 'cuda:0', 'rocm', 'mps',"
            " 'xpu', 'tpu', 'opencl:0', or the device object of a framework."
        )

    def native(self, framework: FrameworkLike) -> Any:
        """Return the framework's own object for this device: ``model.to(get_device().native("torch"))``.

        Args:
            framework: The name of an installed framework.

        Returns:
            A ``torch.device``, ``jax.Device``, ``cupy.cuda.Device``, the device object of pyclesperanto, or
            TensorFlow's device name; the device string for a framework without device objects.

        Raises:
            DeviceNotFoundError: The framework does not have this device. Within
                ``settings(missing_gpu="host")``, the framework's CPU is returned instead, with a warning.
            UnknownFrameworkError: No framework has that name.
            FrameworkNotInstalledError: The framework is not installed.

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


@functools.lru_cache(maxsize=64)  # calls with a device string parse it twice, at 2 µs each
def _device_of_string(text: str) -> Device | None:
    """Return the device that a device string names; None for other text."""
    match = re.fullmatch(_DEVICE_STRING, text) or re.fullmatch(_TENSORFLOW_NAME, text)
    if match is None:
        return None
    kind, index = match.groups()
    kind = kind.lower()
    if kind in _KINDS:
        return Device(kind, int(index or 0))
    return Device("gpu", int(index or 0), accelerator="rocm" if kind == "hip" else kind)


@functools.lru_cache(maxsize=64)
def gpu_device(index: int) -> Device:
    """Return the GPU with this number from a cache, which is faster than creating and validating it.

    >>> gpu_device(1)
    Device('gpu:1')
    """
    return Device("gpu", index)


DeviceLike: TypeAlias = "Device | str | torch.device | jax.Device | cupy.cuda.Device"
FrameworkLike: TypeAlias = "str | MemoryType"
GpuId: TypeAlias = "int | Literal['auto'] | None"


#: The maximum number of entries in a cache. A program that creates classes in a loop would otherwise fill the
#: memory with entries.
MOST_ENTRIES = 512
_caches: list[dict[Any, Any]] = []


def new_cache() -> dict[Any, Any]:
    """Return a dict for cached results. It is emptied whenever the known frameworks or carriers change.

    It is a plain dict, because lookups in a subclass of dict are slower.

    >>> sizes: dict[type, int] = new_cache()
    >>> remember(sizes, float, 8), sizes
    (8, {<class 'float'>: 8})
    """
    _caches.append({})
    return _caches[-1]


def remember(cache: dict[K, V], key: K, value: V) -> V:
    """Store a value in a cache, which is emptied first if it is full, and return the value."""
    if len(cache) >= MOST_ENTRIES:
        cache.clear()
    cache[key] = value
    return value


def empty_caches() -> None:
    """Empty all caches that `new_cache` returned."""
    for cache in _caches:
        cache.clear()


def exact_key(value: Any) -> Any:
    """Return a cache key that differs for 0.0 and -0.0 and for 1, 1.0 and True, and is equal for two NaNs."""
    if issubclass(type(value), np.generic):
        return type(value), value.dtype.str, value.tobytes()
    if issubclass(type(value), float):
        return type(value), np.float64(value).tobytes()
    if issubclass(type(value), complex):
        return type(value), np.complex128(value).tobytes()
    return type(value), value
