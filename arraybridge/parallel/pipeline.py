"""`Pipeline`: run a chain of stages, each in a separate thread on its own device, and report their times."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from arraybridge.batches import Joined, part, plain, snapshot, split_places
from arraybridge.carriers.sources import source_of
from arraybridge.compilers import run_eagerly
from arraybridge.decorators.wrapping import name_of
from arraybridge.formatting import Contents, Table, format_seconds
from arraybridge.interface import registry
from arraybridge.interface.streams import identity
from arraybridge.memory.split_arguments import warn_about_coincidences
from arraybridge.parallel.function_devices import placement, placement_text
from arraybridge.parallel.stage_chain import Run
from arraybridge.parallel.workers import (
    Enter,
    ItemTime,
    Work,
    Worker,
    make_slots,
    note_on_argument_count,
    nothing,
    source_of_items,
)
from arraybridge.tracing.events import Event, began
from arraybridge.trees import arrays_of, map_arrays
from arraybridge.validation import add_hints, bool_option, file_path, whole_number

__all__ = ["Pipeline", "PipelineReport", "StageReport"]

_MISSING: Any = object()
_ONE_ARGUMENT = (
    "arraybridge: A stage gets one argument: the item or the result of the stage before it. Set other"
    " arguments with functools.partial, or return several values as a tuple in the stage before it."
)


class Pipeline:
    """A chain of stages that run at the same time, each on the item that the stage before it has finished.

    A stage is a function or method of one argument. It is usually decorated (``@torch(gpu_id=0)``): the
    decorator determines where it runs, and moves its input there. Each stage has a thread, a bounded queue
    and, on accelerators, a stream. No thread waits for a GPU: the stream of a stage waits for the event that
    the stage before it recorded.

    Args:
        stages: One or more functions of one argument. Each is called with the result of the one before it.
        microbatches: The number of parts into which a call splits its batch. If the batch has fewer rows,
            each row is a part.
        queue_size: The maximum number of items that wait for each stage.
        axis: The axis to split along.
        processes: Whether to run each stage in a spawned process, for functions that hold the GIL; see
            `device_map`.

    Raises:
        TypeError: A stage is not callable or is itself a pipeline, or a number is not an int.
        ValueError: There is no stage, or a number is too small.

    >>> import numpy as np
    >>> def double(x):
    ...     return x * 2
    >>> def shift(x):
    ...     return x + 1
    >>> pipeline = Pipeline(double, shift, microbatches=2)
    >>> pipeline(np.arange(5))
    array([1, 3, 5, 7, 9])
    >>> list(pipeline.map([1, 2, 3]))
    [3, 5, 7]
    >>> pipeline
    Pipeline(double, shift, microbatches=2)
    """

    @add_hints
    def __init__(
        self,
        *stages: Callable[[Any], Any],
        microbatches: int = 4,
        queue_size: int = 2,
        axis: int = 0,
        processes: bool = False,
    ) -> None:
        if not stages:
            raise ValueError("Pipeline() needs at least one stage, such as Pipeline(encode, decode).")
        for i, stage in enumerate(stages):
            if isinstance(stage, (list, tuple)):
                raise TypeError(
                    "Pipeline() takes each stage as a separate argument. To pass a list, use"
                    " Pipeline(*stages)."
                )
            if isinstance(stage, Pipeline):
                raise TypeError(
                    f"Stage {i} is itself a Pipeline. Pass its stages instead, such as"
                    " Pipeline(*inner.stages, last)."
                )
            if not callable(stage):
                raise TypeError(f"Stage {i} is {stage!r}. Pass a function of one argument.")
        self.microbatches = whole_number("microbatches", microbatches, least=1)
        self.queue_size = whole_number("queue_size", queue_size, least=1)
        self.axis = whole_number("axis", axis)
        self.stages = stages
        self.processes: bool = bool_option("processes", processes)
        self._last: Run | None = None

    @run_eagerly
    def __call__(self, batch: Any = _MISSING, *_more: Any, **_named: Any) -> Any:
        """Split the batch, send its parts through the stages, and join the results.

        Args:
            batch: An array, or arrays in nested containers, all with the same number of rows along ``axis``.
                A list of non-arrays with one entry per row is split too. All other values, and values in
                `fixed`, are passed unchanged to every part.

        Returns:
            The results of the last stage, joined along ``axis``. If the stages are row-wise, they equal the
            results for the whole batch bit for bit. Lists with one entry per row, such as lists of strings
            or dicts, are concatenated. Every stage except the last must return new memory.

        Raises:
            TypeError: There is no array in the batch, more than one argument is passed, or a stage returns
                None.
            ValueError: The arrays have different numbers of rows or lack the axis.
            CannotSplitError: The results differ in structure, are values that cannot be joined, or contain a
                list that could be either one entry per row or several results. Also a `ValueError`.
            Exception: Any exception raised by a stage, with a note that names the stage and the microbatch.
        """
        if batch is _MISSING or _more or _named:
            raise TypeError(
                "A pipeline takes one batch. Pass several arrays as a tuple, as in pipeline((x, mask)), or as"
                " a dict, as in pipeline({'x': x, 'mask': mask})."
            )
        rows = self._rows(batch)
        count = max(1, min(self.microbatches, rows))
        if count == 1:
            microbatch = part(batch, self.axis, rows, 0, rows)
            return plain(
                next(self._run(iter([microbatch]), "microbatch", partial(map_arrays, change=snapshot)))
            )
        warn_about_coincidences(split_places(batch, self.axis, rows, "batch"), rows)
        bounds = [(rows * i // count, rows * (i + 1) // count) for i in range(count)]
        parts = (part(batch, self.axis, rows, start, stop) for start, stop in bounds)
        joined = Joined(rows, self.axis, batch, "microbatch", row_by_row=False)
        counts = (stop - start for start, stop in bounds)

        def join(result: Any) -> Any:  # runs in the thread and on the stream of the last stage
            joined.add(result, next(counts))
            return joined.result() if joined.done == rows else None

        *_, result = self._run(parts, "microbatch", join)
        return result

    @run_eagerly
    def map(self, items: Iterable[Any]) -> Iterator[Any]:
        """Send each item through the stages without splitting it, and return the results in order.

        Args:
            items: An iterable. The thread that reads the results also reads the items, lazily. At most
                ``len(stages) * (queue_size + 1)`` items are in progress. A source that reuses a buffer must
                yield copies, and each stage must return new memory.

        Returns:
            An iterator over the results. The threads end when it ends, fails or is deleted.

        Raises:
            TypeError: ``items`` is not iterable, or a stage returns None.
            Exception: Any exception raised by a stage or by ``items``, with a note that names the stage and
                the item. It is raised after the results of the preceding items, and no further item is
                started.
        """
        return self._run(source_of_items("pipeline.map", items), "item")

    # -- running ----------------------------------------------------------------------------------

    def _run(
        self, source: Iterator[Any], unit: str, then: Callable[[Any], Any] | None = None
    ) -> Iterator[Any]:
        last = len(self.stages) - 1
        workers = [[self._worker(i, unit, then if i == last else None)] for i in range(last + 1)]
        self._last = Run(workers, len(self.stages) * (self.queue_size + 1))
        return self._last.results(source)

    def _worker(self, i: int, unit: str, then: Callable[[Any], Any] | None) -> Worker:
        stage = self.stages[i]
        label = name_of(self.stages[i])
        enter: Enter = lambda _: nullcontext(stage)  # noqa: E731
        stop: Callable[[], object] = nothing
        if self.processes:
            # Imported here, since it is rarely needed.
            from arraybridge.parallel.worker_processes import WorkerProcess

            process = WorkerProcess(partial(identity, stage), repr(stage), f"stage {i} ({label})")
            enter = process.working
            stop = process.stop

        @contextmanager
        def working(worker: Worker) -> Iterator[Work]:
            with enter(worker) as call:
                yield partial(_run_stage, stage, label, call, then)

        return Worker(
            working,
            lambda number: f"in stage {i} ({label}), {unit} {number}",
            kind="stage",
            name=label,
            device=_device(stage),
            stop=stop,
            depth=self.queue_size,
            slots=make_slots(self.queue_size) if i else None,
        )

    def _rows(self, batch: Any) -> int:
        """Return the number of rows along the axis, which all arrays of the batch must have."""
        arrays = arrays_of(batch)
        if not arrays:
            raise TypeError(
                f"A call splits its batch into parts, but got a {type(batch).__name__} without arrays. Pass"
                " an array, such as np.asarray(numbers). To process items unsplit, use pipeline.map(items)."
            )
        counts = []
        for x in arrays:
            framework, array = source_of(x)
            # NumPy arrays of any dtype, and the values and indices of sparse arrays, can be split and joined.
            if not isinstance(array, np.ndarray) and not framework.sparse.layout(array):
                framework.check(array)
            shape = framework.shape(array)
            rank = len(shape)
            if not -rank <= self.axis < rank:
                fix = f"Pass an axis from {-rank} to {rank - 1} to Pipeline, wrap" if rank else "Wrap"
                raise ValueError(
                    f"An array of shape {shape} does not have axis {self.axis}. {fix} the array in"
                    " arraybridge.fixed() to pass it unsplit with every part, or pass single items"
                    " to pipeline.map(items)."
                )
            counts.append(shape[self.axis])
        if len(set(counts)) > 1:
            raise ValueError(
                f"The arrays of the batch have {counts} rows along axis {self.axis}. Pass arrays with equal"
                " numbers of rows, or wrap those that every part needs whole in arraybridge.fixed()."
            )
        return counts[0]

    def __repr__(self) -> str:
        return f"Pipeline({', '.join(map(name_of, self.stages))}, microbatches={self.microbatches})"

    def report(self) -> PipelineReport:
        """Return the times of each stage in the last run; for a run in progress, the times so far.

        Raises:
            RuntimeError: The pipeline has not run yet.

        >>> pipeline = Pipeline(abs)
        >>> _ = list(pipeline.map([-1, -2]))
        >>> pipeline.report().bottleneck
        'abs'
        """
        run = self._last
        if run is None:
            raise RuntimeError("This pipeline has not run yet. Call it, or iterate over pipeline.map(items).")
        stages = tuple(
            StageReport(
                name=name_of(stage),
                device=placement_text(stage),
                items=worker.items,
                busy=worker.busy,
                starved=worker.starved,
                blocked=worker.blocked,
                spans=tuple(worker.spans.copy()),
            )
            for stage, (worker,) in zip(self.stages, run.stages, strict=True)
        )
        return PipelineReport(stages, run.ended - run.began, run.most_in_flight)


def _run_stage(stage: Any, label: str, call: Work, then: Callable[[Any], Any] | None, item: Any) -> Any:
    """Return the result of a stage for an item, after calling ``then`` with it, if given.

    ``call`` runs the stage, possibly in another process.
    """
    try:
        result = call(item)
    except TypeError as error:
        note_on_argument_count(error, stage, 1, _ONE_ARGUMENT)
        raise
    if result is None:
        raise TypeError(f"{label} returned None. A stage must return the input of the next stage.")
    return result if then is None else then(result)


def _device(stage: Any) -> str:
    """Return the device string that a stage's decorator names, or ``""``. The device may not exist."""
    placed = placement(stage)
    if placed is None or not placed.is_fixed:
        return ""
    kind = registry.metadata_of(placed.framework).accelerator_kind if placed.framework else "gpu"
    return f"{kind}:{placed.gpu_id}" if placed.device is None else str(placed.device)


