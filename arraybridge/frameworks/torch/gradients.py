"""PyTorch's half of gradients across frameworks."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from arraybridge.errors import GradientError, MemoryConversionError, told
from arraybridge.frameworks.autodiff import (
    Autodiff,
    Body,
    Linear,
    Operation,
    Shape,
    Span,
    captured,
    no_forward_mode,
    writes_to_argument,
    writes_to_cotangent,
)
from arraybridge.frameworks.holders import held_by_one, is_kept
from arraybridge.frameworks.tokens import kept_by, token_of
from arraybridge.frameworks.torch.modes import (
    Captures,
    Drawing,
    NoGenerators,
    NoMemory,
    Untouched,
    are_hooks_set,
    reads_its_own,
    refuse_hidden,
    without_hooks,
)

__all__ = ["TorchAutodiff", "memory_is_held"]

#: What torch says where somebody asks for the memory of a tensor that requires grad.
_GIVEN_AWAY = ("on Tensor that requires grad", "export tensors that require gradient")
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


class TorchAutodiff(Autodiff):
    def is_differentiated(self, x: torch.Tensor) -> bool:
        if x.requires_grad:
            return torch.is_grad_enabled() or _is_wrapped(x)
        return _is_wrapped(x) or _has_tangent(x)

    def stays_in_thread(self, x: torch.Tensor) -> bool:
        return bool(_is_wrapped(x))  # by torch.func, whose transforms belong to a thread; graphs do not

    def has_graph(self, x: torch.Tensor) -> bool:
        return x.grad_fn is not None

    def is_smooth(self, x: torch.Tensor) -> bool:
        return x.is_floating_point() or x.is_complex()

    def span(self, x: torch.Tensor) -> Span | None:
        if _is_wrapped(x):
            return None
        if x.is_contiguous():
            start = x.data_ptr()
            return start, start + x.numel() * x.element_size()
        storage = x.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()

    def conjugate(self, x: torch.Tensor) -> torch.Tensor:
        return x.conj().resolve_conj() if x.is_complex() else x

    def refuse_call(self, arrays: Sequence[torch.Tensor], label: str) -> None:
        if any(_has_tangent(x) for x in arrays):
            raise no_forward_mode(label)

    # -- as the caller -----------------------------------------------------------------------------

    def apply(self, operation: Operation, arrays: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        operation.wanted = tuple(
            wanted and (x.requires_grad or _is_wrapped(x))
            for wanted, x in zip(operation.wanted, arrays, strict=True)
        )
        frame = _Frame(operation)
        try:
            return list(_Bridge.apply(frame, *arrays))
        finally:
            frame.kept = None  # from now on it lives as long as the graph

    @contextmanager
    def noticing(self, label: str, function: Any, passed: Sequence[Any]) -> Iterator[None]:
        # An operation's forward runs without grad mode, in which torch neither follows what it computes nor
        # refuses to give it away as numbers.
        try:
            with torch.enable_grad(), Captures(label), _reading_its_own(False):
                yield
        except (RuntimeError, BufferError) as error:
            if isinstance(error, GradientError) or not any(said in str(error) for said in _GIVEN_AWAY):
                raise
            raise captured(
                "torch", f"{label}(): it reads the numbers of a tensor that requires grad"
            ) from error

    def may_run_again(self) -> bool:
        # torch.utils.checkpoint(use_reentrant=True) runs it without a graph; in its backward it is seen.
        return are_hooks_set() or torch._C._current_graph_task_id() != -1

    def dense(self, cotangent: torch.Tensor) -> torch.Tensor:
        return cotangent if cotangent.layout is torch.strided else cotangent.to_dense()

    def follows(self, arrays: Sequence[torch.Tensor]) -> bool:
        return torch.is_grad_enabled() and any(x.requires_grad or _is_wrapped(x) for x in arrays)

    # -- as the callee -----------------------------------------------------------------------------

    def linearise(self, body: Body, arrays: list[Any], wanted: tuple[bool, ...], label: str) -> Linear:
        with torch.inference_mode(False), torch.enable_grad():
            arrays = [_own(x) for x in arrays]
            inputs = [x.requires_grad_() for x, w in zip(arrays, wanted, strict=True) if w]
            before = [x._version for x in arrays]
            with _reading_its_own():
                leaves, spec = body(arrays)
            for i in range(len(leaves)):  # `enumerate` would hold them, too
                x = leaves[i]
                graph = isinstance(x, torch.Tensor) and x.grad_fn is not None
                # State, which the function may write to later, or detach.
                if graph and (
                    is_kept(x, [leaves])
                    or weakref.getweakrefcount(x)
                    or _is_kept_base(x, [*arrays, *leaves])
                    or _is_shared(x, arrays, leaves)
                ):
                    leaves[i] = x.clone()
        if before != [x._version for x in arrays]:
            raise writes_to_argument("torch", label, "x.clone()")
        refuse_hidden(leaves, arrays, label)
        linear = _Graph()
        linear.leaves, linear.spec, linear.inputs = leaves, spec, inputs
        linear.outputs = [x for x in leaves if isinstance(x, torch.Tensor) and self.is_smooth(x)]
        if body not in _checked:
            _refuse_captured(linear.outputs, arrays, label)
        return linear

    def pulled(
        self, body: Body, count: int, takes: tuple[bool, ...], present: tuple[bool, ...], whole: bool = False
    ) -> Body:
        def pullback(arrays: list[Any]) -> tuple[list[Any], Any]:
            with torch.inference_mode(False), torch.enable_grad():
                inputs = [
                    x if x.requires_grad else _own(x).requires_grad_(take)
                    for x, take in zip(arrays[:count], takes, strict=True)
                ]
                with _reading_its_own():
                    leaves, _ = body(inputs)
                outputs = [x for x in leaves if isinstance(x, torch.Tensor) and self.is_smooth(x)]
                outputs = [x for x, p in zip(outputs, present, strict=True) if p]
                taken = [x for x, t in zip(inputs, takes, strict=True) if t]
                found = _gradients(outputs, taken, arrays[count:], create_graph=True)
            if whole:
                found = [torch.zeros_like(x) if g is None else g for x, g in zip(taken, found, strict=True)]
            return found, None

        _checked.add(pullback)
        return pullback

    def foretell(
        self, body: Body, arrays: Sequence[Shape], wanted: tuple[bool, ...], label: str
    ) -> tuple[list[Any], Any, list[Shape]]:
        from torch._subclasses.fake_tensor import FakeTensorMode

        without_values = FakeTensorMode(allow_non_fake_inputs=True)
        try:
            with (
                self.replayed(self.random_state()),
                without_hooks(),
                self.repeatable(label) if any(wanted) else nullcontext(),
                torch.enable_grad(),
                without_values,
                Untouched(without_values),
                NoMemory(label, without_values),
            ):
                fakes = [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in arrays]
                inputs = [x.requires_grad_() for x, w in zip(fakes, wanted, strict=True) if w]
                leaves, spec = body(fakes)
        except (RuntimeError, NotImplementedError, TypeError, MemoryConversionError) as error:
            raise GradientError(
                f"{label}(): inside jax.jit its shapes have to be foretold, and that failed:"
                f" {told(error)}. Shapes that depend on values, .item(), .numpy(), torch.distributions"
                " without validate_args=False and calls of further frameworks cannot be foretold; call"
                " the function outside of jax.jit",
                reason="shapes cannot be foretold",
            ) from error
        finally:
            # A tensor that the function keeps, in a cache, writes nothing where it is read later.
            without_values.allow_non_fake_inputs = False
        found = [x for x in leaves if isinstance(x, torch.Tensor)]
        if inputs:
            refuse_hidden(leaves, fakes, label)
            _refuse_captured([x for x in found if self.is_smooth(x)], fakes, label)
        return leaves, spec, [(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in found]

    def version(self, x: torch.Tensor) -> int | None:
        return None if x.is_inference() else int(x._version)

    def is_held(self, x: torch.Tensor) -> bool:
        return sys.getrefcount(x) > held_by_one() or _other_users(x) > 0

    def repeatable(self, label: str) -> AbstractContextManager[Any]:
        return NoGenerators(label)

    def random_state(self) -> Any:
        state = torch.default_generator.get_state().numpy().tobytes()
        if not torch.cuda.is_initialized():
            return (state,)
        return (state, *(s.numpy().tobytes() for s in torch.cuda.get_rng_state_all()))

    @contextmanager
    def drawing(self) -> Iterator[list[Any]]:
        with Drawing() as mode:
            yield mode.found

    @contextmanager
    def replayed(self, state: Any) -> Iterator[None]:
        now = self.random_state()
        _set_random_state(state)
        try:
            yield
        finally:
            _set_random_state(now)


@contextmanager
def _reading_its_own(does: bool = True) -> Iterator[None]:
    token = reads_its_own.set(does)
    try:
        yield
    finally:
        reads_its_own.reset(token)


def _is_kept_base(x: torch.Tensor, known: list[Any]) -> bool:
    """Whether ``x`` is a view of a tensor that somebody holds, and that is none of those known."""
    return _holders_of_base(x) > _ONE_HOLDER and not any(x._base is y for y in known)


def _holders_of_base(x: torch.Tensor) -> int:
    base = x._base
    return 0 if base is None else sys.getrefcount(base)


def _is_shared(x: torch.Tensor, arguments: list[Any], leaves: list[Any]) -> bool:
    """Whether more than its graph and other results hold the memory of a result, and no argument does.

    Whoever keeps ``x.detach()``, ``x.data``, a view or its NumPy array holds the storage, and not ``x``.
    """
    if x.layout is not torch.strided or _is_wrapped(x):
        return False
    base = x._base
    others = _other_users(x) - (base is not None)
    if others:
        node = type(x.grad_fn if base is None else base.grad_fn)  # asked itself, it would unpack the result
        others -= any(hasattr(node, name) for name in _SAVING_RESULTS)
    if others < 1:
        return False
    start = _start(x)
    if any(_start(y) == start for y in arguments):
        return False
    results = {id(y): y for y in leaves if isinstance(y, torch.Tensor) and y is not x and y is not base}
    return others > sum(_start(y) == start for y in results.values())


def memory_is_held(x: torch.Tensor) -> bool | None:
    """Whether more than ``x``, and a tensor that it alone is a view of, holds its memory; None: who knows."""
    if weakref.getweakrefcount(x):
        return True
    if x.layout is not torch.strided or x.is_nested or _is_wrapped(x):
        return None
    base = _holders_of_base(x)
    try:
        others = _other_users(x) - (base > 0)
        if base > _ONE_HOLDER:
            return True
        if others > 0 and (x.grad_fn is not None or not x.untyped_storage().resizable()):
            return None  # its own graph may hold it, or another framework
    except RuntimeError:  # it stands for others
        return None
    return others > 0


def _other_users(x: torch.Tensor) -> int:
    """How many besides ``x`` hold its memory; many where that is not torch's, as of ``torch.from_numpy``."""
    storage = x.untyped_storage()
    if not storage.resizable():
        return _MANY
    # torch gives the same object for the same storage, if somebody has it.
    return int(torch._C._storage_Use_Count(storage._cdata)) - 2 + (sys.getrefcount(storage) > _OWN_REFERENCES)


