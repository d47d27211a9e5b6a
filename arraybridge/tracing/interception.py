"""Record conversions by the frameworks' own calls, for traces with ``foreign=True``.

While such a trace is open, the functions in the table `_CALLS` are wrapped. The originals are restored when
the last such trace ends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, update_wrapper
from threading import RLock, current_thread, get_ident, local
from types import MethodType
from typing import Any

import numpy as np

from arraybridge.device import Device
from arraybridge.errors import MemoryConversionError
from arraybridge.host import dlpack_capsules, file_maps
from arraybridge.interface import registry
from arraybridge.interface.framework import Framework
from arraybridge.interface.interchange import is_c_contiguous
from arraybridge.interface.metadata import BUILT_IN
from arraybridge.interface.runtime import NO_CONTEXT, Runtime
from arraybridge.reasons import Cause, Reason, as_cause
from arraybridge.tracing import events, user_lines
from arraybridge.tracing.events import Event, Steps
from arraybridge.tracing.records import Record
from arraybridge.tracing.user_lines import Site
from arraybridge.trees import leaves_of

#: The functions of each package that convert arrays.
_CALLS = {package: calls for one in BUILT_IN.values() for package, calls in one.native_calls.items()}
_WIDE_DTYPES = ("float64", "int64", "uint64", "complex128")
#: Packages whose functions read arrays of any framework on the host.
_ON_HOST = ("numpy",)
#: Functions that read an array of their own library on the host, and therefore wait for it.
_READERS = ("numpy", "cpu", "__array__", "asnumpy", "get", "pull")
#: Packages with a ``compiler`` module that reports whether a call is being compiled.
_COMPILING = ("torch",)
_COMPILERS = ("jit.script", "compile", "export.export")
#: The usual abbreviations of modules and classes.
_SHORT = {package: one.alias for one in BUILT_IN.values() for package in one.native_calls}
_SHORT |= {"jax.numpy": "jnp", "jax.Array": "Array", "torch.Tensor": "Tensor"}
#: The PyTorch compiler, which recognizes NumPy functions by identity (trace_rules.py,
#: pytorch/pytorch#106211). Any PyTorch optimizer imports it. It is active from the first `torch.compile`
#: call. If it was imported before the trace, it is treated as active.
_COMPILER = "torch._dynamo"
# Types of common arguments that are not arrays. Calls with such an argument are passed on after one lookup.
_PLAIN = frozenset((list, tuple, int, float, complex, bool, str, bytes, range, type(None)))
_RESHARDED = Cause(Reason.RESHARDED)
_READ_ONLY = Cause(Reason.READ_ONLY)
_READ_ONLY_FILE_MAP = Cause(Reason.READ_ONLY_FILE_MAP)
_CAPSULE: type = type(np.empty(0).__dlpack__())


@dataclass(slots=True, eq=False)
class Conversion:
    """A conversion by a framework's own call.

    Attributes:
        call: The name of the function, such as ``"jnp.asarray"``.
        source: The name of the source framework; ``"capsule"`` for a DLPack capsule.
        target: The name of the target framework.
        source_dtype: The dtype of the array, as an object of its framework.
        target_dtype: The dtype of the result, as an object of its framework.
        source_device: The device of the array.
        device: The device of the result.
        nbytes: The number of bytes of the result.
        shares: Whether the array and the result share memory.
        steps: The shape, strides and itemsize of a copied array, for `Event.layout`.
        array: The identifying number of a copied array, for `Event.array`.
        unavoidable: The reason why no function could have shared the memory; None if one could.
        wanted: The name of the dtype that the program passed to JAX; ``""`` if it passed none.
        runtime: The properties of the target framework's functions, or the defaults.
    """

    call: str
    source: str
    target: str
    source_dtype: Any
    target_dtype: Any
    source_device: Device
    device: Device
    nbytes: int
    shares: bool
    steps: Steps | None = None
    array: int | None = None
    unavoidable: Cause | None = None
    wanted: str = ""
    runtime: Runtime | type[Runtime] = Runtime

    def cause(self) -> Cause:
        """Return the reason for copying or sharing."""
        if self.shares:
            return Cause(Reason.SHARED_MEMORY)
        if self.source_device != self.device:
            return Cause(Reason.OTHER_DEVICE, device=str(self.device), source_device=str(self.source_device))
        cast = self._cause_of_cast()
        if cast is not None:
            return cast
        steps = None if self.runtime.has_strides else self.steps
        if steps is not None and not is_c_contiguous(*steps):
            return Cause(Reason.NOT_C_CONTIGUOUS)
        return self.unavoidable or Cause(Reason.NATIVE_COPY, call=self.call)

    def _cause_of_cast(self) -> Cause | None:
        """Return the reason for a change of dtype; None if the dtypes are equal."""
        was = _name_of_dtype(self.source_dtype)
        now = _name_of_dtype(self.target_dtype)
        if was == now:
            return None
        is_narrowed = self.wanted in ("", was) and was in _WIDE_DTYPES and now not in _WIDE_DTYPES
        if is_narrowed and self.runtime.narrows_64_bit:
            return Cause(Reason.NARROWED, source_dtype=was, dtype=now)
        return Cause(Reason.NATIVE_CAST, dtype=now)


class NativeCallRecord(Record):
    """The record of a conversion by a framework's own call."""

    __slots__ = ("conversion",)

    def __init__(
        self,
        began: float,
        seconds: float,
        thread: str,
        thread_id: int,
        site: Site,
        conversion: Conversion,
    ) -> None:
        self.began = began
        self.seconds = seconds
        self.thread = thread
        self.thread_id = thread_id
        self.site = site
        self.conversion = conversion

    def event(self, opened: float, line: int) -> Event:
        """Return the event of the call; see `Record.event`."""
        conversion = self.conversion
        cause = conversion.cause()
        file, _, _, library = self.site
        return Event(
            kind="foreign",
            name=conversion.call,
            start=self.began - opened,
            seconds=self.seconds,
            thread=self.thread,
            device=str(conversion.device),
            file=file,
            line=line,
            nbytes=0 if conversion.shares else conversion.nbytes,
            reason=cause.text,
            library=library,
            thread_id=self.thread_id,
            layout="" if conversion.steps is None else events.stride_pattern(*conversion.steps),
            array=conversion.array,
            source=conversion.source,
            target=conversion.target,
            code=cause.code,
        )


