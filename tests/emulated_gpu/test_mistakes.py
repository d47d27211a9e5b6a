"""Mutation tests of stream ordering: for each broken guarantee, a test in tests/gpu fails.

Each mistake replaces a function. The test that detects it passes before and fails with the mistake: on a
lazy GPU, a missing wait shows every time.
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
from arraybridge.device import Device
from arraybridge.interface.streams import StreamEvent
from tests.emulated_gpu import accounting
from tests.gpu import test_memory as memory
from tests.gpu import test_ordering as ordering
from tests.gpu.test_ordering import _restore_streams  # noqa: F401  # fixture: restores streams after each test
from tests.helpers import EMULATED, require_two_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(EMULATED == "at-once", reason="in eager mode, no work is ever late"),
]

CUPY, TORCH = "frameworks.cupy.framework", "frameworks.torch"
Function = Callable[..., Any]
MISTAKES: list[Any] = []


def mistake(target: str, noticed: Function, *arguments: Any) -> Callable[[Function], Function]:
    """Register a wrong version of ``target`` and the test that detects it.

    The wrong version is called with the original function and its arguments. A target may have several
    wrong versions.
    """

    def register(wrong: Function) -> Function:
        name = "-".join([wrong.__name__, *map(str, arguments)])
        test = functools.partial(noticed, *arguments)
        MISTAKES.append(pytest.param(f"arraybridge.{target}", wrong, test, id=name))
        return wrong

    return register


@pytest.mark.parametrize(("target", "wrong", "noticed"), MISTAKES)
def test_mistake_is_detected(
    target: str, wrong: Function, noticed: functools.partial[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = getattr(noticed.func, "pytestmark", ())
    if any("_two_gpus" in mark.args for mark in marks if mark.name == "usefixtures"):
        require_two_gpus()
    noticed()  # skips if its frameworks are not installed
    arraybridge.free_memory()
    accounting.empty_pools()  # so that memory does not already hold the expected values
    right = resolve_name(target)

    def planted(*args: Any, **kwargs: Any) -> Any:
        return wrong(right, *args, **kwargs)

    monkeypatch.setattr(target, planted)
    with pytest.raises(AssertionError) as caught:
        noticed()
    assert "shows nothing" not in str(caught.value)


@mistake(
    f"{CUPY}.CupyFramework.from_host",
    memory.test_copies_are_complete_when_the_call_returns,
    "cupy",
    True,
)
def skip_the_wait_for_a_copy_from_pinned_memory(
    _: Function, self: Any, view: np.ndarray, device: Device
) -> Any:
    with self.devices.select(device):
        x = cupy.empty(view.shape, view.dtype)
        x.set(view)
        return x


@mistake(
    f"{CUPY}.CupyStreams.wait_for",
    ordering.test_stream_waits_for_the_default_stream_by_handle,
    "cupy",
)
@mistake(
    f"{TORCH}.streams.TorchStreams.wait_for",
    ordering.test_stream_waits_for_the_default_stream_by_handle,
    "torch",
)
def skip_the_wait_for_the_default_stream(right: Function, self: Any, device: Device, handle: int) -> None:
    if handle:
        right(self, device, handle)


@mistake(f"{CUPY}.CupyStreams.record_event", ordering.test_pipeline_of_plain_functions_keeps_inputs_alive)
def skip_the_wait_for_an_event(right: Function, self: Any, device: Device) -> StreamEvent:
    event: StreamEvent = right(self, device)
    return event._replace(wait=lambda: None)


@mistake(
    f"{CUPY}.CupyDevices.to_device",
    ordering.test_source_of_a_copy_between_gpus_is_read_before_reuse,
    "to_gpu",
)
@mistake(
    f"{CUPY}.CupyDevices.to_device",
    ordering.test_prefetch_source_reuses_one_buffer,
    "to the other GPU",
)
def reuse_a_source_before_it_was_copied(_: Function, self: Any, x: Any, device: Device) -> Any:
    ready = cupy.cuda.get_current_stream().record()
    with self.select(device):
        cupy.cuda.get_current_stream().wait_event(ready)
        return x.copy()


@mistake(
    f"{CUPY}.CupyStreams.stream",
    ordering.test_input_is_complete_when_a_function_copies_it_to_the_host,
    "cupy",
)
@contextmanager
def let_a_function_not_wait_for_its_caller(_: Function, self: Any, device: Device) -> Iterator[None]:
    outer = cupy.cuda.get_current_stream()
    with cupy.cuda.Stream(non_blocking=True) as inner:
        yield
    outer.wait_event(inner.record())


@mistake(f"{CUPY}.CupyStreams.stream", ordering.test_result_is_complete_when_the_caller_reads_it)
@contextmanager
def let_a_caller_not_wait_for_the_function(_: Function, self: Any, device: Device) -> Iterator[None]:
    outer = cupy.cuda.get_current_stream()
    with cupy.cuda.Stream(non_blocking=True) as inner:
        inner.wait_event(outer.record())
        yield


@mistake(
    f"{CUPY}.CupyStreams.take_stream",
    ordering.test_stage_stream_is_restored_after_a_user_stream,
)
def lose_the_threads_stream_after_a_with_block(right: Function, self: Any, device: Device) -> None:
    with cupy.cuda.Device(device.index):
        right(self, device)
        stream = cupy.cuda.get_current_stream()
        stream.__exit__()
        stream.use()


@mistake(
    f"{CUPY}.CupyStreams.take_over",
    ordering.test_result_is_read_before_its_stream_reuses_the_memory,
    "array",
)
@mistake(
    f"{TORCH}.streams.TorchStreams.take_over",
    ordering.test_memory_of_another_thread_is_read_before_reuse,
    "torch",
)
def leave_a_result_on_the_stream_that_made_it(_: Function, self: Any, x: Any) -> Any:
    return x


@mistake(f"{CUPY}.on_gpu", ordering.test_arrays_on_another_gpu_are_imported_in_order, "cupy", "dlpack")
@mistake(
    f"{CUPY}.on_gpu",
    ordering.test_arrays_on_another_gpu_are_imported_in_order,
    "cupy",
    "interface",
)
@contextmanager
def stay_on_the_current_device(right: Function, index: int) -> Iterator[None]:
    yield


@mistake(
    "interface.keep_alives._release_in_order",
    ordering.test_exported_memory_is_read_before_its_owner_reuses_it,
    "torch",
    "shared",
)
@mistake(
    "interface.keep_alives._release_in_order",
    ordering.test_exports_of_a_framework_without_streams_stay_alive_until_read,
    "cupy",
)
def release_an_export_before_it_was_read(*_: Any) -> None:
    pass


@mistake(
    "parallel.workers.Worker.keep_alive_until_done",
    ordering.test_arrays_stay_alive_until_a_thread_has_read_them,
    "prefetch",
)
@mistake(
    "parallel.workers.Worker.keep_alive_until_done",
    ordering.test_arrays_stay_alive_until_a_thread_has_read_them,
    "Pipeline",
)
def drop_inputs_that_a_thread_reads(_: Function, self: Any, item: Any) -> list[StreamEvent]:
    return []
