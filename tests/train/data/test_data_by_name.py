"""Data by name: fetched by one rank a volume from a hub's server, at one commit for all volumes, and trained on as a file would be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from rank_harness import ForkServer, RunFile

from lockstep_train.checkpoint.format.manifest import Manifest, decode
from support.hub_server import Hub, running_hub

NAME = "org/texts"
CARD = (
    b"---\nconfigs:\n- config_name: small\n  data_files:\n  - {split: train, path: small/train*}\n  - {split: test, path:"
    b" small/test*}\n---\n"
)
QUICK: dict[str, Any] = {"optimization": {"maxSteps": 2, "globalBatchSize": 4}, "checkpoint": {"everySteps": 1}}
LONGER = QUICK | {"optimization": QUICK["optimization"] | {"maxSteps": 3}}
EVALUATED = {"evaluation": {"everySteps": 1, "data": {"name": NAME, "config": "small", "split": "test"}}}


def parquet(texts: list[str]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), sink)
    return bytes(sink.getvalue())


def files_of(texts: list[str]) -> dict[str, bytes]:
    return {"README.md": CARD, "small/train.parquet": parquet(texts), "small/test.parquet": parquet(texts[:5])}


def lines_of(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


TEXTS = [f"text {number} of some" + " and more" * (number % 4) for number in range(60)]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        hub.add(NAME, files_of(TEXTS), "datasets")
        yield hub


def of_hub(**more: Any) -> dict[str, Any]:
    return {"path": None, "name": NAME, "config": "small", **more}


def manifest(run: Path, commit: str) -> Manifest:
    return decode((run / "checkpoints" / commit / "manifest.json").read_bytes())


def test_a_dataset_by_name_trains_as_a_file_of_its_rows_does_and_later_starts_ask_nobody(
    ranks: ForkServer, run_file: RunFile, hub: Hub, tmp_path: Path
) -> None:
    rows, own = (lines_of(tmp_path / f"{len(texts)}.jsonl", texts) for texts in (TEXTS, TEXTS[:5]))
    evaluation = {"everySteps": 1, "data": {"path": own}}
    by_file = run_file("by-file", folder="runs/by-file", data={"path": rows}, evaluation=evaluation, **QUICK)
    named = run_file("named", folder="runs/named", data=of_hub(), **EVALUATED, **QUICK)
    ranks.run("main", [by_file] * 2)
    ended = ranks.run("main", [named] * 2, nodes=2, HF_ENDPOINT=hub.endpoint)
    repository = hub.repositories["datasets", NAME]
    commit = repository.revisions["main"]
    assert f"Dataset {NAME}, config small, split train, revision {commit}" in ended.outputs[0]
    assert hub.sent["small/train.parquet"] == len(files_of(TEXTS)["small/train.parquet"]), "one of the two nodes has fetched it, for both"
    ours, theirs = (manifest(tmp_path / "runs" / name, "step-2.a1") for name in ("named", "by-file"))
    assert [shard.sha256 for shard in ours.shards] == [shard.sha256 for shard in theirs.shards]
    assert ours.eval_loss == theirs.eval_loss
    assert ours.identity.data_files.keys() == {f"{NAME}/small[{split}]@{commit}" for split in ("train", "test")}

    repository.commit(files_of(TEXTS[::-1]))
    hub.requests.clear()
    longer = run_file("named", folder="runs/named", data=of_hub(), **EVALUATED, **LONGER)
    ranks.run("main", [longer] * 2, nodes=2, HF_ENDPOINT=hub.endpoint)
    assert hub.requests == []


def test_all_volumes_are_at_the_commit_of_the_first_though_its_branch_has_moved(
    ranks: ForkServer, run_file: RunFile, hub: Hub, tmp_path: Path
) -> None:
    runs = [
        run_file(f"node-{node}", folder=f"volume-{node}/runs/x", storage="PerPod", data=of_hub(), evaluation=None, **QUICK)
        for node in range(2)
    ]
    ranks.run("main", runs, nodes=2, HF_ENDPOINT=hub.endpoint)
    commit = hub.repositories["datasets", NAME].revisions["main"]
    hub.repositories["datasets", NAME].commit(files_of(TEXTS[::-1]))
    shutil.rmtree(tmp_path / "volume-0/cache")
    runs = [
        run_file(f"node-{node}", folder=f"volume-{node}/runs/x", storage="PerPod", data=of_hub(), evaluation=None, **LONGER)
        for node in range(2)
    ]
    ranks.run("main", runs, nodes=2, HF_ENDPOINT=hub.endpoint)
    for node in range(2):
        (folder,) = (tmp_path / f"volume-{node}/cache/datasets/org--texts").glob("*-*/small")
        assert folder.parent.name.startswith(commit)


def test_what_the_hub_does_not_have_ends_all_ranks_by_one_sentence(ranks: ForkServer, run_file: RunFile, hub: Hub) -> None:
    named = run_file("named", folder="runs/named", data=of_hub(split="dev"), **QUICK)
    ended = ranks.run("main", [named] * 2, nodes=2, HF_ENDPOINT=hub.endpoint, codes=78)
    for output in ended.outputs:
        assert f"the dataset {NAME} (config small) has no split dev; it has test, train" in output
        assert "Traceback" not in output


def test_a_hub_that_fails_ends_an_attempt_and_not_the_job(ranks: ForkServer, run_file: RunFile, hub: Hub) -> None:
    named = run_file("named", folder="runs/named", data=of_hub(), **QUICK)
    hub.faults.statuses["/api/"] = [503] * 50
    soon = {"fetch.fetch.BACKOFF_SECONDS": 0.01}
    ended = ranks.run("main_with", [named] * 2, HF_ENDPOINT=hub.endpoint, codes=1, arguments={"constants": soon})
    assert f"can't be asked for the dataset {NAME}: it answers 503" in ended.output
