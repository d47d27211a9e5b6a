"""Wrappers of the frameworks' own functions, which record conversions for traces with ``foreign=True``.

While such a trace is open, each function in the table `_CALLS` is replaced by a `_Call`, which calls the
original function and adds a `NativeCallRecord` to the logs if the call converted an array. The originals are
restored when the last such trace ends.

- `intercepting` is the ``with`` block during which the functions are wrapped.
- `_attach` wraps the functions of a package, and `_detach` restores them.
- `_LaterImports` wraps the functions of packages that are imported while a trace is open.
- `_Compiler` restores functions while a compiler of PyTorch runs.
- The module `native_calls` determines what a call converted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from threading import RLock, current_thread, get_ident, local
from types import MethodType
from typing import Any

import numpy as np

from arraybridge.host import dlpack_capsules
from arraybridge.interface import registry
from arraybridge.interface.framework import Framework
from arraybridge.interface.metadata import BUILT_IN
from arraybridge.tracing import events, user_lines
from arraybridge.tracing.native_calls import CAPSULE, NativeCallRecord, observer_of, pause_of
from arraybridge.trees import leaves_of

#: The functions of each package that convert arrays.
_CALLS = {package: calls for one in BUILT_IN.values() for package, calls in one.native_calls.items()}
#: The framework of each of these packages.
_FRAMEWORKS = {package: one.name for one in BUILT_IN.values() for package in one.native_calls}
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


class _Thread(local):
    """The state of the current thread: its name and number, and whether a wrapped function is running."""

    busy = False

    def __init__(self) -> None:
        self.name = current_thread().name
        self.number = get_ident()


_thread = _Thread()
_lock = RLock()
_open_traces = 0
# The installed wrappers of each package.
_attached: dict[str, list[_Call]] = {}
# This returns False until PyTorch is imported, and is then replaced by `torch.compiler.is_compiling`.
_is_compiling: Callable[[], bool] = bool
_compiles = False
_active_logs: Callable[[], Iterable[Any]] = tuple  # the logs that record calls made by this thread


class _Call:
    """A wrapper of a framework function that records the conversions that the function performs.

    The wrapper compares equal to the function, because PyTorch looks functions up in dicts. If another
    wrapped function is running in this thread, the call is a step of that function and is not recorded.

    Args:
        holder: The module or class of the function.
        attribute: The name of the function in the holder.
        name: The name of the function in events, such as ``"jnp.asarray"``.
        package: The package that the holder belongs to.
    """

    def __init__(self, holder: Any, attribute: str, name: str, package: str) -> None:
        # A class may also inherit the function.
        self._is_own = attribute in vars(holder)
        original = vars(holder)[attribute] if self._is_own else getattr(holder, attribute)
        update_wrapper(self, original)
        self._original = original
        self._holder = holder
        self._attribute = attribute
        self._name = name
        self._framework = _FRAMEWORKS[package]
        self._takes_trees = name == "jax.device_put"
        self._takes_dtype = name in ("jnp.asarray", "jnp.array")
        self._reads_on_host = package in _ON_HOST or attribute in _READERS
        passed_by = {np.ndarray} if package == "numpy" else set()
        self._plain = _PLAIN - {list, tuple} if self._takes_trees else _PLAIN | passed_by
        # Unlike a Python function, a function written in C does not become a bound method.
        self._binds = hasattr(type(original), "__get__")

    def attach(self) -> None:
        """Replace the function by this wrapper."""
        setattr(self._holder, self._attribute, self)

    def detach(self) -> None:
        """Restore the function, unless other code has replaced the wrapper."""
        if vars(self._holder).get(self._attribute) is not self:
            return
        if self._is_own:
            setattr(self._holder, self._attribute, self._original)
        else:
            delattr(self._holder, self._attribute)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x: Any = args[0] if args else next(filter(_is_source, kwargs.values()), None)
        cls = type(x)
        try:
            is_passed_on = cls in self._plain
        except TypeError:  # the class is unhashable
            is_passed_on = False
        if is_passed_on or _thread.busy or _is_compiling():
            return self._original(*args, **kwargs)
        owner = registry.find_owner(x)
        if owner is None and cls is not CAPSULE and not self._takes_trees:
            return self._original(*args, **kwargs)
        logs = _active_logs()
        if not logs:
            return self._original(*args, **kwargs)
        _thread.busy = True
        try:
            # Read a capsule before the call consumes it.
            capsule_memory = dlpack_capsules.capsule_address(x) if cls is CAPSULE else None
            self._prepare(owner, x)
            began = time.perf_counter()
            result = self._original(*args, **kwargs)
            seconds = time.perf_counter() - began
            wanted = kwargs.get("dtype", *args[1:2]) if self._takes_dtype else None
            self._record(logs, x, result, capsule_memory, wanted, began, seconds)
        finally:
            _thread.busy = False
        return result

    def _prepare(self, owner: Framework | None, x: Any) -> None:
        """Start the devices and wait for the source if the call would, so that its time includes neither."""
        is_own = owner is not None and owner.name == self._framework
        if not is_own:  # otherwise, the devices have started
            events.start_devices(self._framework)
        if owner is None or owner.devices.has_only_host:
            return
        runtime = owner.runtime
        # Other calls between GPUs are ordered by streams and do not wait.
        waits = self._reads_on_host or (runtime.is_asynchronous and not is_own)
        if not waits or runtime.is_idle():
            return
        pause = pause_of(owner)
        if pause is None:
            events.wait_for(owner, x)
        else:
            with pause():
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
        """Add a record of each array that a call converted to the logs."""
        if y is x:
            return
        frame = sys._getframe(2)  # noqa: SLF001  # the caller's; `f_back` would create other frame objects
        site = user_lines.site(frame, is_native_call=True)
        if site is None:  # a step of a conversion by arraybridge
            return
        # The package that made the call; "" for the user's code.
        caller = "" if site[1] is frame.f_code else frame.f_globals.get("__name__", "").partition(".")[0]
        pairs = zip(leaves_of(x), leaves_of(y), strict=False) if self._takes_trees else ((x, y),)
        for one, other in pairs:
            observer = None if other is one else observer_of(one, other)
            if observer is None or caller in observer.own_callers:
                continue
            fields = observer.examine(self._name, one, other, capsule_memory, wanted)
            if fields is None:
                continue
            record = NativeCallRecord(began, seconds, _thread.name, _thread.number, site, fields)
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


def _is_source(x: Any) -> bool:
    return registry.find_owner(x) is not None or type(x) is CAPSULE


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
    """Restore the functions of a package."""
    for call in _attached.pop(package, ()):
        call.detach()


def _attach(package: str) -> None:
    """Wrap the functions of a package, which is imported."""
    global _is_compiling
    if _compiles and package in _ON_HOST:
        return
    for path in _CALLS[package].split():
        *parents, attribute = path.split(".")
        owner: Any = sys.modules[package]
        for parent in parents:
            owner = getattr(owner, parent, None)
        full = ".".join((_SHORT.get(package, package), *parents))
        name = f"{_SHORT.get(full, full)}.{attribute}"
        kind = _Compiler if path in _COMPILERS else _Call
        for holder in _patch_targets(owner, attribute):
            call = kind(holder, attribute, name, package)
            call.attach()
            _attached.setdefault(package, []).append(call)
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
