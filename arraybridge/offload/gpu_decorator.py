"""`@gpu`: write NumPy-style code, and let each call run where it is done first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from arraybridge.conversion.placement import Placement, check_placement
from arraybridge.decorators.wrapping import Decorated, P, R, decorate, kind_of_function, label_of, wrap
from arraybridge.frameworks import registry
from arraybridge.types import FrameworkLike, GpuId
from arraybridge.validation import whole_number

if TYPE_CHECKING:
    from arraybridge.offload.cost_model import History
    from arraybridge.offload.gpu_call import OffloadDecision

__all__ = ["Offloaded", "gpu", "stay_on_gpu"]

Q = ParamSpec("Q")
R_co = TypeVar("R_co", covariant=True)


class Offloaded(Decorated[P, R_co], Protocol[P, R_co]):
    """A function that `gpu` decorates, for type checkers."""

    explain: Callable[..., OffloadDecision]
    history: History

    # A method: self is given by the attribute access.
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
    """Run a NumPy-style function on a GPU whenever that is expected to be done sooner.

    The function is written with methods and operators of its arrays, or with ``xp = array_namespace(x)``; on
    the CPU it is handed NumPy arrays, on a card arrays of CuPy, PyTorch or JAX, whichever is installed.
    Its results come back as its first array came: NumPy for NumPy, a torch tensor for a torch tensor.

    The function is pure in its array arguments, and draws no random numbers.

    Timings are kept per call signature: dtypes, ranks, the byte count rounded to a power of two, and number
    and string arguments. The faster place is used, transfers included, and the other one is measured again
    now and then. Arrays that are on the GPU stay there. Quick calls, calls that do not fit into the GPU's
    memory, and all calls without a GPU or inside ``use_device("cpu")`` run on the CPU.

    Results are verified per exact call: every argument that is not an array counts by type and value, and
    so does the structure of containers. The first such call runs on the CPU. The second one is a trial,
    which also runs on the GPU, and structure, shapes, dtypes and values are compared, to half of the dtype's
    digits. A call with a number that was not used before therefore runs on the CPU.

    A function that differs (in PyTorch, ``x.std()`` divides by N-1) or fails on the card stays on the CPU
    from then on, with one warning that shows the difference. A call that runs out of memory is computed on
    the CPU.

    Args:
        fn: a function, method, static or class method. It should do nothing besides computing its result: a
            call that fails on the card is made again on the CPU.
        gpu_id: the card; ``"auto"`` for the one with the most free memory when it is first needed. Left out,
            the default device (`set_device`), else card 0.
        backend: the framework to use on the card; left out, the first of cupy, torch and jax that has it.
        split_axis: for functions that treat each row along this axis by itself: where the card's memory
            runs out, the batch is halved along it before the CPU is resorted to.
        **unknown: any other option, which is refused.

    Returns:
        a function with the name, docstring, signature and type hints of ``fn``, and with ``explain(*args)``,
        which says where such a call would run and why, and ``history``, the times measured.

    Raises:
        TypeError: ``fn`` is no plain function, or an option is of the wrong type.
        ValueError: an option has a value that makes no sense.

    A call raises what the function raises.

    >>> import numpy as np
    >>> @gpu
    ... def normalise(x):
    ...     return (x - x.mean()) / x.std()
    >>> normalise(np.array([1.0, 3.0]))
    array([-1.,  1.])
    >>> print(normalise.explain(np.array([1.0, 3.0])).on_gpu)
    False
    """
    if unknown:
        raise TypeError(
            f"@gpu has no option {next(iter(unknown))!r}. Its options are gpu_id, backend and split_axis."
            " Choose the card by its number, as in gpu_id=0."
        )
    number, _ = check_placement(gpu_id, None)
    name = None if backend is None else registry.framework_name(backend)
    if name is not None and registry.metadata_of(name).runs_numpy_code is False:
        raise ValueError(
            f"backend={name!r} does not run NumPy-style functions on a card;"
            f" pass one of {', '.join(registry.numpy_like_names())}"
        )
    if split_axis is not None:
        whole_number("split_axis", split_axis)
    decorator = partial(decorate, what="@gpu", make=partial(_offloaded, name, number, split_axis))
    return decorator if fn is None else decorator(fn)


def _offloaded(backend: str | None, gpu_id: GpuId, split_axis: int | None, fn: Any) -> Any:
    # Here, since it takes a tenth of the time of `import arraybridge`.
    from arraybridge.offload.gpu_call import Offload

    if kind_of_function(fn) != "function":
        raise TypeError(
            f"@gpu takes plain functions, and {label_of(fn)}() is a coroutine or a generator, which is not"
            " done when its call returns; decorate the function that computes"
        )
    run = Offload(fn, backend=backend, gpu_id=gpu_id, split_axis=split_axis)
    wrapper = wrap(fn, run)
    wrapper.explain = run.explain
    wrapper.history = run.history
    wrapper.gpu_id = gpu_id
    wrapper._placement = Placement(None, gpu_id=gpu_id)
    return wrapper


@contextmanager
def stay_on_gpu() -> Iterator[None]:
    """Inside the ``with`` block, what `gpu` functions computed on a card stays there for the next one.

    Holds for this thread or task. A result is an array of the card's framework where the call ran on the
    card, and a NumPy array where it ran on the CPU; `to_numpy` fetches either at the end.

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
    from arraybridge.offload.gpu_call import staying

    token = staying.set(True)
    try:
        yield
    finally:
        staying.reset(token)
