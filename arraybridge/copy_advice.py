"""Advice on avoiding a copy, for each `Reason` that has some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from arraybridge.interface import registry
from arraybridge.reasons import Reason

__all__ = ["ADVICE", "Copy", "advice_for_copy"]


@dataclass(frozen=True, slots=True)
class Copy:
    """A kind of copy, with the details that its advice depends on.

    Attributes:
        code: The reason for the copy.
        source: The framework of the array.
        target: The framework of the result.
        device: The device of the result, such as ``"gpu:0"``.
        layout: The layout of the array, as in `Event.layout`.
        call: The framework's own call that made the copy; ``""`` for a conversion by arraybridge.
        once: When or where to change the array, such as ``"once, before the loop"``.
    """

    code: Reason
    source: str
    target: str
    device: str
    layout: str = ""
    call: str = ""
    once: str = "where it is created"

    @property
    def is_to_host(self) -> bool:
        """Whether the result is on the host."""
        return self.device.startswith("cpu")

    @property
    def fits_aligned(self) -> bool:
        """Whether the target would share an array from `aligned`."""
        is_on_host = registry.metadata_of(self.source).has_only_host and self.is_to_host
        return is_on_host and registry.framework(self.target).alignment > 1


def advice_for_copy(copy: Copy) -> str:
    """Return advice on avoiding the copy; ``""`` if there is none."""
    advice = ADVICE.get(copy.code, "")
    return advice.format(copy=copy) if isinstance(advice, str) else advice(copy)


_LAYOUTS = {
    "transposed": "this array is transposed",
    "reversed": "this array is reversed",
    "broadcast": "this array repeats its elements (np.broadcast_to)",
    "sliced": "this array skips elements (a slice with a step, or part of each row)",
    "": "this array is not in C order",
}
#: The expression that makes an array C-contiguous, by framework.
_CONTIGUOUS = {"torch": "x.contiguous()", "cupy": "cupy.ascontiguousarray(x)"}
_COPIED_THERE = "(y = aligned(x.shape, x.dtype); y[...] = x)"
#: Maps pairs of source and target to the name and the code of a framework's own call that shares memory.
_NATIVE = {
    ("numpy", "torch"): ("torch.from_numpy", "torch.from_numpy(x)"),
    ("torch", "numpy"): ("Tensor.numpy", "x.numpy()"),
    ("jax", "numpy"): ("np.asarray", "np.asarray(x)"),
}


# The advice of the next two functions depends on the layout. `reasons.DEPENDS_ON_LAYOUT` lists their reasons.


def _make_contiguous(copy: Copy) -> str:
    order = _LAYOUTS[copy.layout]
    if copy.fits_aligned:
        return (
            f"{order}: make it C-contiguous {copy.once}, in memory from aligned(shape, dtype), which"
            f" {copy.target} can share {_COPIED_THERE}"
        )
    expression = _CONTIGUOUS.get(copy.source, "np.ascontiguousarray(x)")
    return f"{order}: make it C-contiguous {copy.once} ({expression})"


def _align(copy: Copy) -> str:
    if copy.layout:
        return _make_contiguous(copy)
    return (
        f"create the array with aligned(shape, dtype), or copy it into such an array {copy.once}"
        f" {_COPIED_THERE}; then arraybridge.to_{copy.target}(x) shares it"
    )


def _normalize_bools(copy: Copy) -> str:
    bits = "x.view(torch.uint8)" if copy.source == "torch" else "x.view(np.uint8)"
    return f"create the array by a comparison, or replace it {copy.once} with {bits} != 0"


def _move_less(copy: Copy) -> str:
    if copy.call and copy.is_to_host:
        return ""  # no cheaper call copies a value to the host
    if copy.call:
        return (
            f"prefetch(items, '{copy.target}', device='{copy.device}') moves the next item while this one"
            " is used"
        )
    if copy.is_to_host:
        source = copy.source
        return (
            f"each call copies it to the host: keep it in {source} between the steps (decorate them for"
            f" {source} with output_type='{source}'), and convert the last result"
        )
    return (
        f"each call moves it to {copy.device}: convert it {copy.once}, keep results there between the steps,"
        f" or let prefetch(items, '{copy.target}') move the next item while this one is used"
    )


def _share(copy: Copy) -> str:
    name, expression = _NATIVE.get((copy.source, copy.target), ("", ""))
    native = f"{expression} or " if name and name != copy.call else ""
    return f"{native}arraybridge.to_{copy.target}(x) shares it, as long as neither array is modified"


_CAST_ONCE = "create the array in that dtype, or cast it {copy.once}"
_GATHER = "gather it where it is created (jax.device_put(x, jax.devices()[0]))"
#: The advice for each reason, as text that refers to the `Copy` as ``copy``, or as a function of the `Copy`.
ADVICE: dict[Reason, str | Callable[[Copy], str]] = {
    Reason.COPY_REQUESTED: "omit copy=True, as long as neither the result nor the original is modified",
    Reason.CAST_REQUESTED: _CAST_ONCE,
    Reason.NOT_C_CONTIGUOUS: _make_contiguous,
    Reason.NOT_COMPACT: _make_contiguous,
    Reason.STRIDES_IGNORED: _make_contiguous,
    Reason.NEGATIVE_STRIDES: _make_contiguous,
    Reason.STRIDE_MULTIPLES: _make_contiguous,
    Reason.MISALIGNED: _align,
    Reason.MISALIGNED_IN_FILE: "save the file once with save_safetensors(new_path, load_safetensors(path)),"
    " which aligns this array; then arraybridge.to_{copy.target}(x) shares it",
    Reason.MISALIGNED_ELEMENTS: _align,
    Reason.BYTE_ORDER: "convert it to the native byte order {copy.once}: x.astype(x.dtype.newbyteorder('='))",
    Reason.BOOL_BYTES: _normalize_bools,
    Reason.READ_ONLY: "arraybridge.to_{copy.target}(x, copy=False) shares it, as long as the result is not"
    " modified; or make the original writable",
    Reason.READ_ONLY_FILE_MAP: 'open the file in copy-on-write mode (np.load(path, mmap_mode="c"),'
    ' np.memmap(mode="c") or load_safetensors(path)), which shares memory and never changes the file; do not'
    " overwrite or shorten the file while it is in use",
    Reason.CACHED_SCALAR: "pass a number (float(x)) instead of a 0-d array",
    Reason.REPLICATED: _GATHER,
    Reason.LAZY_VALUES: "resolve it {copy.once}: x.resolve_conj().resolve_neg()",
    Reason.FLOAT8: "use bfloat16, or convert float8 arrays once, before the loop",
    Reason.COPIES_ONLY: "{copy.target} has separate memory: convert {copy.once}, and keep results there",
    Reason.MANAGED_MEMORY: "allocate it under"
    " cupy.cuda.using_allocator(cupy.get_default_memory_pool().malloc)",
    Reason.SEVERAL_SHARDS: _GATHER,
    Reason.NO_SHARED_MEMORY: _move_less,
    Reason.OTHER_DEVICE: _move_less,
    Reason.SEPARATE_MEMORY: _move_less,
    Reason.INDEX_DTYPE: "int64 indices can be shared: cast them {copy.once}",
    Reason.NATIVE_COPY: _share,
    Reason.NATIVE_CAST: _CAST_ONCE,
    Reason.NARROWED: "arraybridge.to_{copy.target}(x) keeps all bits; or narrow it {copy.once}, if fewer bits"
    " suffice",
}
