"""``grad="flow"``: a function of one framework as an operation that another framework differentiates.

What is peculiar to a framework stands in its `Autodiff`. Here is what lies between two of them: which array
is whose, how values cross over, and that no two gradients share memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from arraybridge.conversion.trace import open_logs
from arraybridge.errors import GradientError, MemoryConversionError
from arraybridge.frameworks import registry
from arraybridge.frameworks.autodiff import written_beside
from arraybridge.frameworks.base import Framework
from arraybridge.functions.bridge import Bridge, as_inner, may_run_again
from arraybridge.functions.convert import being_compiled, convert
from arraybridge.functions.crossing import autodiff_of
from arraybridge.functions.declaration import Call
from arraybridge.functions.dtypes import DtypeConversion
from arraybridge.functions.inside import (
    WITH_DERIVATIVES,
    differentiates_around,
    mark_of,
    noticing,
    refuse_graphs_around,
)
from arraybridge.functions.options import DecoratorOptions
from arraybridge.functions.runner import Runner, framework_of
from arraybridge.memory.recovery import run_with_oom_recovery
from arraybridge.timeline.events import device_words
from arraybridge.trees import ARRAY, Structure, arrays_of, flattened, kind_of, kinds, prefix, source_of
from arraybridge.types import Cache

__all__ = ["FlowRunner", "check_flow"]

#: Type of an array → its framework, where that one has derivatives.
_owners: Cache[type, Framework | None] = Cache()


def _owner(leaf: Any) -> Framework | None:
    cls = type(leaf)
    try:
        return _owners[cls]
    except KeyError:
        pass
    owner = registry.find_owner(leaf) if (kinds.get(cls) or kind_of(leaf)) == ARRAY else None
    return _owners.keep(cls, None if owner is None or owner.autodiff is None else owner)


class FlowRunner(Runner):
    """Runs a function in its framework, and lets the caller's backward pass go through it."""

    def __init__(self, fn: Callable[..., Any], options: DecoratorOptions) -> None:
        # The sources are checked here, and what is converted was detached before.
        inner = options._replace(strict=False, grad="error")
        super().__init__(fn, inner)
        self.declared = options
        # Where nobody differentiates, it is an ordinary function, and results go back to the caller; where
        # its own framework does, they stay with their graph.
        ordinary = options._replace(grad="detach", output_type="input")
        inside = options._replace(grad="error", output_type=options.framework)
        self.ordinary = Runner(fn, ordinary)
        self.inside = Runner(fn, inside)
        #: Where the framework of the function differentiates around.
        self.watched = Runner(fn, ordinary)
        self.watched.body = self._without_graph
        #: Forward and pullback of a function that its framework compiles, by structure.
        self.programs: dict[Any, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return (FlowRunner, (self.fn, self.declared))

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if being_compiled():  # torch.compile looks into what it is not told to leave alone
            if not _untraced:
                _untraced.append(registry.framework("torch").scopes.untraced(FlowRunner.call))
            return _untraced[0](self, args, kwargs)
        return self.call(args, kwargs)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own, given = args[: self.skip], args[self.skip :]
        leaves, spec = flattened((given, kwargs))
        owners = [_owner(leaf) for leaf in leaves]
        if self.declared.strict:
            self._refuse_what_is_no_array(args, kwargs)
            for leaf in leaves:
                if (kinds.get(type(leaf)) or kind_of(leaf)) == ARRAY:
                    self._check_source(leaf)
        followed = {
            owner.name
            for owner, leaf in zip(owners, leaves, strict=True)
            if owner is not None and autodiff_of(owner).is_differentiated(leaf)
        }
        if not followed:
            if may_run_again() or any(map(_is_repeated, owners)):
                with as_inner(framework_of(self.name), self.label):
                    return self._ordinarily(args, kwargs, leaves, owners)
            return self._ordinarily(args, kwargs, leaves, owners)
        if len(followed) > 1:
            raise self._two(followed)
        (name,) = followed
        if name == self.name:
            return self.inside(args, kwargs)
        caller = framework_of(name)
        live = [i for i, owner in enumerate(owners) if owner is caller]
        if not self.recovers:
            return self._differentiated(own, leaves, spec, caller, live)
        gpu_id = None if self.options.gpu_id == "auto" else self.options.gpu_id
        retries = self.options.max_retries
        return run_with_oom_recovery(
            self._differentiated, own, leaves, spec, caller, live, max_retries=retries, gpu_id=gpu_id
        )

    def _ordinarily(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Any],
        owners: list[Framework | None],
    ) -> Any:
        """The result where nobody differentiates the arguments, but perhaps what is captured."""
        ordinary = self.watched if differentiates_around(self.name) else self.ordinary
        for owner in owners:
            if owner is not None and owner.name != self.name and autodiff_of(owner).is_recording():
                with noticing(owner, mark_of(owner), self.label, self.fn, leaves):
                    return ordinary(args, kwargs)
        return ordinary(args, kwargs)

    def _without_graph(self, *args: Any, **kwargs: Any) -> Any:
        result = self.fn(*args, **kwargs)
        refuse_graphs_around(self.name, arrays_of(result), self.label)
        return result

    def _differentiated(
        self, own: tuple[Any, ...], leaves: list[Any], spec: Structure, caller: Framework, live: list[int]
    ) -> Any:
        span = self.begun() if open_logs else None
        if span is None:
            return self._differentiate(own, leaves, spec, caller, live)
        with span:
            result = self._differentiate(own, leaves, spec, caller, live)
            named = self.placed and self.options.gpu_id != "auto"
            span.device = str(self._wanted(framework_of(self.name))) if named else device_words(result)
            return result

    def _differentiate(
        self, own: tuple[Any, ...], leaves: list[Any], spec: Structure, caller: Framework, live: list[int]
    ) -> Any:
        here = autodiff_of(caller)
        try:
            arrays = [here.prepare(leaves[i]) for i in live]
            here.refuse_call(arrays, self.label)
            call = Call()
            # Of a worker of `device_map`, which may have ended when the backward runs.
            place = None if self.placed else self._running_on()
            body = UserBody(self, own, leaves, spec, live, call, caller)
            operation = Bridge(
                body,
                framework_of(self.name),
                caller,
                arrays,
                lambda x: convert(x, self.name, self.grad, None, place) if place else self._array(x, call),
                self.label,
                body.beside(),
            )
            result = operation.assemble(here.apply(operation, arrays))  # pyright: ignore[reportArgumentType]
        except MemoryConversionError as error:
            if not str(error).startswith(f"{self.label}()"):
                prefix(error, f"{self.label}()")
            raise
        return result if self.contract is None else super(Runner, self).leave(result, None)

    def _two(self, followed: set[str]) -> GradientError:
        names = " and ".join(sorted(followed))
        return GradientError(
            f"{self.label}(): arrays of {names} are being differentiated in one call, and a backward pass"
            " goes through one framework; pass those of the others without their graph: x.detach() in torch,"
            " tf.stop_gradient(x) in TensorFlow, a value from outside of the transformation in JAX",
            target_type=self.name,
            reason=f"differentiated arrays of {names}",
        )