def _name_of_dtype(dtype: Any) -> str:
    """Return the NumPy name of a framework's dtype."""
    # PyTorch dtypes do not have a ``name``.
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")


class _Thread(local):
    busy = False

    def __init__(self) -> None:
        self.name = current_thread().name
        self.number = get_ident()


_thread = _Thread()
_lock = RLock()
_open_traces = 0
_patches: dict[str, list[tuple[Any, str, _Call, bool]]] = {}
# This returns False until PyTorch is imported, and is then replaced by `torch.compiler.is_compiling`.
_is_compiling: Callable[[], bool] = bool
_compiles = False
_active_logs: Callable[[], Iterable[Any]] = tuple  # the logs that record calls made by this thread


class _Call:
    """A wrapper of a framework function that records the conversions that the function performs.

    The wrapper compares equal to the function, because PyTorch looks functions up in dicts.
    """

    def __init__(self, original: Any, name: str, library: str = "") -> None:
        update_wrapper(self, original)
        self._original = original
        self._name = name
        self._takes_trees = name == "jax.device_put"
        self._takes_dtype = name in ("jnp.asarray", "jnp.array")
        self._library = library
        self._reads_on_host = library in _ON_HOST or name.rpartition(".")[2] in _READERS
        passed_by = {np.ndarray} if name.startswith("np.") else set()
        self._plain = _PLAIN - {list, tuple} if self._takes_trees else _PLAIN | passed_by
        # Unlike a Python function, a function written in C does not become a bound method.
        self._binds = hasattr(type(original), "__get__")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x: Any = args[0] if args else next(filter(_is_source, kwargs.values()), None)
        cls = type(x)
        if cls in self._plain or _thread.busy or _is_compiling():
            return self._original(*args, **kwargs)
        owner = registry.find_owner(x)
        if owner is None and cls is not _CAPSULE and not self._takes_trees:
            return self._original(*args, **kwargs)
        logs = _active_logs()
        if not logs:
            return self._original(*args, **kwargs)
        _thread.busy = True
        try:
            # Read a capsule before the call consumes it.
            capsule_memory = dlpack_capsules.capsule_address(x) if cls is _CAPSULE else None
            wanted = kwargs.get("dtype", *args[1:2]) if self._takes_dtype else None
            if owner is not None:
                self._wait_for(owner, x)
            events.start_devices(self._library)
            began = time.perf_counter()
            result = self._original(*args, **kwargs)
            self._record(logs, x, result, capsule_memory, wanted, began, time.perf_counter() - began)
        finally:
            _thread.busy = False
        return result

    def _wait_for(self, owner: Framework, x: Any) -> None:
        """Wait for the source array if the call would wait, so that the measured time excludes the wait."""
        if owner.devices.has_only_host:
            return
        runtime = owner.runtime
        # Other calls between GPUs are ordered by streams and do not wait.
        waits = self._reads_on_host or (runtime.is_asynchronous and owner.name != self._library)
        if waits and not runtime.is_idle():
            with runtime.pause_observation():
                events.wait_for(owner, x)

    def _record(
        self,
        logs: Iterable[Any],
        x: Any,
        y: Any,
        capsule_memory: int | None,
        wanted: Any,
        began: float,
        seconds: float,
    ) -> None:
        if y is x:
            return
        frame = sys._getframe(2)  # noqa: SLF001  # the caller's; `f_back` would create other frame objects
        at = user_lines.site(frame, is_native_call=True)
        if at is None:  # a step of a conversion by arraybridge
            return
        # The package that made the call; "" for the user's code.
        caller = "" if at[1] is frame.f_code else frame.f_globals.get("__name__", "").partition(".")[0]
        pairs = zip(leaves_of(x), leaves_of(y), strict=False) if self._takes_trees else ((x, y),)
        for one, other in pairs:
            observer = _observer(registry.find_owner(one), registry.find_owner(other))
            if observer is None:
                continue
            conversion = observer.conversion(self._name, caller, capsule_memory, wanted, one, other)
            if conversion is not None:
                record = NativeCallRecord(began, seconds, _thread.name, _thread.number, at, conversion)
                for log in logs:
                    log.add(record)
                seconds = 0.0  # the first array of a tree gets the time of the call

    def __get__(self, x: Any, cls: Any = None) -> Any:
        return MethodType(self, x) if self._binds and x is not None else self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __eq__(self, other: object) -> bool:
        return bool(self._original == (other._original if isinstance(other, _Call) else other))

    def __hash__(self) -> int:
        return hash(self._original)

    def __reduce__(self) -> Any:
        name = self._original.__name__
        module = sys.modules.get(getattr(self._original, "__module__", None) or "")
        # Functions are pickled by name. If the name does not refer to this wrapper, pickle the original.
        return name if getattr(module, name, None) is self else (max, ((self._original,),))

    def __repr__(self) -> str:
        return repr(self._original)