def _own_references() -> int:
    x = torch.zeros(1)
    storage = x.untyped_storage()
    return sys.getrefcount(storage)


_MANY = 1_000_000
with torch._C._DisableFuncTorch(), torch.inference_mode(False):  # whatever is in force at the import
    _ONE_HOLDER = _holders_of_base(torch.zeros(1).view(1))
    _OWN_REFERENCES = _own_references()


def _start(x: torch.Tensor) -> int:
    return int(x.untyped_storage().data_ptr()) if x.layout is torch.strided else -1


#: Where a node of the graph has one of these, it is the result that the node made, in the same memory.
_SAVING_RESULTS = ("_saved_result", "_saved_output")


#: Pullbacks of functions that were looked into; they have leaves of their own, which look foreign.
_checked: weakref.WeakSet[Body] = weakref.WeakSet()


def _set_random_state(state: tuple[bytes, ...]) -> None:
    tensors = [torch.frombuffer(bytearray(s), dtype=torch.uint8) for s in state]
    torch.set_rng_state(tensors[0])
    for i, tensor in enumerate(tensors[1:]):
        torch.cuda.set_rng_state(tensor, i)


def _has_tangent(x: torch.Tensor) -> bool:
    level = torch.autograd.forward_ad._current_level
    return level >= 0 and torch._VF._unpack_dual(x, level=level)[1] is not None


