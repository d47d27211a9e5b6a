"""Calls of functions that are decorated with `gpu`: choice of the device, execution and timing."""

from __future__ import annotations

import copy
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from arraybridge.carriers.sources import source_of
from arraybridge.conversion.convert import convert_memory
from arraybridge.conversion.device_resolution import gpu_index_of
from arraybridge.decorators.results import Restoration, ResultConversion
from arraybridge.decorators.wrapping import label_of, takes_self
from arraybridge.devices.inventory import least_used_gpu
from arraybridge.errors import CannotSplitError, FrameworkNotInstalledError, error_text, first_line
from arraybridge.formatting import format_bytes, format_seconds
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Framework
from arraybridge.frameworks.installation import is_imported
from arraybridge.frameworks.registry import BUILT_IN
from arraybridge.hardware import driver, gpus
from arraybridge.memory.oom_recovery import drop_tracebacks, is_oom_error, recovered
from arraybridge.offload.call_signature import (
    NoSignatureError,
    Proof,
    Proofs,
    names_in,
    signature_of,
    signature_of_self,
)
from arraybridge.offload.cost_model import CPU, GPU, History, Timings
from arraybridge.offload.verification import difference, widened
from arraybridge.parallel.function_devices import placement, placement_text
from arraybridge.settings import chosen_device, worker_device
from arraybridge.tracing import trace_log
from arraybridge.tracing.trace_log import open_logs
from arraybridge.trees import ARRAY, arrays_of, kind_of, kinds, leaves_of, map_arrays
from arraybridge.types import Device, GpuId, new_cache, remember

#: Calls below both limits do not search for a GPU: importing a framework takes longer than many such calls.
PROBE_BYTES = 1 << 20
PROBE_SECONDS = 1e-3
_TOO_SMALL = "its arrays are too small to search for a GPU"
_SPARSE = "sparse arrays stay on the CPU"
#: Calls that take less time on the CPU finish there before a call on the GPU would start.
QUICK = 50e-6
_TOO_QUICK = "it finishes on the CPU before a call on the GPU would start"
#: The number of seconds for which a measurement of free GPU memory is reused.
FREE_MEMORY_SECONDS = 0.5

#: The clock of all timings, in seconds.
clock: Callable[[], float] = time.perf_counter

#: Whether results stay on the GPU, in this thread or task.
staying: ContextVar[bool] = ContextVar("arraybridge_stay_on_gpu", default=False)
#: Whether this thread runs a function whose device is chosen. `gpu` functions that it calls run there, too.
_decided: ContextVar[bool] = ContextVar("arraybridge_gpu_decided", default=False)


