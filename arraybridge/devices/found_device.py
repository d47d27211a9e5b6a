"""`FoundDevice`, a device of this machine with its memory and the frameworks that can use it."""

from __future__ import annotations

from dataclasses import dataclass

from arraybridge.device import Device

__all__ = ["FoundDevice"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FoundDevice(Device):
    """A device of this machine, as `devices` reports it. It prints and compares like any `Device`.

    Attributes:
        kind: As for `Device`.
        index: As for `Device`.
        name: As for `Device`.
        frameworks: The names of the frameworks that can use the device.
        total: The total memory in bytes; None if it is unknown until the device is initialized.
        free: The free memory in bytes; None if it is unknown until the device is initialized.
        identity: The UUID, or the PCI address if the UUID is unknown; an empty string if both are unknown.
    """

    frameworks: tuple[str, ...] = ()
    total: int | None = None
    free: int | None = None
    identity: str = ""
