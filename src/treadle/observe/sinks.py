"""Metric sinks: always a JSON file, and TensorBoard and Weights & Biases if configured.

The JSON file is the record of a run, so its failure is an error. The others are views of it: the first failure of one
is reported as a warning and switches it off, and the run goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

from treadle.config.sections import ObserveSection
from treadle.errors import RunFolderLostError, TreadleError, first_line
from treadle.observe.metric_lines import metric_line, read_metric_lines
from treadle.observe.run_folder import RunFolder
from treadle.observe.wandb_sink import WandbSink, import_wandb

Warn = Callable[[str], None]


class MetricSink(Protocol):
    """Takes the numbers of a run.

    `write` may be called several times with the same `rollout_id` (training, then evaluation), with any number of
    values, and with values that are not finite. After `close`, which may be called twice, all of it is stored.
    """

    def write(self, rollout_id: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """Appends one JSON object a line, each on disk before `write` returns."""

    def __init__(self, path: Path):
        self.path = path
        self._size = sum(len(line) for line, _ in read_metric_lines(path))
        try:
            self._file: Any = open(path, "ab", buffering=0)  # noqa: SIM115 closed by close()
            self._file.truncate(self._size)  # a line cut short by a kill would swallow the next one
        except OSError as error:
            raise TreadleError(f"{path} can't be written ({error.strerror}); give another --run-dir") from error

    def write(self, rollout_id: int, values: Mapping[str, float]) -> None:
        """Append one line; raises `TreadleError` if the disk is full, all earlier lines kept whole."""
        if self._file is None:
            raise TreadleError(f"{self.path} is closed; metrics of rollout {rollout_id} came too late")
        line = metric_line(rollout_id, values)
        self._check_there()
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._size)
            raise TreadleError(
                f"metrics of rollout {rollout_id} can't be written to {self.path} ({error.strerror}); "
                "earlier lines are safe: free some space and resume with --load"
            ) from error
        self._size += len(line)

    def _check_there(self) -> None:
        """Raise `RunFolderLostError` if the open file is not the one in the run folder: lines would be lost."""
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path)):
                return
        raise RunFolderLostError(
            f"{self.path} was removed or replaced while the run went on; start the run again in another --run-dir"
        )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class TensorBoardSink:
    """Writes TensorBoard scalars; the step is the rollout id.

    Uses tensorboard's own record writer, which needs neither tensorflow nor a thread. TensorBoard discards what an
    earlier part of a resumed run wrote at or after `start_rollout_id`.
    """

    def __init__(self, folder: Path, start_rollout_id: int = 0):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        stamp = f"{time.time():017.6f}"  # readers take the files of a folder in the order of their names
        self._file: Any = open(folder / f"events.out.tfevents.{stamp}.{os.getpid()}", "xb")  # noqa: SIM115
        self._records = RecordWriter(self._file)
        self._write_event(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if start_rollout_id > 0:
            start = SessionLog(status=SessionLog.START)
            self._write_event(Event(wall_time=time.time(), step=start_rollout_id, session_log=start))

    def _write_event(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._file.flush()

    def write(self, rollout_id: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._file is None:
            raise TreadleError(f"the TensorBoard file is closed; metrics of rollout {rollout_id} came too late")
        scalars = [Summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()]
        self._write_event(Event(wall_time=time.time(), step=int(rollout_id), summary=Summary(value=scalars)))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class OptionalSink:
    """A sink whose errors don't end the run: the first one is reported as a warning and switches the sink off."""

    def __init__(self, name: str, make: Callable[[], MetricSink], warn: Warn):
        self.name = name
        self._warn = warn
        self._sink: MetricSink | None = None
        try:
            self._sink = make()
        except Exception as error:  # a third-party client raises what it likes
            self._switch_off(error)

    def _switch_off(self, error: Exception) -> None:
        sink, self._sink = self._sink, None
        said = first_line(error)
        self._warn(f"{self.name} is switched off for the rest of the run: {said}; metrics.jsonl still has everything")
        if sink is not None:
            with suppress(Exception):  # it has failed and been reported already
                sink.close()

    def write(self, rollout_id: int, values: Mapping[str, float]) -> None:
        if self._sink is None:
            return
        try:
            self._sink.write(rollout_id, values)
        except Exception as error:
            self._switch_off(error)

    def close(self) -> None:
        sink, self._sink = self._sink, None
        if sink is None:
            return
        try:
            sink.close()
        except Exception as error:
            self._warn(f"{self.name} could not be closed: {first_line(error)}; metrics.jsonl has everything")


class FanOut:
    """Writes to several sinks, in order."""

    def __init__(self, sinks: Sequence[MetricSink]):
        self.sinks = tuple(sinks)

    def write(self, rollout_id: int, values: Mapping[str, float]) -> None:
        for sink in self.sinks:
            sink.write(rollout_id, values)

    def close(self) -> None:
        with ExitStack() as stack:
            for sink in reversed(self.sinks):
                stack.callback(sink.close)


def open_sinks(
    folder: RunFolder,
    section: ObserveSection,
    warn: Warn,
    start_rollout_id: int = 0,
    config: Mapping[str, Any] | None = None,
) -> MetricSink:
    """Open the configured sinks as one; raises `ConfigError` if wandb is configured and not installed."""
    sinks: list[MetricSink] = [JsonlSink(folder.metrics)]
    if section.tensorboard:
        sinks.append(OptionalSink("TensorBoard", lambda: TensorBoardSink(folder.tensorboard, start_rollout_id), warn))
    project = section.wandb_project
    if project is not None:
        import_wandb()
        sinks.append(OptionalSink("wandb", lambda: WandbSink(project, folder.path.name, folder.path, config), warn))
    return FanOut(sinks)
