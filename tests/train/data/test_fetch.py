"""A base model by its name: fetched by one rank a volume from a hub's server, pinned for the run, and trained as a folder would be."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyarrow import fs
from rank_harness import ForkServer, RunFile

from lockstep_train.checkpoint.format.manifest import Manifest, decode
from support.hub_server import TOKEN, Hub, running_hub
from support.s3_server import running_s3

NAME = "org/tiny"
QUICK: dict[str, Any] = {"optimization": {"maxSteps": 2, "globalBatchSize": 4}, "checkpoint": {"everySteps": 1}, "evaluation": None}
LONGER = QUICK | {"optimization": QUICK["optimization"] | {"maxSteps": 3}}


@pytest.fixture
def hub(model: Path) -> Iterator[Hub]:
    with running_hub() as hub:
        hub.add(NAME, files_of(model))
        yield hub


def files_of(model: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}


def by_name(hub: Hub, **more: str) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.endpoint, **more}


def cases(hub: Hub) -> Any:
    return hub.repositories["models", NAME]


def weights(model: Path) -> str:
    return next(path.name for path in model.iterdir() if path.suffix == ".safetensors")


def manifest(run: Path, commit: str) -> Manifest:
    return decode((run / "checkpoints" / commit / "manifest.json").read_bytes())


def test_a_model_by_name_is_fetched_once_and_trains_as_its_folder_does(
    ranks: ForkServer, run_file: RunFile, model: Path, hub: Hub, tmp_path: Path
) -> None:
    by_folder = run_file("by-folder", folder="runs/by-folder", **QUICK)
    named = run_file("named", folder="runs/named", model={"name": NAME}, **QUICK)
    ranks.run("main", [by_folder] * 2)
    ended = ranks.run("main", [named] * 2, nodes=2, **by_name(hub))
    commit = cases(hub).revisions["main"]
    folder = tmp_path / "cache/models/org--tiny" / commit
    assert f"Base model {NAME} at {commit} in {folder}" in ended.outputs[0]
    assert hub.sent[weights(model)] == (model / weights(model)).stat().st_size, "one of the two nodes has fetched it, for both"
    ours, theirs = (manifest(tmp_path / "runs" / name, "step-2.a1") for name in ("named", "by-folder"))
    assert [shard.sha256 for shard in ours.shards] == [shard.sha256 for shard in theirs.shards]
    assert ours.base_origin == {"name": NAME, "revision": None, "pin": commit}
    description = json.loads((tmp_path / "runs/named/adapter/adapter_config.json").read_text())
    assert (description["base_model_name_or_path"], description["revision"]) == (NAME, commit)

    moved = cases(hub).commit({**files_of(model), "config.json": b"{}"})
    assert moved != commit
    hub.requests.clear()
    longer = run_file("named", folder="runs/named", model={"name": NAME}, **LONGER)
    ranks.run("main", [longer] * 2, nodes=2, **by_name(hub))
    assert hub.requests == [], "a run stays with the commit that it began with, and asks nobody for it"


def test_each_volume_gets_the_model_at_one_commit(ranks: ForkServer, run_file: RunFile, model: Path, hub: Hub, tmp_path: Path) -> None:
    runs = [run_file(f"node-{node}", folder=f"volume-{node}/runs/x", storage="PerPod", model={"name": NAME}, **QUICK) for node in range(2)]
    ranks.run("main", runs, nodes=2, **by_name(hub))
    commit = cases(hub).revisions["main"]
    for node in range(2):
        volume = tmp_path / f"volume-{node}"
        assert (volume / "cache/models/org--tiny" / commit / "config.json").is_file()
        assert json.loads((volume / "runs/x/model.json").read_text())["pin"] == commit
    assert hub.requests.count(f"GET /api/models/{NAME}") == 1, "the branch is looked up once for all"


def test_a_run_killed_while_it_fetches_goes_on_at_the_byte_and_at_its_commit(
    ranks: ForkServer, run_file: RunFile, model: Path, hub: Hub, tmp_path: Path
) -> None:
    large = os.urandom(30_000_000)
    files = {**files_of(model), "tokenizer.model": large}
    commit = cases(hub).commit(files)
    hub.faults.held = "tokenizer.model"
    named = run_file("named", folder="runs/named", model={"name": NAME}, **QUICK)
    outputs = ranks.start("main", [named] * 2, **by_name(hub))
    folder = tmp_path / "cache/models/org--tiny"
    hub.faults.held = ""
    part = folder / f".{commit}.partial" / "tokenizer.model.part"
    deadline = time.monotonic() + 60
    hub.faults.bytes_per_second = 20e6
    while not (part.exists() and part.stat().st_size >= 10_000_000):
        assert time.monotonic() < deadline, "\n".join(path.read_text() for path in outputs)
        time.sleep(0.01)
    ranks.kill()
    assert not (folder / commit).exists()
    kept = part.stat().st_size
    cases(hub).commit({**files, "config.json": b"{}"})
    hub.faults.bytes_per_second = None
    hub.sent.clear()
    ranks.run("main", [named] * 2, **by_name(hub))
    assert hub.sent["tokenizer.model"] == len(large) - kept
    assert manifest(tmp_path / "runs/named", "step-2.a1").base_origin == {"name": NAME, "revision": None, "pin": commit}


def test_a_gated_model_ends_all_ranks_by_one_sentence_and_no_token_is_written_anywhere(
    ranks: ForkServer, run_file: RunFile, hub: Hub, tmp_path: Path
) -> None:
    cases(hub).gated = True
    named = run_file("named", folder="runs/named", model={"name": NAME}, **QUICK)
    ended = ranks.run("main", [named] * 2, codes=78, **by_name(hub, HF_TOKEN="hf_somebodyelse"))
    for output in ended.outputs:
        assert "is gated and the token's account has no access to it" in output
        assert "Traceback" not in output
    ended = ranks.run("main", [named] * 2, **by_name(hub, HF_TOKEN=TOKEN))
    written = [path for path in tmp_path.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert written == []
    assert TOKEN not in ended.output


def test_no_network_ends_an_attempt_and_not_the_job(ranks: ForkServer, run_file: RunFile, hub: Hub, tmp_path: Path) -> None:
    named = run_file("named", folder="runs/named", model={"name": NAME}, **QUICK)
    hub.faults.statuses["/api/"] = [503] * 50
    ended = ranks.run("main_with", [named] * 2, codes=1, arguments={"constants": {"fetch.fetch.BACKOFF_SECONDS": 0.01}}, **by_name(hub))
    assert "can't be asked for the model org/tiny: it answers 503" in ended.output
    ended = ranks.run("main", [named] * 2, codes=78, **by_name(hub, HF_HUB_OFFLINE="1"))
    assert "HF_HUB_OFFLINE is set" in ended.output


def test_a_job_by_name_runs_on_this_machine_and_its_data_is_shown_before(hub: Hub, model: Path, data: Path, tmp_path: Path) -> None:
    for name in ("workspace", "datasets"):
        (tmp_path / name).mkdir()
    shutil.copy(data, tmp_path / "datasets/data.jsonl")
    training = {
        "model": {"name": NAME, "revision": "main", "tokenSecret": {"name": "hub"}},
        "data": {"path": "/datasets/data.jsonl", "maxLength": 32},
        "precision": "FP32",
        "optimization": {"maxSteps": 1},
    }
    spec = {"nodes": 1, "gpusPerNode": 0, "training": training}
    job = {"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "x"}, "spec": spec}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable, "-m", "lockstep.cli.main", "run", "-f", str(tmp_path / "job.yaml"), "--cluster", str(tmp_path),
        ]  # fmt: skip
        environment = {**os.environ, **by_name(hub, HF_TOKEN=TOKEN), "DS_ACCELERATOR": "cpu"}
        return subprocess.run(
            [*command, *options], capture_output=True, text=True, timeout=170, check=False, env=environment, stdin=subprocess.DEVNULL
        )

    shown = run("--preview", "1")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "data.jsonl:1: " in shown.stdout
    assert weights(model) not in hub.sent
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Fetched org/tiny at " in done.stdout
    assert "Secret" not in (tmp_path / "workspace/runs/x/model.json").read_text()
    assert (tmp_path / "workspace/runs/x/adapter/adapter_model.safetensors").is_file()


def test_a_model_of_an_object_store_trains_and_a_later_start_asks_nobody(
    ranks: ForkServer, run_file: RunFile, model: Path, tmp_path: Path
) -> None:
    named = run_file("named", folder="runs/named", model={"name": "s3://models/tiny"}, **QUICK)
    with running_s3() as server:
        variables = {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "secret-of-a-test",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": server,
        }
        store = fs.S3FileSystem(
            endpoint_override=server, access_key="test", secret_key="test", region="us-east-1", allow_bucket_creation=True
        )
        store.create_dir("models")
        for name, content in files_of(model).items():
            with store.open_output_stream(f"models/tiny/{name}") as file:
                file.write(content)
        ranks.run("main", [named] * 2, nodes=2, **variables)
    origin = manifest(tmp_path / "runs/named", "step-2.a1").base_origin
    assert origin is not None and origin["name"] == "s3://models/tiny"
    longer = run_file("named", folder="runs/named", model={"name": "s3://models/tiny"}, **LONGER)
    ended = ranks.run("main", [longer] * 2, nodes=2, **variables)
    assert "secret-of-a-test" not in ended.output
