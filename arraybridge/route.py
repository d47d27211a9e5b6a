"""The `Route` class, which `explain` returns and `trace` records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from arraybridge.device import Device
from arraybridge.formatting import format_bytes, format_seconds, html_table
from arraybridge.reasons import Cause, Reason
from arraybridge.strides import Steps, stride_pattern

__all__ = ["Route", "copy_method"]

Method = Literal["same", "view", "dlpack", "device", "host"]
_METHODS: dict[Method, str] = {
    "same": "the same object",
    "view": "shared through a view",
    "dlpack": "shared through DLPack",
    "device": "copied to the device",
    "host": "copied through host memory",
}


def copy_method(device: Device) -> Method:
    """Return the method of a copy to a device."""
    return "host" if device.kind == "cpu" else "device"


@dataclass(frozen=True, init=False, repr=False)
class Route:
    """The route of a conversion: its method, device, copies and reason; ``str()`` returns a sentence.

    Attributes:
        source: The name of the source framework.
        target: The name of the target framework.
        method: ``"same"``, ``"view"``, ``"dlpack"``, ``"device"`` or ``"host"``.
        device: The device of the result.
        shares_memory: Whether source and result share memory.
        copies: The number of times that the data is copied.
        nbytes: The number of bytes of the elements.
        cause: The reason for the route, with its details.
        steps: The shape, strides and itemsize of the array if its layout is the cause; otherwise None.
        seconds: The measured duration; None if the conversion was not measured. Not compared by ``==``.
        layout: ``"csr"``, ``"csc"``, ``"coo"`` or ``"bsr"`` for a sparse array; ``""`` for a dense array.
    """

    source: str
    target: str
    method: Method
    device: Device
    shares_memory: bool
    copies: int
    nbytes: int
    cause: Cause
    steps: Steps | None = None
    seconds: float | None = field(default=None, compare=False)
    layout: str = ""

    def __init__(
        self,
        source: str,
        target: str,
        method: Method,
        device: Device,
        shares_memory: bool,
        copies: int,
        nbytes: int,
        cause: Cause,
        steps: Steps | None = None,
        seconds: float | None = None,
        layout: str = "",
    ) -> None:
        # A trace creates a route per conversion. The `__init__` method that dataclasses generate calls
        # `object.__setattr__` per field, which takes three times as long.
        values = self.__dict__
        values["source"] = source
        values["target"] = target
        values["method"] = method
        values["device"] = device
        values["shares_memory"] = shares_memory
        values["copies"] = copies
        values["nbytes"] = nbytes
        values["cause"] = cause
        values["steps"] = steps
        values["seconds"] = seconds
        values["layout"] = layout

    # The reason and the advice are formatted on access, since a trace creates a route per conversion.

    @property
    def code(self) -> Reason:
        """The reason for the route as a `Reason`."""
        return self.cause.code

    @property
    def reason(self) -> str:
        """The reason for the route as text."""
        return self.cause.text

    @property
    def advice(self) -> str:
        """Advice on avoiding the copy; ``""`` if nothing is copied or there is none."""
        if not self.copies:
            return ""
        # Imported here, since importing it takes 0.6 ms.
        from arraybridge.copy_advice import Copy, advice_for_copy

        copy = Copy(
            self.code,
            source=self.source,
            target=self.target,
            device=str(self.device),
            layout=stride_pattern(*self.steps) if self.steps else "",
        )
        advice = advice_for_copy(copy)
        if not advice or not self.layout:
            return advice
        return f"for the copied values or indices: {advice}"

    def to_dict(self) -> dict[str, Any]:
        """Return the route as a dictionary of strings and numbers that JSON can store."""
        return {
            "source": self.source,
            "target": self.target,
            "method": self.method,
            "device": str(self.device),
            "shares_memory": self.shares_memory,
            "copies": self.copies,
            "nbytes": self.nbytes,
            "layout": self.layout,
            "reason": self.reason,
            "code": str(self.code),
            "advice": self.advice,
            "seconds": self.seconds,
        }

    def __repr__(self) -> str:
        values = {**self.to_dict(), "device": self.device}
        del values["code"], values["advice"]
        if not self.layout:
            del values["layout"]
        return f"Route({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    def __str__(self) -> str:
        how = _METHODS[self.method]
        if self.layout:
            how = f"sparse {self.layout.upper()}, {how}"
        if self.copies > 1:
            how += f", {self.copies} copies"
        took = "" if self.seconds is None else f", in {format_seconds(self.seconds)}"
        return (
            f"{self.source} → {self.target} on {self.device}: {how} ({format_bytes(self.nbytes)}{took}),"
            f" because {self.reason}."
        )

    def _repr_html_(self) -> str:
        fields = {
            "method": self.method,
            "layout": self.layout.upper(),
            "device": str(self.device),
            "shares memory": "yes" if self.shares_memory else "no",
            "copies": str(self.copies),
            "bytes": format_bytes(self.nbytes),
            "time": format_seconds(self.seconds),
            "reason": self.reason,
        }
        head = ("conversion", f"{self.source} → {self.target}")
        return html_table(head, [row for row in fields.items() if row[1]])
