"""The `Route` of a conversion, which `explain` returns and `trace` records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from arraybridge.formatting import format_bytes, format_seconds, html_table
from arraybridge.reasons import Cause, Reason
from arraybridge.tracing.memory_layouts import Steps
from arraybridge.tracing.memory_layouts import layout as memory_layout
from arraybridge.types import Device

__all__ = ["Route"]

Method = Literal["same", "view", "dlpack", "device", "host"]


@dataclass(frozen=True, slots=True, repr=False)
class Route:
    """What a conversion does, or will do; prints as one plain sentence.

    Attributes:
        source, target: names of the frameworks.
        method: ``"same"``, ``"view"``, ``"dlpack"``, ``"device"`` or ``"host"``.
        device: where the result lives.
        shares_memory: whether source and result see the same bytes.
        copies: how many times the bytes are copied.
        nbytes: bytes that the elements occupy.
        cause: why it is done so, with the details.
        steps: shape, strides and itemsize of an array whose layout is the cause; else None.
        seconds: how long it took; None where nothing was measured. Not part of a comparison.
        layout: ``"csr"``, ``"csc"``, ``"coo"`` or ``"bsr"`` for a sparse array; ``""`` for a dense one.
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

    # The texts are made when they are read, since each conversion in a trace has a route.

    @property
    def code(self) -> Reason:
        """Why it is done so, as a `Reason`."""
        return self.cause.code

    @property
    def reason(self) -> str:
        """Why it is done so, in words."""
        return self.cause.text

    @property
    def advice(self) -> str:
        """What would save the copy; ``""`` if nothing is copied or nothing would."""
        if not self.copies:
            return ""
        # Here, since it costs 0.6 ms of `import arraybridge`.
        from arraybridge.tracing.copy_advice import Copy, advice_for

        copy = Copy(
            self.code,
            source=self.source,
            target=self.target,
            device=str(self.device),
            layout=memory_layout(*self.steps) if self.steps else "",
        )
        advice = advice_for(copy)
        if not advice or not self.layout:
            return advice
        return f"for the values or indices that are copied: {advice}"

    def to_dict(self) -> dict[str, Any]:
        """Plain strings and numbers, ready for JSON."""
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
        how = {
            "same": "the same object",
            "view": "shared through a view",
            "dlpack": "shared through DLPack",
            "device": "copied to the device",
            "host": "copied through host memory",
        }[self.method]
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
