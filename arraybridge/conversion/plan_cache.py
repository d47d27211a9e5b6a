"""The plan cache: decisions that later calls with the same signature and plan key reuse.

1. A *call signature* consists of all arguments except the array: the target, a declared source and options.
   Its first two items are ``source_type`` and ``target_type`` of `convert_memory`. If only one of them is
   passed by position, it is the target, and the other is None.
2. `plans_by_signature` maps a call signature and the type of the array to a plan, a function that converts
   such arrays.
3. A plan first tries the fast converter of the two frameworks, which raises for arrays that need special
   handling. Then it computes the plan key of the array (`FastPath.plan_key`), and runs the function for
   that key.
4. For the most common calls, which pass only a target, `plans_by_signature` maps the target's name to the
   fast converter alone, or to the whole plan for arrays of other libraries and for some sparse arrays. If
   the fast converter raises, the plan for the full call signature does not try it again.

In a trace, the decision to record comes from the same plan, which also caches a route for each plan key, if
that determines the route (`recall_decision`). Other calls in a trace are decided and are not cached.

The plan for sparse arrays takes them apart and converts each part with the plan for that part.

The plan for carriers reads the array of each object, and converts it with the plan for arrays.

Nothing is cached for calls that pass ``gpu_id``. The result of such a call depends on more than the call and
the array: ``"auto"`` depends on free memory, and the CPU may replace a missing GPU. For dense
arrays, at most a fast converter is cached if the array or the result is on an accelerator, if the array is an
instance of a subclass, or if its framework has no plan key.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import numpy as np

from arraybridge.caches import MOST_ENTRIES, new_cache, remember
from arraybridge.carriers.registry import carrier_of
from arraybridge.carriers.sources import is_planned_source, key_of_values, open_by_carrier
from arraybridge.carriers.third_party_arrays import (
    HOST_PRODUCERS,
    is_protocol_producer,
    make_importer,
    make_opener,
    restrict_to_host,
)
from arraybridge.conversion.decision import decide
from arraybridge.conversion.request import Decision, Request
from arraybridge.conversion.table import FastFunction, cell
from arraybridge.device import Device
from arraybridge.errors import MemoryConversionError
from arraybridge.interface import registry
from arraybridge.interface.devices import CPU, Devices
from arraybridge.interface.framework import NoPlanError
from arraybridge.interface.streams import identity
from arraybridge.reasons import Reason
from arraybridge.route import Route

__all__ = [
    "MOST_PLAN_KEYS",
    "add_plan",
    "can_recall",
    "plans_by_signature",
    "recall_decision",
    "run",
    "signature_of_call",
    "store_plan",
]

#: Call signature → type of the array → the plan, a function of the array and, if it was passed, of ``out``.
#: Plans raise `NoPlanError` for arrays that they do not support. The slow path then handles the array.
#: The target's name → type of the array → the plan for calls that pass only a target.
#: ``(_KEYED, signature)`` → type of the array → the `_KeyedPlan` of a plan, to which plan keys are added.
plans_by_signature: dict[Hashable, dict[type, Any]] = new_cache()
_KEYED = "plan keys"
_NO_PLANS: dict[type, Any] = {}
#: The maximum number of plan keys of a plan. Strided arrays have a key for each shape.
MOST_PLAN_KEYS = 4096
#: Causes that the call signature and the plan key determine. Others also depend on the file that an array
#: maps, for example.
_CAUSES_BY_KEY = (Reason.SHARED_HOST_MEMORY, Reason.COPY_REQUESTED, Reason.CAST_REQUESTED)


def signature_of_call(
    source: Any,
    target: Any,
    *,
    copy: Any = None,
    dtype: Any = None,
    grad: str = "error",
    device: Any = None,
) -> tuple[Any, ...]:
    """Return the call signature of ``convert_memory(x, source, target, copy=, dtype=, grad=, device=)``.

    It includes the types of ``copy`` and ``dtype``, because 1 == True.
    """
    return (source, target, None, copy, type(copy), dtype, type(dtype), grad, device)


def store_plan(signature: tuple[Any, ...], request: Request, data: Any, decision: Decision) -> None:
    """Cache the decision for this call signature and the plan key of the array, if it can be cached."""
    if request.gpu_id is not None or not _is_hashable((signature, type(data))):
        return
    if data is not decision.data and carrier_of(data) is not None:
        _store_carrier_plan(signature, request, data, decision)
        return
    open_array: FastFunction | None = None
    if data is not decision.data:  # an array of another library
        open_array = _make_opener_for(data, decision)
        if open_array is None:
            return
    if decision.route.layout:
        by_parts = decision.convert_by_parts
        if by_parts is None or open_array is not None:
            return

        errors: tuple[type[Exception], ...] = (MemoryConversionError, *decision.native_errors)

        def convert(x: Any) -> Any:
            try:  # as in `run`, without another call
                return by_parts(x, _convert_part)
            except errors as error:
                raise NoPlanError from error

        decision = replace(decision, convert=convert)
    _add_plans(signature, data, open_array, request, decision)


def run(convert: Callable[..., Any], errors: tuple[type[Exception], ...], *arrays: Any) -> Any:
    """Call the function of a decision on other arrays.

    If it fails, raise `NoPlanError`: the slow path decides again, and reports the error.
    """
    expected: tuple[type[Exception], ...] = (MemoryConversionError, *errors)
    try:
        return convert(*arrays)
    except expected as error:
        raise NoPlanError from error


def _convert_planned(x: Any, signature: Hashable) -> Any:
    """Convert an array by the plan for a call signature; raise `NoPlanError` if there is none."""
    try:
        plan = plans_by_signature[signature][type(x)]
    except (KeyError, TypeError):
        raise NoPlanError from None
    return plan(x)


class _KeyedPlan:
    """The functions for arrays of one class and one call signature, by plan key.

    Attributes:
        source: The framework of the arrays.
        target: The framework that they are converted to.
        errors: The exceptions that the two frameworks raise for arrays that they do not support.
        converters: Plan key → the function that converts such arrays.
        routes: Plan key → the route of the first such array, if others differ only in size and duration.
        function: The plan for `plans_by_signature`. It tries the fast converter, if there is one that the
            caller has not tried, then the function for the plan key. It is not a method, whose calls take
            50 ns longer.
    """

    __slots__ = ("converters", "errors", "function", "routes", "source", "target")

    def __init__(self, fast: FastFunction | None, decision: Decision) -> None:
        self.source = decision.source
        self.target = decision.target
        self.errors: tuple[type[Exception], ...] = (MemoryConversionError, *decision.native_errors)
        self.converters: dict[Hashable, FastFunction] = {}
        self.routes: dict[Hashable, Route] = {}
        by_key = self._by_key()
        self.function = by_key if fast is None else _try_first(fast, by_key)

    def _by_key(self) -> FastFunction:
        """Return a function that converts an array by the function for its plan key."""
        converters = self.converters
        plan_key = self.source.fast_path.plan_key
        alignment = self.target.alignment
        errors = self.errors

        def convert_by_key(x: Any) -> Any:
            key = plan_key(x, alignment)
            try:
                convert = converters[key]
            except KeyError:
                raise NoPlanError from None
            try:  # as in `run`, without another call
                return convert(x)
            except errors as error:
                raise NoPlanError from error

        return convert_by_key

    def add(self, key: Hashable, data: Any, decision: Decision) -> None:
        """Add the decision about ``data`` for arrays with the same plan key."""
        remember(self.converters, key, decision.convert, MOST_PLAN_KEYS)
        if can_recall(data, decision):
            remember(self.routes, key, decision.route, MOST_PLAN_KEYS)

    def decision(self, x: Any) -> Decision | None:
        """Return the decision that is cached for the plan key of an array, or None; see `recall_decision`."""
        if not self.routes:  # always true for arrays of other libraries; see `can_recall`
            return None
        source = self.source
        key = source.fast_path.plan_key(x, self.target.alignment)
        cached = self.routes.get(key)
        convert = self.converters.get(key)
        if cached is None or convert is None:  # each table is emptied when it is full
            return None
        route = Route(
            cached.source,
            cached.target,
            cached.method,
            cached.device,
            shares_memory=cached.shares_memory,
            copies=cached.copies,
            nbytes=source.nbytes(x),
            cause=cached.cause,
        )
        return Decision(route, source, self.target, x, convert)


def can_recall(data: Any, decision: Decision) -> bool:
    """Return whether the route of this decision is that of all arrays with the plan key of ``data``."""
    route = decision.route
    return data is decision.data and route.cause.code in _CAUSES_BY_KEY and not route.layout


def recall_decision(signature: Hashable, x: Any) -> Decision | None:
    """Return the decision about an array from the plan for a call signature, for a trace.

    It is None if there is no plan for such arrays, or if the route depends on more than the plan key.
    """
    try:
        keyed: _KeyedPlan = plans_by_signature[_KEYED, signature][type(x)]
    except (KeyError, TypeError):
        return None
    try:
        return keyed.decision(x)
    except NoPlanError:
        return None


def _try_first(first: FastFunction, second: FastFunction) -> FastFunction:
    """Return a plan that calls ``second`` for arrays that ``first`` does not support."""

    def convert(x: Any) -> Any:
        try:
            return first(x)
        except NoPlanError:
            return second(x)

    return convert


def _open_first(
    open_array: FastFunction, convert_view: FastFunction, direct: FastFunction | None, request: Request
) -> FastFunction:
    """Return a plan for arrays of another library, which calls ``direct`` or else converts a NumPy view."""
    if convert_view is identity:
        return open_array
    for_view = replace(request, declared=None)

    def open_and_convert(x: Any) -> Any:
        view = open_array(x)
        try:
            return convert_view(view)
        except NoPlanError:
            pass
        try:  # a producer that always returns one DLPack capsule cannot be opened again by the slow path
            return _convert_part(view, for_view)
        except MemoryConversionError as error:
            raise NoPlanError from error

    return open_and_convert if direct is None else _try_first(direct, open_and_convert)


class _CarrierPlan:
    """The plan for carriers of one class: take the array out, and convert it by the plan for such arrays.

    Nothing about the object is cached, so it may change between conversions.

    Attributes:
        signatures: The keys of the plans for the array. If the call passes only a target, the first key is
            the target's name.
        errors: The exceptions that the two frameworks raise for values that they do not support.
        reads: The functions that read and convert values that are not in memory, by `key_of_values`.
    """

    __slots__ = ("errors", "reads", "signatures")

    def __init__(self, signatures: tuple[Hashable, ...], errors: tuple[type[Exception], ...]) -> None:
        self.errors: tuple[type[Exception], ...] = (MemoryConversionError, *errors)
        self.signatures = signatures
        self.reads: dict[Hashable, FastFunction] = {}

    def __call__(self, x: Any) -> Any:
        array = open_by_carrier(x)
        if type(array) is tuple:
            values = array[0]
            read = self.reads.get(key_of_values(values))
            if read is None:
                raise NoPlanError
            try:  # as in `run`, without another call
                return read(values)
            except self.errors as error:
                raise NoPlanError from error
        for signature in self.signatures:  # as in `_convert_planned`, without another call
            try:
                plan = plans_by_signature[signature][type(array)]
            except (KeyError, TypeError):
                continue
            try:
                return plan(array)
            except NoPlanError:
                pass
        raise NoPlanError


def _store_carrier_plan(signature: tuple[Any, ...], request: Request, data: Any, decision: Decision) -> None:
    """Cache the plan for carriers of the class of ``data``, and the plan for its array or its values."""
    if request.copy is False and is_protocol_producer(data):
        return  # `decide` inspects the device of each object
    bare = request.target if request.is_bare else None
    own = signature if bare is None else signature_of_call(bare, None)
    array = decision.data
    if registry.find_owner(array) is decision.source:
        store_plan(own, request, array, decision)
    elif not is_planned_source(decision.source, array) or decision.route.device != CPU:
        return
    cls = type(data)
    plan = plans_by_signature.get(signature, {}).get(cls)
    if not isinstance(plan, _CarrierPlan):
        plan = _CarrierPlan((own,) if bare is None else (bare, own), decision.native_errors)
        add_plan(signature, cls, plan)
    if bare is not None:
        add_plan(bare, cls, plan)
    if registry.find_owner(array) is not decision.source:
        remember(plan.reads, key_of_values(array), decision.convert, MOST_PLAN_KEYS)


def _is_hashable(key: Any) -> bool:
    """Return whether a key can be in the table. An option or a class may be unhashable."""
    try:
        hash(key)
    except TypeError:
        return False
    return True


def _make_opener_for(data: Any, decision: Decision) -> FastFunction | None:
    """Return a fast function that views arrays of the class of ``data`` as NumPy arrays, or None."""
    if decision.source not in HOST_PRODUCERS and not isinstance(data, np.generic):
        return None
    return make_opener(data, decision.data, decision.target)


def _add_plans(
    signature: tuple[Any, ...],
    data: Any,
    open_array: FastFunction | None,
    request: Request,
    decision: Decision,
) -> None:
    """Add the plan for the call signature and, for calls that pass only a target, for the target's name."""
    cls = type(data)
    fast = _choose_fast(request, decision)
    is_bare = request.is_bare
    # ``convert_memory(x, target)``, whose signature begins with the target, has already tried the fast
    # converter, which is stored for the target's name.
    has_tried = is_bare and signature[0] is not None and open_array is None
    plan = _make_plan(signature, data, request, decision, None if has_tried else fast)
    if open_array is not None:
        direct: FastFunction | None = None
        if fast is not None:
            direct = make_importer(data, decision.data, decision.source, decision.target)
        if request.copy is False:
            open_array = restrict_to_host(open_array)
            direct = direct and restrict_to_host(direct)
        plan = plan and _open_first(open_array, plan, direct, request)
        fast = plan
    add_plan(signature, cls, plan)
    if is_bare:  # the target may have been passed by position or by keyword
        # If all arrays of the class are sparse, there is no fast converter, and the plan has no plan keys.
        is_always_sparse = fast is None and plan is decision.convert
        add_plan(request.target, cls, plan if is_always_sparse else fast)


