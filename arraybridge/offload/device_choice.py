"""The choice between the CPU and a GPU for each call to a function decorated with `gpu`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

from arraybridge.conversion.device_resolution import gpu_index_of
from arraybridge.decorators.wrapping import SelfArgument
from arraybridge.device import Device
from arraybridge.devices.inventory import least_used_gpu
from arraybridge.formatting import format_bytes, format_seconds
from arraybridge.offload.call_arguments import Arguments
from arraybridge.offload.call_signature import NoSignatureError, names_in, signature_of_self
from arraybridge.offload.gpu_search import BackendGpu, find_gpu, found_gpus
from arraybridge.offload.timing_history import CPU, GPU, History, Timings
from arraybridge.offload.verification import Proof, Proofs
from arraybridge.parallel.function_devices import placement, placement_text
from arraybridge.settings import chosen_device, worker_device
from arraybridge.types import GpuId

#: Calls with fewer bytes and seconds than these limits do not search for a GPU, because importing a framework
#: takes longer than many such calls.
PROBE_BYTES = 1 << 20
PROBE_SECONDS = 1e-3
_TOO_SMALL = "its arrays are too small to justify a search for a GPU"
_SPARSE = "sparse arrays stay on the CPU"
#: Calls that take fewer seconds than this on the CPU finish there before a call on the GPU would start.
QUICK = 50e-6
_TOO_QUICK = "it finishes on the CPU before a call on the GPU would start"

#: Whether results of `gpu` functions stay on the GPU in the current thread or task; see `stay_on_gpu`.
staying: ContextVar[bool] = ContextVar("arraybridge_stay_on_gpu", default=False)


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
        where = f"on {self.device} in {self.backend}" if self.on_gpu else "on the CPU in NumPy"
        sentences = [r[:1].upper() + r[1:] + ("" if r.endswith(".") else ".") for r in self.reasons]
        return "\n".join([f"It would run {where}.", *sentences])


class Choice(NamedTuple):
    """The choice of the GPU (None for the CPU) for one call, with the reason and the verification state."""

    gpu: BackendGpu | None
    reason: str
    proof: Proof | None = None


class DeviceChooser:
    """The policy that chooses the device for each call to a `gpu` function.

    Attributes:
        backend: The framework to use on the GPU, or None for the first framework that finds the GPU.
        gpu_id: The number of the GPU, "auto" until the first use, or None for the default device.
        self_argument: The rule that recognizes ``self`` and ``cls``, which are never converted; None if the
            function is not defined in a class.
        history: The timings of the decorated function.
        proofs: The verification states of its call signatures.
        cpu_reason: The reason why the decorated function stays on the CPU, or "" if it does not.
    """

    def __init__(self, fn: Callable[..., Any], *, backend: str | None, gpu_id: GpuId) -> None:
        self.backend = backend
        self.gpu_id: GpuId = gpu_id
        self.self_argument = SelfArgument.of(fn)
        self.history = History()
        self.proofs = Proofs()
        self._self_names = () if self.self_argument is None else names_in(fn)
        placed = placement(fn)
        self.cpu_reason = "" if placed is None else f"another decorator sets its device: {placement_text(fn)}"

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments of a call. ``self`` or ``cls`` is stored separately and never converted."""
        skip = 0 if self.self_argument is None else self.self_argument.count(args)
        return Arguments(args[:skip], args[skip:], kwargs)

    def decide(self, call: Arguments, timings: Timings, proof_of: Callable[[Any], Proof]) -> Choice:
        """Return the device on which a call runs, with the reason.

        ``proof_of`` returns the verification state of an exact signature. If a call runs on the CPU because
        its signature is new, the state records that, so that the next call with this signature is the trial.
        """
        cpu = timings.estimate(CPU)
        gpu = self._candidate(call, cpu)
        if isinstance(gpu, str):
            return Choice(None, gpu)
        try:
            proof = proof_of(self.proof_key(call, gpu))
        except NoSignatureError as error:
            return Choice(None, f"{error}, so verified runs do not apply to other calls")
        if not call.in_numpy and all(gpu.contains(x) for x in call.arrays):
            return Choice(gpu, "the arrays are already on the GPU", proof)
        if timings.cpu_reason:
            return Choice(None, timings.cpu_reason)
        if cpu is None:
            proof.seen = True
            return Choice(None, "there are no timings for such arguments yet")
        if cpu < QUICK:
            return Choice(None, _TOO_QUICK)
        needed = 3 * call.nbytes  # the arguments, the result and intermediate results
        free = gpu.free()
        if free and needed > free:
            return Choice(
                None,
                f"it needs about {format_bytes(needed)}, but {gpu.name} has only {format_bytes(free)} free",
            )
        return self._by_time(gpu, timings, proof)

    def explain(self, *args: Any, **kwargs: Any) -> OffloadDecision:
        """Return the device on which a call would run, with the reasons, without calling the function."""
        call = self.arguments(args, kwargs).inspect()
        if not call.arrays:
            return OffloadDecision(False, Device("cpu"), "numpy", ("It takes no arrays.",))
        timings = self.history.get(call.signature) or Timings()
        gpu, reason, proof = self.decide(call, timings, self._known_proof)
        reasons = [f"{reason}: {format_bytes(call.nbytes)}" if reason is _TOO_SMALL else reason]
        for place, phrase in ((CPU, "On the CPU,"), (GPU, "On the GPU, with transfers,")):
            seconds = timings.estimate(place)
            if seconds is not None:
                time_text = format_seconds(seconds)
                reasons.append(f"{phrase} it takes {time_text} (runs so far: {timings.counts[place]})")
        if proof is not None and not proof.is_verified:
            reasons.append(
                "The first run with these arguments on the GPU is a trial. It also runs on the CPU, and the"
                " results are compared"
            )
        device, backend = (Device("cpu"), "numpy") if gpu is None else (gpu.device, gpu.backend)
        estimates = timings.estimate(CPU), timings.estimate(GPU)
        return OffloadDecision(gpu is not None, device, backend, tuple(reasons), *estimates)

    def proof_key(self, call: Arguments, gpu: BackendGpu) -> Any:
        """Return the key of a verification state: the exact signature, the framework and the GPU."""
        return signature_of_self(call.own, self._self_names) if call.own else (), call.exact(), gpu.name

    def _candidate(self, call: Arguments, cpu: float | None) -> BackendGpu | str:
        """Return the GPU on which a call could run, or the reason why it must run on the CPU.

        The exact signature of the call is not considered yet. ``cpu`` is the time of the call on the CPU in
        seconds, if known.
        """
        if call.has_sparse:
            return _SPARSE
        if call.in_numpy and not found_gpus and call.nbytes < PROBE_BYTES and (cpu or 0.0) < PROBE_SECONDS:
            return _TOO_SMALL
        gpu = self._gpu()
        if isinstance(gpu, str):
            return gpu
        if self.cpu_reason:
            return self.cpu_reason
        # Quick calls return here, because `decide` computes the exact signature next, which takes time.
        is_quick = cpu is not None and cpu < QUICK
        return _TOO_QUICK if is_quick and call.in_numpy else gpu

    def _by_time(self, gpu: BackendGpu, timings: Timings, proof: Proof) -> Choice:
        """Choose the faster device, or a GPU that has no timings. New signatures run on the CPU first."""
        if timings.counts[GPU] or (proof.is_verified and staying.get()):
            place, reason = timings.choose()
        else:
            place = GPU
            reason = "there are no timings on the GPU for such arguments yet"
        if place == CPU:
            return Choice(None, reason)
        if proof.is_verified or proof.seen:
            return Choice(gpu, reason, proof)
        proof.seen = True
        return Choice(
            None, "it has not run with exactly these arguments before. The next such call is a trial"
        )

    def _gpu(self) -> BackendGpu | str:
        """Return the GPU to run on, or the reason why there is none."""
        # Workers of device_map have their own device. `chosen` is None if no device was selected.
        chosen = (worker_device.get() if self.gpu_id is None else None) or chosen_device()
        if chosen is not None and chosen.kind == "cpu":
            return "the default device is the CPU"
        return find_gpu(self.backend, self._index(chosen))

    def _index(self, chosen: Device | None) -> int:
        """Return the index of the GPU: ``gpu_id``, otherwise the index of the default device, otherwise 0."""
        number = gpu_index_of(self.gpu_id)
        if isinstance(number, str):  # "auto", which is resolved once
            number = self.gpu_id = least_used_gpu() or 0
        if number is not None:
            return number
        return 0 if chosen is None else chosen.index

    def _known_proof(self, key: Any) -> Proof:
        """Return a copy of a signature's verification state, or a new one if there is none.

        If the key of a method call has no ``self``, use the state of the same signature with any ``self``.
        """
        own, *rest = key
        found = self.proofs.peek(key)
        # method.explain() gets no self, because `explain` is an attribute of the function.
        if self.self_argument is not None and not own:
            found = next((proof for (_, *others), proof in self.proofs.items() if others == rest), None)
        return Proof() if found is None else copy.copy(found)
