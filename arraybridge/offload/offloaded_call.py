"""Calls to functions decorated with `gpu`: execution, timing, trials and restoration of results."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

import numpy as np

from arraybridge.compilers import run_eagerly
from arraybridge.decorators.results import Restoration, ResultConversion
from arraybridge.decorators.wrapping import label_of
from arraybridge.errors import error_text, first_line, warn
from arraybridge.memory.oom_recovery import drop_tracebacks, is_oom_error, run_with_oom_recovery
from arraybridge.offload import records
from arraybridge.offload.call_signature import Call
from arraybridge.offload.decision import DeviceChooser, OffloadDecision
from arraybridge.offload.gpu_search import BackendGpu
from arraybridge.offload.records import CPU, GPU, Record
from arraybridge.offload.verification import difference, widen
from arraybridge.outcome import ask
from arraybridge.tracing import trace_log
from arraybridge.tracing.trace_log import open_logs
from arraybridge.trees import arrays_of, map_arrays
from arraybridge.types import GpuId

#: Whether this thread is running a function whose device has been chosen. The `gpu` functions that this
#: function calls run on the same device.
_decided: ContextVar[bool] = ContextVar("arraybridge_gpu_decided", default=False)


class Offload:
    """A function whose calls run on the CPU or on a GPU."""

    def __init__(self, fn: Callable[..., Any], backend: str | None = None, gpu_id: GpuId = None) -> None:
        self.fn = fn
        self.label = label_of(fn)
        self.chooser = DeviceChooser(fn, backend, gpu_id)
        self.self_argument = self.chooser.self_argument

    def __reduce__(self) -> tuple[Any, ...]:  # timings do not apply to other machines
        return (Offload, (self.fn, self.chooser.backend, self.chooser.gpu_id))

    @run_eagerly
    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call on the chosen device, and return its result."""
        call = self.chooser.call(args, kwargs)
        if _decided.get() or not call.inspect().arrays:
            return call.run(self.fn)
        record = self.chooser.history.record(call)
        gpu, reason = self.chooser.decide(call, record)
        if open_logs:
            with trace_log.span("decision", self.label) or nullcontext() as span:
                if span is not None:
                    span.device = "cpu" if gpu is None else str(gpu.device)
                    span.reason = reason
                result, warning = self._run(gpu, call, record)
        else:
            result, warning = self._run(gpu, call, record)
        if warning:
            warn(f"{self.label}() {warning}", RuntimeWarning)
        return result

    @run_eagerly
    def explain(self, *args: Any, **kwargs: Any) -> OffloadDecision:
        """Return the device on which a call would run, with the reasons, without calling the function."""
        return self.chooser.explain(*args, **kwargs)

    # -- execution --------------------------------------------------------------------------------

    def _run(self, gpu: BackendGpu | None, call: Call, record: Record) -> tuple[Any, str]:
        """Run a call, and return its result and the text of a warning (``""`` for no warning)."""
        if gpu is None:
            return self._run_on_cpu(call, record), ""
        if gpu.name not in record.verified:
            return self._trial(gpu, call, record)
        try:
            return self._run_on_gpu(gpu, call, record), ""
        except Exception as error:  # noqa: BLE001  # if the function is wrong, it raises on the CPU too
            result = self._run_on_cpu(call, record)
            return result, self._remember_failure(gpu, record, error)

    def _run_on_cpu(self, call: Call, record: Record) -> Any:
        started = records.clock()
        result = _restore_from_host(call, call.on_host().run(self.fn))
        record.add(CPU, records.clock() - started)
        return result

    def _run_on_gpu(self, gpu: BackendGpu, call: Call, record: Record) -> Any:
        """Return the result of a run on a GPU, restored to the type and device of the first array."""

        def attempt() -> Any:
            on_gpu = call.map(gpu.put)
            result = gpu.run(lambda: _run_decided(on_gpu, self.fn))
            return _restore(result, call.arrays[0], record.scalars)

        started = records.clock()
        result = run_with_oom_recovery(attempt, max_retries=1, gpu_id=gpu.device.index)
        if not gpu.contains(call.arrays[0]):  # otherwise, the GPU may still be computing the result
            record.add(GPU, records.clock() - started)
        return result

    def _remember_failure(self, gpu: BackendGpu, record: Record, error: Exception) -> str:
        """Record that the function failed on the GPU, and return the text of the warning."""
        cause = first_line(error_text(error))
        drop_tracebacks(error)  # local variables in tracebacks keep GPU memory allocated
        if is_oom_error(error):
            record.cpu_reason = f"it ran out of memory on {gpu.name} before"
            return f"ran out of memory on {gpu.name} ({cause}). This call was computed on the CPU."
        self.chooser.cpu_reason = f"it cannot run in {gpu.backend}: {cause}"
        return (
            f"cannot run in {gpu.backend} ({cause}). It runs on the CPU from now on. Use functions that"
            f" {gpu.backend} has, or remove @gpu."
        )

    # -- the trial --------------------------------------------------------------------------------

    def _trial(self, gpu: BackendGpu, call: Call, record: Record) -> tuple[Any, str]:
        """Run a call on the CPU and on a GPU. Return the result, and a warning if the GPU fails its trial."""
        on_host = call.on_host()
        started = records.clock()
        expected = _run_decided(on_host, self.fn)
        record.add(CPU, records.clock() - started)
        if expected is None:
            self.chooser.cpu_reason = "it returns None, which cannot be verified"
            return expected, ""
        record.scalars = [isinstance(x, np.generic) for x in arrays_of(expected, also=np.generic)]
        try:
            actual = self._run_on_gpu(gpu, call, record)
        except Exception as error:  # noqa: BLE001  # the function may raise anything on the GPU
            return _restore_from_host(call, expected), self._remember_failure(gpu, record, error)
        text = self._difference(gpu, on_host, expected, actual)
        if not text:
            record.verified.add(gpu.name)
            return actual, ""
        self.chooser.cpu_reason = f"its trial failed: in {gpu.backend}, {text}"
        warning = (
            f"has a different result on the GPU: in {gpu.backend}, {text}. It runs on the CPU from now on."
            f" Use functions that return the same in {gpu.backend}, or remove @gpu."
        )
        return _restore_from_host(call, expected), warning

    def _difference(self, gpu: BackendGpu, on_host: Call, expected: Any, actual: Any) -> str:
        """Describe the difference between the results of a call in NumPy and on a GPU; "" for none."""
        if not difference(expected, actual):
            return ""
        text = difference(expected, actual, arrays_of([on_host.args, on_host.kwargs]))
        if text:
            return text
        # In double precision, rounding errors are smaller, but differences between formulas are not.
        wide = on_host.map(widen)

        def run_both() -> tuple[Any, Any]:
            return _run_decided(wide, self.fn), gpu.run(lambda: _run_decided(wide.map(gpu.put), self.fn))

        results = ask(run_both)  # the function may raise anything for other dtypes
        return "" if results is None else difference(*results, arrays_of([wide.args, wide.kwargs]))


def _run_decided(call: Call, fn: Callable[..., Any]) -> Any:
    """Call ``fn``. The `gpu` functions that ``fn`` calls run on the same device."""
    token = _decided.set(True)
    try:
        return call.run(fn)
    finally:
        _decided.reset(token)


def _restore_from_host(call: Call, result: Any) -> Any:
    """Return a NumPy result with the framework and device of the first array of the call."""
    return result if call.in_numpy else _restore(result, call.arrays[0], [])


def _restore(result: Any, first: Any, scalars: list[bool]) -> Any:
    """Return the result in the framework, on the device and in the carrier of the first array argument.

    ``scalars`` states for each array in the result whether NumPy returns a scalar there. If the first array
    is a NumPy array, the result has NumPy scalars in these places.
    """
    restoration = Restoration(first, writable=True)
    restored = ResultConversion(restoration.array).tree(result)
    if not restoration.framework.devices.has_only_host or not any(scalars):
        return restored
    is_scalar = iter(scalars)

    def as_scalar(x: Any) -> Any:
        scalar = next(is_scalar, True)
        return x[()] if scalar and type(x) is np.ndarray and not x.ndim else x

    return map_arrays(restored, as_scalar, also=np.generic)
