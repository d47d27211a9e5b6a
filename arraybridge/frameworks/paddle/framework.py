"""PaddlePaddle: tensors on the CPU and on CUDA GPUs."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from paddle.autograd import PyLayer

from arraybridge.device import Device
from arraybridge.errors import GradientError
from arraybridge.host import buffers, dtype_names
from arraybridge.interface import autodiff
from arraybridge.interface.batching import Batching, IndexedBatching
from arraybridge.interface.component import component
from arraybridge.interface.devices import CPU, Devices
from arraybridge.interface.framework import Framework
from arraybridge.interface.interchange import Interchange
from arraybridge.interface.memory import Holding, Memory
from arraybridge.interface.unsupported import array_error
from arraybridge.reasons import Cause, Reason

# uint16 is excluded, because Paddle interprets its values as bfloat16 (PaddlePaddle/Paddle#76229).
_DTYPES = dtype_names.PLAIN - {"uint16"} | {"bfloat16", "float8_e4m3fn", "float8_e5m2"}
# Dtypes that Paddle can cast, but neither slice nor sum (3.3, PaddlePaddle/Paddle#76229).
_NO_KERNELS = ("uint32", "uint64")


class PaddleInterchange(Interchange):
    """Exchange of memory with Paddle."""

    dlpack_device = 2 if paddle.is_compiled_with_cuda() else None

    def strides(self, x: Any) -> tuple[int, ...]:
        return tuple(step * x.element_size() for step in x.strides)

    def address(self, x: Any) -> int:
        return int(x.data_ptr())

    def cannot_stride(self, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Cause | None:
        steps = [step for step, extent in zip(strides, shape, strict=True) if extent > 1]
        if any(step < 0 for step in steps):
            return Cause(Reason.NEGATIVE_STRIDES, framework="Paddle")
        return Cause(Reason.STRIDE_MULTIPLES) if any(step % itemsize for step in steps) else None

    def block_until_ready(self, x: Any) -> None:
        if x.place.is_gpu_place():
            paddle.device.cuda.current_stream(x.place.gpu_device_id()).synchronize()


class PaddleDevices(Devices):
    """The CPU and the CUDA GPUs that Paddle can use."""

    def device_of(self, x: Any) -> Device:
        place = x.place
        return Device("gpu", place.gpu_device_id()) if place.is_gpu_place() else CPU

    def available(self) -> tuple[Device, ...]:
        return (CPU, *(Device("gpu", i) for i in range(paddle.device.cuda.device_count())))

    def missing_device_reason(self) -> str:
        if not paddle.is_compiled_with_cuda():
            return "This build of Paddle supports only the CPU. Install paddlepaddle-gpu."
        return "Paddle finds no CUDA device. Check that the NVIDIA driver is installed."

    def to_device(self, x: Any, device: Device) -> Any:
        place = paddle.CUDAPlace(device.index) if device.kind == "gpu" else paddle.CPUPlace()
        # A private name: to() cannot copy to a place and block (Paddle 3.3, no issue found).
        return x._copy_to(place, True)  # noqa: SLF001  # True: block until the copy is complete

    @contextmanager
    def select(self, device: Device) -> Iterator[None]:
        before = paddle.device.get_device()
        paddle.device.set_device(str(device))
        try:
            yield
        finally:
            paddle.device.set_device(before)

    def is_started(self) -> bool:
        return paddle.device.cuda.device_count() > 0


class PaddleMemory(Memory):
    """The interface to Paddle's GPU memory and out-of-memory errors."""

    def is_oom(self, error: BaseException) -> bool:
        return isinstance(error, (MemoryError, RuntimeError)) and "ResourceExhausted" in str(error)

    def usage(self) -> list[Holding]:
        rows = []
        cuda = paddle.device.cuda
        for i in range(cuda.device_count()):
            used = cuda.memory_allocated(i)
            peak = cuda.max_memory_allocated(i)
            rows.append(Holding(f"gpu:{i}", "paddle", used, cuda.memory_reserved(i) - used, peak))
        return rows

    def free_cache(self, device: Device | None, compiled: bool = False) -> int:
        before = sum(one.cached or 0 for one in self.usage())
        paddle.device.cuda.empty_cache()
        return max(before - sum(one.cached or 0 for one in self.usage()), 0)


