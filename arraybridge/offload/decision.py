"""The decision between the CPU and a GPU for each call to a function decorated with `gpu`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from arraybridge.conversion.device_resolution import gpu_index_of
from arraybridge.decorators.wrapping import SelfArgument
from arraybridge.device import Device
from arraybridge.devices.inventory import least_used_gpu
from arraybridge.formatting import format_bytes, format_seconds
from arraybridge.offload.call_signature import Call
from arraybridge.offload.gpu_search import BackendGpu, find_gpu, found_gpus
from arraybridge.offload.records import CPU, GPU, History, Record
from arraybridge.parallel.function_devices import placement, placement_text
from arraybridge.settings import device_setting, worker_device
from arraybridge.types import GpuId

#: Calls with fewer bytes and seconds than these limits do not search for a GPU, because importing a framework
#: takes longer than many such calls.
PROBE_BYTES = 1 << 20
PROBE_SECONDS = 1e-3
#: Calls that take fewer seconds than this on the CPU finish there before a call on the GPU would start.
QUICK = 50e-6


@dataclass(frozen=True, slots=True)
class OffloadDecision:
    """The device on which a call to a `gpu` function would run, and the reasons. Printed as sentences.

    Attributes:
        on_gpu: Whether the call would run on a GPU.
        device: The device on which the call would run.
        backend: The framework in which the call would run.
        reasons: The reason for the decision, followed by details such as measured times.
        cpu_seconds: The time on the CPU in seconds; None if unknown.
        gpu_seconds: The time on the GPU in seconds, with transfers; None if unknown.

    >>> import numpy as np, arraybridge
    >>> double = arraybridge.gpu(lambda x: 2 * x)
    >>> double.explain(np.ones(3)).backend
    'numpy'
    """

    on_gpu: bool
    device: Device
    backend: str
    reasons: tuple[str, ...]
    cpu_seconds: float | None = None
    gpu_seconds: float | None = None

    def __str__(self) -> str:
        place = f"on {self.device} in {self.backend}" if self.on_gpu else "on the CPU in NumPy"
        sentences = [r[:1].upper() + r[1:] + ("" if r.endswith(".") else ".") for r in self.reasons]
        return "\n".join([f"It would run {place}.", *sentences])


class DeviceChooser:
    """The policy that chooses the device for each call to a `gpu` function.

    Attributes:
        backend: The framework to use on the GPU, or None for the first framework that finds the GPU.
        gpu_id: The number of the GPU, "auto" until the first use, or None for the default device.
        history: The timings and verifications of the decorated function.
        cpu_reason: The reason why the decorated function stays on the CPU, or "" if it does not.
        self_argument: Recognizes ``self`` and ``cls``, which are never converted; None if there is none.
    """

    def __init__(self, fn: Callable[..., Any], backend: str | None = None, gpu_id: GpuId = None) -> None:
        self.backend = backend
        self.gpu_id: GpuId = gpu_id
        self.history = History()
        self.cpu_reason = ""
        if placement(fn) is not None:
            self.cpu_reason = f"another decorator sets its device: {placement_text(fn)}"
        self.self_argument = SelfArgument.of(fn)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return the arguments of a call. ``self`` or ``cls`` is stored separately and never converted."""
        own = 0 if self.self_argument is None else self.self_argument.count(args)
        return Call(args[:own], args[own:], kwargs)

    def decide(self, call: Call, record: Record) -> tuple[BackendGpu | None, str]:
        """Return the GPU on which a call runs (None for the CPU), and the reason.

        ``record`` is that of the signature of the call.
        """
        cpu = record.seconds[CPU]
        gpu = _reason_for_no_search(call, cpu or 0.0) or self._gpu()
        if isinstance(gpu, str):
            return None, gpu
        reason = self.cpu_reason or call.no_signature_reason or record.cpu_reason
        if not reason and all(map(gpu.contains, call.arrays)):
            return gpu, "the arrays are already on the GPU"
        reason = reason or _reason_against(gpu, call, cpu)
        if reason:
            return None, reason
        place, reason = record.choose()
        return (gpu if place == GPU else None), reason

    def explain(self, *args: Any, **kwargs: Any) -> OffloadDecision:
        """Return the device on which a call would run, with the reasons, without calling the function."""
        call = self.call(args, kwargs).inspect()
        if not call.arrays:
            return OffloadDecision(False, Device("cpu"), "numpy", ("It takes no arrays.",))
        # method.explain() gets no self, because `explain` is an attribute of the function.
        any_self = self.self_argument is not None and not call.own
        record = self.history.find(call, any_self=any_self)
        gpu, reason = self.decide(call, record)
        reasons = [reason]
        for place, phrase in ((CPU, "On the CPU,"), (GPU, "On the GPU, with transfers,")):
            seconds = record.seconds[place]
            if seconds is not None:
                text = format_seconds(seconds)
                reasons.append(f"{phrase} it takes {text} (runs so far: {record.counts[place]})")
        times = record.seconds[CPU], record.seconds[GPU]
        if gpu is None:
            return OffloadDecision(False, Device("cpu"), "numpy", tuple(reasons), *times)
        if gpu.name not in record.verified:
            reasons.append(
                "The first run with these arguments on the GPU is a trial. It also runs on the CPU, and the"
                " results are compared"
            )
        return OffloadDecision(True, gpu.device, gpu.backend, tuple(reasons), *times)

    def _gpu(self) -> BackendGpu | str:
        """Return the GPU to run on, or the reason why there is none."""
        # Workers of device_map have their own device. `chosen` is None if no device was selected.
        chosen = (worker_device.get() if self.gpu_id is None else None) or device_setting()
        if chosen is not None and chosen.kind == "cpu":
            return "the default device is the CPU"
        number = gpu_index_of(self.gpu_id)
        if isinstance(number, str):  # "auto", which is resolved once
            number = self.gpu_id = least_used_gpu() or 0
        if number is None:
            number = 0 if chosen is None else chosen.index
        return find_gpu(self.backend, number)


def _reason_for_no_search(call: Call, cpu: float) -> str:
    """Return the reason why a call of ``cpu`` seconds on the CPU does not search for a GPU, or ""."""
    if call.has_sparse:
        return "sparse arrays stay on the CPU"
    if call.in_numpy and not found_gpus and call.nbytes < PROBE_BYTES and cpu < PROBE_SECONDS:
        return f"its arrays are too small to justify a search for a GPU: {format_bytes(call.nbytes)}"
    return ""


def _reason_against(gpu: BackendGpu, call: Call, cpu: float | None) -> str:
    """Return the reason why a call of ``cpu`` seconds on the CPU cannot be faster on a GPU, or ""."""
    if cpu is None:
        return "there are no timings for such arguments yet"
    if cpu < QUICK:
        return "it finishes on the CPU before a call on the GPU would start"
    if gpu.transfer_rate and call.nbytes > cpu * gpu.transfer_rate:
        seconds = format_seconds(call.nbytes / gpu.transfer_rate)
        return f"the transfer of its arrays takes {seconds}, longer than the call on the CPU"
    needed = 3 * call.nbytes  # the arguments, the result and intermediate results
    free = gpu.free()
    if free and needed > free:
        return f"it needs about {format_bytes(needed)}, but {gpu.name} has only {format_bytes(free)} free"
    return ""
