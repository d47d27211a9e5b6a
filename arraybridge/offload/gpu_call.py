"""What a function decorated with `gpu` does on each call: decide, run, measure, and come back."""

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
from arraybridge.conversion.placement import gpu_index_of
from arraybridge.decorators.results import Restoration, ResultConversion
from arraybridge.decorators.wrapping import label_of, takes_self
from arraybridge.devices.inventory import least_used_gpu
from arraybridge.errors import CannotSplitError, FrameworkNotInstalledError, error_text, first_line
from arraybridge.formatting import format_bytes, format_seconds
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Framework
from arraybridge.frameworks.registry import BUILT_IN, is_imported
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

#: Below both of these nobody looks for a card: importing a framework takes longer than many such calls.
PROBE_BYTES = 1 << 20
PROBE_SECONDS = 1e-3
_TOO_LITTLE = "it takes in too little to look for a card"
_SPARSE = "sparse arrays stay on the CPU"
#: What takes less on the CPU is done there before a card has begun.
QUICK = 50e-6
_DONE_BEFORE = "it is done on the CPU before a card has begun"
#: The free memory of a card is asked for again after so many seconds.
ASK_AGAIN = 0.5

#: Seconds, of all that is measured here.
clock: Callable[[], float] = time.perf_counter

#: Whether results stay on the card, in this thread or task.
staying: ContextVar[bool] = ContextVar("arraybridge_stay_on_gpu", default=False)
#: Whether this thread runs a function whose place is decided: `gpu` functions that it calls run there.
_decided: ContextVar[bool] = ContextVar("arraybridge_gpu_decided", default=False)


@dataclass(frozen=True, slots=True)
class OffloadDecision:
    """Where a call of a `gpu` function would run, and why. Prints as plain sentences.

    Attributes:
        on_gpu: whether it would run on a card.
        device: where.
        backend: the framework that it would run in.
        reasons: sentences; the first one is what decided.
        cpu_seconds: what it takes on the CPU; None where nothing is known.
        gpu_seconds: what it takes on the card, with transfers; None where nothing is known.
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


# -- the cards ---------------------------------------------------------------------------------------


class BackendGpu:
    """One card, as one framework sees it."""

    def __init__(self, framework: Framework, device: Device) -> None:
        self.framework = framework
        self.device = device
        self.backend = framework.name
        self.name = f"{framework.name} {device}"
        self._free = 0
        self._asked = -ASK_AGAIN

    def holds(self, x: Any) -> bool:
        """Whether the array, of whichever framework, lives on this card."""
        if type(x) is np.ndarray:
            return False
        owner, data = source_of(x)
        return owner.devices.device_of(data) == self.device

    def put(self, x: Any) -> Any:
        """The array on the card, as one of the backend's; complete on return."""
        return convert_memory(x, self.backend, device=self.device)

    def run(self, fn: Callable[[], Any]) -> Any:
        """``fn()`` with this card as the backend's current one, on a stream of this thread."""
        framework = self.framework
        device = self.device
        with (
            framework.devices.selected(device),
            framework.runtime.x64_context(),
            framework.streams.stream(device),
        ):
            return fn()

    def free(self) -> int:
        """Bytes that the backend could still take, its cache included; 0 where it cannot tell."""
        now = clock()
        if now - self._asked >= ASK_AGAIN:
            self._asked = now
            self._free = self.framework.memory.free_memory_of(self.device)
        return self._free


#: Framework (None: any) and number → the card, or why there is none.
_found: dict[tuple[str | None, int], BackendGpu | str] = new_cache()


def find_gpu(backend: str | None, index: int) -> BackendGpu | str:
    """The card of that number in that framework (None: the first that has it), or why there is none."""
    gpu = _found.get((backend, index))
    return gpu or remember(_found, (backend, index), _find_gpu(backend, index))


