"""The expected conversion matrix: builders of the sources, raw probes, and the expected outcomes.

This module does not use arraybridge. Sources are built and results are read with their own framework's
calls; the tables below are written by hand from the documented guarantees.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

# An array, and a call that changes its memory.
Built: TypeAlias = tuple[Any, Callable[[], None] | None]

FRAMEWORKS = ("numpy", "torch", "jax", "tensorflow", "pyclesperanto")

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *("bfloat16", "float8_e4m3fn", "float8_e5m2"),
)

# Dtypes that NumPy gets from ml_dtypes.
EXTENSION_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")

# OpenCL images and buffers of pyclesperanto: these dtypes, one to three axes, at least one element.
PYCLESPERANTO_DTYPES = ("float32", "int8", "int16", "int32", "uint8", "uint16", "uint32")
PYCLESPERANTO_REFUSES = ("zero-size", "0-d", "5-D")

# ---- expected values -------------------------------------------------------------------------------------
# same    the same object
# share   the same memory, also with copy=False
# copy    other memory; copy=False raises CopyRequiredError
# copy*   other memory by default, the same memory with copy=False (a read-only array converted to PyTorch)
# copy?   other memory by default; copy=False may share or raise (a scalar of an immutable framework)
# may     shared or copied, both are correct; copy=False shares or raises, as the default call did
# empty   no bytes, so there is nothing to share; only shape and dtype count

# fmt: off
#                     numpy     torch     jax       tensorflow
_FROM_NUMPY = {
    "C":             ("same",   "share",  "copy",   "copy"),   # 16-byte aligned, like NumPy's own allocations
    "aligned":       ("same",   "share",  "share",  "share"),  # 64-byte aligned
    "fortran":       ("same",   "share",  "share",  "copy"),
    "transposed":    ("same",   "share",  "share",  "copy"),
    "strided":       ("same",   "share",  "copy",   "copy"),
    "negative":      ("same",   "copy",   "copy",   "copy"),
    "broadcast":     ("same",   "copy*",  "copy",   "copy"),   # broadcast_to() gives a read-only array
    "zero-size":     ("same",   "empty",  "empty",  "empty"),
    "0-d":           ("same",   "share",  "share",  "share"),
    "offset":        ("same",   "share",  "copy",   "copy"),   # one element into an aligned buffer
    "unaligned":     ("same",   "may",    "copy",   "copy"),   # one byte into an aligned buffer
    "read-only":     ("same",   "copy*",  "may",    "may"),    # an immutable target may see read-only memory
    "big-endian":    ("same",   "copy",   "copy",   "copy"),
    "memmap":        ("same",   "copy*",  "may",    "may"),    # mode="r"
    "5-D":           ("same",   "share",  "share",  "share"),
    "size-one":      ("same",   "share",  "share",  "share"),  # absurd strides on axes of length one
}
_FROM_TORCH = {
    "C":             ("share",  "same",   "copy",   "copy"),
    "aligned":       ("share",  "same",   "share",  "share"),
    "fortran":       ("share",  "same",   "share",  "copy"),
    "transposed":    ("share",  "same",   "share",  "copy"),
    "strided":       ("share",  "same",   "copy",   "copy"),
    "broadcast":     ("share",  "same",   "copy",   "copy"),
    "zero-size":     ("empty",  "same",   "empty",  "empty"),
    "0-d":           ("share",  "same",   "share",  "share"),
    "offset":        ("share",  "same",   "copy",   "copy"),
    "unaligned":     ("share",  "same",   "copy",   "copy"),
    "5-D":           ("share",  "same",   "share",  "share"),
    "size-one":      ("share",  "same",   "share",  "share"),
}
_FROM_JAX = {
    "aligned":       ("share",  "share",  "same",   "share"),
    "fortran":       ("share",  "share",  "same",   "copy"),
    "transposed":    ("share",  "share",  "same",   "copy"),
    "zero-size":     ("empty",  "empty",  "same",   "empty"),
    "0-d":           ("may",    "copy?",  "same",   "may"),
    "5-D":           ("share",  "share",  "same",   "share"),
    "size-one":      ("share",  "share",  "same",   "share"),
}
_FROM_TENSORFLOW = {
    "aligned":       ("share",  "share",  "share",  "same"),
    "zero-size":     ("empty",  "empty",  "empty",  "same"),
    "0-d":           ("may",    "copy?",  "may",    "same"),   # TensorFlow's scalars may be misaligned
    "offset":        ("share",  "share",  "copy",   "same"),
    "unaligned":     ("share",  "may",    "copy",   "same"),
    "5-D":           ("share",  "share",  "share",  "same"),
    "size-one":      ("share",  "share",  "share",  "same"),
}
_FROM_PYCLESPERANTO = {  # device memory: never shared with the host
    "C":             ("copy",   "copy",   "copy",   "copy"),
    "size-one":      ("copy",   "copy",   "copy",   "copy"),
}
# fmt: on

_TABLE = {
    "numpy": _FROM_NUMPY,
    "torch": _FROM_TORCH,
    "jax": _FROM_JAX,
    "tensorflow": _FROM_TENSORFLOW,
    "pyclesperanto": _FROM_PYCLESPERANTO,
}
LAYOUTS = tuple(_FROM_NUMPY)

# Layouts that a framework cannot express have no row: JAX has compact, 64-byte aligned arrays ("aligned"),
# and TensorFlow dense ones in C order, both read-only; PyTorch has neither negative strides nor read-only
# tensors; pyclesperanto's arrays are on a device, in C order. Only NumPy has other byte orders.


def inexpressible(framework: str, layout: str, dtype: str) -> bool:
    """Return whether `framework` cannot represent this dtype in this layout."""
    if framework == "pyclesperanto" and dtype not in PYCLESPERANTO_DTYPES:
        return True
    if framework == "tensorflow" and layout in ("offset", "unaligned") and dtype.startswith("float8"):
        return True  # DLPack, the only way to import such memory, does not support float8
    return layout not in _TABLE[framework]


def expected(source: str, target: str, layout: str, dtype: str) -> str:
    """Return the expected outcome: `refuse-dtype`, `refuse-rank`, or one of the codes above."""
    if target == "pyclesperanto":
        if source == "pyclesperanto":
            return "same"
        if layout in PYCLESPERANTO_REFUSES:
            return "refuse-rank"  # perhaps by dtype as well: either reason is correct
        return "copy" if dtype in PYCLESPERANTO_DTYPES else "refuse-dtype"
    if layout == "big-endian" and dtype.startswith("float8") and target not in ("numpy", "tensorflow"):
        return "may"  # ml_dtypes has a ">f1" of single bytes: a view of it and a copy are both correct
    if numpy_dtype(dtype).itemsize == 1:  # single bytes have no order and cannot be unaligned
        layout = {"unaligned": "offset", "big-endian": "aligned"}.get(layout, layout)
    outcome = _TABLE[source][layout][FRAMEWORKS.index(target)]
    if outcome in ("share", "may") and target == "tensorflow" and dtype.startswith("float8"):
        # TensorFlow's DLPack and bitcast do not support float8: tf.constant() works, and it copies.
        return "copy"
    if target == "jax" and layout in ("fortran", "transposed") and _jax_forgets_strides():
        return "copy" if outcome == "share" else outcome
    if (source, target) == ("jax", "numpy") and layout in ("fortran", "transposed"):
        # np.asarray() copies arrays that are not in C order, and NumPy's DLPack does not support extension
        # dtypes.
        return "may" if dtype in EXTENSION_DTYPES else outcome
    return outcome


def _jax_forgets_strides() -> bool:
    """Return whether JAX assumes that imports are C-contiguous, as in 0.7 but not 0.10."""
    import jax

    return tuple(map(int, jax.__version__.split(".")[:2])) < (0, 8)


# ---- building the sources --------------------------------------------------------------------------------


@dataclass
class Source:
    """An array, the C-order bytes of its values, and a function that changes it, if possible."""

    array: Any
    values: bytes
    shape: tuple[int, ...]
    flip: Callable[[], None] | None = None
    """Inverts the lowest bit of every byte of the source's memory."""

    @property
    def flipped(self) -> bytes:
        return bytes(byte ^ 1 for byte in self.values)


