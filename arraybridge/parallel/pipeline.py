"""`Pipeline`: a chain of stages, each in a thread of its own, on its own device; and where its time went."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from arraybridge.batches import Joined, part, plain, snapshot
from arraybridge.carriers.sources import source_of
from arraybridge.decorators.wrapping import name_of
from arraybridge.formatting import Contents, Table, format_seconds
from arraybridge.frameworks import registry
from arraybridge.frameworks.accelerators import itself
from arraybridge.parallel.function_devices import placement, placement_text
from arraybridge.parallel.item_sources import source_of_items
from arraybridge.parallel.workers import Enter, ItemTime, Run, Shown, Work, Worker, nothing
from arraybridge.tracing.events import Event, began
from arraybridge.trees import arrays_of, map_arrays
from arraybridge.validation import whole_number

__all__ = ["Pipeline", "PipelineReport", "StageReport"]

_MISSING: Any = object()


class Pipeline:
    """Run stages one after the other, all at the same time: while one works on an item, the next works on the
    item before.

    Each stage is a function of one argument, usually decorated (``@torch(gpu_id=0)``, a method too): where it
    runs is its own affair, and the decorator brings its input there. Each has a thread, on accelerators a
    stream, and in front of it a queue. A card is never synchronised: the next stage's stream waits for the
    event that the stage before has left.

    Args:
        stages: functions of one argument, one or more. What one returns, the next one gets.
        microbatches: how many parts a call splits its batch into. Where the batch has fewer rows, each row is
            a part.
        queue_size: items that wait in front of each stage at most.
        axis: the axis to split along.
        processes: a spawned process for each stage, for functions that hold Python's lock; see `device_map`.

    Raises:
        TypeError: a stage is no function, or a pipeline itself; a number is none.
        ValueError: there is no stage, or a number is too small.

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
    >>> print(pipeline)
    Pipeline, 2 microbatches along axis 0
      input
        ↓ queue of 2
      double  where its input is  waits for input
        ↓ queue of 2
      shift   where its input is  waits for double
        ↓
      output, in order
    """

    def __init__(
        self,
        *stages: Callable[[Any], Any],
        microbatches: int = 4,
        queue_size: int = 2,
        axis: int = 0,
        processes: bool = False,
    ) -> None:
        if not stages:
            raise ValueError("a pipeline needs one stage or more, as in Pipeline(encode, decode)")
        for i, stage in enumerate(stages):
            if isinstance(stage, (list, tuple)):
                raise TypeError("stages are given one by one: Pipeline(encode, decode), or Pipeline(*stages)")
            if isinstance(stage, Pipeline):
                raise TypeError(
                    f"stage {i} is a pipeline itself; give its stages one by one, as in"
                    " Pipeline(*inner.stages, last)"
                )
            if not callable(stage):
                raise TypeError(f"stage {i} is {stage!r}, which is no function; a stage takes one argument")
        whole_number("microbatches", microbatches, least=1)
        whole_number("queue_size", queue_size, least=1)
        whole_number("axis", axis)
        self.stages = stages
        self.microbatches = microbatches
        self.queue_size = queue_size
        self.axis = axis
        self.processes = processes
        self._last: Run | None = None

    def __call__(self, batch: Any = _MISSING, *_more: Any, **_named: Any) -> Any:
        """Split the batch, send its parts through the stages, and join what comes out.

        Args:
            batch: an array, or arrays in nested containers, all with the same extent along ``axis``. What is
                no array in there goes to every part as it is, and so does an array that is marked as `fixed`.

        Returns:
            the results, joined along ``axis``: bit for bit what the stages make of the whole batch, where
            they treat each row by itself. Their structure is that which the last stage returns. Lists with
            one entry per row, such as texts or dicts, are concatenated.

            The last stage may give a buffer of its own that it writes to again for the next part; the others
            return memory that they do not write to again.

        Raises:
            TypeError: there is no array in the batch, more than one argument is passed, or a stage returns
                None.
            ValueError: the arrays differ in extent or lack the axis.
            CannotSplitError: which is a `ValueError`: the results differ in structure, are values that cannot
                be joined, or contain a list that can be one entry per row or several results.
            Exception: what a stage raises, with a note that names stage and microbatch.
        """
        if batch is _MISSING or _more or _named:
            raise TypeError(
                "a pipeline takes one batch. Pass several arrays as a tuple, as in pipeline((x, mask)), or as"
                " a dict, as in pipeline({'x': x, 'mask': mask})."
            )
        rows = self._rows(batch)
        count = max(1, min(self.microbatches, rows))
        if count == 1:
            microbatch = part(batch, self.axis, rows, 0, rows)
            return plain(
                next(self._run(iter([microbatch]), "microbatch", partial(map_arrays, change=snapshot)))
            )
        bounds = [(rows * i // count, rows * (i + 1) // count) for i in range(count)]
        parts = (part(batch, self.axis, rows, start, stop) for start, stop in bounds)
        joined = Joined(rows, self.axis, batch, "microbatch", row_by_row=False)
        counts = (stop - start for start, stop in bounds)

        def join(result: Any) -> Any:  # in the thread of the last stage, and on its stream
            joined.add(result, next(counts))
            return joined.result() if joined.done == rows else None

        *_, result = self._run(parts, "microbatch", join)
        return result

    def map(self, items: Iterable[Any]) -> Iterator[Any]:
        """Send items through the stages as they are, and give back the results in order.

        Args:
            items: read as there is room, by the thread that asks for the results. At most
                ``len(stages) * (queue_size + 1)`` items are on their way. They wait as they are while the
                next are read: a source that fills one buffer anew has to yield copies, and a stage has to
                return memory that it does not write to again.

        Returns:
            an iterator. When it ends, fails or is dropped half-way, the threads end.

        Raises:
            TypeError: ``items`` cannot be iterated over; later, where a stage returns None.
            Exception: what a stage or ``items`` raise, with a note that names stage and item. The results of
                the items before it come first, and none behind it is begun any more.
        """
        return self._run(source_of_items("pipeline.map", items), "item")

    # -- running ----------------------------------------------------------------------------------

    def _run(self, source: Iterator[Any], unit: str, then: Callable[[Any], Any] = itself) -> Iterator[Any]:
        last = len(self.stages) - 1
        workers = [[self._worker(i, unit, then if i == last else itself)] for i in range(last + 1)]
        self._last = Run(workers, len(self.stages) * (self.queue_size + 1))
        return self._last.results(source)

    def _worker(self, i: int, unit: str, then: Callable[[Any], Any]) -> Worker:
        stage = self.stages[i]
        label = name_of(self.stages[i])
        enter: Enter = lambda _: nullcontext(stage)  # noqa: E731
        stop: Callable[[], object] = nothing
        if self.processes:
            from arraybridge.parallel.worker_processes import WorkerProcess  # which most programs do not need

            process = WorkerProcess(partial(itself, stage), repr(stage), f"stage {i} ({label})")
            enter = process.working
            stop = process.stop

        @contextmanager
        def working(worker: Worker) -> Iterator[Work]:
            with enter(worker) as call:
                yield lambda item: then(_check_result(call(item), label))

        return Worker(
            working,
            lambda number: f"in stage {i} ({label}), {unit} {number}",
            Shown("stage", label, _device(stage)),
            stop,
            depth=self.queue_size,
            slots=self.queue_size if i else 0,
        )

    def _rows(self, batch: Any) -> int:
        """Rows of the batch, which all its arrays have in common."""
        arrays = arrays_of(batch)
        if not arrays:
            raise TypeError(
                "there is no array in the batch, so that it cannot be split; pass single items to"
                " pipeline.map(items)"
            )
        counts = []
        for x in arrays:
            framework, array = source_of(x)
            if not isinstance(array, np.ndarray):  # which is cut and joined whatever it holds
                framework.check(array)
            shape = framework.shape(array)
            if not -len(shape) <= self.axis < len(shape):
                raise ValueError(
                    f"an array of shape {shape} has no axis {self.axis} to split along; pass"
                    " axis= to Pipeline, mark it as fixed(array) to give the whole of it to every part, or"
                    " send single items through pipeline.map(items)"
                )
            counts.append(shape[self.axis])
        if len(set(counts)) > 1:
            raise ValueError(
                f"the arrays of a batch have {counts} rows along axis {self.axis}; all must have as many, but"
                " for those that are marked as fixed(array)"
            )
        return counts[0]

    # -- what it looks like -----------------------------------------------------------------------

    def _drawn(self) -> list[tuple[str, str]]:
        return [(name_of(stage), placement_text(stage)) for stage in self.stages]

    def __repr__(self) -> str:
        return f"Pipeline({', '.join(name for name, _ in self._drawn())}, microbatches={self.microbatches})"

    def __str__(self) -> str:
        plural = "" if self.microbatches == 1 else "es"
        rows = self._drawn()
        width, wide = (max(len(row[i]) for row in rows) for i in (0, 1))
        lines = [f"Pipeline, {self.microbatches} microbatch{plural} along axis {self.axis}", "  input"]
        for (name, place), before in zip(rows, ["input", *(name for name, _ in rows)], strict=False):
            lines.append(f"    ↓ queue of {self.queue_size}")
            lines.append(f"  {name.ljust(width)}  {place.ljust(wide)}  waits for {before}")
        return "\n".join([*lines, "    ↓", "  output, in order"])

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"

    def report(self) -> PipelineReport:
        """Where the last run spent its time, stage by stage; of a run that goes on, what it did so far.

        Raises:
            RuntimeError: nothing has run yet.

        >>> pipeline = Pipeline(abs)
        >>> _ = list(pipeline.map([-1, -2]))
        >>> pipeline.report().bottleneck
        'abs'
        """
        run = self._last
        if run is None:
            raise RuntimeError("this pipeline has not run yet; call it, or go through pipeline.map(items)")
        stages = tuple(
            StageReport(name, place, w.items, w.busy, w.starved, w.blocked, tuple(w.spans.copy()))
            for (name, place), (w,) in zip(self._drawn(), run.stages, strict=True)
        )
        return PipelineReport(stages, run.ended - run.began, run.most_in_flight)


def _check_result(result: Any, label: str) -> Any:
    if result is None:
        raise TypeError(f"{label} returned None; a stage must return what the next one is to get")
    return result


def _device(stage: Any) -> str:
    """The device that a stage names for itself, in words, and unseen; ``""`` where it names none."""
    placed = placement(stage)
    if placed is None or not placed.is_fixed:
        return ""
    kind = registry.metadata_of(placed.framework).accelerator_kind if placed.framework else "gpu"
    return f"{kind}:{placed.gpu_id}" if placed.device is None else str(placed.device)


# -- where its time went -------------------------------------------------------------------------------


class StageReport(NamedTuple):
    """One stage of a run. Times are in seconds, as the stage's thread saw them.

    Attributes:
        name, device: the stage, and where it runs.
        items: how many it has finished.
        busy: spent in the stage, waiting for its accelerator included.
        starved, blocked: spent waiting for an item, and for room in the queue of the next stage.
        spans: number, start and end of each item (the last 10 000).
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
    """A run of a pipeline; prints as a table, also in a notebook.

    Attributes:
        stages: one `StageReport` each.
        seconds: from the start of the threads to the last result.
        most_in_flight: the most items that were on their way at one time.
    """

    stages: tuple[StageReport, ...]
    seconds: float
    most_in_flight: int

    @property
    def bottleneck(self) -> str:
        """The name of the stage that was busy the longest; making it faster makes the pipeline faster."""
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
        """The run as `trace` would have recorded it."""
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
        """Write the run to a file: ``.json`` in the trace-event format, which Perfetto opens; else a picture.

        Raises:
            ImportError: a picture was asked for, and matplotlib is not installed.
        """
        if Path(file).suffix != ".json":
            self.plot(file)
            return
        from arraybridge.tracing.export import save

        save(file, self.events())

    def plot(self, file: str | os.PathLike[str]) -> None:
        """Draw the run: a row for each stage, a bar for each item; in the form that the suffix says.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from arraybridge.tracing.export import plot

        plot(self.events(), file)
