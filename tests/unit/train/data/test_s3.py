"""Data of an object store, with a real S3 server beside: a folder with splits, a pattern, one object; credentials from the environment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from lockstep_spec.training import SourceConfig
from lockstep_train.base.errors import ConfigError
from lockstep_train.data.read.files import DataSource
from lockstep_train.data.read.remote import hub_dataset
from lockstep_train.data.read.text_files import Broken
from lockstep_train.fetch import fetch as fetching
from support.s3_server import bucket, running_s3
from unit.train.data.data_cases import dataset_of, text_of


def parquet(*texts: str) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": list(texts)}), sink)
    return bytes(sink.getvalue())


OBJECTS = {
    "wiki/train-00000-of-00002.parquet": parquet("a", ""),
    "wiki/train-00001-of-00002.parquet": parquet("b"),
    "wiki/test-00000-of-00001.parquet": parquet("c"),
    "lines.jsonl": json.dumps({"text": "of a line"}).encode(),
}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with running_s3() as address:
        yield address


@pytest.fixture
def store(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """pyarrow's file system on the server, with the data there."""
    monkeypatch.setattr(fetching, "BACKOFF_SECONDS", 0.01)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with bucket(server, "data", OBJECTS, monkeypatch) as store:
        yield store


def put(store: Any, name: str, content: bytes) -> None:
    with store.open_output_stream(f"data/{name}") as file:
        file.write(content)


def dataset(cache: Path, path: str, **source: Any) -> DataSource:
    return hub_dataset(SourceConfig(path, **source), cache, print)


def texts(found: DataSource) -> list[str]:
    return [sample.text for sample in found.samples(Broken("x"))]  # type: ignore[union-attr]


def fetched(cache: Path) -> set[str]:
    return {path.name for path in cache.rglob("*") if path.is_file() and path.suffix in {".parquet", ".jsonl"}}


def test_a_folder_of_a_bucket_has_splits_and_only_the_asked_one_is_fetched(store: Any, tmp_path: Path) -> None:
    found = dataset(tmp_path, "s3://data/wiki")
    assert (texts(found), found.name) == (["a", "b"], "s3://data/wiki[train]")
    assert fetched(tmp_path) == {"train-00000-of-00002.parquet", "train-00001-of-00002.parquet"}
    with pytest.raises(ConfigError, match="the folder s3://data/wiki has no split dev; it has test, train"):
        dataset(tmp_path, "s3://data/wiki", split="dev")


def test_objects_are_named_one_by_one_or_by_a_pattern(store: Any, tmp_path: Path) -> None:
    assert texts(dataset(tmp_path, "s3://data/lines.jsonl")) == ["of a line"]
    assert fetched(tmp_path) == {"lines.jsonl"}
    put(store, "wiki/._train.parquet", b"what a Mac writes beside a file")
    assert texts(dataset(tmp_path, "s3://data/wiki/*.parquet")) == ["c", "a", "b"]


def test_a_part_of_objects_is_another_dataset(store: Any, tmp_path: Path) -> None:
    whole, part = (dataset(tmp_path, "s3://data/wiki/*.parquet", split=split) for split in ("train", "train[1:]"))
    assert (texts(whole), texts(part)) == (["c", "a", "b"], ["a", "b"])
    assert (whole.name, part.name) == ("s3://data/wiki/*.parquet", "s3://data/wiki/*.parquet[train[1:]]")
    assert whole.digest != part.digest


def test_objects_of_a_folder_that_are_left_out_are_told(store: Any, tmp_path: Path) -> None:
    for name in ("wiki/more.jsonl", "wiki/._more.jsonl"):
        put(store, name, b"{}")
    told: list[str] = []
    hub_dataset(SourceConfig("s3://data/wiki"), tmp_path, told.append)
    assert any(
        line.startswith("WARNING: the folder s3://data/wiki: left out 1 files that look like data and are of no split: more.jsonl")
        for line in told
    )


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("s3://data/nothing.jsonl", "holds nothing; check the address"),
        ("s3://data/wiki/*.csv", "holds nothing; check the address"),
        ("s3://nobucket/x.parquet", "holds nothing|can't be read"),
        ("s3://data/*/x.parquet", "only the last part of an address may contain"),
    ],
)
def test_an_address_without_data_is_refused(store: Any, tmp_path: Path, path: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        dataset(tmp_path, path)


def test_a_run_trains_on_an_address_and_another_object_there_is_other_data(store: Any, tmp_path: Path) -> None:
    first = dataset_of(tmp_path, path="s3://data/wiki")
    assert [text_of(example.ids) for example in first.training] == ["a", "b"]
    assert [example.source for example in first.training] == ["s3://data/wiki[train]:1", "s3://data/wiki[train]:3"]
    put(store, "wiki/train-00001-of-00002.parquet", parquet("changed"))
    second = dataset_of(tmp_path, path="s3://data/wiki")
    assert [text_of(example.ids) for example in second.training] == ["a", "changed"]
    assert first.files.keys() != second.files.keys()
