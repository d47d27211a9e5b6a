"""NumPy: arrays in host memory, through which other frameworks convert by default."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import numpy as np

from arraybridge.advice import literal
from arraybridge.device import Device
from arraybridge.frameworks import dtype_names, host_memory
from arraybridge.frameworks.accelerator_memory import Memory
from arraybridge.frameworks.base import FastPath, Framework, nbytes_of_parts
from arraybridge.frameworks.batching import IndexedBatching
from arraybridge.frameworks.component import component
from arraybridge.frameworks.device_access import CPU, Devices
from arraybridge.frameworks.interchange import Interchange
from arraybridge.frameworks.runtime import Observation, Runtime
from arraybridge.frameworks.scipy_sparse import ScipySparse
from arraybridge.frameworks.streams import identity
from arraybridge.frameworks.unsupported import (
    is_sub_byte,
    sparse_array_error,
    sub_byte_dtype_error,
    unsupported_array_error,
    unsupported_dtype_error,
)
from arraybridge.reasons import Cause

_NUMBERS = frozenset("biufc")
# The start of the message of numpy._core._exceptions._ArrayMemoryError.
_OOM = r"Unable to allocate [\d.]+ (?:\w*B|bytes) for an array"
_first_byte = ctypes.c_char.from_buffer


class NumpyObservation(Observation):
    """Dtype, bytes, address and device of NumPy arrays."""

    has_strides = True

    def read(self, owner: Framework, x: np.ndarray) -> tuple[Any, int, int | None, Device]:
        return x.dtype, x.nbytes, host_memory.address(x), CPU


class NumpyDevices(Devices):
    """The host, which is NumPy's only device."""

    has_only_host = True


class NumpyFastPath(FastPath):
    """Functions for NumPy arrays that need no special handling."""

    framework: NumpyFramework  # pyright: ignore[reportIncompatibleVariableOverride]  # never reassigned
    fast_view = staticmethod(identity)
    fast_from_view = staticmethod(identity)

    def fast_types(self) -> tuple[type, ...]:
        return tuple(self.framework.classes)

    def plan_key(self, x: np.ndarray, alignment: int) -> Hashable:
        flags = x.flags
        layout = x.ndim if flags.c_contiguous and x.size else (x.shape, x.strides)
        if alignment > 1 or x.itemsize == 16:  # PyTorch requires aligned complex128
            return x.dtype, flags.writeable, layout, host_memory.address(x) % host_memory.ALIGNMENT
        return x.dtype, flags.writeable, layout

    def fast_export(self, x: np.ndarray) -> Any:
        # A ctypes buffer is four times as fast as __array_interface__. It raises for read-only, strided and
        # empty arrays, which then take the slow path.
        first_byte = _first_byte(x)  # type: ignore[arg-type]  # an array is a buffer
        if ctypes.addressof(first_byte) % host_memory.ALIGNMENT:
            raise NotImplementedError
        return x.__dlpack__()


class NumpyInterchange(Interchange):
    """The reasons why NumPy arrays are copied, and the casts that NumPy lacks."""

    framework: NumpyFramework  # pyright: ignore[reportIncompatibleVariableOverride]  # never reassigned

    def copy_reason(self, x: np.ndarray) -> Cause | None:
        return self.framework.copied

    def check_cast(self, source: str, dtype: str) -> None:
        for name in (source, dtype):
            dtype_names.np_dtype(name)  # raises for an ml_dtypes dtype if ml_dtypes is not installed


