"""What a framework may have besides: derivatives that other frameworks go through (``grad="flow"``).

`Autodiff` has two halves. The callee's answers one question, linearise: the results of a function at a point,
and its pullback. The caller's answers another, make this an op of mine: an `Operation` that its own backward
pass then goes through. Neither knows the other; `arraybridge.functions.gradients` stands between them.
"""

from __future__ import annotations

import contextvars
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol

import numpy as np

from arraybridge.errors import GradientError

__all__ = [
    "LOST_CALL",
    "Autodiff",
    "Body",
    "Linear",
    "Operation",
    "Shape",
    "Span",
    "captured",
    "draws_again",
    "hidden",
    "no_forward_mode",
    "overlap",
    "refusals",
    "runs_again",
    "writes_to_argument",
    "writes_to_cotangent",
    "written_beside",
]

#: Whether a function runs again that draws no random numbers itself, and whose inner functions may.
runs_again: contextvars.ContextVar[bool] = contextvars.ContextVar("runs_again", default=False)

#: The number of a call whose runs cannot know one another, so that none may draw random numbers.
LOST_CALL = -0x80000000

#: First address and end of an array's memory.
Span = tuple[int, int]
#: Extents and dtype of an array.
Shape = tuple[tuple[int, ...], str]

#: A function of a flat list of arrays: its results as a flat list of leaves, and the structure around them.
Body = Callable[[list[Any]], tuple[list[Any], Any]]


class Linear(ABC):
    """A function of the callee, linearised at a point."""

    #: What the function returned: arrays of the callee and whatever else; emptied once it is handed over.
    leaves: list[Any]
    #: The structure to put the leaves in, as the body gave it.
    spec: Any
    #: Places in `leaves` of what the function keeps, in a framework where nobody writes to arrays.
    kept: frozenset[int] = frozenset()
    #: Whether each array that `pull` returns is one that nobody else can hold.
    fresh: bool = False

    @abstractmethod
    def pull(self, cotangents: list[Any]) -> list[Any]:
        """Gradients for the wanted arguments, from cotangents for the results that are smooth.

        None stands for a cotangent or a gradient that is zero because nothing depends on it. It may be asked
        several times, in any thread.
        """

    def residuals(self) -> list[Any] | None:
        """The arrays that the pullback keeps, where the callee can tell; `rebuild` takes them back."""
        return None

    def rebuild(self) -> Callable[[list[Any]], Linear]:
        """A function of such arrays that makes a pullback of them again, and keeps none itself."""
        raise NotImplementedError


class Operation(Protocol):
    """A function of the callee as the caller sees it: flat lists of the caller's own arrays in and out.

    The arrays that are passed to its methods are plain values, which no graph, tape or tracer follows.
    """

    label: str
    #: Whether the pullbacks of the two frameworks differ by a complex conjugation.
    flips: bool
    #: For each argument whether it has to get a gradient; the caller may narrow it before `linearise`.
    wanted: tuple[bool, ...]
    #: For each result whether it has a derivative; known once it was computed or foretold.
    smooth: tuple[bool, ...]
    #: For each result whether the pullback may read its memory.
    read_again: tuple[bool, ...]
    #: Whether it is what `pulled` gave.
    is_pullback: bool
    #: Whether the caller may run it again for the backward; set before `linearise`.
    repeats: bool

    #: Whether it has no random numbers that its pullback would have to draw again.
    @property
    def quiet(self) -> bool: ...

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        """The results, and nothing is kept."""
        raise NotImplementedError

    def linearise(self, arrays: Sequence[Any]) -> tuple[list[Any], Linear | None]:
        """The results, and what to pull; None where `again` has to find it out."""
        raise NotImplementedError

    def recall(self, number: int) -> None:
        """Take up what the forward of this pullback left under a number: what to pull, or random numbers."""
        raise NotImplementedError

    def again(self, arrays: Sequence[Any]) -> Linear:
        """What `linearise` gave once more, where it was not kept: with the same random numbers."""
        raise NotImplementedError

    def pull(self, linear: Linear, cotangents: Sequence[Any], known: Sequence[Any]) -> list[Any]:
        """A gradient or None for each argument, from a cotangent or None for each result.

        No gradient shares memory with another one, or with the arrays in ``known``.
        """
        raise NotImplementedError

    def foretell(self, shapes: Sequence[Shape], needed: Sequence[bool]) -> list[Shape]:
        """Shape and dtype of each result, from those of the arguments.

        ``needed``: for which arguments a pullback may be asked later; for none where none will follow.
        """
        raise NotImplementedError

    def next_call(self) -> int:
        """A number below zero for a call where the caller traces, by which its runs know one another."""
        raise NotImplementedError

    def on_host(
        self, arrays: Sequence[np.ndarray], keep: bool, number: int, asked: Sequence[bool] = ()
    ) -> list[np.ndarray]:
        """`run` on NumPy arrays, for callers that trace: results as foretold.

        ``keep`` says that a pullback will follow. All runs with one number, of `next_call`, draw the same
        random numbers, and those with `LOST_CALL` none; 0 is no call. A pullback is told for which arguments
        somebody asks; for the others there are zeros.
        """
        raise NotImplementedError

    def unloaded(self, linear: Linear) -> tuple[Any, list[Any]]:
        """What `linear` keeps, as arrays of the caller, and the function of them that gives it back.

        In place of the function, `linear` itself where it cannot tell what it keeps.
        """
        raise NotImplementedError

    def pulled(
        self,
        linear: Linear | None,
        present: tuple[bool, ...],
        takes: tuple[bool, ...] | None = None,
    ) -> Operation:
        """The pullback as an operation of the arguments, and of the cotangents that are ``present``.

        It gives a gradient or None for each argument that ``takes`` names, by default those that are wanted.
        """
        raise NotImplementedError

    def assemble(self, results: Sequence[Any]) -> Any:
        """What the function returned, with its arrays as the caller's operation gave them."""


