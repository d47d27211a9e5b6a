"""The `Route` of a conversion, which `explain` returns and `trace` records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from arraybridge.reasons import Reason
from arraybridge.show import format_bytes, format_seconds, html_table
from arraybridge.types import Device

__all__ = ["Route"]

Method = Literal["same", "view", "dlpack", "device", "host"]


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
        code: why it is done so, as a `Reason`.
        reason: the same in words.
        advice: what would save the copy; ``""`` if nothing is copied or nothing would.
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
    code: Reason = field(repr=False)
    advice: str = field(default="", repr=False)
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
        facts = {
            "method": self.method,
            "device": str(self.device),
            "shares memory": "yes" if self.shares_memory else "no",
            "copies": str(self.copies),
            "bytes": format_bytes(self.nbytes),
            "time": format_seconds(self.seconds),
            "reason": self.reason,
        }
        head = ("conversion", f"{self.source} → {self.target}")
        return html_table(head, [row for row in facts.items() if row[1]])
