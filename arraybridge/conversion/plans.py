"""What `decide` has decided, kept for the calls that follow.

A form is all that a call says besides its array: the target, a declared source, the options. Most calls are
of the plain form, which names a target alone: `plain` has for it, by target and type of the array, the fast
converter of the pair, which looks at each array itself and raises for one that needs care. For any other
form, and for arrays that need care, `forms` has a plan, by form and type. It asks the few facts
on which the decision rests, as the source's framework tells them of its own arrays, and runs what
`decide` decided for an array of the same facts. Where that was to share, and the pair has a fast
converter that looks at all on which this form depends, that comes first. What a framework cannot tell,
what lives on an accelerator, and what depends on more than the call and the array (``"auto"``, a GPU that
is missing) is never kept, and goes to `decide` each time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from arraybridge.conversion.decide import Request, Run
from arraybridge.conversion.routes import FastFunction, Route
from arraybridge.conversion.table import fast_converter
from arraybridge.errors import MemoryConversionError
from arraybridge.frameworks.base import Framework, refusals
from arraybridge.frameworks.parts import Fallback
from arraybridge.trees import ARRAY, TREE, kind_of, kinds, map_arrays, refuse_circle
from arraybridge.types import Cache, Device

__all__ = ["form_of", "forms", "keep", "map_by_type", "plain"]

#: Target → type of the array → the fast converter of the pair.
plain: Cache[Any, dict[type, FastFunction]] = Cache()
#: Form → type of the array → the plan, a function of the array.
forms: Cache[Hashable, dict[type, FastFunction]] = Cache()
#: What a converter or a plan raises for an array that it cannot vouch for, or that is not planned yet; the
#: careful way says the last word, and in full.
declined: tuple[type[Exception], ...] = (Fallback, KeyError, TypeError, MemoryConversionError)

# Form and type → facts → what was decided for them.
_decided: Cache[tuple[Hashable, type], dict[Hashable, FastFunction]] = Cache()
# Type of the array and target → the function that tells the facts, None where there is none.
_facts: Cache[tuple[type, str], Callable[[Any], Hashable] | None] = Cache()
_MAX_TYPES = 512
_MAX_FACTS = 4096


def form_of(target: str, grad: str, dtype: Any = None, device: Any = None) -> tuple[Any, ...]:
    """The key in `forms` of ``convert_memory(x, target, grad=grad, dtype=dtype, device=device)``."""
    return (target, None, None, None, dtype, grad, device)


def map_by_type(tree: Any, known: Mapping[type, Callable[[Any], Any]], *, also: type | tuple[()] = ()) -> Any:
    """`map_arrays` where the type of an array says what changes it; nothing is said of where an error was.

    Args:
        tree: a container.
        known: type → a function of one array.
        also: as for `map_arrays`.

    Raises:
        KeyError: there is an array of another type.
        ValueError: a container contains itself.
    """
    cls = type(tree)
    if cls is dict:
        children: Iterable[Any] = list(tree.values())
    elif cls is list or cls is tuple:
        children = tree
    else:
        return map_arrays(tree, lambda x: known[type(x)](x), also=also)
    made = []
    same = True
    for child in children:
        change = known.get(type(child))
        if change is not None:
            new = change(child)
        else:
            kind = kinds.get(type(child)) or kind_of(child)
            if kind == ARRAY or isinstance(child, also):
                raise KeyError(type(child))
            try:
                new = map_by_type(child, known, also=also) if kind == TREE else child
            except RecursionError:
                refuse_circle(child)
                raise
        if new is not child:
            same = False
        made.append(new)
    if same:
        return tree
    return made if cls is list else tuple(made) if cls is tuple else dict(zip(tree, made, strict=True))


def keep(form: Hashable | None, request: Request, route: Route, run: Run) -> None:
    """Remember what was decided for this form, and for an array with these facts, if that can be.

    ``form`` is the key of `forms` that `convert_memory` has made, or None. Equal keys have to mean the same.
    """
    global declined
    source, target, cls = run.source, run.target, type(request.data)
    if request.data is not run.data:
        return  # an array of another library, which was opened first
    known = plain.setdefault(request.target, {})  # once: another thread may register a framework meanwhile
    if _is_plain(request) and cls not in known:
        fast = fast_converter(source, target, cls)
        if fast is not None:
            declined = tuple(dict.fromkeys((*declined, *refusals(source, target))))
            if len(known) >= _MAX_TYPES:
                known.clear()
            known[cls] = fast
    try:
        hash(form)
    except TypeError:  # an option that cannot be a key
        return
    if form is None or not _rests_on_facts(request, route):
        return
    facts = _facts_of(cls, source, target)
    if facts is None:
        return
    declined = tuple(dict.fromkeys((*declined, *refusals(source, target))))
    try:
        told = facts(request.data)
    except declined:
        return
    if len(_decided) >= _MAX_TYPES:
        forms.clear()
        _decided.clear()
    runs = _decided.setdefault((form, cls), {})
    if len(runs) >= _MAX_FACTS:
        runs.clear()
    runs[told] = run.convert
    planned = forms.setdefault(form, {})
    if cls not in planned:
        planned[cls] = _plan(facts, runs, None if _is_plain(request) else run.fast)


def _plan(
    facts: Callable[[Any], Hashable], runs: dict[Hashable, FastFunction], fast: FastFunction | None
) -> FastFunction:
    if fast is None:
        return lambda x: runs[facts(x)](x)
    raised = declined

    def plan(x: Any) -> Any:
        try:
            return fast(x)
        except raised:
            return runs[facts(x)](x)

    return plan


def _is_plain(request: Request) -> bool:
    return (
        request.declared is None
        and request.gpu_id is None
        and request.device is None
        and request.copy is None
        and request.dtype is None
        and request.grad == "error"
    )


def _rests_on_facts(request: Request, route: Route) -> bool:
    """Whether another such array would go to the same place, whatever happens until then."""
    if request.gpu_id is not None or route.device.kind != "cpu":
        return False
    return request.device is None or Device.parse(request.device).kind == "cpu"


def _facts_of(cls: type, source: Framework, target: Framework) -> Callable[[Any], Hashable] | None:
    pair = (cls, target.name)
    try:
        return _facts[pair]
    except KeyError:
        found = source.fast.facts(target.alignment) if cls in source.fast.types() else None
    if len(_facts) >= _MAX_TYPES:
        _facts.clear()
    _facts[pair] = found
    return found
