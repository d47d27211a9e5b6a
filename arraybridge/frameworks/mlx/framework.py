"""MLX: lazy arrays on Apple GPUs, and on the CPU on all platforms."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx
import numpy as np

from arraybridge.device import Device
from arraybridge.host import buffers, dtype_names
from arraybridge.interface import autodiff
from arraybridge.interface.batching import IndexedBatching
from arraybridge.interface.component import component
from arraybridge.interface.devices import CPU, Devices
from arraybridge.interface.framework import Framework
from arraybridge.interface.interchange import Interchange
from arraybridge.interface.memory import Holding, Memory
from arraybridge.interface.runtime import Runtime
from arraybridge.interface.unsupported import array_error


class MlxDevices(Devices):
    """The CPU, and the GPU if MLX has one."""

    def available(self) -> tuple[Device, ...]:
        # Memory is unified: every array is on the CPU, and any device can read it.
        return (CPU, Device("gpu", 0)) if mx.is_available(mx.gpu) else (CPU,)

    def missing_device_reason(self) -> str:
        return "This build of MLX supports only the CPU, or the machine has no Apple GPU."

    def select(self, device: Device) -> AbstractContextManager[Any]:
        return mx.stream(_DEVICES[device.kind])

    def is_started(self) -> bool:
        return True


class MlxInterchange(Interchange):
    """Evaluation of lazy MLX arrays."""

    def block_until_ready(self, x: Any) -> None:
        try:
            mx.eval(x)
        except RuntimeError as error:
            if "current thread" not in str(error):
                raise
            raise array_error(
                self.framework,
                "an MLX array that was not evaluated in its own thread",
                "MLX evaluates an array only in the thread that created it",
                "Call mx.eval(x) in that thread.",
            ) from error
        except ValueError as error:  # raised inside mx.compile and mx.vmap
            raise array_error(
                self.framework,
                "a traced MLX value",
                "it has no values yet",
                "Convert it outside of mx.compile and mx.vmap.",
            ) from error


class MlxMemory(Memory):
    """The interface to MLX's memory and out-of-memory errors."""

    def is_oom(self, error: BaseException) -> bool:
        return isinstance(error, RuntimeError) and any(text in str(error) for text in _OOM)

    def usage(self) -> list[Holding]:
        device = "gpu:0" if mx.is_available(mx.gpu) else "cpu"
        return [Holding(device, "mlx", mx.get_active_memory(), mx.get_cache_memory(), mx.get_peak_memory())]

    def reset_peak(self) -> None:
        mx.reset_peak_memory()

    def free_cache(self, device: Device | None, compiled: bool = False) -> int:
        before = mx.get_cache_memory()
        mx.clear_cache()
        return max(before - mx.get_cache_memory(), 0)

    def oom_error(self) -> Exception:
        return RuntimeError("[malloc_or_wait] Unable to allocate 1 bytes. (simulated)")


class MlxRuntime(Runtime):
    """The evaluation of lazy MLX arrays, which raises the errors that their computation caused."""

    def late_errors(self, cls: type) -> Callable[[Any], object]:
        # In other threads, mx.eval also raises for an array that was not evaluated in the thread that created
        # it (MLX >= 0.31.2, ml-explore/mlx#3727).
        return mx.eval


class MlxFramework(Framework):
    """MLX, which always copies the memory that it imports."""

    name = "mlx"
    modules = ("mlx",)
    # An in-place assignment (``x[0] = 1``) gives the array new memory (ml-explore/mlx#466), so views of the
    # old memory keep their values.
    mutable = False
    alignment = 0
    dtypes = dtype_names.PLAIN - {"complex128"} | {"bfloat16"}
    devices = component(MlxDevices)
    batching = component(IndexedBatching)
    interchange = component(MlxInterchange)
    memory = component(MlxMemory)
    runtime = component(MlxRuntime)

    def __init__(self) -> None:
        self.autodiff = MlxAutodiff(self)

    def owns(self, x: Any) -> bool:
        return isinstance(x, mx.array)

    def check(self, x: Any) -> None:
        self.interchange.block_until_ready(x)

    def dtype_name(self, x: Any) -> str:
        return str(x.dtype).removeprefix("mlx.core.")

    def host_view(self, x: Any) -> np.ndarray:
        self.interchange.block_until_ready(x)
        return super().host_view(x)

    def from_host(self, view: np.ndarray, device: Device) -> Any:
        if not view.dtype.isnative or any(step < 0 for step in view.strides):
            view = buffers.copy_aligned(view)  # MLX lacks other byte orders and negative strides
        with mx.stream(_DEVICES[device.kind]):
            # Without a dtype, MLX would convert float64 to float32 and complex128 to complex64 (MLX 0.32).
            return mx.array(view, getattr(mx, _mx_name(view.dtype.name)))

    def cast(self, x: Any, dtype: str) -> Any:
        has_float64 = "float64" in (dtype, self.dtype_name(x))
        # GPUs do not support float64 (ml-explore/mlx#799).
        with mx.stream(mx.cpu if has_float64 else mx.default_device()):
            result = x.astype(getattr(mx, _mx_name(dtype)))
        self.interchange.block_until_ready(result)
        return result


