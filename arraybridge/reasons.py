"""Reasons why an array is shared, copied or rejected, and their texts.

Programs compare the `code` of a `Cause`. Its `text` is for people and may change at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum, auto
from functools import lru_cache
from typing import NamedTuple

__all__ = ["DEPENDS_ON_LAYOUT", "Cause", "Reason", "as_cause"]


class Reason(StrEnum):
    """A reason for which a conversion shares memory, copies, or raises an error."""

    # -- nothing is copied
    SAME_OBJECT = auto()
    SHARED_HOST_MEMORY = auto()
    SHARED_DEVICE_MEMORY = auto()
    #: A framework function shares the memory, on the host or on an accelerator.
    SHARED_MEMORY = auto()
    REPLICA_ON_DEVICE = auto()

    # -- requests by the caller
    COPY_REQUESTED = auto()
    CAST_REQUESTED = auto()
    INTO_OUTPUT = auto()

    # -- the layout of the memory
    NOT_C_CONTIGUOUS = auto()
    NOT_COMPACT = auto()
    STRIDES_IGNORED = auto()
    NEGATIVE_STRIDES = auto()
    STRIDE_MULTIPLES = auto()
    MISALIGNED = auto()
    #: A tensor in a map of a safetensors file, which `save_safetensors` would align.
    MISALIGNED_IN_FILE = auto()
    #: The memory is not aligned to the size of an element.
    MISALIGNED_ELEMENTS = auto()
    BYTE_ORDER = auto()
    #: The bools are stored as bytes other than 0 and 1.
    BOOL_BYTES = auto()

    # -- unsafe writes
    READ_ONLY = auto()
    READ_ONLY_FILE_MAP = auto()
    CACHED_SCALAR = auto()
    REPLICATED = auto()

    # -- the framework
    LAZY_VALUES = auto()
    FLOAT8 = auto()
    COPIES_ONLY = auto()
    MANAGED_MEMORY = auto()
    SEVERAL_SHARDS = auto()

    # -- the device
    NO_SHARED_MEMORY = auto()
    OTHER_DEVICE = auto()
    SEPARATE_MEMORY = auto()
    #: No installed framework can read memory of this kind.
    UNREADABLE_DEVICE = auto()

    # -- the object that carries the array
    FILE = auto()
    SEPARATE_COLUMNS = auto()
    MASKED_STORAGE = auto()
    CHUNKED_STORAGE = auto()
    PACKED_BITS = auto()
    CARRIER_COPIES = auto()
    LIBRARY_COPIES = auto()
    #: The object makes new memory on each access.
    NEW_MEMORY = auto()
    NUMPY_SCALAR = auto()

    # -- conversions by the frameworks' own calls
    NATIVE_COPY = auto()
    NATIVE_CAST = auto()
    NARROWED = auto()
    RESHARDED = auto()

    # -- conversions that raise an error
    REQUIRES_GRAD = auto()
    OTHER_SOURCE = auto()
    NO_DEVICE = auto()

    # -- the parts of a sparse array
    #: One framework stores an array of coordinates per axis, the other one a matrix of coordinates.
    SEPARATE_COORDINATES = auto()
    INDEX_DTYPE = auto()
    #: There are entries after the last row pointer, which are omitted.
    SPARE_ENTRIES = auto()

    #: A reason that a plug-in provides as text.
    OTHER = auto()

    # Enum.__hash__ is written in Python and takes three times as long.
    __hash__ = str.__hash__


#: Reasons whose advice depends on the layout of the array.
DEPENDS_ON_LAYOUT = frozenset(
    (
        Reason.NOT_C_CONTIGUOUS,
        Reason.NOT_COMPACT,
        Reason.STRIDES_IGNORED,
        Reason.NEGATIVE_STRIDES,
        Reason.STRIDE_MULTIPLES,
        Reason.MISALIGNED,
        Reason.MISALIGNED_ELEMENTS,
    )
)


class Cause(NamedTuple):  # creating a frozen dataclass with ten fields takes five times as long
    """A reason with the details that its text contains.

    Attributes:
        code: The kind of reason.
        framework: The framework that cannot share the memory, or could write to it.
        source: The framework of the array, or the object that the array is read from.
        device: The device of the result.
        source_device: The device of the array.
        dtype: The dtype of the result.
        source_dtype: The dtype of the array.
        alignment: The alignment in bytes that ``framework`` needs.
        call: The framework's own call, such as ``"jnp.asarray"``.
        words: The text of `Reason.OTHER`, which follows "because".

    >>> Cause(Reason.MISALIGNED, alignment=64).text
    'its memory is not aligned to 64 bytes'
    """

    code: Reason
    framework: str = ""
    source: str = ""
    device: str = ""
    source_device: str = ""
    dtype: str = ""
    source_dtype: str = ""
    alignment: int = 0
    call: str = ""
    words: str = ""

    @property
    def text(self) -> str:
        """The reason as a clause that follows "because"."""
        text = TEXTS[self.code]
        if isinstance(text, str) and "{" not in text:
            return text
        return _text_with_details(self)


@lru_cache  # a trace has many routes and few causes, and formatting takes 0.6 µs
def _text_with_details(cause: Cause) -> str:
    text = TEXTS[cause.code]
    return text.format(cause) if isinstance(text, str) else text(cause)


def as_cause(cause: Cause | str | None) -> Cause | None:
    """Return a reason from a framework or carrier as a `Cause`. Plug-ins may provide it as text."""
    if not cause:
        return None
    return Cause(Reason.OTHER, words=cause) if isinstance(cause, str) else cause


# -- texts -------------------------------------------------------------------------------------------


def _read_only(cause: Cause) -> str:
    danger = f", and {cause.framework} could write to it" if cause.framework else ""
    return f"it is read-only{danger}"


def _read_only_file_map(cause: Cause) -> str:
    danger = f", and {cause.framework} could write to it" if cause.framework else ""
    return f"it is a read-only map of a file{danger}"


def _other_device(cause: Cause) -> str:
    source = f" from {cause.source_device}" if cause.source_device else ""
    return f"{cause.device} is a different device{source}"


#: The text of each reason: a template that is formatted with its `Cause`, or a function of it.
TEXTS: dict[Reason, str | Callable[[Cause], str]] = {
    Reason.SAME_OBJECT: "it is already there",
    Reason.SHARED_HOST_MEMORY: "both use the same host memory",
    Reason.SHARED_DEVICE_MEMORY: "both use the memory of {0.device}",
    Reason.SHARED_MEMORY: "both use the same memory",
    Reason.REPLICA_ON_DEVICE: "one of its replicas is on {0.device}",
    Reason.COPY_REQUESTED: "copy=True was passed",
    Reason.CAST_REQUESTED: "a cast to {0.dtype} was requested",
    Reason.INTO_OUTPUT: "out= was passed",
    Reason.NOT_C_CONTIGUOUS: "it is not C-contiguous",
    Reason.NOT_COMPACT: "it is not a permutation of a compact array, and XLA supports no other strides",
    Reason.STRIDES_IGNORED: "this version of JAX ignores strides on import",
    Reason.NEGATIVE_STRIDES: "{0.framework} does not support negative strides",
    Reason.STRIDE_MULTIPLES: "its strides are not multiples of the element size",
    Reason.MISALIGNED: "its memory is not aligned to {0.alignment} bytes",
    Reason.MISALIGNED_IN_FILE: "its place in the safetensors file is not aligned to {0.alignment} bytes",
    Reason.MISALIGNED_ELEMENTS: "{0.framework} needs {0.dtype} aligned to {0.alignment} bytes",
    Reason.BYTE_ORDER: "it has non-native byte order",
    Reason.BOOL_BYTES: "some of its bools are bytes other than 0 and 1, which {0.framework} would misread",
    Reason.READ_ONLY: _read_only,
    Reason.READ_ONLY_FILE_MAP: _read_only_file_map,
    Reason.CACHED_SCALAR: "{0.source} may cache scalars, and {0.framework} could write to it",
    Reason.REPLICATED: "it is replicated over several devices, and {0.framework} could write to one replica",
    Reason.LAZY_VALUES: "its conj or neg bit is set",
    Reason.FLOAT8: "TensorFlow imports float8 only by copying",
    Reason.COPIES_ONLY: "{0.framework} imports host memory only by copying",
    Reason.MANAGED_MEMORY: "it is in managed memory",
    Reason.SEVERAL_SHARDS: "it is sharded over several devices",
    Reason.NO_SHARED_MEMORY: (
        "{0.source} on {0.source_device} and {0.framework} on {0.device} do not share memory"
    ),
    Reason.OTHER_DEVICE: _other_device,
    Reason.SEPARATE_MEMORY: "{0.device} has separate memory",
    Reason.UNREADABLE_DEVICE: "no installed framework reads memory on {0.source_device}",
    Reason.FILE: "it is read from {0.source}",
    Reason.SEPARATE_COLUMNS: "the columns of the table are not adjacent in memory",
    Reason.MASKED_STORAGE: "{0.source} stores {0.source_dtype} with a mask",
    Reason.CHUNKED_STORAGE: "{0.source} stores it in several chunks",
    Reason.PACKED_BITS: "{0.source} stores booleans as bits",
    Reason.CARRIER_COPIES: "{0.source} returns a copy of its pixels",
    Reason.LIBRARY_COPIES: "its library copies it to the host from {0.source_device}",
    Reason.NEW_MEMORY: "its __array_interface__ returns other memory on each access",
    Reason.NUMPY_SCALAR: "a NumPy scalar has no memory to share",
    Reason.NATIVE_COPY: "{0.call} copies, although the memory could be shared",
    Reason.NATIVE_CAST: "it is a cast to {0.dtype}",
    Reason.NARROWED: "it is narrowed from {0.source_dtype} to {0.dtype}, since JAX's x64 is off",
    Reason.RESHARDED: "it is redistributed over devices",
    Reason.SEPARATE_COORDINATES: "{0.framework} stores COO indices as one array per axis",
    Reason.INDEX_DTYPE: "{0.framework} stores the indices of this layout as {0.dtype}",
    Reason.SPARE_ENTRIES: "{0.source} has space for more entries than are used",
    Reason.REQUIRES_GRAD: "it requires grad",
    Reason.OTHER_SOURCE: "the declared source is {0.framework}, but the array belongs to {0.source}",
    Reason.NO_DEVICE: "{0.framework} has no device",
    Reason.OTHER: "{0.words}",
}
