"""`Device`, which names a device of any framework, and the parser of device strings."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from arraybridge.hooks import hooks
from arraybridge.types import FrameworkLike
from arraybridge.validation import whole_number

if TYPE_CHECKING:
    import cupy
    import jax
    import torch

_KINDS = ("cpu", "gpu", "opencl")
_DEVICE_STRING = r"(cpu|gpu|opencl|cuda|rocm|hip|mps|xpu|tpu)(?::(\d+))?"
_TENSORFLOW_NAME = r"(?:/job:\w+/replica:\d+/task:\d+)?/(?:device:)?(CPU|GPU):(\d+)"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Device:
    """A device that holds arrays: ``cpu``, ``cpu:3``, ``gpu:0`` or ``opencl:1``.

    ``kind`` is ``"cpu"``, ``"gpu"`` (any accelerator: CUDA, ROCm, XPU, MPS, TPU) or ``"opencl"``.
    Devices are equal if their kinds and indices are equal. A device also equals its string, and has the hash
    of that string. To compare it with another device string, such as ``"cuda:0"``, parse that string.

    Raises:
        ValueError: If ``kind`` is not one of these, or ``index`` is negative or not an int.

    >>> Device.parse("cuda:1"), Device.parse("cpu")
    (Device('gpu:1'), Device('cpu'))
    >>> Device("gpu", 0) == "gpu:0"
    True
    """

    kind: str
    index: int = 0
    #: The name of the hardware, such as ``"NVIDIA H200"``; empty if it was not queried.
    name: str = field(default="", repr=False)
    #: The kind of accelerator that the device string named, such as ``"cuda"``; empty if it named no kind.
    accelerator: str = field(default="", repr=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(
                f"kind={self.kind!r} must be 'cpu', 'gpu' or 'opencl'. For a device string such as 'cuda:1',"
                " use Device.parse()."
            )
        index = self.index
        if index.__class__ is not int or index < 0:
            object.__setattr__(self, "index", whole_number("index", index, least=0, type_error=ValueError))

    @classmethod
    def parse(cls, device: DeviceLike) -> Device:
        """Return the device that a device string or a device object of a framework names.

        Args:
            device: ``"cpu"``, ``"cpu:1"``, ``"gpu"``, ``"gpu:0"``, ``"opencl:0"``, or a TensorFlow device
                name, such as ``"/device:GPU:0"``. ``"cuda"``, ``"rocm"``, ``"mps"``, ``"xpu"`` and ``"tpu"``,
                with or without a number, name an accelerator of that kind. A `Device` or a device object of a
                framework, such as ``torch.device("cuda:1")``, is accepted as well.

        Raises:
            ValueError: If ``device`` is not a device.
        """
        if isinstance(device, Device):
            return device
        parsed = _device_of_string(device) if isinstance(device, str) else hooks.read_device(device)
        if parsed is not None:
            return parsed
        raise ValueError(
            f"{device!r} is not a device. Pass 'cpu', 'cpu:1', 'gpu', 'gpu:0', 'cuda:0', 'rocm', 'mps',"
            " 'xpu', 'tpu', 'opencl:0', or the device object of a framework."
        )

    def native(self, framework: FrameworkLike) -> Any:
        """Return a framework's own object for this device, as in ``model.to(device.native("torch"))``.

        Args:
            framework: The name of an installed framework.

        Returns:
            A ``torch.device``, ``jax.Device``, ``cupy.cuda.Device``, the device object of pyclesperanto, or
            TensorFlow's device name; the device string for a framework without device objects.

        Raises:
            DeviceNotFoundError: If the framework does not have this device. Within
                ``settings(missing_gpu="host")``, the framework's CPU is returned instead, with a warning.
            UnknownFrameworkError: If no framework has that name.
            FrameworkNotInstalledError: If the framework is not installed.

        >>> Device("cpu").native("torch")
        device(type='cpu')
        """
        return hooks.native_device(self, framework)

    def __str__(self) -> str:
        return "cpu" if self.kind == "cpu" and self.index == 0 else f"{self.kind}:{self.index}"

    def __repr__(self) -> str:
        return f"Device({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Device):
            return self.kind == other.kind and self.index == other.index
        return str(self) == other if isinstance(other, str) else NotImplemented

    def __hash__(self) -> int:
        return hash(str(self))


if TYPE_CHECKING:
    DeviceLike: TypeAlias = Device | str | torch.device | jax.Device | cupy.cuda.Device
else:
    # `typing.get_type_hints` evaluates annotations, and must not import a framework.
    DeviceLike = Device | str | Any


@functools.lru_cache(maxsize=64)  # calls with a device string parse it twice, at 2 µs each
def _device_of_string(text: str) -> Device | None:
    """Return the device that a device string names; None for other strings."""
    match = re.fullmatch(_DEVICE_STRING, text) or re.fullmatch(_TENSORFLOW_NAME, text)
    if match is None:
        return None
    kind, index = match.groups()
    kind = kind.lower()
    if kind in _KINDS:
        return Device(kind, int(index or 0))
    return Device("gpu", int(index or 0), accelerator="rocm" if kind == "hip" else kind)


@functools.lru_cache(maxsize=64)
def gpu_device(index: int) -> Device:
    """Return the `Device` of a GPU from a cache, which is faster than creating and validating it.

    >>> gpu_device(1)
    Device('gpu:1')
    """
    return Device("gpu", index)