# -- reports -------------------------------------------------------------------------------


class StageReport(NamedTuple):
    """The times of one stage of a run, in seconds, measured in the stage's thread.

    Attributes:
        name: The name of the stage.
        device: The device on which the stage runs.
        items: The number of finished items.
        busy: Time spent in the stage, including waiting for its accelerator.
        starved: Time spent waiting for an item.
        blocked: Time spent waiting for a slot in the queue of the next stage.
        spans: The number, start and end of each of the last 10 000 items.
    """

    name: str
    device: str
    items: int
    busy: float
    starved: float
    blocked: float
    spans: tuple[ItemTime, ...] = ()


@dataclass(frozen=True)
class PipelineReport(Table):
    """The times of a pipeline run, shown as a table in terminals and notebooks.

    Attributes:
        stages: One `StageReport` per stage.
        seconds: The time from the start of the threads to the last result.
        most_in_flight: The maximum number of items in progress at one time.
    """

    stages: tuple[StageReport, ...]
    seconds: float
    most_in_flight: int

    @property
    def bottleneck(self) -> str:
        """The name of the busiest stage. To speed up the pipeline, speed up this stage."""
        return max(self.stages, key=lambda stage: stage.busy).name

    def _table(self) -> Contents:
        head = ("stage", "device", "items", "busy", "starved", "blocked", "busy %")
        rows = []
        for stage in self.stages:
            share = min(100.0, 100 * stage.busy / (self.seconds or 1.0))
            times = map(format_seconds, (stage.busy, stage.starved, stage.blocked))
            rows.append((stage.name, stage.device, str(stage.items), *times, f"{share:.0f} %"))
        items = self.stages[-1].items if self.stages else 0
        done = f"{items} item{'' if items == 1 else 's'} in {format_seconds(self.seconds)}"
        return head, rows, head[2:], f"{done}; bottleneck: {self.bottleneck}"

    def events(self) -> list[Event]:
        """Return the events that `trace` would have recorded for the run."""
        events = [
            Event(
                kind="stage",
                name=stage.name,
                start=span.start,
                seconds=span.end - span.start,
                thread=f"stage {i}: {stage.name}",
                device=stage.device,
                file="",
                line=0,
                item=span.item,
                flow=str(span.item),
            )
            for i, stage in enumerate(self.stages)
            for span in stage.spans
        ]
        return sorted(events, key=began)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the run to a file: a trace that Perfetto opens if the suffix is ``.json``, otherwise a plot.

        Raises:
            ImportError: A plot was requested, and matplotlib is not installed.
            ValueError: The suffix is neither ``.json`` nor that of an image format.
        """
        if file_path("file", file).suffix != ".json":
            self.plot(file)
            return
        from arraybridge.tracing.export import save

        save(file, self.events())

    def plot(self, file: str | os.PathLike[str]) -> None:
        """Plot the run with one row per stage and one bar per item, in the format given by the file suffix.

        Raises:
            ImportError: Matplotlib is not installed.
            ValueError: The suffix is not that of an image format.
        """
        from arraybridge.tracing.export import plot

        plot(self.events(), file)