def _find_gpu(backend: str | None, index: int) -> BackendGpu | str:
    device = Device("gpu", index)
    reasons: list[str] = []
    for name in _worth_asking(backend):
        try:
            framework = registry.framework(name)
            devices = framework.devices.available()
        except (FrameworkNotInstalledError, RuntimeError) as error:  # or the driver refuses
            reasons.append(f"{name} finds no card ({getattr(error, 'reason', error)})")
            continue
        if device in devices:
            return BackendGpu(framework, device)
        numbers = ", ".join(str(d) for d in devices if d.kind == "gpu")
        reason = framework.devices.missing_device_reason() or f"{name} has no GPU"
        reasons.append(f"{name} has no {device} (it has {numbers})" if numbers else reason)
    if reasons:
        return f"there is no {device} here: {'; '.join(reasons)}"
    reason = driver().reason or "the driver shows none to this process (see CUDA_VISIBLE_DEVICES)"
    return f"there is no GPU here that a framework could use: {reason}"


def _worth_asking(backend: str | None) -> list[str]:
    """The frameworks to ask for a card. Without a driver none is worth the seconds that its import takes."""
    names = registry.numpy_like_names() if backend is None else [backend]
    if sys.platform == "darwin":
        has_driver = platform.machine() == "arm64"
    else:  # an AMD card, or NVIDIA ones
        has_driver = os.path.exists("/dev/kfd") or bool(gpus())  # noqa: PTH110  # pathlib costs 3 ms to import
    return [name for name in names if has_driver or name not in BUILT_IN or is_imported(name)]


# -- a call ------------------------------------------------------------------------------------------


