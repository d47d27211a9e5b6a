"""The order of queues is observed: where a promise about it is broken, a test of tests/gpu fails.

A mistake takes the place of a function. The test that notices it passes before, and fails with it: on a lazy
card a wait that was left out shows each time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any

import cupy
import numpy as np
import pytest

import arraybridge
from arraybridge.frameworks.accelerators import StreamEvent
from arraybridge.types import Device
from tests.emulated_gpu import accounting
from tests.gpu import test_memory as memory
from tests.gpu import test_ordering as ordering
from tests.gpu.test_ordering import _as_it_was  # noqa: F401  # streams and queues, after each test
from tests.helpers import EMULATED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(EMULATED == "at-once", reason="with streams at once nothing is ever late"),
]

CUPY, TORCH = "frameworks.cupy", "frameworks.torch"
Function = Callable[..., Any]
MISTAKES: list[Any] = []


def mistake(target: str, noticed: Function, *arguments: Any) -> Callable[[Function], Function]:
    """Register a wrong version of ``target``, and the test that notices it.

    The wrong version is called with the right one and its arguments. Several may be registered for it.
    """

    def register(wrong: Function) -> Function:
        name = "-".join([wrong.__name__, *map(str, arguments)])
        test = functools.partial(noticed, *arguments)
        MISTAKES.append(pytest.param(f"arraybridge.{target}", wrong, test, id=name))
        return wrong

    return register


@pytest.mark.parametrize(("target", "wrong", "noticed"), MISTAKES)
def test_a_mistake_is_noticed(
    target: str, wrong: Function, noticed: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    noticed()  # which skips where its frameworks are not there
    arraybridge.free_memory()
    accounting.empty_pools()  # so that memory does not hold the right values from before
    right = resolve_name(target)

    def planted(*args: Any, **kwargs: Any) -> Any:
        return wrong(right, *args, **kwargs)

    monkeypatch.setattr(target, planted)
    with pytest.raises(AssertionError) as caught:
        noticed()
    assert "shows nothing" not in str(caught.value)


@mistake(
    f"{CUPY}.CupyFramework.from_host",
    memory.test_what_was_copied_is_complete_when_the_call_returns,
    "cupy",
    True,
)
def a_copy_from_locked_memory_is_not_waited_for(
    _: Function, self: Any, view: np.ndarray, device: Device
) -> Any:
    with self.devices.selected(device):
        x = cupy.empty(view.shape, view.dtype)
        x.set(view)
        return x


@mistake(
    f"{CUPY}.CupyStreams.wait_for",
    ordering.test_a_queue_waits_for_the_default_stream_by_its_handle,
    "cupy",
)
@mistake(
    f"{TORCH}.streams.TorchStreams.wait_for",
    ordering.test_a_queue_waits_for_the_default_stream_by_its_handle,
    "torch",
)
def the_default_stream_is_not_waited_for(right: Function, self: Any, device: Device, handle: int) -> None:
    if handle:
        right(self, device, handle)


@mistake(f"{CUPY}.CupyStreams.mark", ordering.test_a_pipeline_of_plain_functions_frees_nothing_early)
def a_mark_is_not_waited_for(right: Function, self: Any, device: Device) -> StreamEvent:
    mark: StreamEvent = right(self, device)
    return mark._replace(wait=lambda: None)


@mistake(
    f"{CUPY}.CupyDevices.to_device",
    ordering.test_a_copy_to_the_other_gpu_has_been_read_before_its_source_is_used_again,
    "to_gpu",
)
@mistake(
    f"{CUPY}.CupyDevices.to_device",
    ordering.test_a_source_of_prefetch_fills_one_buffer_again_and_again,
    "to the other card",
)
def a_source_is_used_again_before_it_was_copied(_: Function, self: Any, x: Any, device: Device) -> Any:
    ready = cupy.cuda.get_current_stream().record()
    with self.selected(device):
        cupy.cuda.get_current_stream().wait_event(ready)
        return x.copy()


@mistake(
    f"{CUPY}.CupyStreams.stream",
    ordering.test_a_function_that_fetches_its_input_finds_it_there,
    "cupy",
)
@contextmanager
def a_functions_stream_does_not_wait_for_its_caller(_: Function, self: Any, device: Device) -> Iterator[None]:
    outer = cupy.cuda.get_current_stream()
    with cupy.cuda.Stream(non_blocking=True) as inner:
        yield
    outer.wait_event(inner.record())


@mistake(f"{CUPY}.CupyStreams.stream", ordering.test_the_caller_reads_the_result_when_it_is_there)
@contextmanager
def a_caller_does_not_wait_for_the_functions_stream(_: Function, self: Any, device: Device) -> Iterator[None]:
    outer = cupy.cuda.get_current_stream()
    with cupy.cuda.Stream(non_blocking=True) as inner:
        inner.wait_event(outer.record())
        yield


@mistake(
    f"{CUPY}.CupyStreams.take_stream",
    ordering.test_a_stage_that_enters_a_stream_is_back_on_its_own_behind_it,
)
def a_threads_stream_is_lost_behind_a_with(right: Function, self: Any, device: Device) -> None:
    with cupy.cuda.Device(device.index):
        right(self, device)
        stream = cupy.cuda.get_current_stream()
        stream.__exit__()
        stream.use()


@mistake(
    f"{CUPY}.CupyStreams.take_over",
    ordering.test_a_result_is_read_before_its_functions_stream_uses_it_again,
    "array",
)
@mistake(
    f"{TORCH}.streams.TorchStreams.take_over",
    ordering.test_what_another_thread_made_is_its_own_again_only_once_this_one_has_read_it,
    "torch",
)
def a_result_stays_with_the_stream_that_made_it(_: Function, self: Any, x: Any) -> Any:
    return x


@mistake(
    "frameworks.gpu_memory._end",
    ordering.test_what_was_lent_is_read_before_its_owner_uses_it_again,
    "torch",
    "shared",
)
@mistake(
    "frameworks.gpu_memory._end",
    ordering.test_what_a_framework_without_queues_lends_is_kept_until_it_was_read,
    "cupy",
)
def a_loan_ends_before_it_was_read(*_: Any) -> None:
    pass


@mistake(
    "parallel.workers.Worker.hold",
    ordering.test_what_a_thread_reads_is_kept_until_it_was_read,
    "prefetch",
)
@mistake(
    "parallel.workers.Worker.hold",
    ordering.test_what_a_thread_reads_is_kept_until_it_was_read,
    "Pipeline",
)
def a_thread_does_not_keep_what_is_read(_: Function, self: Any, item: Any) -> list[StreamEvent]:
    return []
