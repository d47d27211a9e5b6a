"""The decorator `gpu`, which runs each call to a NumPy-style function on the faster device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from arraybridge.conversion.device_resolution import Placement, check_placement
from arraybridge.decorators.wrapping import Decorated, P, R, decorate, kind_of_function, label_of, wrap
from arraybridge.errors import UnknownFrameworkError, nearest
from arraybridge.formatting import one_of
from arraybridge.frameworks import registry
from arraybridge.types import FrameworkLike, GpuId
from arraybridge.validation import whole_number

if TYPE_CHECKING:
    from arraybridge.offload.device_choice import OffloadDecision
    from arraybridge.offload.timing_history import History

__all__ = ["Offloaded", "gpu", "stay_on_gpu"]

Q = ParamSpec("Q")
R_co = TypeVar("R_co", covariant=True)


class Offloaded(Decorated[P, R_co], Protocol[P, R_co]):
    """The type of a function decorated with `gpu`, for type checkers."""

    explain: Callable[..., OffloadDecision]
    history: History

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
    *, gpu_id: GpuId = None, backend: FrameworkLike | None = None, split_axis: int | None = None
) -> Callable[[Callable[P, R]], Offloaded[P, R]]: ...
def gpu(
    fn: Any = None,
    /,
    *,
    gpu_id: GpuId = None,
    backend: FrameworkLike | None = None,
    split_axis: int | None = None,
    **unknown: Any,
) -> Any:
    """Run each call to a NumPy-style function on the CPU or on a GPU, whichever is faster.

    Write the function with methods and operators of its arrays, or with ``xp = array_namespace(x)``. The
    function gets NumPy arrays on the CPU, and CuPy, PyTorch or JAX arrays on the GPU. Results have the type
    and device of the first array argument.

    The function must be pure: it must not modify its array arguments and must not draw random numbers.

    Timings are recorded per call signature: dtypes, ranks, the byte count rounded up to a power of two, and
    integer and string arguments. Calls run on the device that is faster when transfers are included. The
    slower device is measured again from time to time. Arrays on the GPU stay there. Quick calls, calls that
    do not fit in the GPU memory, and all calls without a GPU or inside ``use_device("cpu")`` run on the CPU.

    Results are verified separately for each exact signature: all arguments that are not arrays must have the
    same types and values, and containers the same structure. The first such call runs on the CPU. The second
    one is a trial, which also runs on the GPU. The structures, shapes, dtypes and values of both results
    are compared, and values must agree to half of the digits of the dtype. A call with a number that was not
    used before therefore runs on the CPU.

    A function whose results differ (in PyTorch, ``x.std()`` divides by N-1) or that fails on the GPU stays on
    the CPU from then on, with one warning that shows the difference or the error. A call that runs out of GPU
    memory is computed on the CPU.

    Args:
        fn: A function, method, static method or class method. It should not have side effects, because a call
            that fails on the GPU is repeated on the CPU.
        gpu_id: The number of the GPU, or ``"auto"`` for the one with the most free memory on first use.
            Defaults to the default device (`set_device`), otherwise to GPU 0.
        backend: The framework on the GPU. Defaults to the first of CuPy, PyTorch and JAX that finds the GPU.
        split_axis: An axis along which the rows are independent. If the GPU runs out of memory, the batch is
            halved along it before the call falls back to the CPU. Defaults to None, which never splits.
        **unknown: Any other option raises `TypeError`.

    Returns:
        A function with the name, docstring, signature and type hints of ``fn``. Its method
        ``explain(*args)`` returns the device on which such a call would run, and the reasons. Its attribute
        ``history`` contains the measured times.

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
        hint = nearest(option, ("gpu_id", "backend", "split_axis"))
        by_number = " Select the GPU by its number, as in gpu_id=0." if option in ("gpu", "device") else ""
        raise TypeError(
            f"@gpu has no option {option!r}{hint}. Its options are gpu_id, backend and split_axis.{by_number}"
        )
    number, _ = check_placement(gpu_id, None)
    name = None if backend is None else _check_backend(backend)
    if split_axis is not None:
        whole_number("split_axis", split_axis)
    decorator = partial(decorate, what="@gpu", make=partial(_offloaded, name, number, split_axis))
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


def _offloaded(backend: str | None, gpu_id: GpuId, split_axis: int | None, fn: Any) -> Any:
    # Imported on first use, because this import takes a tenth of the time of `import arraybridge`.
    from arraybridge.offload.offloaded_call import Offload

    if kind_of_function(fn) != "function":
        raise TypeError(
            f"@gpu expects a plain function, but {label_of(fn)} is a coroutine or a generator, which has not"
            " finished when its call returns. Decorate the function that computes the result."
        )
    run = Offload(fn, backend=backend, gpu_id=gpu_id, split_axis=split_axis)
    wrapper = wrap(fn, run)
    wrapper.explain = run.explain
    wrapper.history = run.history
    wrapper.gpu_id = gpu_id
    wrapper._placement = Placement(None, gpu_id=gpu_id)  # noqa: SLF001 - read by parallel.function_devices
    return wrapper


@contextmanager
def stay_on_gpu() -> Iterator[None]:
    """Leave results of `gpu` functions on the GPU inside the ``with`` block.

    The block affects only the current thread or task. Results are arrays of the GPU framework if the call ran
    on the GPU, and NumPy arrays if it ran on the CPU. Convert them with `to_numpy` at the end.

    >>> import numpy as np
    >>> @gpu
    ... def double(x):
    ...     return 2 * x
    >>> from arraybridge import to_numpy
    >>> with stay_on_gpu():
    ...     result = to_numpy(double(double(np.arange(3))))
    >>> result
    array([0, 4, 8])
    """
    from arraybridge.offload.device_choice import staying

    token = staying.set(True)
    try:
        yield
    finally:
        staying.reset(token)
