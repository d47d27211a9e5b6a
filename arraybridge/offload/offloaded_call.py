"""Calls to functions decorated with `gpu`: execution, timing, trials and restoration of results."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np

from arraybridge.decorators.results import Restoration, ResultConversion
from arraybridge.decorators.wrapping import label_of
from arraybridge.errors import CannotSplitError, error_text, first_line
from arraybridge.memory.oom_recovery import drop_tracebacks, is_oom_error, recovered
from arraybridge.offload import timing_history
from arraybridge.offload.call_arguments import Arguments
from arraybridge.offload.device_choice import Choice, DeviceChooser, OffloadDecision, staying
from arraybridge.offload.gpu_search import BackendGpu
from arraybridge.offload.timing_history import CPU, GPU, Timings
from arraybridge.offload.verification import Proof, difference, widened
from arraybridge.tracing import trace_log
from arraybridge.tracing.trace_log import open_logs
from arraybridge.trees import ARRAY, arrays_of, kinds, map_arrays
from arraybridge.types import GpuId

#: Whether this thread is running a function whose device has been chosen. The `gpu` functions that this
#: function calls run on the same device.
_decided: ContextVar[bool] = ContextVar("arraybridge_gpu_decided", default=False)


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
        self.split_axis = split_axis
        self.label = label_of(fn)
        self.chooser = DeviceChooser(fn, backend=backend, gpu_id=gpu_id)
        self.history = self.chooser.history

    def __reduce__(self) -> tuple[Any, ...]:
        chooser = self.chooser
        make = partial(Offload, backend=chooser.backend, gpu_id=chooser.gpu_id, split_axis=self.split_axis)
        return (make, (self.fn,), self.history)  # the wrapper refers to the same history

    def __setstate__(self, history: timing_history.History) -> None:
        self.history = self.chooser.history = history

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call on the chosen device, and return its result."""
        chooser = self.chooser
        call = chooser.arguments(args, kwargs)
        if _decided.get() or not call.inspect().arrays:
            return call.run(self.fn)
        timings = self.history[call.signature]
        choice = chooser.decide(call, timings, chooser.proofs.get)
        run = self._run_recorded if open_logs else self._run
        result, warning = run(choice, call, timings)
        if warning:
            warnings.warn(f"{self.label}() {warning}", RuntimeWarning, stacklevel=3)
        return result

    def explain(self, *args: Any, **kwargs: Any) -> OffloadDecision:
        """Return the device on which a call would run, with the reasons, without calling the function."""
        return self.chooser.explain(*args, **kwargs)

    # -- execution --------------------------------------------------------------------------------

    def _run_recorded(self, choice: Choice, call: Arguments, timings: Timings) -> tuple[Any, str]:
        """Run a call as `_run` does, and record the choice of the device in the open trace logs."""
        span = trace_log.span("decision", self.label)
        if span is None:
            return self._run(choice, call, timings)
        with span:
            span.device = "cpu" if choice.gpu is None else str(choice.gpu.device)
            span.reason = choice.reason
            return self._run(choice, call, timings)

    def _run(self, choice: Choice, call: Arguments, timings: Timings) -> tuple[Any, str]:
        """Run a call, and return its result and the text of a warning (``""`` for no warning)."""
        gpu, _, proof = choice
        if gpu is None or proof is None:
            return self._on_cpu(call, timings), ""
        if not proof.is_verified:
            return self._trial(gpu, call, timings, proof)
        try:
            return self._on_gpu(gpu, call, timings, proof), ""
        except Exception as error:  # noqa: BLE001  # if the function is wrong, it raises on the CPU too
            result = self._on_cpu(call, timings)
            return result, self._remember_failure(gpu, timings, error)

    def _on_cpu(self, call: Arguments, timings: Timings) -> Any:
        started = timing_history.clock()
        result = _restored_from_host(call, call.on_host().run(self.fn))
        timings.add(CPU, timing_history.clock() - started)
        return result

    def _on_gpu(self, gpu: BackendGpu, call: Arguments, timings: Timings, proof: Proof) -> Any:
        stays = staying.get() or gpu.contains(call.arrays[0])

        def attempt(*batch: Any, **named: Any) -> Any:
            on_gpu = Arguments(call.own, batch, named).mapped(gpu.put)
            result = gpu.run(lambda: _run_decided(on_gpu, self.fn))
            return result if stays else _restored(result, call.arrays[0], proof.scalars)

        started = timing_history.clock()
        index = gpu.device.index
        axis = self.split_axis
        result = recovered(attempt, call.batch, call.named, 1, index, None, axis is not None, axis or 0)
        if not stays:  # the GPU may still be computing a result that stays there
            timings.add(GPU, timing_history.clock() - started)
        return result

    def _remember_failure(self, gpu: BackendGpu, timings: Timings, error: Exception) -> str:
        """Record that the function failed on the GPU, and return the text of the warning."""
        reason = first_line(error_text(error))
        drop_tracebacks(error)  # local variables in tracebacks keep GPU memory allocated
        if is_oom_error(error) or isinstance(error, CannotSplitError):
            timings.cpu_reason = f"it ran out of memory on {gpu.name} before"
            fix = " If its rows are independent, pass split_axis=0 to compute them in parts on the GPU."
            fix = fix if self.split_axis is None else ""
            return f"ran out of memory on {gpu.name} ({reason}). This call was computed on the CPU.{fix}"
        self.chooser.cpu_reason = f"it cannot run in {gpu.backend}: {reason}"
        return (
            f"cannot run in {gpu.backend} ({reason}). It runs on the CPU from now on. Use functions that"
            f" {gpu.backend} has, or remove @gpu."
        )

    # -- the trial --------------------------------------------------------------------------------

    def _trial(self, gpu: BackendGpu, call: Arguments, timings: Timings, proof: Proof) -> tuple[Any, str]:
        """Run a call on the CPU and on a GPU. Return the result, and a warning if the GPU fails its trial."""
        on_host = call.on_host()
        started = timing_history.clock()
        expected = _run_decided(on_host, self.fn)
        timings.add(CPU, timing_history.clock() - started)
        proof.scalars = [isinstance(x, np.generic) for x in arrays_of(expected, also=np.generic)]
        if expected is None:
            self.chooser.cpu_reason = "it returns None, which cannot be verified"
            return expected, ""
        try:
            actual = self._on_gpu(gpu, call, timings, proof)
        except Exception as error:  # noqa: BLE001  # the function may raise anything on the GPU
            return _restored_from_host(call, expected), self._remember_failure(gpu, timings, error)
        reason = self._difference(gpu, on_host, expected, actual)
        if not reason:
            proof.is_verified = True
            return actual, ""
        self.chooser.cpu_reason = f"its trial failed: in {gpu.backend}, {reason}"
        warning = (
            f"has a different result on the GPU: in {gpu.backend}, {reason}. It runs on the CPU from now on."
            f" Use functions that return the same in {gpu.backend}, or remove @gpu."
        )
        return _restored_from_host(call, expected), warning

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
    """Call ``fn``. The `gpu` functions that ``fn`` calls run on the same device."""
    token = _decided.set(True)
    try:
        return call.run(fn)
    finally:
        _decided.reset(token)


def _restored_from_host(call: Arguments, result: Any) -> Any:
    """Return a NumPy result with the framework and device of the first array of the call."""
    return result if call.in_numpy else _restored(result, call.arrays[0], [])


def _restored(result: Any, first: Any, scalars: list[bool]) -> Any:
    """Return the result in the framework, on the device and in the carrier of the first array argument.

    ``scalars`` states for each array in the result whether NumPy returns a scalar there. If the first array
    is a NumPy array, the result has NumPy scalars in these places.
    """
    restoration = Restoration(first, writable=True)
    if not scalars and kinds.get(type(result)) is ARRAY:  # most calls return one array
        return restoration.array(result)
    restored = ResultConversion(restoration.array).tree(result)
    if not restoration.framework.devices.has_only_host or not any(scalars):
        return restored
    is_scalar = iter(scalars)

    def as_scalar(x: Any) -> Any:
        scalar = next(is_scalar, True)
        return x[()] if scalar and type(x) is np.ndarray and not x.ndim else x

    return map_arrays(restored, as_scalar, also=np.generic)