class PaddleBatching(IndexedBatching):
    """Functions that split tensors, including those with dtypes that Paddle cannot slice."""

    def slice_axis(self, x: Any, axis: int, start: int, stop: int) -> Any:
        if self.framework.dtype_name(x) not in _NO_KERNELS:
            return super().slice_axis(x, axis, start, stop)
        return Batching.slice_axis(self, x, axis, start, stop)


# -- derivatives, with Paddle as the calling or the called framework -----------------------------------


class PaddleAutodiff(autodiff.Autodiff):
    """Automatic differentiation by Paddle, as the calling or the called framework."""

    constant_advice = "use w.detach() in the function"
    argument_advice = 'convert(w, "paddle", grad="detach"), after you set its stop_gradient to False'

    def requires_grad(self, x: Any) -> bool:
        return not x.stop_gradient

    def detach(self, x: Any) -> Any:
        return x.detach()

    def is_tracked(self, x: Any) -> bool:
        return not x.stop_gradient and paddle.is_grad_enabled()

    def is_bound_to_thread(self, x: Any) -> bool:
        return False

    def span(self, x: Any) -> autodiff.Extent:
        start = int(x.data_ptr())
        last = sum((extent - 1) * step for extent, step in zip(x.shape, x.strides, strict=True))
        return start, start + (last + 1 if x.size else 0) * int(x.element_size())

    def version(self, x: Any) -> int:
        return int(x.inplace_version)

    def apply(self, operation: autodiff.Operation, arrays: list[Any]) -> list[Any]:
        results, linear = operation.linearize(arrays)
        # Paddle detects modified tensors only for its own operations.
        read_again = set(map(id, operation.find_read_again(results, linear)))
        results = [y.clone() if id(y) in read_again else y for y in results]
        if not any(operation.active) or not any(map(self.is_differentiable, results)):
            return results
        versions = list(map(self.version, arrays))

        def pull_back(cotangents: tuple[Any, ...]) -> list[Any]:
            if versions != list(map(self.version, arrays)):
                raise autodiff.error_for_modified_argument(operation.label)
            _engine.runs = True
            try:
                return _join(operation.gradients(arrays, cotangents, linear), operation.active)
            finally:
                _engine.runs = False

        def guard(_: Any) -> None:
            # backward() frees the context of a PyLayer even with retain_graph=True (Paddle 3.3, no issue
            # found). The next backward() reads it, which would crash the process.
            if alive() is None:
                raise GradientError(
                    "Paddle can run backward() only once through a PyLayer such as this function, even with"
                    " retain_graph=True.",
                    target_type="paddle",
                    reason="a second backward()",
                    advice="Use paddle.grad(..., retain_graph=True) for all but the last pass, or call the"
                    " function again.",
                    place=f"{label}()",
                )

        alive = weakref.ref(pull_back)
        label = operation.label
        constant = [y for y in results if not self.is_differentiable(y)]
        inputs = _join(arrays, operation.active)
        # The results are passed as iterators, because PyLayer modifies tensors among its arguments.
        results = _AppliedLayer.apply(pull_back, iter(results), iter(constant), *inputs)
        for y in results:
            if not y.stop_gradient:
                y.register_hook(guard)
        # Paddle ignores the values returned by hooks on a PyLayer's results (3.3, no issue found), but not
        # those returned by hooks on a view.
        return [y if y.stop_gradient else y.transpose(list(range(y.ndim))) for y in results]

    def linearize(
        self, body: autodiff.Body, arrays: list[Any], active: Sequence[bool], label: str
    ) -> tuple[list[Any], autodiff.Linear]:
        with paddle.enable_grad():
            # In a pullback that is itself differentiated, the arguments are part of a graph.
            inner = any(not x.stop_gradient for x in arrays)
            arrays = [_leaf(x) if a and x.stop_gradient else x for x, a in zip(arrays, active, strict=True)]
            results = self.run(body, arrays, label)
        inputs = autodiff.select(arrays, active)
        pull = functools.partial(_pull, results, inputs, inner)
        return results, autodiff.Linear(pull, _describe_captured(results, inputs))

    def random_state(self) -> Any:
        return paddle.get_rng_state()

    def set_random_state(self, state: Any) -> None:
        paddle.set_rng_state(state)


def _leaf(x: Any) -> Any:
    """Return a tensor that shares the memory of ``x`` and starts a new graph."""
    x = x.detach()
    x.stop_gradient = False
    return x


