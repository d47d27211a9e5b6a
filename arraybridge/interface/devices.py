"""The component `Devices`: the devices of a framework and of its arrays."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from arraybridge.device import Device, gpu_device
from arraybridge.errors import DeviceNotFoundError
from arraybridge.interface.component import Component
from arraybridge.reasons import Reason

__all__ = ["CPU", "Devices"]


CPU = Device("cpu", 0)


class Devices(Component):
    """The devices of a framework, and the devices of its arrays.

    Attributes:
        has_only_host: Whether its arrays are always in host memory (NumPy). If so, ``gpu_id`` has no effect.
        selects_per_thread: Whether `select` affects only the calling thread, not the whole process.
    """

    has_only_host: ClassVar[bool] = False
    selects_per_thread: ClassVar[bool] = True

    def device_of(self, x: Any) -> Device:
        """Return the device of an array.

        Args:
            x: An array of the framework.

        Returns:
            Its device. By default, the CPU.
        """
        return CPU

    def replica(self, x: Any, device: Device) -> Any | None:
        """Return one of the equal arrays that make up a replicated array.

        Args:
            x: An array of the framework.
            device: The preferred device.

        Returns:
            The array on ``device`` if there is one, otherwise any other; None if ``x`` is not replicated over
            several devices.
        """
        return None

    def available(self) -> tuple[Device, ...]:
        """Return all devices that the framework can use on this machine."""
        return (CPU,)

    def visible_devices(self) -> tuple[Device, ...]:
        """Return the available devices, without initializing the driver if possible."""
        return self.available()

    def accelerator(self, index: int) -> Device:
        """Return the device for ``gpu_id=index``, regardless of whether it exists.

        Args:
            index: The number of the accelerator.

        Returns:
            The device.
        """
        return gpu_device(index)

    def default_device(self) -> Device:
        """Return the device for arrays that come from a device that the framework does not have."""
        return CPU

    def find_device(self, device: Device) -> Device:
        """Return the framework's own `Device` object for a requested device.

        Args:
            device: The requested device.

        Returns:
            The available device that equals ``device``.

        Raises:
            DeviceNotFoundError: If the framework does not have the device. The message lists the available
                ones.
        """
        devices = self.available()
        for own in devices:
            if own == device and self.has_accelerator(device.accelerator):
                return own
        raise self._missing_device_error(device)

    def _missing_device_error(self, device: Device) -> DeviceNotFoundError:
        """Return the error for a device that the framework does not have on this machine."""
        framework = self.framework
        devices = self.available()
        requested = f"{device} of kind {device.accelerator!r}" if device.accelerator else str(device)
        names = ", ".join(str(d) for d in devices) or "no devices"
        advice = f'Pass one of these, such as device="{devices[0]}".' if devices else ""
        if framework.has_host and device.kind != "cpu":
            advice = (
                "Pass an available device, such as device='cpu'. To use the CPU whenever a GPU is missing,"
                " write \"with arraybridge.settings(missing_gpu='host'):\" around the call, or set the"
                " environment variable ARRAYBRIDGE_MISSING_GPU=host for all threads and worker processes."
            )
        why = self.missing_device_reason() if _could_have(devices, device) else ""
        explanation = f" {why}" if why else ""
        return DeviceNotFoundError(
            f"{framework.name} has no device {requested} here; it has {names}.{explanation}",
            target_type=framework.name,
            reason=why or f"{framework.name} has no device {requested}",
            code=Reason.NO_DEVICE,
            advice=advice,
        )

    def accelerators(self) -> tuple[str, ...]:
        """Return the accelerator kinds that the framework's device strings use, such as ``("cuda",)``."""
        # PyTorch also calls ROCm devices "cuda".
        kinds = {2: ("cuda",), 8: ("mps",), 10: ("rocm", "cuda"), 14: ("xpu",)}
        return kinds.get(self.framework.interchange.dlpack_device or 0, ())

    def has_accelerator(self, kind: str) -> bool:
        """Return whether the framework's accelerators are of a kind.

        Args:
            kind: The kind in a device string, such as ``"cuda"``; ``""`` for any kind.

        Returns:
            True if they are of that kind, if ``kind`` is ``""``, or if the framework does not know the kinds
            of its accelerators.
        """
        return not kind or kind in (self.accelerators() or (kind,))

    def missing_device_reason(self) -> str:
        """Return sentences that explain why there is no accelerator and how to get one; ``""`` if unknown."""
        return ""

    def to_device(self, x: Any, device: Device) -> Any:
        """Return a copy of an array on another device of this framework.

        Args:
            x: An array of the framework.
            device: One of the available devices.

        Returns:
            The copy. It is complete, or ordered on the framework's stream, when the method returns.
        """
        return self.framework.from_host(self.framework.to_host(x), device)

    def check_move(self, x: Any, device: Device) -> None:
        """Raise for an array that cannot be moved to another device of this framework.

        Args:
            x: An array of the framework.
            device: One of the available devices.

        Raises:
            MemoryConversionError: If the array cannot be moved.
        """

    def select(self, device: Device) -> AbstractContextManager[Any]:
        """Return a context manager that makes a device the current device of the framework.

        Args:
            device: One of the available devices.

        Returns:
            A context manager that restores the previous device on exit.
        """
        return nullcontext()

    def is_started(self) -> bool:
        """Return whether the driver of the accelerators is initialized.

        If it is not, queries that would initialize it are skipped.
        """
        return False

    def starts_with_next_array(self) -> bool:
        """Return whether the next call with an array starts all devices, which may take seconds.

        Returns:
            False by default.
        """
        return False

    def is_scattered(self, x: Any) -> bool:
        """Return whether the memory of an array is distributed over several devices.

        Args:
            x: An array of the framework.

        Returns:
            False by default.
        """
        return False

    def read_device(self, x: Any) -> Device | None:
        """Return the device that a native device object denotes.

        Args:
            x: Any object, such as a ``torch.device``.

        Returns:
            The device; None if ``x`` is not a device of this framework.
        """
        return None

    def native_device(self, device: Device) -> Any:
        """Return the native object or name for a device.

        Args:
            device: One of the available devices.

        Returns:
            An object such as a ``torch.device``. By default, a device string such as ``"gpu:0"``.
        """
        return str(device)


def _could_have(devices: Sequence[Device], missing: Device) -> bool:
    """Return whether a framework with these devices could have the missing one on another machine."""
    if not devices:
        return True
    if missing.kind == "gpu":
        return missing.accelerator in ("", "cuda", "rocm")  # other kinds need a special build
    return missing.kind == "opencl" and any(device.kind == "opencl" for device in devices)
