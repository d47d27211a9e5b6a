"""What torch.compile makes of a decorated function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from arraybridge.frameworks import registry
from arraybridge.functions.options import DecoratorOptions, checked_options
from arraybridge.options import busy_workers, card_meant
from arraybridge.types import Device, GpuId

if TYPE_CHECKING:
    from arraybridge.functions.calls import DecoratedCall

_BARE = checked_options("torch", {})


def being_compiled() -> bool:
    """Whether torch.compile traces the function that asks, which has loaded ``torch._dynamo`` then."""
    return bool(sys.modules["torch"].compiler.is_compiling())


def keeps_graph(options: DecoratorOptions) -> bool:
    """Whether a decorator with these options is nothing to a call with tensors, but for where they are."""
    bare = options._replace(device=None, gpu_id=None, input_type=None, stream=True, output_type="torch")
    return options.output_type in ("torch", "input") and bare == _BARE


def traced(call: DecoratedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call as torch.compile traces it: in one graph where the function takes and returns tensors."""
    options = call.options
    if not options.converts:
        return _complete(call, args, kwargs)
    arguments = (args[call.skip :], kwargs)
    if not call.keeps_graph or busy_workers or not _stays(arguments, options.device, options.gpu_id):
        return _untraced(_complete, call, args, kwargs)
    result = call.fn(*args, **kwargs)
    return result if _stays(result) else _untraced(call.give_back, result, args, kwargs)


def _complete(call: DecoratedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return call.give_back(call.run(args, kwargs), args, kwargs)


def _stays(value: Any, device: Device | None = None, gpu_id: GpuId = None) -> bool:
    """Whether a function of torch takes or returns this as it is, so that torch.compile may go on tracing.

    That is a tensor, where the decorator wants it, what surely is no array, and containers of them.
    """
    torch = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        place = str(value.device).replace("cuda", "gpu")
        return place == (f"gpu:{card_meant(gpu_id)}" if gpu_id is not None else str(device or place))
    if isinstance(value, (dict, list, tuple)):
        children = value.values() if isinstance(value, dict) else value
        return all(_stays(child, device, gpu_id) for child in children)
    plain = (int, float, complex, str, type(None), torch.dtype, torch.device, torch.nn.Module)
    return isinstance(value, plain)


def _untraced(call: Callable[..., Any], *args: Any) -> Any:
    """Call it outside of the graph: arrays that change the framework have memory, and tracers have none."""
    if not _between_graphs:
        torch: Any = registry.framework("torch")
        _between_graphs.append(torch.untraced(lambda call, *args: call(*args)))
    return _between_graphs[0](call, *args)


#: What calls a function as torch.compile leaves it alone, once that was needed.
_between_graphs: list[Callable[..., Any]] = []
