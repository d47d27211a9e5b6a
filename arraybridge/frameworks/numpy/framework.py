"""NumPy: arrays in host memory, through which other frameworks convert by default."""

from __future__ import annotations

import ctypes
import math
import operator
import re
from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import numpy as np

from arraybridge.advice import literal
from arraybridge.device import Device
from arraybridge.frameworks.numpy.sparse import ScipySparse
from arraybridge.host import buffers, dtype_names
from arraybridge.host.buffers import ALIGNMENT, has_other_bools
from arraybridge.host.dtype_names import NUMERIC_KINDS
from arraybridge.interface import unsupported
from arraybridge.interface.batching import IndexedBatching
from arraybridge.interface.component import component
from arraybridge.interface.devices import CPU, Devices
from arraybridge.interface.framework import FastPath, Framework, NoPlanError
from arraybridge.interface.installation import packages_of
from arraybridge.interface.interchange import Interchange
from arraybridge.interface.memory import Memory
from arraybridge.interface.runtime import Runtime
from arraybridge.interface.streams import identity
from arraybridge.outcome import ask
from arraybridge.reasons import Cause

# Packages whose subclasses of ndarray have units → the attribute for the unit, which may be None.
_UNITS = {"astropy": "unit", "unyt": "units", "quantities": "units"}
#: The kind of each dtype of texts of a fixed length → its name.
_TEXT_DTYPES = {"S": "bytes", "U": "str"}
_itemsize = operator.attrgetter("itemsize")
# The start of the message of numpy._core._exceptions._ArrayMemoryError (numpy 2.4, numpy/numpy#13225).
_OOM = r"Unable to allocate [\d.]+ (?:\w*B|bytes) for an array"
_first_byte = ctypes.c_char.from_buffer
_address_of = ctypes.addressof
_LOST_MASK = "its mask would be lost"


class NumpyDevices(Devices):
    """The host, which is NumPy's only device."""

    has_only_host = True


class NumpyFastPath(FastPath):
    """Functions for NumPy arrays that need no special handling."""

    fast_view = staticmethod(identity)
    fast_from_view = staticmethod(identity)

    def fast_types(self) -> tuple[type, ...]:
        return tuple(self.framework.classes)

    def plan_key(self, x: np.ndarray, alignment: int) -> Hashable:
        flags = x.flags
        layout = x.ndim if flags.c_contiguous and x.size else (x.shape, x.strides)
        if alignment > 1 or x.itemsize == 16:  # PyTorch requires aligned complex128
            is_misread = x.dtype.char == "?" and has_other_bools(x)
            return x.dtype, flags.writeable, layout, buffers.address(x) % ALIGNMENT, is_misread
        return x.dtype, flags.writeable, layout

    def fast_export(self, x: np.ndarray) -> Any:
        # A ctypes buffer is four times as fast as __array_interface__. It raises for read-only, strided and
        # empty arrays, which then take the slow path.
        try:
            first_byte = _first_byte(x)  # type: ignore[arg-type]  # an array is a buffer
        except (TypeError, ValueError, BufferError) as error:
            raise NoPlanError from error
        if _address_of(first_byte) % ALIGNMENT:
            raise NoPlanError
        # The first test takes 20 ns, the second one 50.
        if x.itemsize == 1 and x.dtype.char == "?" and has_other_bools(x):
            raise NoPlanError
        try:
            return x.__dlpack__()
        except BufferError as error:  # a dtype that DLPack does not have
            raise NoPlanError from error


class NumpyInterchange(Interchange):
    """The reasons why NumPy arrays are copied, and the casts that NumPy lacks."""

    def strides(self, x: np.ndarray) -> tuple[int, ...]:
        return x.strides

    def copy_reason(self, x: np.ndarray) -> Cause | None:
        return self.framework.copied

    def check_cast(self, source: str, dtype: str) -> None:
        for name in (source, dtype):
            dtype_names.np_dtype(name)  # raises for an ml_dtypes dtype if ml_dtypes is not installed