def _convert_part(x: Any, request: Request) -> Any:
    """Convert an array with its plan, or with a new decision if there is no plan."""
    if request.is_bare:
        plan = plans_by_signature.get(request.target, _NO_PLANS).get(type(x))
        if plan is not None:
            try:
                return plan(x)
            except NoPlanError:
                pass
    signature = signature_of_call(
        request.target,
        None,
        copy=request.copy,
        dtype=request.dtype,
        grad=request.grad,
        device=request.device,
    )
    try:
        return _convert_planned(x, signature)
    except NoPlanError:
        decision = decide(x, request)
    result = decision()
    store_plan(signature, request, x, decision)
    return result


def add_plan(signature: Hashable, cls: type, plan: Any) -> None:
    """Add a plan for a call signature and a type of arrays, unless it is None."""
    if plan is None:
        return
    by_type = plans_by_signature.setdefault(signature, {})
    if max(len(plans_by_signature), len(by_type)) >= MOST_ENTRIES:  # a program may create classes in a loop
        plans_by_signature.clear()
        by_type = plans_by_signature[signature] = {}
    by_type[cls] = plan


def _make_plan(
    signature: Hashable, data: Any, request: Request, decision: Decision, fast: FastFunction | None
) -> FastFunction | None:
    """Return a plan that tries ``fast`` first, then the function cached for the array's plan key."""
    source = decision.source
    target = decision.target
    if decision.route.layout and source.sparse.has_own_classes:
        return decision.convert  # every array of the class is sparse
    plan_key = source.fast_path.plan_key
    alignment = target.alignment
    needs_no_key = source is target and fast is not None
    if needs_no_key or plan_key is None or not _depends_on_plan_key_only(request, decision):
        return fast
    try:
        array_key = plan_key(decision.data, alignment)
    except NoPlanError:
        return fast  # the array has no plan key, for example because it is not in host memory
    cls = type(data)
    keyed: Any = plans_by_signature.get((_KEYED, signature), {}).get(cls)
    if keyed is None:
        keyed = _KeyedPlan(fast, decision)
        add_plan((_KEYED, signature), cls, keyed)
    keyed.add(array_key, data, decision)
    function: FastFunction = keyed.function
    return function