class Autodiff(ABC):
    """The derivatives of a framework: for functions that another framework calls, and the other way round.

    Class attributes:
        transposes: whether the pullback of a complex function is its transpose, as in JAX, and not the
            conjugate transpose, as in torch and TensorFlow.
    """

    transposes: ClassVar[bool] = False

    # -- its arrays --------------------------------------------------------------------------------

    @abstractmethod
    def is_differentiated(self, x: Any) -> bool:
        """Whether a graph, tracer or tape of this framework follows ``x``, in this thread."""

    def stays_in_thread(self, x: Any) -> bool:
        """Whether something follows ``x`` that does not follow it into another thread."""
        return self.is_differentiated(x)

    def has_graph(self, x: Any) -> bool:
        """Whether ``x`` is no start of a graph, and has one that stays behind where it leaves the process."""
        return self.is_differentiated(x)

    @abstractmethod
    def is_smooth(self, x: Any) -> bool:
        """Whether the elements are such that a function can have a derivative: real or complex numbers."""

    @abstractmethod
    def span(self, x: Any) -> Span | None:
        """Where a plain array lies in memory; None where that cannot be told."""

    @abstractmethod
    def conjugate(self, x: Any) -> Any:
        """The complex conjugate, by an operation that it differentiates; real numbers as they are."""

    def scalar(self, x: np.generic) -> Any:
        """One of NumPy's scalars among results, as an array; or as it is where this framework has no such."""
        return np.asarray(x)

    def prepare(self, x: Any) -> Any:
        """An array as `apply` takes it: the value of a variable, for one."""
        return x

    def refuse_call(self, arrays: Sequence[Any], label: str) -> None:
        """Refuse what cannot be followed through: symbolic arrays, forward mode.

        Raises:
            GradientError: saying what to do instead.
        """

    def admit(self, x: Any, label: str) -> None:
        """Refuse an array of this framework whose derivatives would be wrong here.

        Raises:
            GradientError: saying what to do instead.
        """

    # -- as the caller -----------------------------------------------------------------------------

    @abstractmethod
    def apply(self, operation: Operation, arrays: Sequence[Any]) -> list[Any]:
        """The results of an operation, through which this framework's backward pass goes."""

    def noticing(self, label: str, function: Any, passed: Sequence[Any]) -> AbstractContextManager[Any]:
        """A context for the function of another framework: what it captures of this one is noticed there.

        ``passed``: what it is passed besides the arrays that are differentiated.

        Raises:
            GradientError: inside of it, where something that is differentiated is read as plain numbers.
        """
        return nullcontext()

    def is_recording(self) -> bool:
        """Whether it would follow what is captured although it follows no argument: a tape is open."""
        return False

    def traced_apart(self, mark: Hashable) -> AbstractContextManager[Any]:
        """A context in which functions are compiled anew for each ``mark``, where programs are kept.

        A program that was made elsewhere has what it captured as constants, unseen by anybody.
        """
        return nullcontext()

    def is_checkpointed(self) -> bool:
        """Whether what is traced now runs again for the backward, in an order that nothing tells."""
        return False

    def may_run_again(self) -> bool:
        """Whether what is called now runs again for its backward, as far as that is seen without tracing."""
        return False

    def dense(self, cotangent: Any) -> Any:
        """A cotangent with all its elements, where this framework has sparse ones."""
        return cotangent

    def follows(self, arrays: Sequence[Any]) -> bool:
        """Whether the backward pass that runs now is differentiated in turn, with regard to these arrays."""
        return any(map(self.is_differentiated, arrays))

    def pull_back(
        self,
        operation: Operation,
        arrays: Sequence[Any],
        cotangents: Sequence[Any],
        linear: Linear | None,
        known: Sequence[Any],
    ) -> list[Any]:
        """The gradients of an operation that `apply` made part of this framework, for its backward pass.

        ``arrays``: the arguments; ``cotangents``: one for each result, or None; ``linear``: what
        `Operation.linearise` gave, if it is still there; ``known``: as `Operation.pull` takes them.
        """
        given = [
            self.dense(c) if s and c is not None else None
            for c, s in zip(cotangents, operation.smooth, strict=True)
        ]
        if operation.flips:
            given = [None if c is None else self.conjugate(c) for c in given]
        present = tuple(c is not None for c, s in zip(given, operation.smooth, strict=True) if s)
        there = [c for c in given if c is not None]
        if not there:
            return [None] * len(arrays)
        gradients: list[Any]
        if self.follows([*arrays, *there]):
            pullback = operation.pulled(linear, present)
            found = iter(pullback.assemble(self.apply(pullback, [*arrays, *there])))
            gradients = [next(found) if wanted else None for wanted in operation.wanted]
        else:
            gradients = operation.pull(linear or operation.again(arrays), given, known)
        if operation.flips:
            gradients = [None if g is None else self.conjugate(g) for g in gradients]
        return gradients

    # -- as the callee -----------------------------------------------------------------------------

    @abstractmethod
    def linearise(self, body: Body, arrays: list[Any], wanted: tuple[bool, ...], label: str) -> Linear:
        """Run a function of this framework so that it can be pulled back.

        Raises:
            GradientError: it depends on trainable parameters that are none of its arguments.
        """

    @abstractmethod
    def pulled(
        self, body: Body, count: int, takes: tuple[bool, ...], present: tuple[bool, ...], whole: bool = False
    ) -> Body:
        """The pullback of ``body`` as a function of its ``count`` arguments and of the cotangents present.

        It returns a gradient or None for each argument that ``takes`` names; it is differentiable in turn.
        ``whole``: zeros in place of None.
        """

    def foretell(
        self, body: Body, arrays: Sequence[Shape], wanted: tuple[bool, ...], label: str
    ) -> tuple[list[Any], Any, list[Shape]]:
        """What ``body`` returns for arrays of these shapes, without their values.

        ``wanted``: which arguments will have to get gradients; none where nothing will be pulled back.

        Returns:
            the leaves, arrays among them that have no values; their structure; shape and dtype of each array.

        Raises:
            GradientError: it cannot be foretold; or as `linearise`.
        """
        raise GradientError(
            f"{label}(): inside jax.jit its shapes have to be foretold, and its framework cannot run without"
            " values; call the function outside of jax.jit",
            reason="shapes cannot be foretold",
        )

    def repeatable(self, label: str) -> AbstractContextManager[Any]:
        """A context for a function that runs again: refuses random numbers that `replayed` misses.

        Raises:
            GradientError: inside of it, where such numbers are drawn.
        """
        return nullcontext()

    def alike(self, x: Any) -> Any:
        """``x`` for a function that runs more than once: what it or somebody else writes to is not ``x``.

        Only where that costs nothing; other frameworks have a `version`.
        """
        return x

    def is_held(self, x: Any) -> bool:
        """Whether somebody but the one who asks holds ``x``, or its memory; True where nobody can tell."""
        return True

    def version(self, x: Any) -> Any:
        """What equals itself as long as nobody writes to ``x``; None where that cannot be told."""
        return None

    def random_state(self) -> Any:
        """What decides the next random numbers, to be compared, hashed and replayed; None without it."""
        return None

    def drawing(self) -> AbstractContextManager[list[Any] | None]:
        """A context with a list, empty as long as this thread draws no random numbers; None: who knows."""
        return nullcontext()

    def replayed(self, state: Any) -> AbstractContextManager[Any]:
        """A context in which the random numbers come again that followed ``state``."""
        return nullcontext()


