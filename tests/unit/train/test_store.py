"""What ranks put on torch's store proves the run's secret: a stranger who reaches the store makes no rank take a value."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import DistStoreError, PrefixStore, TCPStore  # type: ignore[attr-defined]

from lockstep_train.base import ranks as ranks_module
from lockstep_train.base.errors import ConfigError, TrainerError
from lockstep_train.base.ranks import Ranks, refused_together
from lockstep_train.base.runfile import SECRET_FILE, rank_environment
from lockstep_train.base.store import SignedStore
from lockstep_train.checkpoint.save import commit
from lockstep_train.watch.watchdog import END_KEY, Mark, Reason, make_mark, read_mark

SECRET, SHORT = b"s" * 32, timedelta(seconds=0.2)
LONG = timedelta(seconds=30)


class Scene:
    """Rank 0's store, two of its ranks, and a stranger on its port, who sees every key."""

    def __init__(self) -> None:
        self.server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.stranger = TCPStore("127.0.0.1", self.server.port, is_master=False, timeout=LONG)
        self.here, self.there = self.connection(SECRET), self.connection(SECRET)

    def connection(self, secret: bytes, timeout: timedelta = LONG) -> SignedStore:
        store = TCPStore("127.0.0.1", self.server.port, is_master=False, timeout=LONG)
        return SignedStore(PrefixStore("lockstep", store), secret, timeout)

    def overwrite(self, part: str, value: Callable[[bytes], str]) -> int:
        """Set every key with this part anew, as a stranger. Return how many there were."""
        names = [name for name in self.stranger.list_keys() if part in name]
        for name in names:
            self.stranger.set(name, value(self.stranger.get(name)))
        return len(names)


@pytest.fixture
def scene() -> Iterator[Scene]:
    yield Scene()


def test_ranks_of_one_run_read_what_each_other_has_set(scene: Scene) -> None:
    scene.here.set("a", "1")
    scene.here.set("b", "ü")
    assert scene.there.multi_get(["a", "b"]) == [b"1", "ü".encode()]
    assert (scene.there.check(["a", "b"]), scene.there.check(["a", "c"])) == (True, False)
    assert scene.there.delete_key("a")
    assert not scene.here.check(["a"])


def test_what_was_waited_for_is_read_as_it_is_now_the_next_time(scene: Scene) -> None:
    scene.here.set("beat", "1")
    scene.there.wait(["beat"], LONG)
    assert scene.there.get("beat") == b"1"
    scene.here.set("beat", "2")
    assert scene.here.check(["beat"])  # (`set` doesn't wait for the server, and its answers come in order)
    assert scene.there.get("beat") == b"2"


@pytest.mark.parametrize("secret", [b"", b"x" * 32])
def test_a_key_that_another_secret_has_set_is_not_there(scene: Scene, secret: bytes) -> None:
    scene.connection(secret).set("key", "forged")
    assert not scene.there.check(["key"])


@pytest.mark.parametrize(
    "forged",
    [
        lambda sealed: "forged",
        lambda sealed: "",
        lambda sealed: sealed[:64].decode() + "forged",
        lambda sealed: "0" * 64 + sealed[64:].decode(),
        lambda sealed: sealed.decode() + " ",
    ],
)
def test_a_value_that_a_stranger_has_put_in_a_key_s_place_is_as_if_absent(scene: Scene, forged: Callable[[bytes], str]) -> None:
    scene.here.set("key", "true")
    assert scene.overwrite("key", forged) == 1
    assert not scene.there.check(["key"])
    with pytest.raises(DistStoreError, match="key is of nobody of this run"):
        scene.there.wait(["key"], SHORT)
    with pytest.raises(DistStoreError):
        scene.connection(SECRET, SHORT).get("key")


class Late:
    """A store in which the time is up with the second wait."""

    def __init__(self, store: Any) -> None:
        self.multi_get, self.waits = store.multi_get, 0

    def wait(self, keys: list[str], limit: timedelta) -> None:
        self.waits += 1
        if self.waits > 1:
            raise DistStoreError("wait timeout")


def test_a_stranger_is_named_also_where_the_time_is_up_meanwhile(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.there.set("key", "true")
    scene.there.wait(["key"], LONG)
    assert scene.overwrite("key", lambda _: "forged") == 1
    monkeypatch.setattr(scene.there, "_store", Late(scene.there._store))
    with pytest.raises(DistStoreError, match="key is of nobody of this run"):
        scene.there.wait(["key"], LONG)


def test_a_value_of_one_key_proves_nothing_in_the_place_of_another(scene: Scene) -> None:
    scene.here.set("yes", "1")
    scene.here.set("no", "0")
    sealed = scene.stranger.get(next(name for name in scene.stranger.list_keys() if "yes" in name))
    assert scene.overwrite("/no/", lambda _: sealed.decode()) == 1
    assert not scene.there.check(["no"])


def test_a_forged_value_hides_no_true_one_that_comes_after_it(scene: Scene) -> None:
    scene.here.set("key", "first")
    scene.overwrite("key", lambda _: "forged")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(scene.there.get("key")))
    reader.start()
    scene.here.set("key", "true")
    reader.join(30)
    assert read == [b"true"]


