"""The fastest conversions with the frameworks' own public functions, as a baseline for benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, cast


def _dlpack(x: Any) -> Any:
    return x.__dlpack__()


@dataclass(frozen=True, slots=True)
class NativeCall:
    """The fastest conversion between two frameworks with their own public functions.

    Attributes:
        text: The names of the functions, in call order.
        take: The dotted name of a function in the target's module, or ``""`` if there is none.
        give: The dotted name of a function in the source's module, which is called before ``take``, or ``""``
            if there is none. It may also be a function that does not belong to a framework.
    """

    text: str
    take: str = ""
    give: str | Callable[[Any], Any] = ""

    def call(self, source: Any, target: Any) -> Callable[[Any], Any]:
        """Return the function that converts an array, given the modules of both frameworks."""
        give: Any = self.give
        if isinstance(give, str) and give:
            give = attrgetter(give)(source)
        take: Any = attrgetter(self.take)(target) if self.take else None
        if not give or not take:
            return cast("Callable[[Any], Any]", give or take)

        def call(x: Any) -> Any:
            return take(give(x))

        return call


# Each entry contains the source names, separated by spaces, the target name, and the call.
NATIVE_CALLS = (
    ("numpy", "torch", NativeCall("torch.from_numpy", "from_numpy")),
    ("jax cupy", "torch", NativeCall("torch.from_dlpack", "from_dlpack")),
    (
        "tensorflow",
        "torch",
        NativeCall("to_dlpack, from_dlpack", "from_dlpack", "experimental.dlpack.to_dlpack"),
    ),
    ("numpy torch tensorflow cupy", "jax", NativeCall("jax.dlpack.from_dlpack", "dlpack.from_dlpack")),
    (
        "numpy jax",
        "tensorflow",
        NativeCall("__dlpack__, from_dlpack", "experimental.dlpack.from_dlpack", _dlpack),
    ),
    (
        "torch",
        "tensorflow",
        NativeCall("to_dlpack, from_dlpack", "experimental.dlpack.from_dlpack", "utils.dlpack.to_dlpack"),
    ),
    ("numpy", "cupy", NativeCall("cupy.asarray", "asarray")),
    ("torch jax", "cupy", NativeCall("cupy.from_dlpack", "from_dlpack")),
    ("numpy", "pyclesperanto", NativeCall("pyclesperanto.push", "push")),
    ("torch", "numpy", NativeCall("Tensor.numpy", give="Tensor.numpy")),
    ("jax", "numpy", NativeCall("np.asarray", "asarray")),
    ("tensorflow", "numpy", NativeCall("memoryview, np.asarray", "asarray", memoryview)),
    ("cupy", "numpy", NativeCall("cupy.asnumpy", give="asnumpy")),
    ("pyclesperanto", "numpy", NativeCall("pyclesperanto.pull", give="pull")),
)