class _Compiler(_Call):
    """A wrapper of a PyTorch compiler that restores the original functions while the compiler runs.

    The compiler recognizes functions by identity (torch/_dynamo/trace_rules.py, FunctionIdSet).
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        global _compiles
        with _lock:
            if not self._name.startswith("torch.jit"):
                _compiles = True  # NumPy stays unwrapped after the first `torch.compile`
                _detach("numpy")
            _detach("torch")
            try:
                return self._original(*args, **kwargs)
            finally:
                if _open_traces:
                    _attach("torch")


def _is_source(x: Any) -> bool:
    return registry.find_owner(x) is not None or type(x) is _CAPSULE


class _Observer:
    """An observer of calls that convert arrays of one framework to another.

    Args:
        source: The framework of the array; None for a DLPack capsule.
        target: The framework of the result.
    """

    __slots__ = ("_own_callers", "_source", "_target", "_unobserved")

    def __init__(self, source: Framework | None, target: Framework) -> None:
        self._source = source
        self._target = target
        frameworks = [target] if source is None else [source, target]
        #: Packages whose calls are not conversions by the user.
        self._own_callers: set[str] = set()
        for one in frameworks:
            # Calls by NumPy are conversions if another framework owns the array: NumPy reads it for the user.
            if one is source or not one.devices.has_only_host:
                self._own_callers.update(registry.metadata_of(one.name).packages)
        #: The `Runtime` of a framework whose arrays may run the program's code when read; otherwise None.
        self._unobserved = next((one.runtime for one in frameworks if _runs_code(one)), None)

    def conversion(
        self, call: str, caller: str, capsule_memory: int | None, wanted: Any, x: Any, y: Any
    ) -> Conversion | None:
        """Return the conversion that a call made, or None if it was not a conversion.

        Args:
            call: The name of the function.
            caller: The package of the caller; ``""`` for the user's code.
            capsule_memory: The memory address in a DLPack capsule.
            wanted: The dtype argument of the call.
            x: The array or capsule.
            y: The result.
        """
        if y is x or caller in self._own_callers or (self._source is None and capsule_memory is None):
            return None  # for example, PyTorch casts arrays to print them
        with NO_CONTEXT if self._unobserved is None else self._unobserved.pause_observation():
            try:
                if self._source is None:
                    return self._of_capsule(call, capsule_memory, y)
                return self._of_array(self._source, call, wanted, x, y)
            except (MemoryConversionError, RuntimeError, TypeError, ValueError, AttributeError):
                return None  # a traced or unsupported array: a trace must not break the call

    def _of_capsule(self, call: str, capsule_memory: int | None, y: Any) -> Conversion | None:
        dtype, nbytes, address, device = self._target.runtime.observe(y)
        return Conversion(
            call,
            "capsule",
            self._target.name,
            dtype,
            dtype,
            device,
            device,
            nbytes,
            capsule_memory == address,
        )

    def _of_array(self, source: Framework, call: str, wanted: Any, x: Any, y: Any) -> Conversion | None:
        target = self._target
        dtype, nbytes, address, device = target.runtime.observe(y)
        source_dtype, _, source_address, source_device = source.runtime.observe(x)
        together = source_device is device or source_device == device
        if source_address is None:
            spread = source is target and not x.sharding.is_equivalent_to(y.sharding, y.ndim)
        else:
            spread = address is None  # a JAX array on several devices has no address
        if source is target and together and source_dtype == dtype and not spread:
            return None
        shares = bool((source_address and source_address == address) or (together and not nbytes))
        # Positional arguments save 0.2 µs.
        conversion = Conversion(
            call, source.name, target.name, source_dtype, dtype, source_device, device, nbytes, shares
        )
        if not shares:
            conversion.unavoidable = _unavoidable_cause(source, target, x, source_address, together, spread)
            self._describe_copy(conversion, source, wanted, x)
        return conversion

    def _describe_copy(self, conversion: Conversion, source: Framework, wanted: Any, x: Any) -> None:
        """Set the fields that only copies have, such as the array's layout and its identifying number."""
        if source.runtime.has_strides:
            conversion.steps = events.steps(source, x)
        conversion.array = events.same_array(x)
        conversion.runtime = self._target.runtime
        if wanted is not None:
            conversion.wanted = np.dtype(wanted).name