def test_a_forged_end_ends_no_attempt_and_hides_no_true_one(scene: Scene) -> None:
    forged = json.dumps({"reason": "stop", "rank": 0, "message": "forged"})
    scene.stranger.set(f"lockstep/{END_KEY}", forged)
    make_mark(scene.connection(b"x" * 32), Mark(Reason.STOP, 3, "forged"))
    assert read_mark(scene.there) is None
    make_mark(scene.here, Mark(Reason.HANG, 1, "first"))
    scene.overwrite(END_KEY, lambda _: forged)
    assert read_mark(scene.there) is None
    make_mark(scene.there, Mark(Reason.FAILED, 0, "true"))
    assert read_mark(scene.here) == Mark(Reason.FAILED, 0, "true")
    make_mark(scene.here, Mark(Reason.STOP, 1, "too late"))
    assert read_mark(scene.here) == Mark(Reason.FAILED, 0, "true")


def of(scene: Scene, rank: int, store: Any = None) -> Ranks:
    return Ranks(rank, 2, 0, 1, rank, 2, torch.device("cpu"), store or scene.connection(SECRET, timedelta(seconds=2)), SECRET)


def test_a_stranger_s_manifest_is_written_by_no_node(scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decision = json.dumps({"manifest": "forged", "problem": None, "answered": True})
    for name in ("lockstep/tag/decision", "tag/decision"):
        scene.stranger.set(name, decision)
    monkeypatch.setattr(commit, "DEADLINE", timedelta(seconds=0.1))
    with pytest.raises(DistStoreError):
        commit.await_decision(of(scene, 1), "tag")
    scene.here.set("tag/decision", json.dumps({"manifest": "true", "problem": None, "answered": True}))
    assert commit.write_manifest(of(scene, 1), "tag", tmp_path, commit.await_decision(of(scene, 1), "tag")).committed
    assert [path.read_text() for path in tmp_path.iterdir()] == ["true"]


def test_a_shard_that_a_stranger_acknowledges_is_not_there(scene: Scene) -> None:
    commit.acknowledge(of(scene, 0), "tag", None, "its disk is full")
    commit.acknowledge(of(scene, 1, scene.connection(b"x" * 32)), "tag", None, "forged")
    scene.stranger.set("lockstep/tag/shard/1", json.dumps({"problem": "forged", "node": 1}))
    decision = commit.decide(of(scene, 0), "tag", lambda _: b"", SHORT)
    assert (
        decision.problem == "rank 0 on node 0: its disk is full; rank 1: no shard within 0 s, or its word was deleted from rank 0's store"
    )


def test_a_stranger_who_deletes_what_it_finds_makes_a_save_fail_with_a_word_of_it_and_no_other_commit(scene: Scene) -> None:
    first, second = of(scene, 0), of(scene, 1)
    for rank in (first, second):
        commit.acknowledge(rank, "tag", None, "never read")
        rank.store.wait([f"tag/shard/{rank.rank}"], LONG)
    assert all(scene.stranger.delete_key(name) for name in scene.stranger.list_keys())
    decision = commit.decide(first, "tag", lambda _: b"", SHORT)
    assert decision.manifest is None and "rank 0: no shard within 0 s, or its word was deleted from rank 0's store" in str(decision.problem)


def test_rank_zero_waits_for_a_refusal_that_proves_itself(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.stranger.set("lockstep/start/refused/1", "1")
    waited: list[list[str]] = []
    monkeypatch.setattr(ranks_module, "REFUSED_PATIENCE", SHORT)
    first = of(scene, 0)
    wait = first.store.wait
    monkeypatch.setattr(first.store, "wait", lambda keys, limit: (wait(keys, limit), waited.append(keys)))
    with pytest.raises(ConfigError), refused_together(first, "start"):
        raise ConfigError("no")
    assert waited == []


def test_the_secret_of_an_attempt_is_another_one_than_that_of_the_next(scene: Scene, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("ab" * 32)
    places = [rank_environment({SECRET_FILE: str(file), "LOCKSTEP_ATTEMPT": attempt, "RANK": rank}) for attempt, rank in ("10", "11", "20")]
    first, same, next_one = (ranks_module._secret(place, scene.here) for place in places)
    assert first == same != next_one
    assert scene.stranger.list_keys() == []
    file.unlink()
    with pytest.raises(TrainerError, match=rf"{SECRET_FILE}={file}"):
        ranks_module._secret(places[0], scene.here)