def overlap(span: Span | None, others: Sequence[Span | None]) -> bool:
    """Whether memory overlaps other memory in whole or in part; memory that is not known may."""
    if span is None:
        return True
    start, stop = span
    if start == stop:
        return False
    return any(other is None or (start < other[1] and other[0] < stop) for other in others)


def no_forward_mode(label: str) -> GradientError:
    """The error for forward mode, in whichever framework."""
    return GradientError(
        f"{label}(): forward mode cannot go through a function of another framework, which gives its pullback"
        " alone; use reverse mode: grad, vjp or backward(), jacrev instead of jacfwd, and"
        " jacrev(jacrev(f)) instead of hessian(f)",
        reason="forward mode",
    )


#: How often something that a function captures was noticed, by anybody. What is traced afterwards is traced
#: apart from what was before: programs of functions inside remain.
refusals = SimpleNamespace(count=0)


def captured(framework: str, what: str) -> GradientError:
    """The error for something trainable that a function depends on, and that is none of its arguments."""
    refusals.count += 1
    return GradientError(
        f"{what}, which is none of the arrays that are differentiated, and which would get no gradient. Pass"
        " trainable parameters as arguments, of the caller's framework (torch.func.functional_call(module,"
        " parameters, (x,)) does that in torch, layer.stateless_call in Keras); or freeze what is not"
        " trained, p.requires_grad_(False) or tf.Variable(..., trainable=False): that a layer of Keras is"
        " frozen cannot be seen, nor that a function makes a leaf itself; make such a one of an argument,"
        " x.new_zeros(n) + 0 * x.sum()",
        target_type=framework,
        reason="captured trainable parameters",
    )