def _join(arrays: list[Any], active: Sequence[bool]) -> list[Any]:
    """Return the active arrays as one flat tensor per dtype.

    The flat tensors represent the arrays in Paddle's graph. A PyLayer does not know which of its arguments
    need gradients, so `paddle.grad` fails if only some of them do. `paddle.concat` has this information.
    """
    groups: dict[Any, list[Any]] = {}
    for x in autodiff.select(arrays, active):
        groups.setdefault(x.dtype, []).append(x.reshape([-1]))
    return [first if not more else paddle.concat([first, *more]) for first, *more in groups.values()]


class _AppliedLayer(PyLayer):  # type: ignore[misc]  # paddle is Any here
    """An operation of another framework in Paddle's graph."""

    @staticmethod
    def forward(ctx: Any, pull_back: Any, results: Iterator[Any], constant: Iterator[Any], *_: Any) -> Any:
        ctx.pull_back = pull_back
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*constant)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        return tuple(ctx.pull_back(cotangents))


# ``runs`` states whether a backward pass of Paddle is currently running code of another framework in this
# thread.
_engine = threading.local()


def _pull(outputs: list[Any], inputs: list[Any], inner: bool, cotangents: list[Any]) -> list[Any]:
    """Return the gradients of ``outputs`` with respect to ``inputs``.

    ``inner`` states whether the graph of ``outputs`` is part of another graph, so that the gradients may be
    differentiated again.
    """
    sums: dict[int, tuple[Any, Any]] = {}  # paddle.grad raises for a result that occurs twice
    for y, c in zip(outputs, cotangents, strict=True):
        if c is not None and not y.stop_gradient:
            sums[id(y)] = (y, sums[id(y)][1] + c if id(y) in sums else c)
    if not sums:
        return list(map(paddle.zeros_like, inputs))
    if getattr(_engine, "runs", False):
        raise GradientError(
            "a backward pass of Paddle started another one, through a function of another framework that"
            " calls a Paddle function. This would crash the process.",
            target_type="paddle",
            reason="a nested backward pass",
            advice="Call the Paddle function directly.",
        )
    outputs, cotangents = map(list, zip(*sums.values(), strict=True))
    create_graph = inner or any(not c.stop_gradient for c in cotangents)
    gradients = paddle.grad(
        outputs, inputs, cotangents, retain_graph=True, create_graph=create_graph, allow_unused=True
    )
    # Gradients are copied, because the backward() of a PyLayer may keep a reference to its result.
    return [paddle.zeros_like(x) if g is None else g.clone() for x, g in zip(inputs, gradients, strict=True)]


def _describe_captured(outputs: list[Any], inputs: list[Any]) -> str:
    """Return a description of a captured tensor, which would get no gradient; ``""`` if there is none."""
    seen = {x.grad_fn.node_ptr() for x in inputs}
    nodes = [y.grad_fn for y in outputs if not y.stop_gradient]
    while nodes:
        node = nodes.pop()
        if node.node_ptr() in seen:
            continue
        if node.name() == "GradNodeAccumulation":
            return "a trainable tensor"
        seen.add(node.node_ptr())
        nodes.extend(n for n in node.next_functions if n is not None)
    return ""


# -- the framework -------------------------------------------------------------------------------------


class PaddleFramework(Framework):
    """PaddlePaddle. Only dense tensors are supported."""

    name = "paddle"
    modules = ("paddle",)
    dtypes = _DTYPES
    max_rank = 9  # phi::DDim::kMaxRank, PaddlePaddle/Paddle#54276
    interchange = component(PaddleInterchange)
    devices = component(PaddleDevices)
    memory = component(PaddleMemory)
    batching = component(PaddleBatching)
    autodiff = PaddleAutodiff()

    def owns(self, x: Any) -> bool:
        return isinstance(x, paddle.Tensor)

    def check(self, x: Any) -> None:
        if not x.is_dense():
            cause = "no other framework has its sparse layout"
            raise array_error(self, "a sparse PaddlePaddle tensor", cause, "Pass {}.", "{x}.to_dense()")

    def dtype_name(self, x: Any) -> str:
        return str(x.dtype).removeprefix("paddle.")

    def nbytes(self, x: Any) -> int:
        return int(x.size) * int(x.element_size())

    def to_host(self, x: Any) -> np.ndarray:
        return buffers.copy_aligned(self.host_view(x if x.place.is_cpu_place() else x.cpu()))

    def copy(self, x: Any) -> Any:
        return self.devices.to_device(x, self.devices.device_of(x))

    def cast(self, x: Any, dtype: str) -> Any:
        return x.astype(getattr(paddle, dtype))
