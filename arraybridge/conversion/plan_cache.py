"""The plan cache: decisions that later calls with the same signature and plan key reuse.

1. A *call signature* consists of all arguments except the array: the target, a declared source and options.
   Its first two items are ``source_type`` and ``target_type`` of `convert_memory`. The first one may be the
   source or, if it is the only positional argument, the target.
2. `plans_by_signature` maps a call signature and the type of the array to a plan, a function that converts
   such arrays.
3. A plan first tries the fast converter of the two frameworks, which raises for arrays that need special
   handling. Then it computes the plan key of the array (`FastPath.plan_key`), and runs the function for
   that key.
4. For the most common calls, which pass only a target, `plans_by_signature` maps the target's name to the
   fast converter alone, or to the whole plan for arrays of other libraries and for some sparse arrays. If
   the fast converter raises, the plan for the full call signature does not try it again.

The plan for sparse arrays takes them apart and converts each part with the plan for that part.

Nothing is cached for carriers and for calls that name an accelerator. The result of such a call depends on
more than the call and the array: ``gpu_id="auto"`` depends on free memory, and the CPU may replace a missing
GPU. For dense arrays, at most a fast converter is cached if the array or the result is on an accelerator, if
the array is an instance of a subclass, or if its framework has no plan key.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from dataclasses import replace
from threading import Lock
from typing import Any

from arraybridge.caches import MOST_ENTRIES, new_cache, remember
from arraybridge.carriers.registry import carrier_of
from arraybridge.conversion.decision import decide
from arraybridge.conversion.request import Decision, Request
from arraybridge.conversion.table import FastFunction, cell
from arraybridge.device import Device
from arraybridge.errors import MemoryConversionError
from arraybridge.frameworks.base import conversion_errors
from arraybridge.frameworks.device_access import CPU
from arraybridge.frameworks.third_party_arrays import FOREIGN_HOST, importer, opener

__all__ = ["declined", "plans_by_signature", "signature_of_call"]

#: Call signature → type of the array → the plan, a function of the array.
plans_by_signature: dict[Hashable, dict[type, FastFunction]] = new_cache()
#: The exceptions that plans raise for arrays that they do not support. The slow path then handles the array.
#: `store_plan` replaces this tuple, so other modules read it as ``plan_cache.declined``.
declined: tuple[type[Exception], ...] = (KeyError, MemoryConversionError, *conversion_errors())
_declined_lock = Lock()

# Call signature and type of the array → plan key → the function that converts such arrays.
_converters: dict[tuple[Hashable, type], dict[Hashable, FastFunction]] = new_cache()
_MAX_PLAN_KEYS = 4096


def signature_of_call(
    source: Any, target: Any, *, dtype: Any = None, grad: str = "error", device: Any = None
) -> Hashable:
    """Return the call signature of ``convert_memory(x, source, target, dtype=, grad=, device=)``."""
    return (source, target, None, None, type(None), dtype, type(dtype), grad, device)


def store_plan(signature: tuple[Any, ...], request: Request, data: Any, decision: Decision) -> None:
    """Cache the decision for this call signature and the plan key of the array, if it can be cached."""
    global declined
    open_array: FastFunction | None = None
    if data is not decision.data:  # a carrier, or an array of another library
        open_array = _opener_of(data, decision)
        if open_array is None:
            return
    if request.gpu_id is not None:
        return
    if decision.route.layout:
        by_parts = decision.convert_by_parts
        if by_parts is None or open_array is not None:
            return

        def convert(x: Any) -> Any:
            return by_parts(x, _convert_part)

        decision = replace(decision, convert=convert)
    with _declined_lock:
        declined = tuple(dict.fromkeys((*declined, *decision.conversion_errors)))
    with suppress(TypeError):  # an option may be unhashable
        _add_plans(signature, type(data), open_array, request, decision)


def _opener_of(data: Any, decision: Decision) -> FastFunction | None:
    """Return a fast function that views arrays of the class of ``data`` as NumPy arrays, or None."""
    if decision.source is not FOREIGN_HOST or carrier_of(data) is not None:
        return None
    return opener(data, decision.data)


def _add_plans(
    signature: tuple[Any, ...],
    cls: type,
    open_array: FastFunction | None,
    request: Request,
    decision: Decision,
) -> None:
    """Add the plan for the call signature and, for calls that pass only a target, for the target's name."""
    fast = _fast(request, decision)
    is_bare = _is_bare(request)
    # ``convert_memory(x, target)``, whose signature begins with the target, has already tried the fast
    # converter, which is stored for the target's name.
    has_tried = is_bare and signature[0] is not None and open_array is None
    plan = _planned(signature, request, decision, None if has_tried else fast)
    if open_array is not None:
        direct = importer(open_array, decision.target) if decision.route.shares_memory else None
        plan = _after_opening(open_array, plan, direct)
        fast = plan
    _add(signature, cls, plan)
    if is_bare:  # the target may have been passed by position or by keyword
        # If all arrays of the class are sparse, there is no fast converter, and the plan has no plan keys.
        has_only_plan = fast is None and plan is decision.convert
        _add(request.target, cls, plan if has_only_plan else fast)