def _is_repeated(owner: Framework | None) -> bool:
    return owner is not None and autodiff_of(owner).may_run_again()


#: `FlowRunner.call` as torch.compile leaves it alone, once that was needed.
_untraced: list[Callable[..., Any]] = []


def check_flow(options: DecoratorOptions, kind: str) -> None:
    """Refuse what gradients cannot flow through.

    Raises:
        ValueError: saying what to do instead.
    """
    what = f'@{options.framework}(grad="flow")'
    known = options.framework in WITH_DERIVATIVES
    if not known and (
        options.framework in _WITHOUT_DERIVATIVES or registry.framework(options.framework).autodiff is None
    ):
        raise ValueError(
            f"{what}: {options.framework} has no derivatives; write the function in torch, jax or tensorflow"
        )
    if kind != "function":
        raise ValueError(f"{what} takes plain functions, and this is a {kind}; return all results at once")
    if options.output_type != "input":
        raise ValueError(
            f"{what} gives results back in the caller's framework; leave"
            f" output_type={options.output_type!r} out"
        )
    for option, given, instead in (
        ("slice_by_slice=True", options.slice_by_slice, "loop over the planes inside of the function"),
        ('oom_recovery="split"', options.oom_recovery == "split", "pass oom_recovery=True"),
        (f"dtype={options.dtype!r}", options.dtype is not None, "cast inside of the function"),
        (
            f"dtype_conversion={options.dtype_conversion}",
            options.dtype_conversion is not DtypeConversion.NATIVE_OUTPUT,
            "convert inside of the function, where it is differentiated",
        ),
    ):
        if given:
            raise ValueError(f"{what} cannot be had with {option}: no gradient goes through it; {instead}")