class Arguments:
    """What a function is called with: self, which stays as it is, and all else."""

    def __init__(self, own: tuple[Any, ...], batch: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.own = own
        self.batch = batch
        self.named = named

    def inspect(self) -> Arguments:
        """Find its arrays, and what tells it from other calls."""
        self.arrays: list[Any] = []
        kinds: list[Any] = [tuple(self.named)]
        self.nbytes = 0
        self.in_numpy = True
        self.has_sparse = False
        self._exact: Any = None
        values = (*self.batch, *self.named.values())
        is_flat = all(type(x) is np.ndarray for x in values)
        for x in values if is_flat else leaves_of(values):
            if type(x) is np.ndarray:
                kinds.append((x.dtype, x.ndim))
                nbytes = x.nbytes
            elif kind_of(x) is ARRAY:
                owner, data = source_of(x)
                kinds.append((np.dtype(owner.dtype_name(data)), len(owner.shape(data))))
                nbytes = owner.nbytes(data)
                self.in_numpy = False
                self.has_sparse = self.has_sparse or bool(owner.sparse.layout(data))
            else:
                kinds.append(_kind_of_leaf(x))
                continue
            self.arrays.append(x)
            self.nbytes += nbytes
        self.signature = (self.nbytes.bit_length(), *kinds)
        return self

    def exact(self) -> Any:
        """Return what tells it from calls that a verified run says nothing about.

        Raises:
            NoSignatureError: the arguments cannot be told apart.
        """
        if self._exact is None:
            exact = signature_of((self.batch, self.named))
            self._exact = self.nbytes.bit_length(), exact
        return self._exact

    def mapped(self, convert: Callable[[Any], Any]) -> Arguments:
        """The same with other arrays."""
        batch = tuple([map_arrays(x, convert) for x in self.batch])
        return Arguments(self.own, batch, {name: map_arrays(x, convert) for name, x in self.named.items()})

    def run(self, fn: Callable[..., Any]) -> Any:
        return fn(*self.own, *self.batch, **self.named)

    def on_host(self) -> Arguments:
        return self if self.in_numpy else self.mapped(lambda x: convert_memory(x, "numpy"))

    def restore(self, result: Any) -> Any:
        """A result of NumPy as the first array came."""
        return result if self.in_numpy else _restored(result, self.arrays[0], [])


def _kind_of_leaf(x: Any) -> Any:
    """Numbers that are not whole by their type alone; of functions their code: a lambda is new each time.

    Timings need no more. Whether a result is right depends on `Arguments.exact`.
    """
    cls = type(x)  # not isinstance: an object may raise when it is asked for its __class__
    if cls in (int, bool, str, bytes) or issubclass(cls, np.dtype):
        return cls, x
    if issubclass(cls, (np.integer, np.bool_)):
        return cls, x.item()
    if cls is FunctionType:
        return x.__code__
    return x if issubclass(cls, type) else cls


class _Choice(NamedTuple):
    """Where a call runs: on a GPU, with the proof of its signature, or on the CPU (None); and the reason."""

    gpu: BackendGpu | None
    why: str
    proof: Proof | None = None


class Offload:
    """Runs one function, each call on the CPU or on a card."""

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
        self.skip = 1 if takes_self(fn) else 0  # self stays as it is, also where it is an array
        self.history = History()
        self.proofs = Proofs()
        self._named = names_in(fn) if self.skip else ()
        placed = placement(fn)
        #: Why the function stays on the CPU, or "".
        self.refused = "" if placed is None else f"its own decorator says where it runs: {placement_text(fn)}"

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(Offload, backend=self.backend, gpu_id=self.gpu_id, split_axis=self.split_axis)
        return (make, (self.fn,))

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = Arguments(args[: self.skip], args[self.skip :], kwargs)
        if _decided.get() or not call.inspect().arrays:
            return call.run(self.fn)
        timings = self.history[call.signature]
        choice = self._decide(call, timings, self.proofs.get)
        span = trace_log.span("decision", self.label) if open_logs else None
        with nullcontext() if span is None else span:
            if span is not None:
                span.device = "cpu" if choice.gpu is None else str(choice.gpu.device)
                span.reason = choice.why
            result, complaint = self._run(choice, call, timings)
        if complaint:
            warnings.warn(f"{self.label}() {complaint}", RuntimeWarning, stacklevel=3)
        return result

    # -- where ------------------------------------------------------------------------------------

    def _decide(self, call: Arguments, timings: Timings, proof_of: Callable[[Any], Proof]) -> _Choice:
        """Decide where a call runs.

        ``proof_of`` returns the proof of an exact signature. A call that stays on the CPU for want of one is
        noted in it, so that the next such call is the trial.
        """
        cpu = timings.estimate(CPU)
        gpu = self._candidate(call, cpu)
        if isinstance(gpu, str):
            return _Choice(None, gpu)
        try:
            proof = proof_of(self._key(call, gpu))
        except NoSignatureError as error:
            return _Choice(None, f"{error}, so that one run on the card says nothing about the next")
        if not call.in_numpy and all(gpu.holds(x) for x in call.arrays):
            return _Choice(gpu, "the arrays are on the card already", proof)
        if timings.refused:
            return _Choice(None, timings.refused)
        if cpu is None:
            proof.seen = True
            return _Choice(None, "it has not run with such arrays yet")
        if cpu < QUICK:
            return _Choice(None, _DONE_BEFORE)
        needed = 3 * call.nbytes  # as much again for the result, and on the way to it
        free = gpu.free()
        if free and needed > free:
            return _Choice(
                None,
                f"the call needs about {format_bytes(needed)}, and {gpu.name} has {format_bytes(free)} free",
            )
        return self._by_time(gpu, timings, proof)

    def _candidate(self, call: Arguments, cpu: float | None) -> BackendGpu | str:
        """Return the GPU on which a call could run, or why it runs on the CPU, regardless of its signature.

        ``cpu`` is the time that the call takes on the CPU, if that is known.
        """
        if call.has_sparse:
            return _SPARSE
        if call.in_numpy and not _found and call.nbytes < PROBE_BYTES and (cpu or 0.0) < PROBE_SECONDS:
            return _TOO_LITTLE
        gpu = self._gpu()
        if isinstance(gpu, str):
            return gpu
        if self.refused:
            return self.refused
        # Before the exact signature is made, which takes time.
        is_quick = cpu is not None and cpu < QUICK
        return _DONE_BEFORE if is_quick and call.in_numpy else gpu

    def _by_time(self, gpu: BackendGpu, timings: Timings, proof: Proof) -> _Choice:
        """Choose the faster place, but the GPU only for a signature that has run on the CPU before."""
        if timings.counts[GPU] or (proof.holds and staying.get()):
            place, why = timings.choose()
        else:
            place = GPU
            why = "the card has not been tried with such arrays yet"
        if place == CPU:
            return _Choice(None, why)
        if proof.holds or proof.seen:
            return _Choice(gpu, why, proof)
        proof.seen = True
        return _Choice(
            None, "it has not run with exactly these arguments before; the next such call is a trial"
        )

    def _key(self, call: Arguments, gpu: BackendGpu) -> Any:
        """Return what a proof is kept under: the exact call, and the GPU and framework that it ran in."""
        return signature_of_self(call.own, self._named) if call.own else (), call.exact(), gpu.name

    def _gpu(self) -> BackendGpu | str:
        """The card to run on, or why there is none."""
        # None where nobody chose one; a worker of device_map has a device of its own.
        chosen = (worker_device.get() if self.gpu_id is None else None) or chosen_device()
        if chosen is not None and chosen.kind == "cpu":
            return "the default device is the CPU"
        return find_gpu(self.backend, self._index(chosen))

    def _index(self, chosen: Device | None) -> int:
        """Return the number of the GPU: of ``gpu_id``, else of the default device, else 0."""
        number = gpu_index_of(self.gpu_id)
        if isinstance(number, str):  # "auto", resolved once
            number = self.gpu_id = least_used_gpu() or 0
        if number is not None:
            return number
        return 0 if chosen is None else chosen.index

    def explain(self, *args: Any, **kwargs: Any) -> OffloadDecision:
        """Where the call would run, and why; the function is not called."""
        # A bound method's explain() gets no self: it belongs to the function.
        skip = self.skip if args and kind_of(args[0]) is not ARRAY else 0
        call = Arguments(args[:skip], args[skip:], kwargs).inspect()
        if not call.arrays:
            return OffloadDecision(False, Device("cpu"), "numpy", ("It takes no arrays.",))
        timings = self.history.get(call.signature) or Timings()
        gpu, why, proof = self._decide(call, timings, self._known_proof)
        reasons = [f"{why}: {format_bytes(call.nbytes)}" if why is _TOO_LITTLE else why]
        for place, words in ((CPU, "On the CPU"), (GPU, "On the card, with transfers,")):
            seconds = timings.estimate(place)
            if seconds is not None:
                took = format_seconds(seconds)
                reasons.append(f"{words} it takes {took} (runs so far: {timings.counts[place]})")
        if proof is not None and not proof.holds:
            reasons.append(
                "The first run with these arguments on the card is a trial: it is computed on the CPU as"
                " well, and the results are compared"
            )
        device, backend = (Device("cpu"), "numpy") if gpu is None else (gpu.device, gpu.backend)
        estimates = timings.estimate(CPU), timings.estimate(GPU)
        return OffloadDecision(gpu is not None, device, backend, tuple(reasons), *estimates)

    def _known_proof(self, key: Any) -> Proof:
        """Return a copy of the proof of a signature; of any ``self`` if the call has none."""
        own, *rest = key
        found = self.proofs.peek(key)
        if self.skip and not own:
            found = next((proof for (_, *others), proof in self.proofs.items() if others == rest), None)
        return Proof() if found is None else copy.copy(found)

    # -- running ----------------------------------------------------------------------------------

    def _run(self, choice: _Choice, call: Arguments, timings: Timings) -> tuple[Any, str]:
        """The result, and what there is to complain about, or ``""``."""
        gpu, _, proof = choice
        if gpu is None or proof is None:
            return self._on_cpu(call, timings), ""
        if not proof.holds:
            return self._trial(gpu, call, timings, proof)
        try:
            return self._on_gpu(gpu, call, timings, proof), ""
        except Exception as error:  # noqa: BLE001  # an unknown function's: the CPU tells whether it is its own
            result = self._on_cpu(call, timings)
            return result, self._remember_failure(gpu, timings, error)

    def _on_cpu(self, call: Arguments, timings: Timings) -> Any:
        started = clock()
        result = call.restore(call.on_host().run(self.fn))
        timings.add(CPU, clock() - started)
        return result

    def _on_gpu(self, gpu: BackendGpu, call: Arguments, timings: Timings, proof: Proof) -> Any:
        stays = staying.get() or gpu.holds(call.arrays[0])

        def attempt(*batch: Any, **named: Any) -> Any:
            on_gpu = Arguments(call.own, batch, named).mapped(gpu.put)
            result = gpu.run(lambda: _inside(on_gpu, self.fn))
            return result if stays else _restored(result, call.arrays[0], proof.scalars)

        started = clock()
        index = gpu.device.index
        axis = self.split_axis
        result = recovered(attempt, call.batch, call.named, 1, index, None, axis is not None, axis or 0)
        if not stays:  # else it may be on its way
            timings.add(GPU, clock() - started)
        return result

    def _remember_failure(self, gpu: BackendGpu, timings: Timings, error: Exception) -> str:
        """Remember that the card could not do it, and say so."""
        why = first_line(error_text(error))
        drop_tracebacks(error)  # whose variables hold the card's memory
        if is_oom_error(error) or isinstance(error, CannotSplitError):
            timings.refused = f"it ran out of memory on {gpu.name} before"
            return f"ran out of memory on {gpu.name} ({why}); this call was computed on the CPU"
        self.refused = f"it cannot run in {gpu.backend}: {why}"
        return f"cannot run in {gpu.backend} ({why}); it runs on the CPU from now on"

    # -- the trial --------------------------------------------------------------------------------

    def _trial(self, gpu: BackendGpu, call: Arguments, timings: Timings, proof: Proof) -> tuple[Any, str]:
        """The first run of an exact signature on a card: in NumPy as well, which tells what is right."""
        on_host = call.on_host()
        started = clock()
        expected = _inside(on_host, self.fn)
        timings.add(CPU, clock() - started)
        proof.scalars = [isinstance(x, np.generic) for x in arrays_of(expected, also=np.generic)]
        if expected is None:
            self.refused = "it returns nothing, so that there is nothing to compare"
            return expected, ""
        try:
            actual = self._on_gpu(gpu, call, timings, proof)
        except Exception as error:  # noqa: BLE001  # an unknown function's; NumPy has shown that it is no error of its own
            return call.restore(expected), self._remember_failure(gpu, timings, error)
        why = self._difference(gpu, on_host, expected, actual)
        if not why:
            proof.holds = True
            return actual, ""
        self.refused = f"its trial failed: in {gpu.backend} {why}"
        complaint = f"is not the same on the card: in {gpu.backend} {why}; it runs on the CPU from now on"
        return call.restore(expected), complaint

    def _difference(self, gpu: BackendGpu, on_host: Arguments, expected: Any, actual: Any) -> str:
        arguments = arrays_of([on_host.batch, on_host.named])
        why, exact = difference(expected, actual, arguments)
        if why or exact:
            return why
        # Rounding, or another formula? In double precision the one fades, and the other does not.
        wide = on_host.mapped(widened)
        try:
            expected = _inside(wide, self.fn)
            actual = gpu.run(lambda: _inside(wide.mapped(gpu.put), self.fn))
        except Exception:  # noqa: BLE001  # an unknown function's, which need not take other dtypes than these
            return ""
        return difference(expected, actual, arrays_of([wide.batch, wide.named]))[0]


def _inside(call: Arguments, fn: Callable[..., Any]) -> Any:
    """Run it, and the `gpu` functions that it calls in the same place."""
    token = _decided.set(True)
    try:
        return call.run(fn)
    finally:
        _decided.reset(token)


def _restored(result: Any, first: Any, scalars: list[bool]) -> Any:
    """Return the result in the framework, on the device and in the carrier of the first array argument.

    ``scalars`` states for each array of the result if NumPy returns a scalar there, which NumPy callers get.
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