def numpy_dtype(name: str) -> np.dtype[Any]:
    if name in EXTENSION_DTYPES:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def random_bits(dtype: np.dtype[Any], count: int) -> np.ndarray[Any, Any]:
    """Return `count` elements of random bits, including NaN payloads, infinities, subnormals and extremes."""
    raw = np.random.default_rng(count).integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    if dtype == np.bool_:
        raw &= 1
    return raw.view(dtype)


def _on_numpy(flat: np.ndarray[Any, Any], layout: str) -> np.ndarray[Any, Any]:
    """Return the layout as a NumPy view of a flat array; the size of each base is in `_COUNT`."""
    match layout:
        case "fortran":
            return flat.reshape(3, 4, 2, order="F")
        case "transposed":
            return flat.reshape(6, 4).T
        case "strided":
            return flat.reshape(8, 18)[::2, ::3]
        case "negative":
            return flat.reshape(4, 6)[::-1, ::-1]
        case "broadcast":
            return np.broadcast_to(flat, (4, 6))
        case "zero-size":
            return flat.reshape(0, 3)
        case "0-d":
            return flat.reshape(())
        case "5-D":
            return flat.reshape(2, 1, 3, 2, 2)
        case "size-one":
            strides = (7 * flat.itemsize, flat.itemsize, 1000 * flat.itemsize)
            words = flat.view(f"V{flat.itemsize}")  # as_strided() does not know every extension dtype
            return np.lib.stride_tricks.as_strided(words, (1, 24, 1), strides).view(flat.dtype)
        case _:
            return flat.reshape(4, 6)