def hidden(framework: str, label: str) -> GradientError:
    """The error for an array among the results, in a place where nobody can give it a gradient."""
    return GradientError(
        f"{label}(): it returns an array inside of an object that is no container, where it would get no"
        " gradient; return it by itself or in a container, or register the class with optree"
        ' (optree.register_pytree_node(..., namespace="arraybridge"))',
        target_type=framework,
        reason="an array inside of no container",
    )


def draws_again(framework: str, label: str, what: str = "", instead: str = "") -> GradientError:
    """The error for random numbers of a function that runs again, where they cannot be drawn again."""
    return GradientError(
        f"{label}(): it draws random numbers{what} that {framework} cannot draw again, and it has to run once"
        " more for its backward (in jax.jit, under a checkpoint, for higher orders);"
        f" {instead or 'pass what is random as an argument'}",
        target_type=framework,
        reason="random numbers cannot be drawn again",
    )


def writes_to_cotangent(framework: str, instead: str) -> GradientError:
    """The error for a rule or hook of a backward that writes to memory which is the caller's."""
    return GradientError(
        f"a backward pass of {framework}, in a hook or a rule of one's own, has written to the gradient that"
        f" it was given, whose memory is the caller's; write to a copy, {instead}",
        target_type=framework,
        reason="a cotangent is written to",
    )


def writes_to_argument(framework: str, label: str, instead: str) -> GradientError:
    """The error for a function that writes to memory which is the caller's."""
    return GradientError(
        f"{label}(): it writes to an argument, whose memory is the caller's and which the backward reads"
        f" again; write to a copy, {instead}",
        target_type=framework,
        reason="an argument is written to",
    )


def written_beside(framework: str, label: str) -> GradientError:
    """The error for an array beside the differentiated ones that changed before the function ran again."""
    return GradientError(
        f"{label}(): it has to run once more for the backward (in jax.jit, under a checkpoint, for higher"
        " orders), and an array that it was called with has been written to meanwhile, by the function itself"
        " or by somebody else; write to a copy, x.clone(), or pass a copy, tf.identity(v)",
        target_type=framework,
        reason="an argument is written to",
    )
