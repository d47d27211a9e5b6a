"""The few ways in which an array travels.

``same``    the very object comes back
``view``    the target looks at the source's host memory, through NumPy
``dlpack``  the target shares the source's memory, on the host or on a card, through DLPack
``device``  the bytes are copied straight into the memory of a device
``host``    the bytes are copied into host memory, or by way of it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from arraybridge.frameworks.base import Framework
from arraybridge.show import format_bytes, format_seconds, html_table
from arraybridge.types import Device

__all__ = ["Method", "Route", "device", "dlpack", "host", "same", "view"]

Method = Literal["same", "view", "dlpack", "device", "host"]
FastFunction = Callable[[Any], Any]
#: Builds the fast converter of a pair for arrays that need no care, or None where each needs it.
RouteFunction = Callable[[Framework, Framework], "FastFunction | None"]


# -- route functions: the cells of the table ---------------------------------------------------------


def same(source: Framework, target: Framework) -> FastFunction | None:
    """The very object comes back."""
    return source.fast.same()


def view(source: Framework, target: Framework) -> FastFunction | None:
    """The target looks at the source's host memory through NumPy."""
    if target.name == "numpy":
        return source.fast.view()
    take = target.fast.from_view()
    return None if take is None else source.fast.into(take)


def dlpack(source: Framework, target: Framework) -> FastFunction | None:
    """The target shares the source's memory through a DLPack capsule."""
    export = source.fast.export(target.alignment)
    adopt = target.fast.adopt(immutable=not source.mutable)
    if export is None or adopt is None:
        return None

    def convert(x: Any) -> Any:
        return adopt(export(x))

    return convert


def device(source: Framework, target: Framework) -> FastFunction | None:
    """The bytes are copied straight into the memory of a device; every array is looked at."""
    return None


def host(source: Framework, target: Framework) -> FastFunction | None:
    """The bytes are copied into host memory, or by way of it; every array is looked at."""
    return None


# -- what happens, in words --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Route:
    """What a conversion does, or will do; prints as one plain sentence.

    Attributes:
        source, target: names of the frameworks.
        method: ``"same"``, ``"view"``, ``"dlpack"``, ``"device"`` or ``"host"``.
        device: where the result lives.
        shares_memory: whether source and result see the same bytes.
        copies: how many times the bytes are copied.
        nbytes: bytes that the elements occupy.
        reason: why it is done so, in words.
        seconds: how long it took; None where nothing was measured. Not part of a comparison.
    """

    source: str
    target: str
    method: Method
    device: Device
    shares_memory: bool
    copies: int
    nbytes: int
    reason: str
    seconds: float | None = field(default=None, compare=False)

    def __str__(self) -> str:
        how = {
            "same": "the same object",
            "view": "shared through a view",
            "dlpack": "shared through DLPack",
            "device": "copied to the device",
            "host": "copied through host memory",
        }[self.method]
        if self.copies > 1:
            how += f", {self.copies} copies"
        took = "" if self.seconds is None else f", in {format_seconds(self.seconds)}"
        return (
            f"{self.source} → {self.target} on {self.device}: {how} ({format_bytes(self.nbytes)}{took}),"
            f" because {self.reason}."
        )

    def _repr_html_(self) -> str:
        shown = {
            "conversion": f"{self.source} → {self.target}",
            "method": self.method,
            "device": str(self.device),
            "shares memory": "yes" if self.shares_memory else "no",
            "copies": str(self.copies),
            "bytes": format_bytes(self.nbytes),
            "time": format_seconds(self.seconds),
            "reason": self.reason,
        }
        return html_table((), [row for row in shown.items() if row[1]], row_heads=True)
