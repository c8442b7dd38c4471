"""Datasets by name: fetched by the hub's own client from a small server of its protocol, once a volume, at one commit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from lockstep_spec.choices import DataFormat
from lockstep_spec.training import EvaluationConfig, SamplesConfig, SourceConfig
from lockstep_train.base.errors import ConfigError
from lockstep_train.data.read.files import DataSource
from lockstep_train.data.read.remote import hub_dataset
from lockstep_train.data.read.text_files import Broken
from support.hub_server import Hub, hub_of_this_process
from unit.train.data.data_cases import PLAIN_BYTES, dataset_of, text_of

NAME = "Salesforce/wikitext"
CARD = b"""---
configs:
- config_name: wikitext-2-raw-v1
  data_files:
  - {split: test, path: wikitext-2-raw-v1/test-*}
  - {split: train, path: wikitext-2-raw-v1/train-*}
  - {split: validation, path: wikitext-2-raw-v1/validation-*}
- config_name: wikitext-103-v1
  data_files:
  - {split: train, path: wikitext-103-v1/train-*}
---
About.
"""


def parquet(*texts: str) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": list(texts)}), sink)
    return bytes(sink.getvalue())


WIKITEXT = {
    "README.md": CARD,
    "wikitext-2-raw-v1/train-00000-of-00002.parquet": parquet("", " = A = \n", "one\n"),
    "wikitext-2-raw-v1/train-00001-of-00002.parquet": parquet("two\n"),
    "wikitext-2-raw-v1/validation-00000-of-00001.parquet": parquet("three"),
    "wikitext-2-raw-v1/test-00000-of-00001.parquet": parquet("four"),
    "wikitext-103-v1/train-00000-of-00001.parquet": parquet("large" * 10_000),
}
SMALL = {"config": "wikitext-2-raw-v1"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with hub_of_this_process(monkeypatch, tmp_path) as hub:
        hub.add(NAME, WIKITEXT, "datasets")
        yield hub


def dataset(cache: Path, told: list[str] | None = None, **source: Any) -> DataSource:
    return hub_dataset(SourceConfig(**{"name": NAME, **SMALL, **source}), cache, (told if told is not None else []).append)


def texts(found: DataSource) -> list[str]:
    return [sample.text for sample in found.samples(Broken("x"))]  # type: ignore[union-attr]


def commit_of(found: DataSource) -> str:
    return found.pinned.rpartition("@")[2]


def fetched(hub: Hub) -> list[str]:
    """Data files that were asked for."""
    return sorted(
        request.split("/resolve/")[1].split("/", 1)[1]
        for request in hub.requests
        if request.endswith(".parquet") and "/resolve/" in request
    )


def test_only_the_files_of_the_split_are_fetched_and_their_rows_read_from_there(hub: Hub, tmp_path: Path) -> None:
    told: list[str] = []
    found = dataset(tmp_path, told)
    commit = hub.repositories["datasets", NAME].revisions["main"]
    assert texts(found) == [" = A = \n", "one\n", "two\n"]
    assert fetched(hub) == sorted(path for path in WIKITEXT if path.startswith("wikitext-2-raw-v1/train"))
    assert f"Dataset {NAME}, config wikitext-2-raw-v1, split train, revision {commit}" in told
    assert found.name == f"{NAME}/wikitext-2-raw-v1[train]"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    data = sum(len(content) for path, content in WIKITEXT.items() if path.startswith(("wikitext-2-raw-v1/train", "README")))
    assert sum(path.stat().st_size for path in files if path.suffix != ".json") == data  # one copy of it


def test_a_second_start_asks_nothing_and_needs_no_network(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = dataset(tmp_path)
    asked = len(hub.requests)
    assert dataset(tmp_path).digest == first.digest
    assert len(hub.requests) == asked
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert texts(dataset(tmp_path)) == texts(first)


def test_a_branch_that_moves_changes_nothing_and_a_stated_commit_does(hub: Hub, tmp_path: Path) -> None:
    repository = hub.repositories["datasets", NAME]
    first = dataset(tmp_path)
    later = repository.commit({**WIKITEXT, "wikitext-2-raw-v1/train-00001-of-00002.parquet": parquet("changed")})
    assert commit_of(dataset(tmp_path)) == commit_of(first)
    assert commit_of(dataset(tmp_path, split="test")) == commit_of(first)  # another split of the same dataset is of the same commit
    other = dataset(tmp_path, revision=later)
    assert (commit_of(other), texts(other)[-1]) == (later, "changed")
    assert other.digest != first.digest


def test_a_name_without_an_organization_is_where_the_hub_redirects_it(hub: Hub, tmp_path: Path) -> None:
    hub.moved["wikitext"] = NAME
    assert texts(dataset(tmp_path, name="wikitext")) == texts(dataset(tmp_path / "other"))


def test_wikitext_is_trained_on_and_evaluated_by_name(hub: Hub, tmp_path: Path) -> None:
    own = EvaluationConfig(1, 0.1, 100, SamplesConfig(name=NAME, config="wikitext-2-raw-v1"))
    found = dataset_of(tmp_path, PLAIN_BYTES, own, name=NAME, format=DataFormat.TEXT, **SMALL)
    assert [text_of(example.ids) for example in found.training] == [" = A =\n\none\n\ntwo"]
    assert [text_of(example.ids) for example in found.evaluation] == ["three"]
    assert f"Data: {NAME}/wikitext-2-raw-v1[train]: left out 1 blank rows" in found.notes
    commit = hub.repositories["datasets", NAME].revisions["main"]
    assert f"{NAME}/wikitext-2-raw-v1[train]@{commit}" in found.files


def test_a_part_of_a_split_is_rows_of_the_same_files(hub: Hub, tmp_path: Path) -> None:
    assert texts(dataset(tmp_path, split="train[2:]")) == ["one\n", "two\n"]
    asked = len(hub.requests)
    assert texts(dataset(tmp_path, split="train[:75%]")) == [" = A = \n", "one\n"]
    assert len(hub.requests) == asked


def test_keys_that_a_table_gives_to_every_object_are_not_rendered_as_nulls(hub: Hub, tmp_path: Path) -> None:
    calls = [{"type": "function", "function": {"name": name, "arguments": {key: 1}}} for name, key in (("f", "x"), ("g", "y"))]
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": calls}]
    tools = [{"name": name, "parameters": {key: {"type": "number"}}} for name, key in (("f", "x"), ("g", "y"))]
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": turns, "tools": tools}]), sink)
    hub.add("org/calls", {"train.parquet": bytes(sink.getvalue())}, "datasets")
    sample: Any = next(iter(dataset(tmp_path, name="org/calls", config=None).samples(Broken("x"))))
    assert sample.messages == ({"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": calls})
    assert [tool["parameters"] for tool in sample.tools] == [{"x": {"type": "number"}}, {"y": {"type": "number"}}]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ({"name": "org/nothing"}, "does not show the dataset org/nothing"),
        ({"name": "no/such/name"}, "no/such/name is not a valid hub name"),
        ({"config": None}, f"the dataset {NAME} has several configs; set config to wikitext-103-v1, wikitext-2-raw-v1$"),
        ({"config": "raw"}, f"the dataset {NAME} has no config raw; it has wikitext-103-v1, wikitext-2-raw-v1$"),
        ({"split": "dev"}, rf"the dataset {NAME} \(config wikitext-2-raw-v1\) has no split dev; it has test, train, validation$"),
        ({"revision": "v9"}, "has no revision v9"),
    ],
)
def test_what_the_hub_does_not_have_is_refused_with_what_it_has(hub: Hub, tmp_path: Path, source: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        dataset(tmp_path, **source)
    assert fetched(hub) == []


def test_a_dataset_with_a_script_of_its_own_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/old", {"old.py": b"import datasets", "data/train.zip": b"PK"}, "datasets")
    with pytest.raises(
        ConfigError,
        match=r"the dataset org/old needs a loading script of its own \(old\.py\), .* revision: refs/convert/parquet, and config: ",
    ):
        dataset(tmp_path, name="org/old", config=None)


def test_the_parquet_copy_of_a_dataset_with_a_script_is_read(hub: Hub, tmp_path: Path) -> None:
    repository = hub.add("org/old", {"old.py": b"import datasets"}, "datasets")
    repository.commit({"plain/train/0000.parquet": parquet("a"), "plain/test/0000.parquet": parquet("b")}, "refs/convert/parquet")
    found = dataset(tmp_path, name="org/old", config="plain", revision="refs/convert/parquet")
    assert texts(found) == ["a"]


def test_a_layout_that_was_lost_is_looked_up_again(hub: Hub, tmp_path: Path) -> None:
    first = dataset(tmp_path)
    (note,) = tmp_path.rglob("layouts/*.json")
    note.write_text("{")
    assert texts(dataset(tmp_path)) == texts(first)