def _gradients(
    outputs: list[Any], inputs: list[Any], cotangents: list[Any], *, create_graph: bool
) -> list[Any]:
    # A result may be on another card than the caller's arrays, where its cotangent comes from.
    pairs = [
        (y, c.to(y.device))
        for y, c in zip(outputs, cotangents, strict=True)
        if c is not None and y.requires_grad
    ]
    if not pairs or not inputs:
        return [None] * len(inputs)
    try:
        found = torch.autograd.grad(
            [y for y, _ in pairs],
            inputs,
            [c for _, c in pairs],
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
        )
    except RuntimeError as error:
        if "use_reentrant=True" not in str(error):
            raise
        raise GradientError(
            "a function of torch runs torch.utils.checkpoint(..., use_reentrant=True), which takes part in"
            " backward() of torch alone; pass use_reentrant=False",
            target_type="torch",
            reason="a reentrant checkpoint",
        ) from error
    return [None if g is None else AUTODIFF.dense(g) for g in found]


class _Graph(Linear):
    """A function of torch at a point: its graph."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]

    def pull(self, cotangents: list[Any]) -> list[Any]:
        before = [c is None or AUTODIFF.version(c) for c in cotangents]
        with torch.inference_mode(False):
            found = _gradients(self.outputs, self.inputs, cotangents, create_graph=False)
        if before != [c is None or AUTODIFF.version(c) for c in cotangents]:
            raise writes_to_cotangent("torch", "g * 2 in place of g.mul_(2)")
        return found


def _own(x: torch.Tensor) -> torch.Tensor:
    return x.clone() if x.is_inference() else x.detach()


def _refuse_captured(outputs: list[torch.Tensor], inputs: list[torch.Tensor], label: str) -> None:
    """Refuse leaves of the graph that are no arguments: they would get no gradient, in silence."""
    known = {id(x) for x in inputs}
    seen = set()
    waiting = [x.grad_fn for x in outputs if x.grad_fn is not None]
    found = [x for x in outputs if x.requires_grad and x.grad_fn is None and id(x) not in known]
    while waiting and not found:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        # A function of the user's own may keep something under the same name.
        if node.name() == "torch::autograd::AccumulateGrad" and id(node.variable) not in known:
            found.append(node.variable)
        waiting.extend(n for n, _ in node.next_functions if n is not None)
    if found:
        shape = "×".join(map(str, found[0].shape)) or "one number"
        raise captured("torch", f"{label}(): it depends on a trainable tensor ({shape})")


# -- the operation ---------------------------------------------------------------------------------


class _Frame:
    """What the forward of one call leaves for `_Bridge.setup_context`."""

    __slots__ = ("hooked", "kept", "operation")

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        #: Whether somebody hooks into what is saved: torch.utils.checkpoint, say, which computes it again.
        self.hooked = False
        self.kept: list[torch.Tensor] | None = None


class _Bridge(torch.autograd.Function):  # type: ignore[misc]  # torch is Any here
    """An operation of another framework in torch's graph.

    What its pullback needs is saved as torch saves its own: so that it is freed with the graph, and that
    torch.utils.checkpoint can drop it. Arrays are saved as tensors where somebody hooks into that.
    """

    @staticmethod
    def forward(frame: _Frame, *arrays: torch.Tensor) -> tuple[torch.Tensor, ...]:
        frame.hooked = hooked = are_hooks_set()
        frame.operation.repeats = frame.operation.repeats or AUTODIFF.may_run_again()
        # What is saved by somebody else is not looked at for writes: nothing that is kept lies in its memory.
        results, linear = frame.operation.linearise([x.clone() for x in arrays] if hooked else arrays)
        kept: Any = linear
        tensors: list[torch.Tensor] = []
        if linear is not None and hooked:
            results = [
                y.clone() if again else y
                for y, again in zip(results, frame.operation.read_again, strict=True)
            ]
            kept, tensors = frame.operation.unloaded(linear)
        frame.kept = [*tensors, torch.from_numpy(token_of(kept))]
        return tuple(results)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        frame, *arrays = inputs
        operation = frame.operation
        kept = frame.kept
        ctx.operation, ctx.count = operation, len(arrays)
        ctx.places = None if frame.hooked else _places(arrays)
        # A checkpoint counts what is saved, and memory may be shared in one run and not in the next.
        again = (True,) * len(output) if frame.hooked else operation.read_again
        results = [y for y, read in zip(output, again, strict=True) if read]
        ctx.results = len(results)
        ctx.save_for_backward(*arrays, *results, *kept)
        ctx.mark_non_differentiable(*(y for y, s in zip(output, operation.smooth, strict=True) if not s))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        operation, saved = ctx.operation, ctx.saved_tensors  # once: checkpoint computes them again each time
        arrays, rest = saved[: ctx.count], saved[ctx.count :]
        results, kept = rest[: ctx.results], rest[ctx.results :]
        if all(c is None for c in cotangents):
            return (None,) * (1 + ctx.count)
        linear: Any = kept_by(int(kept[-1]))
        if callable(linear):
            linear = linear(kept[:-1])
        if ctx.places is not None and ctx.places != _places(arrays):
            linear = None  # `share_memory_` moved them, and freed the memory that it would read
        return (None, *AUTODIFF.pull_back(operation, arrays, cotangents, linear, [*arrays, *results]))

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise no_forward_mode(ctx.operation.label)

    @staticmethod
    def vmap(_info: Any, _in_dims: Any, frame: _Frame, *_: Any) -> Any:
        label = frame.operation.label
        raise GradientError(
            f"{label}(): torch.func.vmap cannot map a function of another framework; call it in a loop and"
            " torch.stack the results, or let the function take the whole batch (jax.vmap inside of it)",
            target_type="torch",
            reason="torch's vmap",
        )


def _places(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [0 if _is_wrapped(x) else x.data_ptr() for x in tensors]


AUTODIFF = TorchAutodiff()
