"""The plan cache: decisions that later calls with the same signature and plan key reuse.

1. A *form* is the call signature without the array: the target, a declared source and the options.
2. `plans_by_signature` maps a form and the type of the array to a plan, a function that converts such arrays.
3. A plan first tries the fast converter of the two frameworks, which raises for arrays that need special
   handling. Then it computes the plan key of the array (`FastPath.plan_key`), and runs the function for
   that key.
4. For the most common calls, which pass only a target, `plans_by_signature` has the fast converter under
   that name.

Never cached: arrays whose framework has no plan key, arrays on accelerators, and calls that depend on
more than the call and the array (``gpu_id="auto"``, a missing GPU).
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from dataclasses import replace
from threading import Lock
from typing import Any

from arraybridge.carriers.registry import carrier_of
from arraybridge.conversion.decide import decide
from arraybridge.conversion.decision import Decision, Request
from arraybridge.conversion.table import FastFunction, cell
from arraybridge.errors import MemoryConversionError
from arraybridge.frameworks.base import CPU, conversion_errors
from arraybridge.frameworks.protocol_producers import FOREIGN_HOST, importer, opener
from arraybridge.types import MOST_ENTRIES, Device, new_cache, remember

__all__ = ["declined", "plans_by_signature", "signature_of_call"]

#: Form → type of the array → the plan, a function of the array.
plans_by_signature: dict[Hashable, dict[type, FastFunction]] = new_cache()
#: What a plan raises for an array that it cannot vouch for; the careful way says the last word, and in full.
declined: tuple[type[Exception], ...] = (KeyError, MemoryConversionError, *conversion_errors())
_declining = Lock()

# Form and type of the array → facts → what was decided for them.
_decided: dict[tuple[Hashable, type], dict[Hashable, FastFunction]] = new_cache()
_MAX_PLAN_KEYS = 4096


def signature_of_call(
    source: Any, target: Any, *, dtype: Any = None, grad: str = "error", device: Any = None
) -> Hashable:
    """The form of ``convert_memory(x, source, target, dtype=dtype, grad=grad, device=device)``."""
    return (source, target, None, None, type(None), dtype, type(dtype), grad, device)


def store_plan(signature: tuple[Any, ...], request: Request, data: Any, decision: Decision) -> None:
    """Remember what was decided for this form, and for an array with these facts, if that can be."""
    global declined
    opened: FastFunction | None = None
    if data is not decision.data:  # an array of another library, which was opened first
        opened = _opener_of(data, decision)
        if opened is None:
            return
    if request.gpu_id is not None:
        return
    if decision.route.layout:
        by_parts = decision.convert_by_parts
        if by_parts is None or opened is not None:
            return

        def convert(x: Any) -> Any:
            return by_parts(x, _convert_part)

        decision = replace(decision, convert=convert)
    with _declining:
        declined = tuple(dict.fromkeys((*declined, *decision.conversion_errors)))
    with suppress(TypeError):  # an option that cannot be a key
        _add_plans(signature, type(data), opened, request, decision)


def _opener_of(data: Any, decision: Decision) -> FastFunction | None:
    """Return a function that opens such an array of another library; None if there is no fast one."""
    if decision.source is not FOREIGN_HOST or carrier_of(data) is not None:
        return None
    return opener(data, decision.data)


def _add_plans(
    signature: tuple[Any, ...], cls: type, opened: FastFunction | None, request: Request, decision: Decision
) -> None:
    """Add the plan under the form and, for calls that pass only a target, under the target's name."""
    fast = _fast(request, decision)
    is_bare = _is_bare(request)
    # A call that passes its target first has tried the fast converter by then.
    has_tried = is_bare and signature[0] is not None and opened is None
    plan = _planned(signature, request, decision, None if has_tried else fast)
    if opened is not None:
        direct = importer(opened, decision.target) if decision.route.shares_memory else None
        plan = _after(opened, plan, direct)
        fast = plan
    _add(signature, cls, plan)
    if is_bare:  # regardless of how it was written
        has_only_plan = fast is None and plan is decision.convert
        _add(request.target, cls, plan if has_only_plan else fast)


def _is_bare(request: Request) -> bool:
    """Return whether a call passes only a target."""
    has_options = request.dtype is not None or request.device is not None or request.copy is not None
    return not has_options and request.declared is None and request.grad == "error"


def _convert_part(x: Any, request: Request) -> Any:
    """Return a part of a sparse array, converted by its plan."""
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


def _after(
    opened: FastFunction, plan: FastFunction | None, direct: FastFunction | None
) -> FastFunction | None:
    """Return a plan for arrays of another library, which ``direct`` imports or which are opened first."""
    if plan is None:
        return None
    if direct is None:
        return lambda x: plan(opened(x))

    def import_or_open(x: Any) -> Any:
        try:
            return direct(x)
        except NotImplementedError:
            return plan(opened(x))

    return import_or_open


def _add(signature: Hashable, cls: type, plan: FastFunction | None) -> None:
    by_type = plans_by_signature.setdefault(signature, {})
    if max(len(plans_by_signature), len(by_type)) >= MOST_ENTRIES:  # of classes that are made in a loop
        plans_by_signature.clear()
        by_type = plans_by_signature[signature] = {}
    if plan is not None:
        by_type[cls] = plan


def _planned(
    signature: Hashable, request: Request, decision: Decision, fast: FastFunction | None
) -> FastFunction | None:
    """``fast``, and what was decided for the facts of the arrays for which it is not enough."""
    source = decision.source
    target = decision.target
    if decision.route.layout and source.sparse.has_own_classes:
        return decision.convert  # every array of the class is sparse
    plan_key = source.fast_path.plan_key
    alignment = target.alignment
    if plan_key is None or not _depends_on_plan_key_only(request, decision):
        return fast
    try:
        of_this_array = plan_key(decision.data, alignment)
    except declined:
        return fast  # it is not simply there, in the host's memory
    key = (signature, type(decision.data))
    runs = _decided.get(key) or remember(_decided, key, {})
    if len(runs) >= _MAX_PLAN_KEYS:
        runs.clear()
    runs[of_this_array] = decision.convert
    if fast is None:
        return lambda x: runs[plan_key(x, alignment)](x)

    def plan(x: Any) -> Any:
        try:
            return fast(x)
        except declined:
            return runs[plan_key(x, alignment)](x)

    return plan


def _fast(request: Request, decision: Decision) -> FastFunction | None:
    """Return the fast converter of the pair; None if the form depends on more than it reads."""
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
    """Return whether an option asks for a dtype, copy or device, none of which fast converters read."""
    if request.dtype is not None or request.copy:
        return True
    if request.copy is not None and not decision.source.mutable:  # a scalar may have to be copied
        return True
    if request.device is None:
        return False
    return decision.source is decision.target or Device.parse(request.device) != CPU


def _depends_on_plan_key_only(request: Request, decision: Decision) -> bool:
    """Whether another such array would go to the same place, whatever happens until then."""
    if decision.route.device.kind != "cpu":
        return False
    if type(decision.data) not in decision.source.fast_path.fast_types():
        return False
    return request.device is None or Device.parse(request.device).kind == "cpu"