_COUNT = {"strided": 144, "broadcast": 6, "zero-size": 0, "0-d": 1}


def _on_torch(flat: Any, layout: str) -> Any:
    """Return the same view of a flat tensor, by strides in elements."""
    view = _on_numpy(np.zeros(flat.numel(), np.uint8), layout)
    return flat.as_strided(view.shape, view.strides, flat.storage_offset())


def byte_offset(layout: str, itemsize: int) -> int:
    """Return the offset of the layout from a 64-byte boundary."""
    return {"C": 16, "offset": itemsize, "unaligned": 1}.get(layout, 0)


def aligned_bytes(count: int, offset: int = 0) -> np.ndarray[Any, Any]:
    """Return `count` bytes of NumPy memory, `offset` bytes after a 64-byte boundary."""
    raw = np.zeros(count + 128, np.uint8)
    start = -raw.__array_interface__["data"][0] % 64 + offset
    return raw[start : start + count]


def _build_numpy(layout: str, dtype: str, flat: np.ndarray[Any, Any]) -> Built:
    if layout == "memmap":
        handle, name = tempfile.mkstemp()
        os.close(handle)
        Path(name).write_bytes(flat.tobytes())
        mapped = np.memmap(name, dtype=flat.dtype, mode="r", shape=(4, 6))
        Path(name).unlink()  # the map keeps the file alive
        return mapped, None
    base = aligned_bytes(flat.nbytes, byte_offset(layout, flat.itemsize))
    base[...] = np.frombuffer(flat.tobytes(), np.uint8)
    memory = base.view(flat.dtype)
    if layout == "big-endian":
        # byteswap() does not swap bfloat16 with NumPy 1.26 and ml_dtypes 0.5.1.
        swapped = memory if memory.dtype.kind != "V" else memory.view(f"u{memory.dtype.itemsize}")
        base[...] = swapped.byteswap().view(np.uint8)
        memory = base.view(flat.dtype.newbyteorder(">"))
        assert flat.itemsize == 1 or not memory.dtype.isnative
    array = _on_numpy(memory, layout)
    if layout == "read-only":
        array.flags.writeable = False

    def flip() -> None:
        np.bitwise_xor(base, 1, out=base)

    return array, flip