#: Those of the house that have none, known without importing them.
_WITHOUT_DERIVATIVES = ("numpy", "cupy", "pyclesperanto")


class UserBody:
    """The user's function as one of a flat list of arrays: those of the caller; all else is fixed here."""

    def __init__(
        self,
        runner: FlowRunner,
        own: tuple[Any, ...],
        leaves: list[Any],
        spec: Structure,
        live: list[int],
        call: Call,
        caller: Framework,
    ) -> None:
        self.runner, self.own, self.spec, self.live, self.call = runner, own, spec, live, call
        self.fn, self.programs, self.label = runner.fn, runner.programs, runner.label
        self.caller, self.mark = caller, mark_of(caller)
        #: Every argument but the caller's arrays, in place of which there is None.
        self.fixed = list(leaves)
        #: Where in `fixed` there are arrays; they are of the callee.
        self.others: list[int] = []
        for i in live:
            self.fixed[i] = None
        for i, leaf in enumerate(self.fixed):
            if (kinds.get(type(leaf)) or kind_of(leaf)) == ARRAY:
                self.others.append(i)
                self.fixed[i] = _fixed(runner, leaf, call)
        self.alike = autodiff_of(framework_of(runner.name)).alike
        self.versions = self._versions()

    def __call__(self, arrays: list[Any]) -> tuple[list[Any], Any]:
        if self.versions and self._versions() != self.versions:
            raise written_beside(self.runner.name, self.runner.label)
        fixed = list(self.fixed)
        for i in self.others:
            fixed[i] = self.alike(fixed[i])
        return self.run(fixed, arrays)

    def beside(self) -> list[Any]:
        """The arrays that are fixed, of the callee."""
        return [self.fixed[i] for i in self.others]

    def _versions(self) -> list[Any]:
        there = autodiff_of(framework_of(self.runner.name))
        return [there.version(x) for x in self.beside()]

    def emptied(self) -> UserBody:
        """The same without any array, for `run` to be given them all."""
        empty = copy.copy(self)
        empty.fixed, empty.call = [], Call()
        return empty

    def run(self, fixed: list[Any], arrays: list[Any]) -> tuple[list[Any], Any]:
        leaves = list(fixed)
        for i, array in zip(self.live, arrays, strict=True):
            leaves[i] = array
        args, kwargs = self.spec.filled(iter(leaves))
        with noticing(self.caller, self.mark, self.label, self.fn, fixed):
            found, spec = flattened(self.runner._run((*self.own, *args), kwargs, self.call))
        callee = framework_of(self.runner.name)
        if not any(map(callee.requires_grad, arrays)):
            refuse_graphs_around(callee.name, found, self.label)
        return found, spec


def _fixed(runner: FlowRunner, leaf: Any, call: Call) -> Any:
    """An array beside those that are differentiated, in memory that nobody writes to before the backward."""
    owner, data = source_of(leaf)
    if owner.name != runner.name:
        if owner.requires_grad(data):
            leaf = data = owner.detach(data)
        if owner.mutable:
            leaf = owner.copy(data)
    there = autodiff_of(framework_of(runner.name))
    leaf = there.alike(runner._array(leaf, call))
    there.admit(leaf, runner.label)
    return leaf
