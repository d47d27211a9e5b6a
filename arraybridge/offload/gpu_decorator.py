"""The decorator `gpu`, which runs each call to a NumPy-style function on the faster device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from arraybridge.compilers import exempt
from arraybridge.conversion.device_resolution import Placement, check_placement
from arraybridge.decorators.wrapping import Decorated, P, R, decorate, kind_of_function, label_of, wrap
from arraybridge.errors import UnknownFrameworkError, nearest
from arraybridge.formatting import one_of
from arraybridge.interface import registry
from arraybridge.types import FrameworkLike, GpuId

if TYPE_CHECKING:
    from arraybridge.offload.decision import OffloadDecision

__all__ = ["Offloaded", "gpu"]

Q = ParamSpec("Q")
R_co = TypeVar("R_co", covariant=True)


class Offloaded(Decorated[P, R_co], Protocol[P, R_co]):
    """The type of a function decorated with `gpu`, for type checkers."""

    explain: Callable[..., OffloadDecision]

    # Attribute access binds self.
    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Offloaded[P, R_co]: ...
    @overload
    def __get__(
        self: Offloaded[Concatenate[Any, Q], R_co], instance: object, owner: type | None = None
    ) -> Offloaded[Q, R_co]: ...


@overload
def gpu(fn: Callable[P, R], /) -> Offloaded[P, R]: ...
@overload
def gpu(
    *, gpu_id: GpuId = None, backend: FrameworkLike | None = None
) -> Callable[[Callable[P, R]], Offloaded[P, R]]: ...
@exempt
def gpu(
    fn: Any = None, /, *, gpu_id: GpuId = None, backend: FrameworkLike | None = None, **unknown: Any
) -> Any:
    """Run each call to a NumPy-style function on the faster device, the CPU or a GPU.

    Write the function with methods and operators of its arrays, or with ``xp = array_namespace(x)``. The
    function gets NumPy arrays on the CPU, and CuPy, PyTorch or JAX arrays on the GPU. Results have the type
    and device of the first array argument.

    The function must be pure: it must not modify its array arguments and must not draw random numbers.

    Calls with the same signature run on the device that is faster when transfers are included. A call
    signature consists of the dtypes and ranks of the arrays, their size rounded to a power of two, and the
    values of numbers and strings. All other objects, including ``self``, are compared by identity. Quick
    calls, calls that do not fit in the GPU memory, and all calls without a GPU or inside
    ``use_device("cpu")`` run on the CPU. If all arrays are on the GPU, the call runs there.

    The first call of a signature runs on the CPU. The first run on the GPU is a trial: the function also runs
    in NumPy, and the structures, shapes, dtypes and values of both results are compared. Values must agree to
    half of the digits of the dtype. A call with a number that was not used before therefore runs on the CPU.

    A function whose results differ (in PyTorch, ``x.std()`` divides by N-1) or that fails on the GPU stays on
    the CPU from then on, with one warning that shows the difference or the error. A call that runs out of GPU
    memory is computed on the CPU.

    Args:
        fn: A function, method, static method or class method. It should not have side effects, because a call
            that fails on the GPU is repeated on the CPU.
        gpu_id: The number of the GPU, or ``"auto"`` for the one with the most free memory on first use.
            Defaults to the default device (`set_device`), otherwise to GPU 0.
        backend: The framework on the GPU. Defaults to the first of CuPy, PyTorch and JAX that finds the GPU.
        **unknown: Any other option raises `TypeError`.

    Returns:
        A function with the name, docstring, signature and type hints of ``fn``. Its method
        ``explain(*args)`` returns the device on which such a call would run, the reasons and the times.

    Raises:
        TypeError: If ``fn`` is not a plain function, or an option is unknown or of the wrong type.
        ValueError: If an option has an invalid value.

    Exceptions raised by the function propagate to the caller of the decorated function.

    >>> import numpy as np
    >>> @gpu
    ... def normalize(x):
    ...     return (x - x.mean()) / x.std()
    >>> normalize(np.array([1.0, 3.0]))
    array([-1.,  1.])
    >>> print(normalize.explain(np.array([1.0, 3.0])).on_gpu)
    False
    """
    if unknown:
        option = next(iter(unknown))
        hint = nearest(option, ("gpu_id", "backend"))
        by_number = " Select the GPU by its number, as in gpu_id=0." if option in ("gpu", "device") else ""
        raise TypeError(
            f"@gpu has no option {option!r}{hint}. Its options are gpu_id and backend.{by_number}"
        )
    number, _ = check_placement(gpu_id, None)
    name = None if backend is None else _check_backend(backend)
    decorator = partial(decorate, what="@gpu", make=partial(_offload, name, number))
    return decorator if fn is None else decorator(fn)


def _check_backend(backend: FrameworkLike) -> str:
    """Return the name of a framework that runs NumPy-style functions on a GPU."""
    names = registry.numpy_like_names()
    try:
        name = registry.framework_name(backend, "backend")
    except UnknownFrameworkError:
        raise UnknownFrameworkError(
            f"backend={backend!r} is not a known framework{nearest(backend, names)}. Pass {one_of(names)}."
        ) from None
    if registry.metadata_of(name).runs_numpy_code is False:
        raise ValueError(
            f"backend={name!r} does not run NumPy-style functions on a GPU. Pass {one_of(names)}."
        )
    return name


def _offload(backend: str | None, gpu_id: GpuId, fn: Any) -> Any:
    # Imported on first use, because this import takes a tenth of the time of `import arraybridge`.
    from arraybridge.offload.offloaded_call import Offload

    if kind_of_function(fn) != "function":
        raise TypeError(
            f"@gpu expects a plain function, but {label_of(fn)} is a coroutine or a generator, which has not"
            " finished when its call returns. Decorate the function that computes the result."
        )
    run = Offload(fn, backend, gpu_id)
    wrapper = wrap(fn, run)
    wrapper.explain = run.explain
    wrapper.gpu_id = gpu_id
    wrapper._placement = Placement(None, gpu_id=gpu_id)  # noqa: SLF001  # read by parallel.function_devices
    return wrapper
