"""What a decorated function does on each call: arguments in, the function, its results out."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from arraybridge import batches
from arraybridge.conversion import plans
from arraybridge.conversion.convert import Grad
from arraybridge.conversion.trace import open_logs
from arraybridge.errors import ArrayNotSupportedError, MemoryConversionError, SourceMismatchError
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Framework, find_or_host
from arraybridge.functions.convert import being_compiled, convert, owner_name
from arraybridge.functions.declaration import Call, Declaration
from arraybridge.functions.dtypes import DtypeConversion, convert_dtype
from arraybridge.functions.options import DecoratorOptions
from arraybridge.functions.slices import call_by_planes
from arraybridge.functions.wrap import takes_self
from arraybridge.memory.recovery import Plan, attempted, faults, recovered
from arraybridge.options import OneWarning
from arraybridge.placement import busy_workers, card_meant, worker_device
from arraybridge.timeline.events import device_words
from arraybridge.trees import (
    ARRAY,
    LEAF,
    TREE,
    is_array,
    kind_of,
    kinds,
    leaves_of,
    map_arrays,
    prefix,
    source_of,
)
from arraybridge.types import Cache, Device

__all__ = ["Runner", "framework_of"]


_frameworks: Cache[str, Framework] = Cache()
# Where the plans of arguments are, by form, for a framework without queues of its own.
_ready: Cache[Any, dict[type, Any] | None] = Cache()


def framework_of(name: str) -> Framework:
    found = _frameworks.get(name)
    if found is None:
        found = _frameworks[name] = registry.framework(name)
    return found


class Runner(Declaration):
    """Runs a function in its framework. It holds no framework's objects, so that it pickles."""

    def __init__(self, fn: Callable[..., Any], options: DecoratorOptions) -> None:
        super().__init__(fn, options.contract)
        self.options = options
        self.name = options.framework
        self.grad: Grad = "detach" if options.grad == "detach" else "error"
        # NumPy lives on the host, whatever gpu_id says.
        self.placed = options.device is not None or (options.gpu_id is not None and self.name != "numpy")
        # In words, which are the quicker key of a plan.
        self.device = None if options.device is None else str(Device.parse(options.device))
        self.skip = 1 if takes_self(fn) else 0  # self stays as it is, also where it is an array
        self.body = self._by_planes if options.slice_by_slice else fn
        converts_dtype = options.dtype_conversion is not DtypeConversion.NATIVE_OUTPUT
        # Most decorators say nothing of devices, dtypes and the like, and then an array takes one call.
        self.strict = options.strict
        self.plain_arguments = not self.placed and not options.strict and options.dtype is None
        self.keeps_dtype = not converts_dtype
        self.plain_results = self.keeps_dtype and options.output_type != "input"
        self.recovers = options.oom_recovery is not False
        self.splits = self.recovers and options.oom_recovery is not True
        self.output = options.output_type
        # Where the plans of its arguments are, by type; what names a card has none. Those of its results are
        # of the plain form, where they are converted at all.
        self.planned = options.gpu_id is None or self.name == "numpy"
        self.results_planned = self.keeps_dtype and self.grad == "error" and self.contract is None
        self.into: Any = self.name
        if self.grad != "error" or self.placed or options.dtype is not None:
            self.into = plans.form_of(self.name, self.grad, options.dtype, self.device)
        self.only = options.input_type if options.strict else None
        self.place: Device | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # What was found out here, as `place`, is of no use in another process, and the pickled bytes of a
        # function would differ from call to call; Dask names its tasks by them.
        return (Runner, (self.fn, self.options))

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if open_logs or busy_workers or being_compiled():
            return self._without_plans(args, kwargs)
        brought = None if kwargs or faults else self._by_plans(args)
        if brought is None:
            call = Call()
            return self._home_by_plans(self._called(args, kwargs, call), call.first)
        values, first = brought
        if not self.recovers:
            return self._home_by_plans(self.body(*values), first)
        result, failure = attempted(self.body, values, {}, sys.exception())
        if failure is None:
            return self._home_by_plans(batches.plain(result) if self.splits else result, first)
        del brought, values  # nothing of an attempt stays until the next
        call = Call()
        call.first = first
        try:
            return self._home_by_plans(self._recovering(args, kwargs, call, failure), first)
        finally:
            del failure  # whose traceback holds this frame

    def _without_plans(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = Call()
        span = self.begun() if open_logs else None
        if span is None:
            return self.leave(self._called(args, kwargs, call), call)
        with span:
            result = self._called(args, kwargs, call)
            span.device = device_words(result) if call.place is None else str(call.place)
            return self.leave(result, call)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> Any:
        return self._recovering(args, kwargs, call) if self.recovers else self._carefully(args, kwargs, call)

    def _carefully(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> Any:
        args, kwargs, _ = self.enter(args, kwargs, call)
        return self._run(args, kwargs, call)

    def _by_plans(self, args: tuple[Any, ...]) -> tuple[list[Any], Any] | None:
        """The arguments as `enter` makes them and the first array as it came, where each has a plan."""
        known = _ready.get(self.into)
        if known is None or not self.planned:
            return None
        values: list[Any] = []
        given, first, only = args, None, self.only
        if self.skip:
            values.extend(args[:1])
            given = args[1:]
        try:
            for value in given:
                cls = type(value)
                look = known.get(cls)
                if look is not None:
                    if only is not None and owner_name(value) != only:
                        return None
                    values.append(look(value))
                    if first is None:
                        first = value
                elif kinds.get(cls) == LEAF:
                    values.append(value)
                elif kinds.get(cls) == TREE and self.plain_results and only is None and not self.splits:
                    made = plans.map_by_type(value, known)
                    values.append(made)
                    if first is None and made is not value:  # there were arrays in it
                        first = value
                else:
                    return None
        except plans.declined:
            return None
        except Exception:
            # Memory may run out here too, which each framework says in its own way: the recovery knows them.
            if not self.recovers:
                raise
            return None
        return None if first is None else (values, first)

    def _home_by_plans(self, result: Any, first: Any) -> Any:
        """What `leave` makes of a result, where it has a plan."""
        if self.results_planned:
            output = self.output
            if output == "input" and type(first) is np.ndarray:
                output = "numpy"
            known = plans.by_form.get(output)
            if known is not None:
                cls = type(result)
                look = known.get(cls)
                try:
                    if look is not None:
                        return look(result)
                    if kinds.get(cls) == TREE:
                        return plans.map_by_type(result, known, also=np.generic)
                except plans.declined:  # the careful way says it in full
                    pass
        call = Call()
        call.first = first
        return self.leave(result, call)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> Any:
        if call.place is None and (call.first is not None or not self.placed):
            return self.body(*args, **kwargs)
        if call.first is None and self.placed and card_meant(self.options.gpu_id) != "auto":
            # No array brings the device along; it has to be selected for those that the function makes.
            framework = framework_of(self.name)
            with framework.selected(find_or_host(framework, self._wanted(framework))):
                return self.body(*args, **kwargs)
        # The place is known where it matters: on a card with streams.
        if call.place is None or not self.options.stream:
            return self.body(*args, **kwargs)
        # `args` keeps what was brought alive until the stream of the caller waits for this one.
        framework = framework_of(self.name)
        with framework.streams.stream(call.place):
            result = self.body(*args, **kwargs)
        if not framework.streams.has_queues:
            return result
        # What was made on that stream is read, and freed, on the caller's.
        return map_arrays(result, lambda x: framework.streams.take_over(x) if framework.owns(x) else x)

    def _by_planes(self, *args: Any, **kwargs: Any) -> Any:
        return call_by_planes(self.fn, self.skip, args, kwargs)

    def _recovering(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Call,
        failure: Exception | None = None,
    ) -> Any:
        """The conversions are tried again with the function: they too may run out of memory.

        ``failure`` is that of a first attempt.
        """
        options = self.options
        gpu_id = None if options.gpu_id is None else card_meant(options.gpu_id)
        if gpu_id == "auto":
            gpu_id = None
        if options.oom_recovery is True:
            attempt = (args, kwargs, call)
            plan = Plan(options.max_retries, gpu_id)
            try:
                return recovered(self._carefully, attempt, {}, plan, failure)
            finally:
                del failure  # whose traceback holds this frame
        own, batch, names = args[: self.skip], args[self.skip :], tuple(kwargs)
        count = len(batch)

        def in_part(*values: Any) -> Any:
            named = dict(zip(names, values[count:], strict=True))
            return self._carefully((*own, *values[:count]), named, call)

        plan = Plan(options.max_retries, gpu_id, split=True, axis=options.split_axis, least=options.min_split)
        try:
            return recovered(in_part, (*batch, *kwargs.values()), {}, plan, failure)
        finally:
            del failure

    # -- arguments --------------------------------------------------------------------------------

    def enter(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any], Call]:
        """The arguments with their arrays brought to the framework, and what to remember of them."""
        if call is None:
            call = self.opened()
        if self.placed and not being_compiled():
            with OneWarning():
                return self._entered(args, kwargs, call)
        return self._entered(args, kwargs, call)

    def _entered(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call
    ) -> tuple[tuple[Any, ...], dict[str, Any], Call]:
        changed: list[Any] | None = None
        for i in range(self.skip, len(args)):
            value = args[i]
            kind = kinds.get(type(value)) or kind_of(value)
            if kind == LEAF:
                continue
            try:
                new = self._array(value, call) if kind == ARRAY else self._tree(value, call)
            except MemoryConversionError as error:
                prefix(error, f"{self.label}(), argument {self._parameter(i)}")
                raise
            if new is not value:
                if changed is None:
                    changed = list(args)
                changed[i] = new
        # Whoever called keeps the arguments as they came: what was made of them must not outlive an attempt.
        named = kwargs
        for name, value in kwargs.items():
            kind = kinds.get(type(value)) or kind_of(value)
            if kind == LEAF:
                continue
            try:
                new = self._array(value, call) if kind == ARRAY else self._tree(value, call)
            except MemoryConversionError as error:
                prefix(error, f"{self.label}(), argument {name!r}")
                raise
            if new is not value:
                if named is kwargs:
                    named = kwargs.copy()
                named[name] = new
        if call.first is None or self.strict:
            self._refuse_what_is_no_array(args, kwargs)
        if self.planned and call.first is not None and not being_compiled():
            known = plans.by_form.get(self.name) if self.into == self.name else plans.by_form.get(self.into)
            if known is not _ready.get(self.into) and not framework_of(self.name).streams.has_queues:
                _ready[self.into] = known
        return args if changed is None else tuple(changed), named, call

    def bring(self, value: Any) -> Any:
        if self.strict:
            self._refuse_what_is_no_array((), {"value that was sent": value})
        kind = kinds.get(type(value)) or kind_of(value)
        if kind == LEAF:
            return value
        try:
            return self._array(value, Call()) if kind == ARRAY else self._tree(value, Call())
        except MemoryConversionError as error:
            prefix(error, f"{self.label}(), argument 'value that was sent'")
            raise

    def _refuse_what_is_no_array(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse an argument that could be made an array and is none, as a table of pandas.

        The function was written for arrays, and would be run on what its framework does not know.
        """
        given: list[tuple[int | str, Any]] = [(i, args[i]) for i in range(self.skip, len(args))]
        for where, value in [*given, *kwargs.items()]:
            for leaf in leaves_of(value):
                if hasattr(type(leaf), "__array__") and not (is_array(leaf) or isinstance(leaf, np.generic)):
                    error = registry.unknown_array(leaf)
                    prefix(error, f"{self.label}(), argument {self._parameter(where)}")
                    raise error

    def _tree(self, value: Any, call: Call) -> Any:
        return map_arrays(value, lambda leaf: self._array(leaf, call))

    def _array(self, value: Any, call: Call) -> Any:
        if call.first is None:
            call.first = value
        if self.plain_arguments:
            new = convert(value, self.name, self.grad, None, self._running_on() if busy_workers else None)
        else:
            if self.strict:
                self._check_source(value)
            new = (
                self._to_place(value, call)
                if self.placed
                else convert(value, self.name, self.grad, None, self._running_on(), self.options.dtype)
            )
        if call.place is None:
            framework = _frameworks.get(self.name) or framework_of(self.name)
            if framework.streams.has_queues or (self.placed and card_meant(self.options.gpu_id) == "auto"):
                call.place = framework.device_of(new)
        return new

    def _running_on(self) -> Device | None:
        """The device of this worker of `device_map`, for a function that names none; NumPy has but one."""
        # torch.compile, which traces this, does not know context variables.
        return worker_device.get() if busy_workers and self.name != "numpy" else None

    def _to_place(self, value: Any, call: Call) -> Any:
        options = self.options
        gpu_id = card_meant(options.gpu_id)
        if gpu_id == "auto":
            if call.place is None:
                return convert(value, self.name, self.grad, "auto", None, options.dtype)
            # All arrays of a call go where the first one went.
            return convert(value, self.name, self.grad, None, call.place, options.dtype)
        framework = framework_of(self.name)
        if options.dtype is None and framework.owns(value) and not open_logs:
            here, wanted = framework.device_of(value), self._wanted(framework)
            whole = not framework.pool.is_scattered(value)
            if whole and here.kind == wanted.kind and here.index == wanted.index:
                return value
        return convert(value, self.name, self.grad, gpu_id, self.device, options.dtype)

    def _wanted(self, framework: Framework) -> Device:
        if self.place is None:
            gpu_id, device = card_meant(self.options.gpu_id), self.options.device
            self.place = (
                framework.accelerator(gpu_id) if isinstance(gpu_id, int) else Device.parse(device or "cpu")
            )
        return self.place

    def _check_source(self, value: Any) -> None:
        source, _ = source_of(value)
        declared = self.options.input_type
        if source.name != declared:
            raise SourceMismatchError(
                f"it takes arrays of {declared} alone (strict=True), and this one is of {source.name};"
                f" convert it with to_{declared}(), or leave strict=True out to have it converted",
                source_type=source.name,
                target_type=self.name,
                reason=f"declared {declared}, found {source.name}",
            )

    def _parameter(self, index: int | str) -> str:
        """The name of an argument by its position or keyword, for a message."""
        if isinstance(index, str):
            return repr(index)
        try:
            parameters = list(inspect.signature(self.fn).parameters.values())
        except (TypeError, ValueError):  # a callable written in C may have no signature
            return str(index)
        for i, parameter in enumerate(parameters):
            if parameter.kind is parameter.VAR_POSITIONAL:
                return f"*{parameter.name}[{index - i}]"
            if i == index:
                return repr(parameter.name)
        return str(index)

    # -- results ----------------------------------------------------------------------------------

    def leave(self, result: Any, call: Call | None) -> Any:
        """The result with its arrays converted as the options say, checked against the contract."""
        kind = kinds.get(type(result)) or kind_of(result)
        if kind != LEAF or isinstance(result, np.generic):
            try:
                if kind == ARRAY and self.plain_results:
                    result = convert(result, self.output, self.grad)
                elif kind == ARRAY and self.keeps_dtype and call is not None and call.first is not None:
                    result = self._home(result, *source_of(call.first))
                else:
                    result = map_arrays(result, self._out(call or Call()), also=np.generic)
            except MemoryConversionError as error:
                prefix(error, f"{self.label}(), result")
                raise
        return result if self.contract is None else super().leave(result, call)

    def _out(self, call: Call) -> Callable[[Any], Any]:
        """The function that converts one array of the result."""
        if self.plain_results:
            name, grad = self.output, self.grad
            return lambda x: (
                self._scalar_out(x, None) if isinstance(x, np.generic) else convert(x, name, grad)
            )
        first = None if call.first is None else source_of(call.first)
        wanted = self.options.dtype_conversion
        dtype: str | None = wanted.value
        if wanted is DtypeConversion.PRESERVE_INPUT:
            dtype = None if first is None else first[0].dtype_name(first[1])
        elif wanted is DtypeConversion.NATIVE_OUTPUT:
            dtype = None

        def out(array: Any) -> Any:
            if isinstance(array, np.generic):
                return self._scalar_out(array, first)
            if dtype is None:
                return self._delivered(array, first)
            dtypes = source_of(array)[0].dtypes
            if dtypes is None or dtype in dtypes:
                return self._delivered(convert_dtype(array, dtype), first)
            return convert_dtype(self._delivered(array, first), dtype)  # its own framework has no such dtype

        return out

    def _scalar_out(self, scalar: Any, first: tuple[Framework, Any] | None) -> Any:
        """One of NumPy's scalars: an array without axes elsewhere, where there are such arrays."""
        name = self.output
        if name == "input":
            name = "numpy" if first is None else first[0].name
        if name == "numpy" or not is_array(scalar):
            return scalar
        try:
            framework_of(name).supports("float32", ())
        except ArrayNotSupportedError:  # it has no arrays without axes
            return scalar
        return self._delivered(np.asarray(scalar), first)

    def _delivered(self, array: Any, first: tuple[Framework, Any] | None) -> Any:
        if self.output != "input":
            return convert(array, self.output, self.grad)
        return array if first is None else self._home(array, *first)

    def _home(self, array: Any, source: Framework, brought: Any) -> Any:
        """An array of the result in the framework and on the device of what the caller brought."""
        if source.name != "numpy":
            home = source.device_of(brought)
            owner, held = source_of(array)
            here = home if held is brought else owner.device_of(held)
            if home.kind != here.kind or home.index != here.index:
                return convert(array, source.name, self.grad, device=home)
            if owner is source and not open_logs:
                return array
        return convert(array, source.name, self.grad)
