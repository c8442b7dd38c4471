"""No damage to any file of a commit goes unseen, and none ends in anything but a refusal."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep_train.checkpoint.format import volume
from lockstep_train.checkpoint.format.manifest import Manifest, decode, seal, shapes, unseal
from lockstep_train.checkpoint.format.volume import read_view, shard_problem
from lockstep_train.proof import __main__ as proof
from support.checkpoint_cases import make_commit, record


def check(commit: Path) -> Manifest:
    """What a start checks before it loads. Raises ValueError."""
    try:
        manifest = decode((commit / "manifest.json").read_bytes())
    except OSError as error:
        raise ValueError("unreadable") from error
    shapes(manifest.shards)
    problem = next((problem for shard in manifest.shards if (problem := shard_problem(commit, shard))), None)
    if problem is not None:
        raise ValueError(problem)
    return manifest


@pytest.fixture
def commit(tmp_path: Path) -> Path:
    return make_commit(tmp_path, "step-3.a1", eval_loss=1.5, ranks=3)


def test_every_flipped_bit_cut_exchange_and_deletion_of_any_file_is_seen(commit: Path, tmp_path: Path) -> None:
    check(commit)
    other = make_commit(tmp_path, "step-2.a1", eval_loss=1.5, ranks=3)
    for path in sorted(commit.iterdir()):
        whole = path.read_bytes()
        for content in (whole + b"\0", bytes(len(whole)), (other / path.name).read_bytes()):
            path.write_bytes(content)
            with pytest.raises(ValueError):
                check(commit)
        for position in range(len(whole)):
            for content in (whole[:position] + bytes([whole[position] ^ 1 << position % 8]) + whole[position + 1 :], whole[:position]):
                path.write_bytes(content)
                with pytest.raises(ValueError):
                    check(commit)
        path.unlink()
        with pytest.raises(ValueError):
            check(commit)
        path.write_bytes(whole)
    check(commit)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every value in a JSON document is."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(value[key], (*path, key))


def changed(document: Any, place: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    again = copy.deepcopy(document)
    parent = again
    for key in place[:-1]:
        parent = parent[key]
    change(parent, place[-1])
    return again


def test_a_forged_manifest_with_a_right_checksum_is_refused_or_means_what_it_says(commit: Path) -> None:
    """Every value replaced by every kind of nonsense: a ValueError, or a manifest of the right types whose files are its own."""
    document = unseal((commit / "manifest.json").read_bytes())
    nonsense = [None, -1, 1 << 70, 1.5, "", "../../etc/passwd", "/etc/passwd", [], {}, [[]], True]
    told = 0
    for place in places(document):
        for value in nonsense:
            forged = changed(document, place, lambda parent, key, value=value: parent.__setitem__(key, value))
            (commit / "manifest.json").write_bytes(seal(forged))
            try:
                manifest = check(commit)
            except ValueError:
                told += 1
                continue
            assert all((commit / shard.file).resolve().parent == commit.resolve() for shard in manifest.shards)
            assert type(manifest.step) is int
            assert manifest.step >= 0
    assert told > 100


def test_a_forged_record_is_left_out(tmp_path: Path) -> None:
    volume.write_record(tmp_path, record(3, "step-5.a2", 3, "uid"))
    path = tmp_path / "chain" / "a3.json"
    document = unseal(path.read_bytes())
    for place in places(document):
        for value in (None, -1, 7, "x", [], {}):
            path.write_bytes(seal(changed(document, place, lambda parent, key, value=value: parent.__setitem__(key, value))))
            view = read_view(tmp_path)
            assert view.damaged == (3,) or view.records[0].attempt == 3


def test_every_flipped_bit_of_a_record_is_seen_and_its_number_stays_taken(tmp_path: Path) -> None:
    volume.write_record(tmp_path, record(3, "step-5.a2", 3, "uid"))
    path = tmp_path / "chain" / "a3.json"
    whole = path.read_bytes()
    for position in range(len(whole)):
        for content in (whole[:position] + bytes([whole[position] ^ 1 << position % 8]) + whole[position + 1 :], whole[:position]):
            path.write_bytes(content)
            assert read_view(tmp_path).damaged == (3,)


def test_a_record_under_another_attempt_s_name_is_damaged(tmp_path: Path) -> None:
    volume.write_record(tmp_path, record(3))
    shutil.copy(tmp_path / "chain" / "a3.json", tmp_path / "chain" / "a4.json")
    assert read_view(tmp_path).damaged == (4,)


def test_commits_whose_record_is_lost_are_named(tmp_path: Path) -> None:
    volume.write_record(tmp_path, record(1))
    make_commit(tmp_path, "step-1.a1")
    make_commit(tmp_path, "step-2.a2")
    assert [str(name) for name in read_view(tmp_path).unrecorded] == ["step-2.a2"]


def test_what_is_sealed_comes_back_whatever_it_holds() -> None:
    draw = random.Random(5)  # noqa: S311 (test data)
    for _ in range(200):
        body = {"".join(draw.choices('a"\\\n}é ', k=5)): draw.choice(['", "sha256": "', 1, None, {"sha256": "x"}, [1.5]]) for _ in range(4)}
        assert unseal(seal(body)) == json.loads(json.dumps(body))


def test_an_output_that_is_no_folder_is_one_sentence_that_names_it(
    commit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "taken"
    output.write_text("a file")
    assert proof.main([str(commit), "--output", str(output)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"lockstep: {output}")
    assert "Not a directory; check that the folders are readable and writable" in said
    assert len(said.splitlines()) == 1
