"""Gradients across frameworks, for PyTorch code that calls functions of other frameworks and vice versa."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from arraybridge.compilers import run_eagerly
from arraybridge.errors import GradientError, MemoryConversionError
from arraybridge.interface import autodiff

# A private name: no public function returns whether a torch.func transform tracks a tensor (torch 2.14, no
# issue found).
_is_transformed = torch._C._functorch.is_functorch_wrapped_tensor  # noqa: SLF001
# A private name: no public function recognizes the tensors that is_grads_batched=True passes (torch 2.14,
# pytorch/pytorch#65564). They belong to an older implementation of vmap.
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # noqa: SLF001


class TorchAutodiff(autodiff.Autodiff):
    """PyTorch's gradients, computed by ``torch.autograd``."""

    constant_advice = "use w.detach() in the function (for a module, call module.requires_grad_(False))"
    module_advice = "For the parameters of a module, use torch.func.functional_call."
    argument_advice = 'to_torch(w, grad="detach").requires_grad_()'

    def requires_grad(self, x: torch.Tensor) -> bool:
        return x.requires_grad

    def detach(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    def is_tracked(self, x: torch.Tensor) -> bool:
        if x.requires_grad and torch.is_grad_enabled():
            return True
        return _is_transformed(x) or forward_ad.unpack_dual(x).tangent is not None

    def is_bound_to_thread(self, x: torch.Tensor) -> bool:
        return bool(_is_transformed(x))  # transforms belong to a thread; graphs do not

    def span(self, x: torch.Tensor) -> autodiff.Extent:
        if x.layout is not torch.strided or _is_transformed(x):
            return 0, 0
        if x.is_contiguous():
            return x.data_ptr(), x.data_ptr() + x.nbytes
        storage = x.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()

    def version(self, x: torch.Tensor) -> int:
        return 0 if x.is_inference() else int(x._version)  # noqa: SLF001  # documented by PyTorch

    def apply(self, operation: autodiff.Operation, arrays: list[torch.Tensor]) -> list[torch.Tensor]:
        saved: list[torch.Tensor] = []
        try:
            return list(_Applied.apply(operation, saved, *arrays))
        finally:
            saved.clear()  # from now on, only the graph keeps these tensors alive

    def run(self, body: autodiff.Body, arrays: list[torch.Tensor], label: str) -> list[Any]:
        try:
            return super().run(body, arrays, label)
        except RuntimeError as error:
            if "a leaf Variable that requires grad" in str(error) and "in-place" in str(error):
                raise autodiff.error_for_modified_argument(label) from error
            raise

    def linearize(
        self, body: autodiff.Body, arrays: list[torch.Tensor], active: Sequence[bool], label: str
    ) -> tuple[list[torch.Tensor], autodiff.Linear]:
        with torch.inference_mode(False):  # this also enables recording of gradients
            # In a pullback that is differentiated again, the arguments are part of a graph.
            inner = any(x.requires_grad for x in arrays)
            arrays = [_track(x) if a else x for x, a in zip(arrays, active, strict=True)]
            results = self.run(body, arrays, label)
        pull = functools.partial(_pull, results, autodiff.select(arrays, active), inner)
        return results, autodiff.Linear(pull, _describe_captured(results, arrays))

    def predict(
        self, body: autodiff.Body, shapes: list[autodiff.Shape], label: str
    ) -> tuple[list[autodiff.Shape], str, bool]:
        _check_triton_import_order(label)
        fake = _shape_prediction()(allow_non_fake_inputs=True)
        try:
            with torch.enable_grad(), fake:
                arrays = [
                    torch.empty(shape, dtype=getattr(torch, dtype), device="cpu") for shape, dtype in shapes
                ]
                active = [self.is_differentiable(x) for x in arrays]
                results, linear = self.linearize(body, arrays, active, label)
        except GradientError:
            raise
        except (RuntimeError, NotImplementedError, TypeError, MemoryConversionError) as error:
            raise autodiff.unpredictable_shapes_error(label, error) from error
        predicted = [(tuple(y.shape), str(y.dtype).removeprefix("torch.")) for y in results]
        return predicted, linear.captured, fake.draws

    def random_state(self) -> np.ndarray:
        states = [torch.get_rng_state()]
        if torch.cuda.is_initialized():
            states += torch.cuda.get_rng_state_all()
        return torch.cat(states).numpy() if len(states) > 1 else states[0].numpy()

    def set_random_state(self, state: np.ndarray) -> None:
        every = torch.from_numpy(state.copy())
        size = torch.get_rng_state().numel()
        torch.set_rng_state(every[:size])
        if state.size > size:
            torch.cuda.set_rng_state_all(list(every[size:].chunk(torch.cuda.device_count())))


@functools.cache
def _shape_prediction() -> type:
    """Return a mode class that makes functions run on tensors without values."""
    # This module is private (pytorch/pytorch#77972), but torch.device("meta") would not apply to constants.
    # The import is late, because the module imports Triton, which crashes the process if TensorFlow is
    # imported first.
    from torch._subclasses.fake_tensor import FakeTensorMode

    class ShapePrediction(FakeTensorMode):  # type: ignore[misc]  # torch is Any here
        """A mode in which tensors have no values, and which records whether random numbers are drawn."""

        draws = False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.draws = self.draws or torch.Tag.nondeterministic_seeded in func.tags
            return super().__torch_dispatch__(func, types, args, kwargs)

    return ShapePrediction


def _check_triton_import_order(label: str) -> None:
    """Raise an error if importing Triton next would crash the process (tensorflow/tensorflow#124205)."""
    loaded = sys.modules
    if "tensorflow" not in loaded or "triton" in loaded or importlib.util.find_spec("triton") is None:
        return
    raise GradientError(
        "inside jax.jit, PyTorch imports Triton to predict shapes, which crashes the process if TensorFlow is"
        " imported first.",
        reason="TensorFlow was imported before Triton",
        advice="Put 'import triton' before 'import tensorflow', or call the function outside of jax.jit.",
        place=f"{label}()",
    )


def _track(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` if it requires grad; otherwise a leaf tensor with these values that requires grad."""
    if x.requires_grad:
        return x
    return (x.clone() if x.is_inference() else x.detach()).requires_grad_()


def _pull(
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    inner: bool,
    cotangents: list[torch.Tensor | None],
) -> list[torch.Tensor]:
    """Return the gradients with respect to ``inputs``. They are differentiable if ``inner`` is true."""
    # A cotangent is on the device of the caller's arrays, which may differ from the device of the result.
    pairs = [
        (y, c.to(y.device))
        for y, c in zip(outputs, cotangents, strict=True)
        if c is not None and y.requires_grad
    ]
    if not pairs:
        return [torch.zeros_like(x) for x in inputs]
    gradients = torch.autograd.grad(
        [y for y, _ in pairs],
        inputs,
        [c for _, c in pairs],
        retain_graph=True,
        create_graph=inner or any(c.requires_grad for _, c in pairs),
        materialize_grads=True,
    )
    return [_unshare(g) for g in gradients]


def _unshare(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as a dense tensor, copied unless it may be differentiated again."""
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    # A torch.autograd.Function or a hook may keep a reference to the tensor that it returns.
    if gradient.requires_grad or _is_transformed(gradient):
        return gradient
    return gradient.clone()


def _describe_captured(outputs: list[torch.Tensor], arguments: list[torch.Tensor]) -> str:
    """Return a description of a captured trainable tensor (not an argument); ``""`` if there is none."""
    nodes = [y.grad_fn for y in outputs if y.grad_fn is not None]
    leaves = [y for y in outputs if y.requires_grad and y.grad_fn is None]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        following = [n for n, _ in node.next_functions if n is not None]
        nodes += following
        if not following and hasattr(node, "variable"):
            leaves.append(node.variable)
    if {id(x) for x in arguments}.issuperset(map(id, leaves)):
        return ""
    return "a trainable tensor"


def _vmap_error(label: str) -> GradientError:
    return GradientError(
        "torch.func.vmap and batched backward passes (is_grads_batched=True, vectorize=True, jacrev) cannot"
        " map functions of other frameworks.",
        reason="PyTorch's vmap",
        advice="For a Jacobian, call torch.func.jacrev(f, chunk_size=1)(x) or"
        " torch.autograd.functional.jacobian(f, x). Otherwise, loop and torch.stack the results, or pass the"
        " whole batch to the function.",
        place=f"{label}()",
    )


# -- the operation in PyTorch's graph ------------------------------------------------------------------


class _Applied(torch.autograd.Function):  # type: ignore[misc]  # torch is Any here
    """An operation of another framework as a node of PyTorch's graph."""

    @staticmethod
    def forward(
        operation: autodiff.Operation, saved: list[torch.Tensor], *arrays: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():  # so that calling .numpy() on a captured parameter raises
            results, linear = operation.linearize(arrays)
        # Detached tensors share the version counters of the results, which count writes.
        read_again = [y.detach() for y in operation.find_read_again(results, linear)]
        # PyTorch keeps and frees this empty tensor, and thus its attributes, with the graph.
        holder = torch.empty(0, device="cpu")
        holder.linear = linear
        holder.spans = [AUTODIFF.span(x) for x in (*arrays, *read_again)]
        saved[:] = [*read_again, holder]
        return tuple(results)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.operation, saved, *arrays = inputs
        ctx.count = len(arrays)
        # PyTorch frees saved tensors with the graph and in checkpoints, and detects writes to them.
        ctx.save_for_backward(*arrays, *saved)
        ctx.mark_non_differentiable(*(y for y in output if not AUTODIFF.is_differentiable(y)))
        ctx.set_materialize_grads(False)

    @staticmethod
    @run_eagerly
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        operation = ctx.operation
        saved = ctx.saved_tensors
        arrays = saved[: ctx.count]
        if any(c is not None and _is_batched(c) for c in cotangents):
            raise _vmap_error(operation.label)
        if all(c is None for c in cotangents):
            return (None,) * (2 + ctx.count)
        dense = [c.to_dense() if c is not None and c.layout is not torch.strided else c for c in cotangents]
        return (None, None, *operation.gradients(arrays, dense, _read_saved(saved)))

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise autodiff.forward_mode_error(
            ctx.operation.label,
            "backward(), torch.func.vjp or torch.func.jacrev(f, chunk_size=1); for the Hessian of a scalar"
            " function, torch.func.jacrev(torch.func.jacrev(f, chunk_size=1), chunk_size=1)",
        )

    @staticmethod
    def vmap(_info: Any, _in_dims: Any, operation: autodiff.Operation, *_: Any) -> Any:
        raise _vmap_error(operation.label)


# PyTorch reads the signature at each call (torch 2.13, pytorch/pytorch#189573). Computing it each time would
# take a third of the call's time.
_Applied.forward.__signature__ = inspect.signature(_Applied.forward)  # type: ignore[attr-defined]


def _read_saved(saved: Sequence[torch.Tensor]) -> autodiff.Linear | None:
    """Return the saved derivative; None if saved-tensor hooks replaced the tensors that it reads."""
    *read, holder = saved
    valid = getattr(holder, "spans", None) == [AUTODIFF.span(x) for x in read]
    return holder.linear if valid else None


AUTODIFF = TorchAutodiff()