def _is_bare(request: Request) -> bool:
    """Return whether a call passes only a target."""
    has_options = request.dtype is not None or request.device is not None or request.copy is not None
    return not has_options and request.declared is None and request.grad == "error"


def _convert_part(x: Any, request: Request) -> Any:
    """Convert a part of a sparse array with its plan, or with a new decision if there is no plan."""
    dtype = request.dtype
    device = request.device
    copy = request.copy
    signature = (None, request.target, None, copy, type(copy), dtype, type(dtype), request.grad, device)
    is_bare = copy is None and dtype is None and device is None and request.grad == "error"
    try:
        return plans_by_signature[request.target if is_bare else signature][type(x)](x)
    except declined:
        decision = decide(x, request)
    result = decision()
    store_plan(signature, request, x, decision)
    return result


def _after_opening(
    open_array: FastFunction, plan: FastFunction | None, direct: FastFunction | None
) -> FastFunction | None:
    """Return a plan for arrays of another library, which calls ``direct`` or else converts a NumPy view."""
    if plan is None:
        return None
    if direct is None:
        return lambda x: plan(open_array(x))

    def import_or_open(x: Any) -> Any:
        try:
            return direct(x)
        except NotImplementedError:
            return plan(open_array(x))

    return import_or_open


def _add(signature: Hashable, cls: type, plan: FastFunction | None) -> None:
    """Add a plan for a call signature and a type of arrays, unless it is None."""
    if plan is None:
        return
    by_type = plans_by_signature.setdefault(signature, {})
    if max(len(plans_by_signature), len(by_type)) >= MOST_ENTRIES:  # a program may create classes in a loop
        plans_by_signature.clear()
        by_type = plans_by_signature[signature] = {}
    by_type[cls] = plan


def _planned(
    signature: Hashable, request: Request, decision: Decision, fast: FastFunction | None
) -> FastFunction | None:
    """Return a plan that tries ``fast`` first, then the function cached for the array's plan key."""
    source = decision.source
    target = decision.target
    if decision.route.layout and source.sparse.has_own_classes:
        return decision.convert  # every array of the class is sparse
    plan_key = source.fast_path.plan_key
    alignment = target.alignment
    if plan_key is None or not _depends_on_plan_key_only(request, decision):
        return fast
    try:
        array_key = plan_key(decision.data, alignment)
    except declined:
        return fast  # the array has no plan key, for example because it is not in host memory
    key = (signature, type(decision.data))
    by_plan_key = _converters.get(key) or remember(_converters, key, {})
    if len(by_plan_key) >= _MAX_PLAN_KEYS:
        by_plan_key.clear()
    by_plan_key[array_key] = decision.convert
    if fast is None:
        return lambda x: by_plan_key[plan_key(x, alignment)](x)

    def plan(x: Any) -> Any:
        try:
            return fast(x)
        except declined:
            return by_plan_key[plan_key(x, alignment)](x)

    return plan


def _fast(request: Request, decision: Decision) -> FastFunction | None:
    """Return the fast converter of the two frameworks; None if it does not support the call."""
    source = decision.source
    target = decision.target
    if _is_beyond_fast(request, decision):
        return None
    if source is not target and type(decision.data) not in source.fast_path.fast_types():
        return None
    fast = cell(source.name, target.name)(source, target)
    if fast is None or request.grad == "error" or source is target:
        return fast
    detach = source.autodiff.detach
    return lambda x: fast(detach(x))


def _is_beyond_fast(request: Request, decision: Decision) -> bool:
    """Return whether the call has an option that fast converters do not support."""
    if request.dtype is not None or request.copy:
        return True
    # copy=False also shares scalars, which fast converters copy.
    if request.copy is not None and not decision.source.mutable:
        return True
    if request.device is None:
        return False
    return decision.source is decision.target or Device.parse(request.device) != CPU


def _depends_on_plan_key_only(request: Request, decision: Decision) -> bool:
    """Return whether an array with the same plan key always gets the same decision."""
    if decision.route.device.kind != "cpu":
        return False
    if type(decision.data) not in decision.source.fast_path.fast_types():
        return False
    return request.device is None or Device.parse(request.device).kind == "cpu"