# Parts of the messages of MLX's allocators (backend/metal/allocator.cpp, backend/no_gpu/allocator.cpp).
_OOM = ("[malloc", "[metal::malloc]", "Unable to allocate")
_DEVICES = {"cpu": mx.cpu, "gpu": mx.gpu}


def _mx_name(dtype: str) -> str:
    return "bool_" if dtype == "bool" else dtype


# -- derivatives, with MLX as the calling or the called framework --------------------------------------


class MlxAutodiff(autodiff.Autodiff):
    """Automatic differentiation by MLX, as the calling or the called framework."""

    constant_advice = "use mx.stop_gradient(w) in the function"
    argument_advice = 'convert(w, "mlx", grad="detach"), and list its position in argnums= of mx.grad'

    def __init__(self, framework: MlxFramework) -> None:
        self._framework = framework

    def requires_grad(self, x: Any) -> bool:
        return self.is_tracked(x)

    def detach(self, x: Any) -> Any:
        return self._framework.copy(x)  # mx.stop_gradient(x) would be part of the graph

    def is_tracked(self, x: Any) -> bool:
        # MLX has no function that returns whether a transformation tracks an array (0.32, no issue found).
        # But only a tracked array keeps its graph after evaluation.
        self._framework.interchange.block_until_ready(x)
        graph = io.StringIO()
        mx.export_to_dot(graph, x)
        return "shape=rectangle" in graph.getvalue()

    def prepare(self, x: Any) -> Any:
        # The function may assign in place (``x += 1``), which would change the original object.
        return x[...]

    def span(self, x: Any) -> autodiff.Extent:
        return np.lib.array_utils.byte_bounds(self._framework.host_view(x))

    def apply(self, operation: autodiff.Operation, arrays: list[Any]) -> list[Any]:
        results, linear = operation.linearize(arrays)
        if not any(operation.active) or not any(map(self.is_differentiable, results)):
            return results  # a custom function without differentiable results would crash the process

        def pullback(xs: Any, cotangents: Any, _: Any) -> list[Any]:
            xs = _as_list(xs)
            smooth = [
                c if self.is_differentiable(y) else None
                for c, y in zip(_as_list(cotangents), results, strict=True)
            ]
            gradients = operation.gradients(xs, smooth, linear)
            return [mx.zeros_like(x) if g is None else g for x, g in zip(xs, gradients, strict=True)]

        def raise_forward_mode_error(*_: Any) -> Any:
            raise autodiff.forward_mode_error(operation.label, "mx.grad or mx.vjp")

        def constant(*_: Any) -> Any:
            return results

        call = mx.custom_function(constant)
        call.vjp(pullback)
        call.jvp(raise_forward_mode_error)
        return list(call(*arrays))

    def linearize(
        self, body: autodiff.Body, arrays: list[Any], active: Sequence[bool], label: str
    ) -> tuple[list[Any], autodiff.Linear]:
        state = self.random_state()
        results = body(list(map(self.prepare, arrays)))
        inner = any(map(self.is_tracked, arrays))
        captures = not inner and any(map(self.is_tracked, results))
        captured = "a differentiated array" if captures else ""
        inputs = autodiff.select(arrays, active)

        def pull(cotangents: list[Any]) -> list[Any]:
            """Return the gradients. The function runs again, because `mx.vjp` includes the forward pass."""

            def smooth(*values: Any) -> list[Any]:
                results = body(autodiff.substitute(list(map(self.prepare, arrays)), active, values))
                outputs = [y for y, c in zip(results, cotangents, strict=True) if c is not None]
                # mx.vjp loses the cotangent of a result that occurs twice, even as y.reshape(y.shape) (MLX
                # 0.32, no issue found).
                return outputs[:1] + [y * 1 for y in outputs[1:]]

            with self.replay(state):
                gradients = mx.vjp(smooth, inputs, [c for c in cotangents if c is not None])[1]
            # The vjp of an mx.custom_function may keep a reference to the array that it returns. Products are
            # new arrays.
            return [g * 1 for g in gradients]

        return results, autodiff.Linear(pull, captured, arrays)

    def random_state(self) -> np.ndarray:
        return np.concatenate([np.asarray(key) for key in mx.random.state])

    def set_random_state(self, state: np.ndarray) -> None:
        high, low = state.tolist()
        mx.random.seed(high << 32 | low)  # a key consists of the two halves of its seed


def _as_list(xs: Any) -> list[Any]:
    """Return a list of arrays. MLX passes a single array without a list."""
    return [xs] if isinstance(xs, mx.array) else list(xs)