class NumpyBatching(IndexedBatching):
    """Functions that split and join NumPy arrays, including masked arrays and other subclasses."""

    def _joined(self, name: str, on_host: Callable[..., np.ndarray], arrays: list[Any], axis: int) -> Any:
        """Join arrays and preserve their class, mask and dtype, which NumPy's functions may change."""
        first = next((x for x in arrays if isinstance(x, np.ma.MaskedArray)), arrays[0])
        values = on_host(arrays, axis, dtype=first.dtype)
        if type(first) is np.ndarray:
            return values
        joined = np.empty_like(first, shape=values.shape)
        joined[...] = values
        if isinstance(joined, np.ma.MaskedArray):
            joined.mask = on_host([np.ma.getmaskarray(x) for x in arrays], axis)
        return joined

    def output_buffer(self, part: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
        # A subclass may hold more than values, such as a mask.
        return np.empty(shape, part.dtype) if type(part) is np.ndarray else None

    def reinterpret(self, memory: np.ndarray, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        elements = dtype_names.np_dtype(dtype)
        nbytes = elements.itemsize * math.prod(shape)
        return memory.reshape(-1).view(np.uint8)[:nbytes].view(elements).reshape(shape)


class NumpyMemory(Memory):
    """NumPy's out-of-memory errors."""

    def is_oom_text(self, text: str) -> bool:
        return re.match(_OOM, text) is not None


class NumpyRuntime(Runtime):
    """The array API namespace of NumPy."""

    observation = NumpyObservation()

    def array_namespace(self) -> Any:
        import array_api_compat.numpy as namespace

        return namespace


class NumpyFramework(Framework):
    """NumPy, including array subclasses without a mask, and the sparse arrays of SciPy.

    Attributes:
        classes: The array classes that hold nothing but values. Plug-ins may add their own.
    """

    name = "numpy"
    classes: ClassVar[list[type]] = [np.ndarray, np.memmap]
    respects_read_only = True
    devices = component(NumpyDevices)
    fast_path = component(NumpyFastPath)
    interchange = component(NumpyInterchange)
    batching = component(NumpyBatching)
    memory = component(NumpyMemory)
    runtime = component(NumpyRuntime)
    sparse = ScipySparse()

    def __init__(self, copied: Cause | None = None) -> None:
        """Create the framework.

        Args:
            copied: The reason why memory from another library is a copy; None if it is not.
        """
        self.copied = copied

    def owns(self, x: Any) -> bool:
        return isinstance(x, np.ndarray) or self.sparse.layout(x) != ""

    def check(self, x: np.ndarray) -> None:
        if type(x) is not np.ndarray:
            self._check_mask(x)
        dtype = x.dtype
        if dtype.kind in _NUMBERS or dtype.name in dtype_names.EXTENDED:
            return
        if is_sub_byte(dtype.name):
            raise sub_byte_dtype_error(self, dtype.name)
        raise unsupported_dtype_error(self, dtype, *_advice_for_elements(x))

    def _check_mask(self, x: np.ndarray) -> None:
        """Raise for sparse arrays, and for subclasses with a mask, which a view of the values would drop."""
        if self.sparse.layout(x):
            raise sparse_array_error(self, x)
        if isinstance(x, np.ma.MaskedArray):
            names = x.dtype.names
            field = f"[{literal(repr(names[0]))}]" if names else ""
            instead = "its mask would be lost; pass {}, with a value of your choice, or {} and {} separately"
            expressions = (
                f"{{x}}{field}.filled(0)",
                f"{{x}}{field}.data",
                f"np.ma.getmaskarray({{x}}{field})",
            )
            raise unsupported_array_error(self, "a masked array", instead, *expressions)
        what = f"an array of type {type(x).__qualname__}, which has a mask,"
        if x.dtype.names is None and has_attribute(x, "unmasked"):  # astropy's Masked
            instead = "its mask would be lost; pass {}, or {} and {} separately"
            raise unsupported_array_error(self, what, instead, "{x}.filled(0)", "{x}.unmasked", "{x}.mask")
        # The fields of a record array are attributes, and one of them may be named "mask".
        if x.dtype.names is None and has_attribute(x, "mask"):
            instead = "its mask would be lost; pass {}, all of its values, and its mask separately"
            raise unsupported_array_error(self, what, instead, "{x}.view(np.ndarray)")

    def nbytes(self, x: Any) -> int:
        if isinstance(x, np.ndarray) or not self.sparse.layout(x):
            return int(x.nbytes)
        return nbytes_of_parts(self, x)

    def host_view(self, x: np.ndarray) -> np.ndarray:
        return x if type(x) is np.ndarray else x.view(np.ndarray)

    def from_host(self, view: np.ndarray, device: Device) -> np.ndarray:
        return view.view(np.ndarray) if type(view) is not np.ndarray else view

    def cannot_view(self, view: np.ndarray) -> Cause | None:
        return None  # NumPy supports any strides, byte order and alignment, and read-only views

    def copy(self, x: np.ndarray) -> np.ndarray:
        if type(x) is np.ndarray and x.dtype.isnative and x.dtype.kind in _NUMBERS:
            # Large copies are aligned, so that other frameworks can share their memory.
            return host_memory.contiguous_copy(x)
        return x.copy()  # sparse arrays also have this method

    def cast(self, x: np.ndarray, dtype: str) -> np.ndarray:
        return host_memory.cast(x, dtype)


def has_attribute(x: Any, name: str) -> bool:
    """Return whether an object has an attribute; also True if a property raises an unexpected error."""
    try:
        return hasattr(x, name)
    except Exception:  # noqa: BLE001  # a property of a third-party class may raise anything
        return True


def _advice_for_elements(x: Any) -> tuple[str, ...]:
    """Return the text and the expressions of the advice for elements that are not numbers.

    ``x`` may be an array in a file, whose elements are not read.
    """
    kind = x.dtype.kind
    names = x.dtype.names
    values = "{x}" if isinstance(x, np.ndarray) else "{x}[...]"
    if kind in "Mm":
        instead = (
            "their elements are dates or durations, not numbers; pass {}, which counts time units, with the"
            " smallest integer for NaT"
        )
        return instead, f'{values}.astype("int64")'
    if names:
        instead = "their elements consist of fields; pass one field at a time, {}"
        return instead, f"{values}[{literal(repr(names[0]))}]"
    if kind == "V":
        instead = "their elements have no fields and are not numbers; pass their bytes, {}"
        return instead, f"np.frombuffer({values}.tobytes(), np.uint8)"
    is_text = kind != "O" or (x.dtype.metadata or {}).get("vlen") in (str, bytes)  # h5py's strings
    if isinstance(x, np.ndarray) and _are_numbers(x):
        if kind == "O":
            instead = "their elements are numeric objects; pass {}, in which None becomes NaN"
            return instead, "{x}.astype(float)"
        return "their elements are strings that represent numbers; pass {}", "{x}.astype(float)"
    if not is_text:
        elements = f"{values.format(x='x')}.tolist()"
        return (f"not all of their elements are numbers; convert them with convert_tree({elements}, target)",)
    numbers = f"np.unique({values}, return_inverse=True)[1]"
    return "their strings are not numbers; pass integers that identify the strings, {}", numbers


def _are_numbers(x: np.ndarray) -> bool:
    """Return whether strings or objects can be cast to numbers; False for objects in imported memory.

    An exporter may declare any bytes to be objects, and reading such an object crashes the process.
    """
    base = x.base
    while isinstance(base, np.ndarray):
        base = base.base
    if x.dtype.kind == "O" and base is not None:
        return False
    try:
        x.astype(float)
    except Exception:  # noqa: BLE001  # the elements may be of any class
        return False
    return True
