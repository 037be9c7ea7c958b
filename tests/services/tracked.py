"""Reads back what trackers show, with their own libraries: by number of a trial, its params, metrics and state."""

from __future__ import annotations

import functools
import json
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

#: size of a block of an offline file of W&B, which has the format of LevelDB's logs, after a header
BLOCK, HEADER = 32768, 7


Shown = list[tuple[int, Mapping[str, Any]]]


def quietly(read: Callable[..., Shown]) -> Callable[..., Shown]:
    """Ignore the warnings of a library, such as deprecations, which are not ours."""

    @functools.wraps(read)
    def found(*args: Any) -> Shown:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return read(*args)

    return found


@quietly
def read_mlflow(uri: str, experiment: str) -> Shown:
    """Return the runs of trials, by the client of MLflow."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    shown = []
    runs = client.search_runs([found.experiment_id], max_results=1000)
    [whole] = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    for run in runs:
        if run is whole:
            continue
        assert run.data.tags["mlflow.parentRunId"] == whole.info.run_id
        history = client.get_metric_history(run.info.run_id, "loss")
        found = {
            "params": run.data.params,
            "metrics": run.data.metrics,
            "state": run.info.status,
            "steps": sorted({each.step for each in history}),
        }
        shown.append((int(run.data.tags["shadho.number"]), found))
    return shown


@quietly
def read_tensorboard(folder: Path) -> Shown:
    """Return the folders of trials, by TensorBoard's accumulator of events and its hparams plugin."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    shown = []
    for part in folder.iterdir():
        if not part.name.isdecimal():
            continue
        events = EventAccumulator(str(part)).Reload()
        content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
        start = HParamsPluginData.FromString(content).session_start_info
        params = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.hparams.items()}
        scalars = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
        metrics = {tag: points[-1].value for tag, points in scalars.items()}
        steps = sorted({each.step for each in scalars.get("loss", ())})
        found = {"params": params, "metrics": metrics, "state": params["state"], "steps": steps}
        shown.append((int(part.name), found))
    return shown


@quietly
def read_wandb(folder: Path) -> Shown:
    """Return the offline runs, by the records of W&B."""
    from wandb.proto.wandb_internal_pb2 import Record

    shown = []
    for file in folder.glob("offline-run-*/run-*.wandb"):
        number = int(file.stem.rpartition("-")[2])
        found: dict[str, Any] = {"params": {}, "metrics": {}, "state": None, "steps": []}
        for content in _records(file.read_bytes()):
            record = Record.FromString(content)
            if record.HasField("run"):
                assert record.run.run_id == file.stem.removeprefix("run-")
                found["params"] |= {each.key: json.loads(each.value_json) for each in record.run.config.update}
                found["group"], found["tags"] = record.run.run_group, [*record.run.tags]
            if record.HasField("history"):
                found["steps"].append(record.history.step.num)
            if record.HasField("summary"):
                update = {each.key or each.nested_key[0]: each.value_json for each in record.summary.update}
                found["metrics"] |= {key: json.loads(value) for key, value in update.items()}
            if record.HasField("exit"):
                found["state"] = record.exit.exit_code
        shown.append((number, found))
    return shown


def _records(content: bytes) -> Iterator[bytes]:
    """Yield the records of an offline file, whose parts have a checksum, a length and a kind."""
    assert content[:4] == b":W&B"
    place, whole = HEADER, b""
    while place + 7 <= len(content):
        if BLOCK - place % BLOCK < 7:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        # A record is whole (1), or has a first (2), middle (3) and last part (4).
        if kind in (1, 4):
            yield whole
            whole = b""