def _unavoidable_cause(
    source: Framework, target: Framework, x: Any, address: int | None, together: bool, spread: bool
) -> Cause | None:
    """Return the reason why no function could have shared the memory of ``x``, or None if one could."""
    cause = _RESHARDED if spread else as_cause(source.interchange.copy_reason(x))
    if cause is not None:
        return cause
    if together and (address or 0) % (target.alignment or 1):
        return file_maps.misalignment(x, target.name, target.alignment)
    keeps_read_only = target.respects_read_only or not target.mutable
    if source.devices.has_only_host and not keeps_read_only and not x.flags.writeable:
        return _READ_ONLY_FILE_MAP if file_maps.is_read_only_map(x) else _READ_ONLY
    return None


def _runs_code(framework: Framework) -> bool:
    """Return whether reading an array of the framework may run the program's code."""
    return type(framework.runtime).pause_observation is not Runtime.pause_observation


@cache
def _observer(source: Framework | None, target: Framework | None) -> _Observer | None:
    return None if target is None else _Observer(source, target)


@contextmanager
def intercepting(active: Callable[[], Iterable[Any]]) -> Iterator[None]:
    """Wrap the functions in `_CALLS` in a ``with`` block. ``active`` returns the logs of this thread."""
    global _open_traces, _active_logs, _compiles
    with _lock:
        _active_logs = active
        _open_traces += 1
        if _open_traces == 1:
            _compiles = _COMPILER in sys.modules
            for package in _CALLS:
                # No public attribute records that an import is still running (Python 3.14,
                # python/cpython#15057).
                spec = getattr(sys.modules.get(package), "__spec__", None)
                if spec is not None and not getattr(spec, "_initializing", False):
                    _attach(package)
            sys.meta_path.insert(0, _later)
    try:
        yield
    finally:
        with _lock:
            _open_traces -= 1
            if _open_traces == 0:
                sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _later]
                for package in _CALLS:
                    _detach(package)