@dataclass(frozen=True, slots=True)
class OffloadDecision:
    """The device on which a call to a `gpu` function would run, and the reasons. Prints as sentences.

    Attributes:
        on_gpu: Whether it would run on a GPU.
        device: The device on which it would run.
        backend: The framework in which it would run.
        reasons: Sentences. The first one is the reason for the decision.
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


# -- the GPUs ----------------------------------------------------------------------------------------


class BackendGpu:
    """A GPU as a device of one framework."""

    def __init__(self, framework: Framework, device: Device) -> None:
        self.framework = framework
        self.device = device
        self.backend = framework.name
        self.name = f"{framework.name} {device}"
        self._free = 0
        self._measured_at = -FREE_MEMORY_SECONDS

    def contains(self, x: Any) -> bool:
        """Return whether an array of any framework is on this GPU."""
        if type(x) is np.ndarray:
            return False
        owner, data = source_of(x)
        return owner.devices.device_of(data) == self.device

    def put(self, x: Any) -> Any:
        """Return an array converted to the framework and this GPU. The copy is complete on return."""
        return convert_memory(x, self.backend, device=self.device)

    def run(self, fn: Callable[[], Any]) -> Any:
        """Return ``fn()``, called with this GPU as the current device, on a stream of this thread."""
        framework = self.framework
        device = self.device
        with (
            framework.devices.selected(device),
            framework.runtime.x64_context(),
            framework.streams.stream(device),
        ):
            return fn()

    def free(self) -> int:
        """Return the bytes that the framework can still allocate, with its cache; 0 if unknown."""
        now = clock()
        if now - self._measured_at >= FREE_MEMORY_SECONDS:
            self._measured_at = now
            self._free = self.framework.memory.free_memory_of(self.device)
        return self._free


#: Framework (None for any) and index → the GPU, or the reason why there is none.
_found: dict[tuple[str | None, int], BackendGpu | str] = new_cache()


def find_gpu(backend: str | None, index: int) -> BackendGpu | str:
    """Return the GPU with this index in a framework (None for the first one that has it), or the reason."""
    gpu = _found.get((backend, index))
    return gpu or remember(_found, (backend, index), _find_gpu(backend, index))


def _find_gpu(backend: str | None, index: int) -> BackendGpu | str:
    device = Device("gpu", index)
    reasons: list[str] = []
    for name in _names_to_probe(backend):
        try:
            framework = registry.framework(name)
            devices = framework.devices.available()
        except (FrameworkNotInstalledError, RuntimeError) as error:  # drivers raise RuntimeError
            reasons.append(f"{name} finds no GPU ({getattr(error, 'reason', error)})")
            continue
        if device in devices:
            return BackendGpu(framework, device)
        numbers = ", ".join(str(d) for d in devices if d.kind == "gpu")
        reason = framework.devices.missing_device_reason() or f"{name} has no GPU"
        reasons.append(f"{name} has no {device} (it has {numbers})" if numbers else reason)
    if reasons:
        return f"the device {device} was not found: {'; '.join(reasons)}"
    reason = driver().reason or "the driver reports no GPU to this process (see CUDA_VISIBLE_DEVICES)"
    return f"no framework can use a GPU: {reason}"


def _names_to_probe(backend: str | None) -> list[str]:
    """Return the frameworks in which to search for a GPU. Without a driver, none is imported for that."""
    names = registry.numpy_like_names() if backend is None else [backend]
    if sys.platform == "darwin":
        has_driver = platform.machine() == "arm64"
    else:  # an AMD or an NVIDIA GPU
        has_driver = os.path.exists("/dev/kfd") or bool(gpus())  # noqa: PTH110  # importing pathlib costs 3 ms
    return [name for name in names if has_driver or name not in BUILT_IN or is_imported(name)]


# -- a call ------------------------------------------------------------------------------------------


class Arguments:
    """The arguments of a call: ``self``, which is never converted, and the others."""

    def __init__(self, own: tuple[Any, ...], batch: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.own = own
        self.batch = batch
        self.named = named

    def inspect(self) -> Arguments:
        """Set the arrays, their size in bytes and the call signature, and return the same object."""
        self.arrays: list[Any] = []
        parts: list[Any] = [tuple(self.named)]
        self.nbytes = 0
        self.in_numpy = True
        self.has_sparse = False
        self._exact: Any = None
        values = (*self.batch, *self.named.values())
        is_flat = all(type(x) is np.ndarray for x in values)
        for x in values if is_flat else leaves_of(values):
            if type(x) is np.ndarray:
                parts.append((x.dtype, x.ndim))
                nbytes = x.nbytes
            elif kind_of(x) is ARRAY:
                owner, data = source_of(x)
                parts.append((np.dtype(owner.dtype_name(data)), len(owner.shape(data))))
                nbytes = owner.nbytes(data)
                self.in_numpy = False
                self.has_sparse = self.has_sparse or bool(owner.sparse.layout(data))
            else:
                parts.append(_key_of_leaf(x))
                continue
            self.arrays.append(x)
            self.nbytes += nbytes
        self.signature = (self.nbytes.bit_length(), *parts)
        return self

    def exact(self) -> Any:
        """Return the exact signature. A verified run applies only to calls with an equal one.

        Raises:
            NoSignatureError: If an argument cannot be compared between calls.
        """
        if self._exact is None:
            exact = signature_of((self.batch, self.named))
            self._exact = self.nbytes.bit_length(), exact
        return self._exact

    def mapped(self, convert: Callable[[Any], Any]) -> Arguments:
        """Return the arguments with each array replaced by ``convert(array)``."""
        batch = tuple([map_arrays(x, convert) for x in self.batch])
        return Arguments(self.own, batch, {name: map_arrays(x, convert) for name, x in self.named.items()})

    def run(self, fn: Callable[..., Any]) -> Any:
        """Call the function with these arguments."""
        return fn(*self.own, *self.batch, **self.named)

    def on_host(self) -> Arguments:
        """Return the arguments with NumPy arrays."""
        return self if self.in_numpy else self.mapped(lambda x: convert_memory(x, "numpy"))

    def restore(self, result: Any) -> Any:
        """Return a NumPy result with the framework and device of the first array."""
        return result if self.in_numpy else _restored(result, self.arrays[0], [])


def _key_of_leaf(x: Any) -> Any:
    """Return the part of a call signature for a value that is not an array.

    Floating-point numbers count by type only. Functions count by their code, because a lambda is a new object
    in each call. This is sufficient for timings; `Arguments.exact` decides about the reuse of verifications.
    """
    cls = type(x)  # not isinstance, because `__class__` of an object may raise
    if cls in (int, bool, str, bytes) or issubclass(cls, np.dtype):
        return cls, x
    if issubclass(cls, (np.integer, np.bool_)):
        return cls, x.item()
    if cls is FunctionType:
        return x.__code__
    return x if issubclass(cls, type) else cls


class _Choice(NamedTuple):
    """The GPU on which a call runs, or None for the CPU, with the reason and the proof of the signature."""

    gpu: BackendGpu | None
    reason: str
    proof: Proof | None = None


class Offload:
    """A function whose calls run on the CPU or on a GPU."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        backend: str | None = None,
        gpu_id: GpuId = None,
        split_axis: int | None = None,
    ) -> None:
        self.fn = fn
        self.backend = backend
        self.split_axis = split_axis
        self.gpu_id: GpuId = gpu_id
        self.label = label_of(fn)
        self.skip = 1 if takes_self(fn) else 0  # self is never converted, even if it is an array
        self.history = History()
        self.proofs = Proofs()
        self._named = names_in(fn) if self.skip else ()
        placed = placement(fn)
        #: The reason why the function stays on the CPU, or "".
        self.cpu_reason = "" if placed is None else f"another decorator sets its device: {placement_text(fn)}"

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(Offload, backend=self.backend, gpu_id=self.gpu_id, split_axis=self.split_axis)
        return (make, (self.fn,))

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call on the chosen device, and return its result."""
        call = Arguments(args[: self.skip], args[self.skip :], kwargs)
        if _decided.get() or not call.inspect().arrays:
            return call.run(self.fn)
        timings = self.history[call.signature]
        choice = self._decide(call, timings, self.proofs.get)
        span = trace_log.span("decision", self.label) if open_logs else None
        with nullcontext() if span is None else span:
            if span is not None:
                span.device = "cpu" if choice.gpu is None else str(choice.gpu.device)
                span.reason = choice.reason
            result, warning = self._run(choice, call, timings)
        if warning:
            warnings.warn(f"{self.label}() {warning}", RuntimeWarning, stacklevel=3)
        return result

    # -- decision ---------------------------------------------------------------------------------

    def _decide(self, call: Arguments, timings: Timings, proof_of: Callable[[Any], Proof]) -> _Choice:
        """Decide where a call runs.

        ``proof_of`` returns the proof of an exact signature. If a call runs on the CPU because its signature
        is new, the proof records it, so that the next such call is the trial.
        """
        cpu = timings.estimate(CPU)
        gpu = self._candidate(call, cpu)
        if isinstance(gpu, str):
            return _Choice(None, gpu)
        try:
            proof = proof_of(self._key(call, gpu))
        except NoSignatureError as error:
            return _Choice(None, f"{error}, so verified runs do not apply to other calls")
        if not call.in_numpy and all(gpu.contains(x) for x in call.arrays):
            return _Choice(gpu, "the arrays are already on the GPU", proof)
        if timings.cpu_reason:
            return _Choice(None, timings.cpu_reason)
        if cpu is None:
            proof.seen = True
            return _Choice(None, "there are no timings for such arguments yet")
        if cpu < QUICK:
            return _Choice(None, _TOO_QUICK)
        needed = 3 * call.nbytes  # the arguments, the result and intermediate results
        free = gpu.free()
        if free and needed > free:
            return _Choice(
                None,
                f"it needs about {format_bytes(needed)}, but {gpu.name} has only {format_bytes(free)} free",
            )
        return self._by_time(gpu, timings, proof)

    def _candidate(self, call: Arguments, cpu: float | None) -> BackendGpu | str:
        """Return the GPU on which a call could run, or the reason for the CPU, regardless of its signature.

        ``cpu`` is the time of the call on the CPU in seconds, if known.
        """
        if call.has_sparse:
            return _SPARSE
        if call.in_numpy and not _found and call.nbytes < PROBE_BYTES and (cpu or 0.0) < PROBE_SECONDS:
            return _TOO_SMALL
        gpu = self._gpu()
        if isinstance(gpu, str):
            return gpu
        if self.cpu_reason:
            return self.cpu_reason
        # Here, because `_decide` spends time on the exact signature next.
        is_quick = cpu is not None and cpu < QUICK
        return _TOO_QUICK if is_quick and call.in_numpy else gpu

    def _by_time(self, gpu: BackendGpu, timings: Timings, proof: Proof) -> _Choice:
        """Return the faster device, but the GPU only for a signature that has run on the CPU before."""
        if timings.counts[GPU] or (proof.is_verified and staying.get()):
            place, reason = timings.choose()
        else:
            place = GPU
            reason = "there are no timings on the GPU for such arguments yet"
        if place == CPU:
            return _Choice(None, reason)
        if proof.is_verified or proof.seen:
            return _Choice(gpu, reason, proof)
        proof.seen = True
        return _Choice(
            None, "it has not run with exactly these arguments before. The next such call is a trial"
        )

    def _key(self, call: Arguments, gpu: BackendGpu) -> Any:
        """Return the key of a proof: the exact signature, the framework and the GPU."""
        return signature_of_self(call.own, self._named) if call.own else (), call.exact(), gpu.name

    def _gpu(self) -> BackendGpu | str:
        """Return the GPU to run on, or the reason why there is none."""
        # Workers of device_map have their own device. None if no device was selected.
        chosen = (worker_device.get() if self.gpu_id is None else None) or chosen_device()
        if chosen is not None and chosen.kind == "cpu":
            return "the default device is the CPU"
        return find_gpu(self.backend, self._index(chosen))

    def _index(self, chosen: Device | None) -> int:
        """Return the index of the GPU: from ``gpu_id``, otherwise of the default device, otherwise 0."""
        number = gpu_index_of(self.gpu_id)
        if isinstance(number, str):  # "auto", which is resolved once
            number = self.gpu_id = least_used_gpu() or 0
        if number is not None:
            return number
        return 0 if chosen is None else chosen.index

    def explain(self, *args: Any, **kwargs: Any) -> OffloadDecision:
        """Return where a call would run and the reasons, without calling the function."""
        # explain() of a bound method gets no self, because it is an attribute of the function.
        skip = self.skip if args and kind_of(args[0]) is not ARRAY else 0
        call = Arguments(args[:skip], args[skip:], kwargs).inspect()
        if not call.arrays:
            return OffloadDecision(False, Device("cpu"), "numpy", ("It takes no arrays.",))
        timings = self.history.get(call.signature) or Timings()
        gpu, reason, proof = self._decide(call, timings, self._known_proof)
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

    def _known_proof(self, key: Any) -> Proof:
        """Return a copy of the proof of a signature. If the call has no ``self``, that of any ``self``."""
        own, *rest = key
        found = self.proofs.peek(key)
        if self.skip and not own:
            found = next((proof for (_, *others), proof in self.proofs.items() if others == rest), None)
        return Proof() if found is None else copy.copy(found)

    # -- execution --------------------------------------------------------------------------------

    def _run(self, choice: _Choice, call: Arguments, timings: Timings) -> tuple[Any, str]:
        """Return the result and the text of a warning, or ``""``."""
        gpu, _, proof = choice
        if gpu is None or proof is None:
            return self._on_cpu(call, timings), ""
        if not proof.is_verified:
            return self._trial(gpu, call, timings, proof)
        try:
            return self._on_gpu(gpu, call, timings, proof), ""
        except Exception as error:  # noqa: BLE001  # if the function is wrong, it raises on the CPU, too
            result = self._on_cpu(call, timings)
            return result, self._remember_failure(gpu, timings, error)

    def _on_cpu(self, call: Arguments, timings: Timings) -> Any:
        started = clock()
        result = call.restore(call.on_host().run(self.fn))
        timings.add(CPU, clock() - started)
        return result

    def _on_gpu(self, gpu: BackendGpu, call: Arguments, timings: Timings, proof: Proof) -> Any:
        stays = staying.get() or gpu.contains(call.arrays[0])

        def attempt(*batch: Any, **named: Any) -> Any:
            on_gpu = Arguments(call.own, batch, named).mapped(gpu.put)
            result = gpu.run(lambda: _run_decided(on_gpu, self.fn))
            return result if stays else _restored(result, call.arrays[0], proof.scalars)

        started = clock()
        index = gpu.device.index
        axis = self.split_axis
        result = recovered(attempt, call.batch, call.named, 1, index, None, axis is not None, axis or 0)
        if not stays:  # otherwise the GPU may not have finished
            timings.add(GPU, clock() - started)
        return result

    def _remember_failure(self, gpu: BackendGpu, timings: Timings, error: Exception) -> str:
        """Record that the function failed on the GPU, and return the text of the warning."""
        reason = first_line(error_text(error))
        drop_tracebacks(error)  # its variables hold memory of the GPU
        if is_oom_error(error) or isinstance(error, CannotSplitError):
            timings.cpu_reason = f"it ran out of memory on {gpu.name} before"
            fix = " If its rows are independent, pass split_axis=0 to compute them in parts on the GPU."
            fix = fix if self.split_axis is None else ""
            return f"ran out of memory on {gpu.name} ({reason}). This call was computed on the CPU.{fix}"
        self.cpu_reason = f"it cannot run in {gpu.backend}: {reason}"
        return (
            f"cannot run in {gpu.backend} ({reason}). It runs on the CPU from now on. Use functions that"
            f" {gpu.backend} has, or remove @gpu."
        )

    # -- the trial --------------------------------------------------------------------------------

    def _trial(self, gpu: BackendGpu, call: Arguments, timings: Timings, proof: Proof) -> tuple[Any, str]:
        """Run an exact signature for the first time on a GPU, and compare the result with that of NumPy."""
        on_host = call.on_host()
        started = clock()
        expected = _run_decided(on_host, self.fn)
        timings.add(CPU, clock() - started)
        proof.scalars = [isinstance(x, np.generic) for x in arrays_of(expected, also=np.generic)]
        if expected is None:
            self.cpu_reason = "it returns None, which cannot be verified"
            return expected, ""
        try:
            actual = self._on_gpu(gpu, call, timings, proof)
        except Exception as error:  # noqa: BLE001  # the function may raise anything; in NumPy it did not
            return call.restore(expected), self._remember_failure(gpu, timings, error)
        reason = self._difference(gpu, on_host, expected, actual)
        if not reason:
            proof.is_verified = True
            return actual, ""
        self.cpu_reason = f"its trial failed: in {gpu.backend}, {reason}"
        warning = (
            f"has a different result on the GPU: in {gpu.backend}, {reason}. It runs on the CPU from now on."
            f" Use functions that return the same in {gpu.backend}, or remove @gpu."
        )
        return call.restore(expected), warning

    def _difference(self, gpu: BackendGpu, on_host: Arguments, expected: Any, actual: Any) -> str:
        arguments = arrays_of([on_host.batch, on_host.named])
        reason, exact = difference(expected, actual, arguments)
        if reason or exact:
            return reason
        # In double precision, rounding errors are smaller, but differences between formulas are not.
        wide = on_host.mapped(widened)
        try:
            expected = _run_decided(wide, self.fn)
            actual = gpu.run(lambda: _run_decided(wide.mapped(gpu.put), self.fn))
        except Exception:  # noqa: BLE001  # the function may raise anything for other dtypes
            return ""
        return difference(expected, actual, arrays_of([wide.batch, wide.named]))[0]


def _run_decided(call: Arguments, fn: Callable[..., Any]) -> Any:
    """Call the function. The `gpu` functions that it calls run on the same device."""
    token = _decided.set(True)
    try:
        return call.run(fn)
    finally:
        _decided.reset(token)


def _restored(result: Any, first: Any, scalars: list[bool]) -> Any:
    """Return the result in the framework, on the device and in the carrier of the first array argument.

    ``scalars`` states for each array in the result whether NumPy returns a scalar there. Callers whose first
    array is on the host get that scalar.
    """
    restoration = Restoration(first, writable=True)
    if not scalars and kinds.get(type(result)) is ARRAY:  # one array, in most calls
        return restoration.array(result)
    restored = ResultConversion(restoration.array).tree(result)
    if not restoration.framework.devices.has_only_host or not any(scalars):
        return restored
    is_scalar = iter(scalars)

    def as_scalar(x: Any) -> Any:
        scalar = next(is_scalar, True)
        return x[()] if scalar and type(x) is np.ndarray and not x.ndim else x

    return map_arrays(restored, as_scalar, also=np.generic)