def _choose_fast(request: Request, decision: Decision) -> FastFunction | None:
    """Return the fast converter of the two frameworks; None if it does not support the call."""
    source = decision.source
    target = decision.target
    if _is_beyond_fast(request, decision):
        return None
    if source is not target and type(decision.data) not in source.fast_path.fast_types():
        return None
    if source is target:
        if request.device is None:
            return identity
        return _make_keeper(source.devices) if decision.route.method == "same" else None
    fast = cell(source.name, target.name)(source, target)
    if fast is None or request.grad == "error":
        return fast
    detach = source.autodiff.detach
    errors = decision.native_errors
    return lambda x: fast(run(detach, errors, x))


def _make_keeper(devices: Devices) -> FastFunction:
    """Return a plan for ``device="cpu"`` within one framework: it returns arrays on the CPU unchanged."""
    device_of = devices.device_of
    is_scattered = devices.is_scattered

    def convert(x: Any) -> Any:
        if device_of(x) is CPU and not is_scattered(x):
            return x
        raise NoPlanError

    return convert


def _is_beyond_fast(request: Request, decision: Decision) -> bool:
    """Return whether the call has an option that fast converters do not support."""
    if request.dtype is not None or request.copy:
        return True
    # copy=False also shares scalars, which fast converters copy.
    if request.copy is not None and not decision.source.mutable:
        return True
    return request.device is not None and Device.parse(request.device) != CPU


def _depends_on_plan_key_only(request: Request, decision: Decision) -> bool:
    """Return whether arrays with the same plan key are always converted by the same function."""
    if decision.route.device.kind != "cpu":
        return False
    if type(decision.data) not in decision.source.fast_path.fast_types():
        return False
    return request.device is None or Device.parse(request.device).kind == "cpu"
