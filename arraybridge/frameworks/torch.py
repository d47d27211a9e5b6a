"""PyTorch: CPU, and whatever accelerator ``torch.accelerator`` finds (CUDA, ROCm, XPU, MPS)."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.utils import dlpack as torch_dlpack

from arraybridge.errors import DtypeNotSupportedError
from arraybridge.frameworks import hostmemory
from arraybridge.frameworks.base import CPU, Fallback, Framework, Mark, Usage, refuse, refuse_dtype
from arraybridge.types import Device

__all__ = ["TorchFramework", "copy_host_memory"]

# torch.uint16, 32 and 64 came with torch 2.3, and float8 before; a name that this torch lacks is left out.
_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
        *("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

# NumPy knows these only through ml_dtypes, and Tensor.numpy not at all: there they travel as
# integers of their size.
_CARRIER = {
    name: torch.int16 if dtype.itemsize == 2 else torch.uint8
    for name, dtype in _DTYPES.items()
    if name == "bfloat16" or name.startswith("float8")
}


# How messages of memory that ran out begin where torch raises a plain RuntimeError (or AcceleratorError).
_OOM = re.compile(
    r"\[enforce fail at (?:alloc_cpu|CPUAllocator)\.cpp.*DefaultCPUAllocator: "
    r"(?:can't allocate|not enough) memory"
    r"|(?:CUDA|HIP)(?: driver)? error: out of memory"
    r"|(?:CUDA|HIP|cu[A-Za-z]+|hip[a-z]+) error: \w+_ALLOC_FAILED"
    r"|cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_(?:DEVICE|HOST)_ALLOCATION_FAILED"
    r"|(?:MPS backend|XPU|CUDA|HIP) out of memory",
    re.DOTALL,
)


class TorchFramework(Framework):
    name = "torch"
    modules = ("torch",)
    extra = "torch"
    dtypes = frozenset(_DTYPES)

    def __init__(self) -> None:
        self.dlpack_device = 2 if torch.version.cuda else 10 if torch.version.hip else None
        self.has_streams = self.can_pin = self.dlpack_device is not None
        self.counts_pinned = hasattr(torch.accelerator, "empty_host_cache") and hasattr(
            torch.cuda, "host_memory_stats"
        )

    def owns(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor)

    def array_classes(self) -> tuple[type, ...]:
        return (torch.Tensor,)

    def is_plain(self, x: torch.Tensor) -> bool:
        return type(x) is torch.Tensor and not x.__dict__

    def held_bytes(self, x: torch.Tensor) -> int:
        held = min(x.nbytes, x.untyped_storage().nbytes())  # an expanded tensor repeats its elements
        if x.requires_grad and x.is_leaf and x.grad is not None:
            held += x.grad.nbytes
        return held

    def check(self, x: torch.Tensor) -> None:
        if x.is_nested:
            raise refuse(self, "a nested tensor", "pass x.to_padded_tensor(value), or its parts x.unbind()")
        if x.layout is not torch.strided:
            raise refuse(self, f"a {str(x.layout)[6:]} tensor", "pass x.to_dense()")
        if x.is_quantized:
            raise refuse_dtype(self, x.dtype, "pass x.dequantize(), or x.int_repr() with its scale")
        if x.device.type == "meta":
            raise refuse(self, "a meta tensor", "it has no values")
        if x.dtype not in _NAMES:
            raise refuse_dtype(self, x.dtype, 'ask for a cast first, x.to(torch.float32) or x.to("cpu")')
        if not _has_storage(x):
            raise refuse(
                self,
                "a traced or batched tensor",
                "convert outside torch.compile, torch.export and torch.func transforms",
            )

    def dtype_name(self, x: torch.Tensor) -> str:
        return str(x.dtype).removeprefix("torch.")

    def nbytes(self, x: torch.Tensor) -> int:
        return x.numel() * x.element_size()

    def strides(self, x: torch.Tensor) -> tuple[int, ...]:
        return tuple(step * x.element_size() for step in x.stride())

    def address(self, x: torch.Tensor) -> int:
        return x.data_ptr()

    def device_of(self, x: torch.Tensor) -> Device:
        if x.is_cpu or x.is_meta:  # a sixth of the time that x.device.type takes
            return CPU
        return Device("gpu", x.device.index or 0)

    def is_lazy(self, x: torch.Tensor) -> bool:
        return x.is_conj() or x.is_neg()  # conjugation and negation are put off as bits of the tensor

    def resolve(self, x: torch.Tensor) -> torch.Tensor:
        return x.resolve_conj().resolve_neg()

    def requires_grad(self, x: torch.Tensor) -> bool:
        return x.requires_grad

    def detach(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    # -- host memory ------------------------------------------------------------------------------

    def host_view(self, x: torch.Tensor) -> np.ndarray:
        # .numpy() marks the storage as not resizable: a later x.resize_() raises instead of freeing
        # the memory that the consumer reads. A DLPack export alone does not.
        carrier = _CARRIER.get(_NAMES[x.dtype])
        if carrier is None:
            return x.numpy()
        return x.view(carrier).numpy().view(hostmemory.np_dtype(_NAMES[x.dtype]))

    def to_host(self, x: torch.Tensor) -> np.ndarray:
        if x.device.type == "cpu":
            return super().to_host(x)
        return self.host_view(x.cpu())

    def from_host(self, view: np.ndarray, device: Device) -> torch.Tensor:
        if device != CPU:
            tensor = self.from_host(view if not self.cannot_view(view) else hostmemory.fresh(view), CPU)
            return tensor.to(self.torch_device(device))
        name = view.dtype.name
        if not view.size:  # nothing to share, and from_numpy minds negative strides here too
            view = hostmemory.packed(view.shape, view.dtype)
        view = hostmemory.writable_alias(view)
        if name in _CARRIER:
            return torch_dlpack.from_dlpack(hostmemory.capsule(view))
        return torch.from_numpy(view)

    def cannot_view(self, view: np.ndarray) -> str:
        # torch loads complex128, and no other dtype, with instructions that end the process elsewhere (2.13).
        if view.dtype.itemsize == 16 and view.size and hostmemory.address(view) % 16:
            return "torch needs complex128 aligned to 16 bytes"
        return super().cannot_view(view)

    def cannot_stride(self, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> str:
        for extent, stride in zip(shape, strides, strict=True):
            if stride < 0:
                return "torch has no negative strides"  # torch.from_dlpack ends the process
            if stride % itemsize and extent > 1:
                return "its strides are no multiples of the element size"
        return ""

    # -- devices ----------------------------------------------------------------------------------

    def devices(self) -> tuple[Device, ...]:
        if not torch.accelerator.is_available():
            return (CPU,)
        return (CPU, *(Device("gpu", i) for i in range(torch.accelerator.device_count())))

    def torch_device(self, device: Device) -> torch.device:
        if device.kind == "cpu":
            return torch.device("cpu")
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None:
            raise LookupError(device)  # find_device has seen it
        return torch.device(accelerator.type, device.index)

    def missing_device_reason(self) -> str:
        if torch.version.cuda is None and torch.version.hip is None:
            return f"torch {torch.__version__} is built for the CPU alone; install a CUDA or ROCm build."
        return "torch.accelerator finds no device; is the driver installed?"

    def free_memory_of(self, device: Device) -> int:
        where = self.torch_device(device)
        return torch.cuda.mem_get_info(where)[0] if where.type == "cuda" else 0

    def to_device(self, x: torch.Tensor, device: Device) -> torch.Tensor:
        return x.to(self.torch_device(device))

    def adopt(self, x: Any, source: Framework, device: Device) -> torch.Tensor:
        # torch.from_dlpack hands the producer the current stream of this thread on that device.
        if source.name == "tensorflow":
            return torch.from_dlpack(x.__dlpack__())  # has no stream=; waits until the memory is ready
        if not hasattr(type(x), "__dlpack__"):
            return torch.as_tensor(x, device="cuda")  # __cuda_array_interface__
        return torch.from_dlpack(x)

    def settle(self, x: torch.Tensor) -> None:
        if x.device.type != "cpu":
            torch.accelerator.current_stream(x.device).synchronize()

    def card_of(self, device: Device) -> tuple[str, str, int | None]:
        if device.kind != "gpu" or not torch.cuda.is_initialized():
            return "", "", None  # asking would open the cards
        facts = torch.cuda.get_device_properties(device.index)
        uuid = getattr(facts, "uuid", None)  # torch 2.5
        return facts.name, "" if uuid is None else f"GPU-{uuid}", int(facts.total_memory)

    def array_namespace(self) -> Any:
        import array_api_compat.torch as namespace

        return namespace

    def thread_settings(self) -> Callable[[], AbstractContextManager[Any]]:
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        casts = [
            (kind, torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        ]

        @contextmanager
        def same() -> Iterator[None]:
            with ExitStack() as stack:
                if inference:
                    stack.enter_context(torch.inference_mode())
                stack.enter_context(torch.set_grad_enabled(grad))
                for kind, dtype in casts:
                    stack.enter_context(torch.autocast(kind, dtype))
                yield

        return same

    def take_stream(self, device: Device) -> None:
        if device.kind == "gpu" and self.has_streams:
            with torch.cuda.device(device.index):  # set_stream selects the card of the stream, too
                torch.cuda.set_stream(torch.cuda.Stream(device.index))

    def mark(self, device: Device) -> Mark | None:
        if device.kind != "gpu" or not self.has_streams:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device.index))
        return Mark(
            self,
            device,
            lambda: event.wait(torch.cuda.current_stream(device.index)),
            event.synchronize,
            event.query,
        )

    def take_over(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            x.record_stream(torch.cuda.current_stream(x.device))
        return x

    # -- values -----------------------------------------------------------------------------------

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        strided = x.layout is torch.strided and not x.is_nested
        return x.clone(memory_format=torch.contiguous_format) if strided else x.clone()

    def cast(self, x: torch.Tensor, dtype: str) -> torch.Tensor:
        return x.to(_DTYPES[dtype])

    # -- memory -----------------------------------------------------------------------------------

    def is_oom(self, error: BaseException) -> bool:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        return isinstance(error, RuntimeError) and _OOM.match(str(error)) is not None

    def oom_error(self) -> Exception:
        return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. (a rehearsal)")

    def concatenate(self, parts: list[torch.Tensor], axis: int) -> torch.Tensor:
        return torch.cat(parts, axis)

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> torch.Tensor:
        return torch.empty(shape, dtype=_DTYPES[dtype], device=self.torch_device(device))

    def is_started(self) -> bool:
        return torch.cuda.is_initialized() or (
            torch.accelerator.is_available() and not torch.cuda.is_available()
        )

    def _opened(self, device: Device | None = None) -> list[int]:
        """Numbers of the cards to ask, of which none is opened by asking."""
        if device is not None and device.kind != "gpu":
            return []
        count = torch.accelerator.device_count() if self.is_started() else 0
        return [i for i in range(count) if device is None or device.index == i]

    def free_cache(self, device: Device | None, compiled: bool = False) -> int:
        freed = 0
        cards = self._opened(device)
        if cards and hasattr(torch.accelerator, "empty_cache"):  # torch 2.9
            before = sum(torch.accelerator.memory_reserved(i) for i in cards)
            torch.accelerator.empty_cache()
            freed = before - sum(torch.accelerator.memory_reserved(i) for i in cards)
        elif cards and torch.cuda.is_initialized():
            before = sum(torch.cuda.memory_reserved(i) for i in cards)
            torch.cuda.empty_cache()
            freed = before - sum(torch.cuda.memory_reserved(i) for i in cards)
        if cards and torch.cuda.is_initialized():
            freed += _free_pinned_cache()
        return freed

    def usage(self) -> list[Usage]:
        found = []
        for i in self._opened() if torch.cuda.is_initialized() else []:
            stats = torch.cuda.memory_stats_as_nested_dict(i)
            if stats:
                used, reserved = (stats[k]["all"] for k in ("allocated_bytes", "reserved_bytes"))
                cached = reserved["current"] - used["current"]
                found.append(Usage(Device("gpu", i), used["current"], cached, used["peak"]))
        return found

    def card_memory(self, device: Device) -> tuple[int, int] | None:
        if device.kind != "gpu" or not torch.cuda.is_initialized():
            return None
        return torch.cuda.mem_get_info(device.index)

    def card_uuids(self) -> list[str]:
        if not torch.cuda.is_initialized():
            return []
        cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return [str(card.uuid) for card in cards if hasattr(card, "uuid")]

    def reset_peak(self, device: Device) -> bool:
        for i in self._opened(device) if torch.cuda.is_initialized() else []:
            torch.cuda.reset_peak_memory_stats(i)
            return True
        return False

    def allocator(self) -> tuple[Callable[[int, int, int], int], Callable[[int], None]]:
        return torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete

    def selected(self, device: Device) -> AbstractContextManager[Any]:
        if device.kind != "gpu":
            return nullcontext()
        if torch.version.cuda or torch.version.hip:
            return torch.cuda.device(device.index)
        return torch.accelerator.device_index(device.index)  # torch 2.8

    def pinned_bytes(self, nbytes: int) -> np.ndarray | None:
        if not torch.cuda.is_available():
            return None
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()

    def is_pinned(self, memory: np.ndarray) -> bool:
        return torch.from_numpy(hostmemory.writable_alias(memory)).is_pinned()

    def is_bare(self, x: torch.Tensor) -> bool:
        if not self.is_plain(x) or x.requires_grad or self.is_lazy(x):
            return False
        if getattr(x, "has_names", bool)():  # torch 2.13 has no named dimensions any more
            return False
        # Inside dual_level() a tensor may carry a tangent; asking for it compiles a lot first (2.13).
        return getattr(torch.autograd.forward_ad, "_current_level", 0) < 0

    def own_bytes(self, x: torch.Tensor) -> np.ndarray | None:
        if not x.is_contiguous():
            return None
        # Unlike .numpy(), DLPack leaves the storage resizable; NumPy 1 marks what comes by it as read-only.
        return hostmemory.writable_alias(np.from_dlpack(x.view(-1).view(torch.uint8)))

    def enqueue_copy(
        self, host: np.ndarray, x: torch.Tensor, offset: int, to_host: bool
    ) -> Callable[[], None]:
        place = x.view(-1).view(torch.uint8)[offset : offset + host.size]
        staged = torch.from_numpy(host)  # torch sees by its address that it is pinned
        with torch.cuda.device(x.device):
            if to_host:
                staged.copy_(place, non_blocking=True)
            else:
                place.copy_(staged, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        return done.synchronize

    # -- running functions ------------------------------------------------------------------------

    def untraced(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn``, which torch.compile runs as it is, between two graphs."""
        reason = "arraybridge converts between frameworks outside of a graph; leave fullgraph=True out"
        takes_reason = "reason" in inspect.signature(torch.compiler.disable).parameters  # since torch 2.7
        return torch.compiler.disable(fn, **({"reason": reason} if takes_reason else {}))

    def stream(self, device: Device) -> AbstractContextManager[Any] | None:
        return _side_stream(device.index) if device.kind == "gpu" else None

    def stack(self, planes: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(planes)

    def unstack(self, x: torch.Tensor) -> list[torch.Tensor]:
        return list(x.unbind())

    # -- fast paths -------------------------------------------------------------------------------

    fast_errors = (TypeError, ValueError, RuntimeError, DtypeNotSupportedError)

    def exact_types(self) -> tuple[type, ...]:
        return (torch.Tensor, torch.nn.Parameter)

    def fast_view(self) -> Callable[[torch.Tensor], np.ndarray]:
        # Refuses by itself what needs care: other devices and layouts, lazy bits, grad, bfloat16.
        return torch.Tensor.numpy

    def fast_from_view(self) -> Callable[[np.ndarray], torch.Tensor]:
        return torch.from_numpy

    def fast_export(self, alignment: int) -> Callable[[torch.Tensor], Any]:
        mask = alignment - 1

        def export(x: torch.Tensor) -> Any:
            if x.data_ptr() & mask:
                raise Fallback
            return x.numpy().__dlpack__()

        return export

    def fast_import(self, immutable: bool) -> Callable[[Any], torch.Tensor]:
        from_dlpack = torch_dlpack.from_dlpack

        def adopt(capsule: Any) -> torch.Tensor:
            tensor: torch.Tensor = from_dlpack(capsule)
            return tensor if tensor.ndim else tensor.clone()

        return adopt if immutable else from_dlpack


def _free_pinned_cache() -> int:
    """Give back the pinned host memory that torch keeps; returns its bytes. Only with CUDA open."""
    empty = getattr(torch.accelerator, "empty_host_cache", None)
    stats = getattr(torch.cuda, "host_memory_stats", None)
    if empty is None or stats is None:  # before torch 2.9 there is no public call
        return 0
    before = stats().get("allocated_bytes.current", 0)
    empty()
    return int(before - stats().get("allocated_bytes.current", 0))


_streams = threading.local()


@contextmanager
def _side_stream(index: int) -> Iterator[None]:
    """This thread's own stream on the card, as `Framework.stream` describes."""
    own: dict[Any, Any] = _streams.__dict__  # card → stream
    side = own.get(index)
    if side is None:
        side = own[index] = torch.cuda.Stream(index)
    outer = torch.cuda.current_stream(index)
    # What was allocated on one stream and freed may be reused before the other is done with it only where
    # nothing orders the two. These waits do, at each change from one to the other.
    side.wait_stream(outer)
    try:
        with torch.cuda.stream(side):
            yield
    finally:
        outer.wait_stream(side)


def _has_storage(x: torch.Tensor) -> bool:
    """False for tensors that stand for others: fake, functional and batched ones."""
    try:
        x.data_ptr()
    except RuntimeError:
        return False
    return True


_BY_SIZE = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


def copy_host_memory(target: np.ndarray, view: np.ndarray) -> bool:
    """Copy ``view`` into ``target``, both host memory, with torch's threads; False where torch cannot.

    The bytes travel as integers of the element's size, so that no value is touched.
    """
    carrier = _BY_SIZE.get(view.dtype.itemsize)
    if carrier is None or not view.dtype.isnative or _FRAMEWORK.cannot_view(hostmemory.writable_alias(view)):
        return False
    source = hostmemory.writable_alias(view).view(np.ndarray)
    torch.from_numpy(target.view(carrier)).copy_(torch.from_numpy(source.view(carrier)))
    return True


_FRAMEWORK = TorchFramework()