class NumpyBatching(IndexedBatching):
    """Functions that split and join NumPy arrays, including masked arrays and other subclasses."""

    def common_dtype(self, x: np.ndarray) -> str:
        text = _TEXT_DTYPES.get(x.dtype.kind)
        return self.framework.dtype_name(x) if text is None else text

    def _join(self, name: str, on_host: Callable[..., np.ndarray], arrays: list[Any], axis: int) -> Any:
        """Join arrays and preserve class, mask and dtype, unlike NumPy's functions (numpy/numpy#18675)."""
        first = next((x for x in arrays if isinstance(x, np.ma.MaskedArray)), arrays[0])
        dtype = first.dtype
        if dtype.kind in _TEXT_DTYPES:  # the longest text
            dtype = max((x.dtype for x in arrays), key=_itemsize)
        values = on_host(arrays, axis, dtype=dtype)
        if type(first) is np.ndarray:
            return values
        joined = np.empty_like(first, dtype=dtype, shape=values.shape)
        joined[...] = values
        if isinstance(joined, np.ma.MaskedArray):
            joined.mask = on_host([np.ma.getmaskarray(x) for x in arrays], axis)
        return joined

    def output_buffer(self, part: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
        # A subclass may hold more than values, such as a mask. Later parts may contain longer texts.
        if type(part) is not np.ndarray or part.dtype.kind in _TEXT_DTYPES:
            return None
        return np.empty(shape, part.dtype)

    def reinterpret(self, memory: np.ndarray, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        elements = dtype_names.np_dtype(dtype)
        nbytes = elements.itemsize * math.prod(shape)
        return memory.reshape(-1).view(np.uint8)[:nbytes].view(elements).reshape(shape)


class NumpyMemory(Memory):
    """NumPy's out-of-memory errors."""

    def is_oom_text(self, text: str) -> bool:
        return re.match(_OOM, text) is not None


class NumpyRuntime(Runtime):
    """The array API namespace of NumPy, and the properties of arrays that traces read."""

    has_strides = True
    namespace = "array_api_compat.numpy"

    def observe(self, x: np.ndarray) -> tuple[Any, int, int | None, Device]:
        return x.dtype, x.nbytes, buffers.address(x), CPU


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
            self._check_unit(x)
            self._check_mask(x)
        dtype = x.dtype
        if dtype.kind in NUMERIC_KINDS or dtype.name in dtype_names.EXTENDED:
            return
        what = f"a NumPy array of dtype {dtype}" if isinstance(x, np.ndarray) else f"values of dtype {dtype}"
        if unsupported.is_sub_byte(dtype.name):
            raise unsupported.sub_byte_dtype_error(self, what, dtype.name)
        raise unsupported.dtype_error(self, what, *_element_advice(x))

    def _check_mask(self, x: np.ndarray) -> None:
        """Raise for sparse arrays, and for subclasses with a mask, which views drop (numpy/numpy#26669)."""
        if self.sparse.layout(x):
            raise unsupported.sparse_array_error(self, x)
        if isinstance(x, np.ma.MaskedArray):
            advice = _mask_advice(x, "{x}.data", "np.ma.getmaskarray({x})")
            raise unsupported.array_error(self, "a masked NumPy array", _LOST_MASK, *advice)
        is_masked = hasattr(type(x), "unmasked")  # astropy's Masked
        # The fields of a record array are attributes, and one of them may be named "mask".
        if not is_masked and (x.dtype.names or not _may_have_mask(x)):
            return
        what = f"a {type(x).__qualname__}"
        if is_masked:
            advice = _mask_advice(x, "{x}.unmasked", "{x}.mask")
        else:
            advice = "Pass {}, all of its values, and its mask separately.", "{x}.view(np.ndarray)"
        raise unsupported.array_error(self, what, _LOST_MASK, *advice)

    def _check_unit(self, x: np.ndarray) -> None:
        """Raise for subclasses with a unit (astropy, unyt, quantities), even a dimensionless one."""
        if not isinstance(x, np.ndarray) or not _has_unit(x):
            return
        has_mask = _may_have_mask(x)
        raise unsupported.array_error(
            self,
            f"a {type(x).__qualname__}",
            "its mask and its unit would be lost" if has_mask else "its unit would be lost",
            "Pass {}.",
            "{x}.filled(0).view(np.ndarray)" if has_mask else "{x}.view(np.ndarray)",
        )

    def host_view(self, x: np.ndarray) -> np.ndarray:
        return x if type(x) is np.ndarray else x.view(np.ndarray)

    def from_host(self, view: np.ndarray, device: Device) -> np.ndarray:
        return view.view(np.ndarray) if type(view) is not np.ndarray else view

    def cannot_view(self, view: np.ndarray) -> Cause | None:
        return None  # NumPy supports any strides, byte order and alignment, and read-only views

    def copy(self, x: np.ndarray) -> np.ndarray:
        if type(x) is np.ndarray and x.dtype.isnative and x.dtype.kind in NUMERIC_KINDS:
            # Large copies are aligned, so that other frameworks can share their memory.
            return buffers.contiguous_copy(x)
        return x.copy() if isinstance(x, np.ndarray) else self.sparse.copy(x)

    def cast(self, x: np.ndarray, dtype: str) -> np.ndarray:
        return buffers.cast(x, dtype)


def _may_have_mask(x: Any) -> bool:
    """Return whether an array has a mask; also True if reading it raises an unexpected error."""
    return ask(hasattr, x, "mask") is not False


def _has_unit(x: np.ndarray) -> bool:
    packages = packages_of(type(x))
    names = [name for package, name in _UNITS.items() if package in packages]
    return any(getattr(x, name, None) is not None for name in names)


def _mask_advice(x: Any, values: str, mask: str) -> tuple[str, ...]:
    """Return the advice for a masked array and its expressions.

    In ``values`` and ``mask``, which are the expressions for the values and the mask of an array, ``{x}`` is
    that array.
    """
    code = "{x}"
    while x.dtype.names:
        name = _best_field(x.dtype)
        x = x[name]
        code += f"[{literal(repr(name))}]"
    values = values.replace("{x}", code)
    mask = mask.replace("{x}", code)
    if x.dtype.kind in NUMERIC_KINDS:
        advice = "Pass {}, with a value of your choice, or {} and {} separately."
        return advice, f"{code}.filled(0)", values, mask
    _, advice, *expressions = _element_advice(x.view(np.ndarray), values)
    return f"{advice} Its mask is {{}}.", *expressions, mask


def _element_advice(x: Any, code: str = "") -> tuple[str, ...]:
    """Return the cause, the advice and its expressions for elements that are not numbers.

    ``x`` may be an array in a file, whose elements are not read.
    """
    is_array = isinstance(x, np.ndarray)
    code = code or ("{x}" if is_array else "{x}[...]")
    return _advice_for_dtype(x.dtype, x if is_array else None, code)


def _best_field(dtype: np.dtype[Any]) -> str:
    """Return the name of the first numeric field, or of the first field if none is numeric."""
    names = list(dtype.names or ())
    return next((name for name in names if dtype[name].base.kind in NUMERIC_KINDS), names[0])


def _advice_for_dtype(dtype: np.dtype[Any], values: np.ndarray | None, code: str) -> tuple[str, ...]:
    """Return the cause, the advice and its expressions for a dtype, and for the elements if they are known.

    The advice for numbers, such as those in a field, is to pass them.
    """
    kind = dtype.kind
    if dtype.itemsize == 0:  # such as float0, the gradient of integers in JAX
        return "its elements have no bytes", "Pass zeros of its shape, {}.", f"np.zeros({code}.shape)"
    if dtype.names:
        name = _best_field(dtype)
        field = None if values is None else values[name]
        _, advice, *expressions = _advice_for_dtype(dtype[name].base, field, f"{code}[{literal(repr(name))}]")
        advice = "Pass one field at a time, {}." if expressions else advice
        return "its elements consist of fields", advice, *expressions
    if kind in NUMERIC_KINDS:
        return "", "Pass {}.", f"{code}{_cast_of_wide(dtype)}"
    if kind in "Mm":
        cause = "its elements are dates or durations"
        advice = "Pass {}, which counts time units, with the smallest integer for NaT."
        return cause, advice, f'{code}.astype("int64")'
    if kind == "V":
        return "its elements are bytes", "Pass {}.", f"np.frombuffer({code}.tobytes(), np.uint8)"
    return _advice_for_objects(dtype, values, code)


def _cast_of_wide(dtype: np.dtype[Any]) -> str:
    """Return the code that casts a dtype that only NumPy has; ``""`` for another dtype."""
    if dtype.kind == "c":
        return '.astype("complex128")' if dtype.itemsize > 16 else ""
    return '.astype("float64")' if dtype.itemsize > 8 else ""


def _advice_for_objects(dtype: np.dtype[Any], values: np.ndarray | None, code: str) -> tuple[str, ...]:
    """Return the cause, the advice and its expressions for strings and Python objects."""
    is_text = dtype.kind != "O" or dict(dtype.metadata or {}).get("vlen") in (str, bytes)  # h5py's strings
    cause = "its elements are strings" if is_text else "its elements are Python objects"
    if values is not None and _are_numbers(values):
        note = "" if is_text else ", in which None becomes NaN"
        return cause, f"Its elements represent numbers: pass {{}}{note}.", f"{code}.astype(float)"
    if not is_text:
        elements = f"{code.format(x='x')}.tolist()"
        return (
            cause,
            f"Not all of its elements are numbers: convert them with convert_tree({elements}, target).",
        )
    advice = "Pass integers that identify the strings, {}."
    return cause, advice, f"np.unique({code}, return_inverse=True)[1]"


def _are_numbers(x: np.ndarray) -> bool:
    """Return whether strings or objects can be cast to numbers; False for objects in imported memory.

    An exporter may declare any bytes to be objects, and reading such an object crashes the process.
    """
    base = x.base
    while isinstance(base, np.ndarray):
        base = base.base
    if x.dtype.kind == "O" and base is not None:
        return False
    return ask(x.astype, float) is not None