def _build_torch(layout: str, dtype: str, flat: np.ndarray[Any, Any]) -> Built:
    import torch

    if layout == "unaligned":  # a storage offset counts elements, so a whole byte needs a buffer
        base = torch.frombuffer(bytearray(aligned_bytes(flat.nbytes + 64)), dtype=torch.uint8)
        start = -base.data_ptr() % 64 + 1
        memory = torch.frombuffer(base.numpy(), dtype=getattr(torch, dtype), count=flat.size, offset=start)
    else:
        base = torch.zeros(flat.nbytes + 256, dtype=torch.uint8)
        start = -base.data_ptr() % 64 + byte_offset(layout, flat.itemsize)
        assert start % flat.itemsize == 0, "PyTorch must align its allocations to 64 bytes"
        memory = base[start : start + flat.nbytes].view(getattr(torch, dtype))
    base[start : start + flat.nbytes] = torch.tensor(list(flat.tobytes()), dtype=torch.uint8)

    def flip() -> None:
        base.bitwise_xor_(1)

    return _on_torch(memory, layout), flip


def _build_jax(layout: str, dtype: str, flat: np.ndarray[Any, Any]) -> Built:
    import jax
    import jax.numpy as jnp
    from jax.experimental.layout import Format, Layout

    with x64(jax):
        array = jnp.array(_on_numpy(flat, layout).copy())
        if layout in ("fortran", "transposed"):
            order = tuple(reversed(range(array.ndim)))
            array = jax.device_put(array, Format(Layout(major_to_minor=order), array.sharding))
        jax.block_until_ready(array)
    assert array.dtype.name == dtype
    return array, None


def _build_tensorflow(layout: str, dtype: str, flat: np.ndarray[Any, Any]) -> Built:
    import tensorflow as tf

    if layout in ("offset", "unaligned"):
        if dtype == "bfloat16":  # NumPy does not export it
            torch = pytest.importorskip("torch", reason="makes unaligned bfloat16 memory for TensorFlow")
            capsule = torch.utils.dlpack.to_dlpack(_build_torch(layout, dtype, flat)[0])
        else:
            capsule = _build_numpy(layout, dtype, flat)[0].__dlpack__()
        return tf.experimental.dlpack.from_dlpack(capsule), None
    return tf.constant(_on_numpy(flat, layout)), None


def _build_pyclesperanto(layout: str, dtype: str, flat: np.ndarray[Any, Any]) -> Built:
    return cle_push(np.ascontiguousarray(_on_numpy(flat, layout))), None


def cle_module() -> Any:
    """Return the package of the two that the process has imported with a device."""
    module = sys.modules.get("pyclesperanto")
    if module is None or not hasattr(module, "push"):
        module = sys.modules["pyclesperanto_prototype"]
    return module


def cle_push(array: np.ndarray[Any, Any]) -> Any:
    """Return an array that keeps the dtype; the prototype's push() makes everything float32."""
    if cle_module().__name__ == "pyclesperanto":
        return cle_module().push(array)
    from pyclesperanto_prototype._tier0._pycl import OCLArray

    return OCLArray.from_array(array)


def x64(jax: Any) -> Any:
    """Return a context in which JAX keeps 64 bits, by either of the names it has had in JAX."""
    enable = getattr(jax, "enable_x64", None)
    if enable is None:
        from jax.experimental import enable_x64 as enable
    return enable(True)


_BUILDERS = {
    "numpy": _build_numpy,
    "torch": _build_torch,
    "jax": _build_jax,
    "tensorflow": _build_tensorflow,
    "pyclesperanto": _build_pyclesperanto,
}


def build(framework: str, layout: str, dtype: str) -> Source:
    """Return a source of that framework, layout and dtype, with its values as native C-order bytes."""
    flat = random_bits(numpy_dtype(dtype), _COUNT.get(layout, 24))
    values = _on_numpy(flat, layout)
    array, flip = _BUILDERS[framework](layout, dtype, flat)
    return Source(array, values.tobytes(), values.shape, flip)