def _detach(package: str) -> None:
    for holder, name, call, own in _patches.pop(package, ()):
        if vars(holder).get(name) is call:  # other code has not replaced the wrapper
            setattr(holder, name, call._original) if own else delattr(holder, name)  # noqa: SLF001


def _attach(package: str) -> None:
    global _is_compiling
    if _compiles and package in _ON_HOST:
        return
    for path in _CALLS[package].split():
        *parents, name = path.split(".")
        owner: Any = sys.modules[package]
        for parent in parents:
            owner = getattr(owner, parent, None)
        full = ".".join((_SHORT.get(package, package), *parents))
        for holder in _patch_targets(owner, name):
            own = name in vars(holder)
            original = vars(holder)[name] if own else getattr(holder, name)
            kind = _Compiler if path in _COMPILERS else _Call
            call = kind(original, f"{_SHORT.get(full, full)}.{name}", package)
            setattr(holder, name, call)
            _patches.setdefault(package, []).append((holder, name, call, own))
    if package in _COMPILING:
        _is_compiling = sys.modules[package].compiler.is_compiling


def _patch_targets(owner: Any, name: str) -> Iterator[Any]:
    """Yield the objects to patch: ``owner``, or the subclasses of an abstract JAX or TensorFlow class."""
    if isinstance(owner, type) and owner.__module__.startswith(("jax", "tensorflow")):
        yield from filter(lambda cls: name in vars(cls), type.__subclasses__(owner))
    elif hasattr(owner, name):
        yield owner


class _LaterImports:
    """A module finder that wraps frameworks when they are imported while a trace is open."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec from the other finders, with a loader that also wraps the module's functions."""
        if name == _COMPILER:
            _detach("numpy")  # the compiler inspects NumPy's functions, which are wrapped again afterwards
        elif name not in _CALLS:
            return None
        others = (getattr(finder, "find_spec", None) for finder in [*sys.meta_path] if finder is not self)
        spec = next((spec for find in others if find and (spec := find(name, path, target))), None)
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            del loader.exec_module
            completed = False
            try:
                run(module)
                completed = True
            finally:
                with _lock:
                    if _open_traces and name == _COMPILER:
                        _attach("numpy")  # also after a failed import, since NumPy was unwrapped for it
                    elif _open_traces and completed:
                        _attach(name)

        loader.exec_module = exec_module
        return spec


_later: Any = _LaterImports()