def without_values(source: str) -> dict[str, Any]:
    """Return arrays with non-numeric elements, or without dense, concrete elements."""
    if source == "numpy":
        return {
            "masked": np.ma.masked_array(np.arange(3, dtype=np.float32), [True, False, False]),
            "object": np.array([1, "a", None], object),
            "string": np.array(["a", "bc"]),
            "bytes": np.array([b"a", b"bc"]),
            "datetime": np.array(["2020-01-01"], "datetime64[D]"),
            "timedelta": np.array([1, 2], "timedelta64[s]"),
            "structured": np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
            "void": np.zeros(2, "V3"),
            "longdouble": np.zeros(2, np.longdouble),
        }
    if source == "jax":
        import jax

        return {"key": jax.random.key(0)}
    if source == "tensorflow":
        import tensorflow as tf

        return {
            "ragged": tf.ragged.constant([[1], [2, 3]]),
            "string": tf.constant("a"),
        }
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns about beta and deprecated layouts
        return {
            "quantized": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
            "meta": torch.ones(3, device="meta"),
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            "mkldnn": torch.ones(3, 3).to_mkldnn(),
            "uint4": torch.zeros(4, dtype=torch.uint8).view(torch.uint4),
        }


# ---- reading arrays, each with its framework's own calls -------------------------------------------------


def framework_of(array: Any) -> str:
    """Return the framework by the class of the array."""
    for kind in type(array).__mro__:
        root = kind.__module__.partition(".")[0]
        if root in ("numpy", "torch", "tensorflow"):
            return root
        if root in ("jax", "jaxlib"):
            return "jax"
        if root.startswith("pyclesperanto"):
            return "pyclesperanto"
    return f"no framework: {type(array)!r}"


def bits(array: Any) -> bytes:
    """Return the values as bytes in C order and native byte order."""
    match framework_of(array):
        case "numpy":
            return np.asarray(array).astype(array.dtype.newbyteorder("="), copy=False).tobytes()
        case "torch":
            import torch

            if array.numel() == 0:
                return b""
            return array.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        case "jax":
            return _live_bits_of_jax(array)
        case "tensorflow":
            return array._numpy().tobytes()
        case "pyclesperanto":
            return cle_module().pull(array).tobytes()
        case other:
            raise AssertionError(other)


def _live_bits_of_jax(array: Any) -> bytes:
    """Read the buffer itself: JAX keeps the NumPy copy of an array whose layout is not the default one."""
    if array.size == 0:
        return b""
    order = array.format.layout.major_to_minor
    raw = ctypes.string_at(array.unsafe_buffer_pointer(), array.size * array.dtype.itemsize)
    physical = np.frombuffer(raw, array.dtype).reshape([array.shape[axis] for axis in order])
    return physical.transpose(np.argsort(order)).tobytes()


def address(array: Any) -> int | None:
    """Return the host address of the first element, or None for device memory."""
    match framework_of(array):
        case "numpy":
            return int(array.__array_interface__["data"][0])
        case "torch":
            return int(array.data_ptr())
        case "jax":
            return int(array.unsafe_buffer_pointer())
        case "tensorflow":
            import tensorflow as tf

            # _numpy() is a view for every dtype, but not of a scalar; reshape() keeps the memory.
            tensor = tf.convert_to_tensor(array)  # of a variable
            viewed = (tensor if tensor.ndim else tf.reshape(tensor, (1,)))._numpy()
            return int(viewed.__array_interface__["data"][0])
        case _:
            return None


def dtype_name(array: Any) -> str:
    match framework_of(array):
        case "torch":
            return str(array.dtype).removeprefix("torch.")
        case "pyclesperanto":
            return np.dtype(array.dtype).name
        case _:
            return str(array.dtype.name)


def is_in_its_place(array: Any) -> bool:
    """Return whether the array is on the host, or on the current OpenCL device."""
    match framework_of(array):
        case "numpy":
            return True
        case "torch":
            return str(array.device) == "cpu"
        case "jax":
            return [(device.platform, device.id) for device in array.devices()] == [("cpu", 0)]
        case "tensorflow":
            return bool(array.device.endswith("device:CPU:0"))
        case _:
            # Arrays of the prototype have a queue, but no device.
            package = cle_module()
            prototype = package.__name__ == "pyclesperanto_prototype"
            return prototype or str(array.device) == str(package.get_device())
