"""Both ends of `lockstep cp` over a local pair of sockets: what arrives, what travels again, what is refused."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.platforms.inpod import carry, source_of
from lockstep.platforms.inpod.carry import draft_name
from lockstep.platforms.inpod.entries import Entry
from lockstep_machine.wire import CarryError, Gone, Wire
from lockstep_spec.senders import Senders

CHUNK = 1 << 20

BYTES = bytes(range(256)) * 4096 * 3  # three chunks


class Ends:
    """A giver and a taker, each in a thread, over a pair of sockets that can be cut after so many bytes."""

    def __init__(self, giver: Callable[[Wire], Any], taker: Callable[[Wire], Any]) -> None:
        self.sockets = socket.socketpair()
        self.raised: list[Exception] = []
        self.results: list[Any] = [None, None]
        ends = [(0, giver), (1, taker)]
        self.threads = [threading.Thread(target=self._run, args=end) for end in ends]

    def _run(self, number: int, act: Callable[[Wire], Any]) -> None:
        own = self.sockets[number]
        try:
            self.results[number] = act(Wire(own.fileno(), own.fileno(), 20.0))
        except (CarryError, Gone, OSError) as error:
            self.raised.append(error)
            if not isinstance(error, Gone):
                with contextlib.suppress(Gone):
                    Wire(own.fileno(), own.fileno(), 20.0).say({"failed": str(error)})
        with contextlib.suppress(OSError):
            own.shutdown(socket.SHUT_RDWR)

    def run(self) -> Any:
        for thread in self.threads:
            thread.start()
        for thread in self.threads:
            thread.join()
        for own in self.sockets:
            own.close()
        return self.results[0]


def copied(source: Path, target: Path, **limits: Any) -> Any:
    """What the giver says was done. Raises what an end raised first."""
    ends = Ends(lambda wire: carry.give(wire, source), lambda wire: carry.take(wire, str(target), **limits))
    result = ends.run()
    if ends.raised:
        raise next((error for error in ends.raised if isinstance(error, CarryError)), ends.raised[0])
    return result


def cut(source: Path, target: Path, after: int) -> None:
    """A transfer whose connection breaks when the taker has had `after` bytes."""

    def passed(size: int, so_far: list[int] = [0]) -> None:  # noqa: B006 (the count)
        so_far[0] += size
        if so_far[0] >= after:
            raise Gone("cut")

    with pytest.raises(Gone):
        copied(source, target, passed=passed)


def tree(folder: Path) -> dict[str, bytes | str]:
    return {
        path.relative_to(folder).as_posix(): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "weights").write_bytes(BYTES)
    (folder / "sub" / "run.sh").write_text("#!/bin/sh\n")
    (folder / "sub" / "run.sh").chmod(0o755)
    (folder / "empty").touch()
    return folder


def test_a_folder_arrives_with_its_bytes_and_its_programs_runnable(source: Path, tmp_path: Path) -> None:
    assert copied(source, tmp_path / "there") == {"files": 3, "sent": 3, "bytes": len(BYTES) + 10, "resumed": 0}
    assert tree(tmp_path / "there") == tree(source)
    assert (tmp_path / "there/sub/run.sh").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(("size", "syncs"), [((1 << 20) - 1, 0), (1 << 20, 1)])
def test_a_file_of_a_mebibyte_is_on_the_disk_before_it_has_its_name(
    size: int, syncs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    (tmp_path / "x").write_bytes(bytes(size))
    copied(tmp_path / "x", tmp_path / "y")
    assert len(synced) == syncs


def test_only_what_differs_travels_again(source: Path, tmp_path: Path) -> None:
    copied(source, tmp_path / "there")
    assert copied(source, tmp_path / "there")["bytes"] == 0
    (tmp_path / "there/weights").write_bytes(BYTES[:-1] + b"x")
    done = copied(source, tmp_path / "there")
    assert (done["sent"], done["bytes"]) == (1, len(BYTES))
    assert tree(tmp_path / "there") == tree(source)


def sent(source: Path, target: Path, *, force: bool = False) -> Any:
    """What the giver says of a copy to a volume that keeps records."""
    return copied(
        source, target, sender={"origin": f"h:{source}", "line": "give it another place", "force": force, "roots": [str(target.parent)]}
    )


def test_what_another_folder_sent_is_not_replaced_until_it_is_forced(tmp_path: Path) -> None:
    files = {name: tmp_path / name / "train.py" for name in ("a", "b")}
    for name, file in files.items():
        file.parent.mkdir()
        file.write_text(name)
    there = tmp_path / "volume/train.py"
    there.parent.mkdir()
    there.write_text("by hand")
    assert sent(files["a"], there)["sent"] == 1, "no folder is known to have sent it"
    files["a"].write_text("a, edited")
    assert sent(files["a"], there)["sent"] == 1
    with pytest.raises(CarryError, match=f"{there} was sent from h:{tmp_path}/a, and would be another file: give it another place"):
        sent(files["b"], there)
    assert there.read_text() == "a, edited"
    assert sent(files["b"], there, force=True)["sent"] == 1
    with pytest.raises(CarryError, match=f"was sent from h:{tmp_path}/b"):
        sent(files["a"], there)


def test_a_copied_folder_is_seen_by_a_sync_of_another_one_and_known_as_its_own(source: Path, tmp_path: Path) -> None:
    target, senders = tmp_path / "volume" / "copy", Senders()
    target.parent.mkdir()
    sent(source, target)
    path = f"{target}/sub/run.sh"
    assert senders.of(path) == [f"h:{source}/sub"]
    assert senders.others(path, "h:/other", "h:/other/sub/run.sh") == [f"h:{source}/sub"]
    assert senders.others(path, f"h:{source}", f"h:{source}/sub/run.sh") == []


def test_a_broken_transfer_goes_on_where_it_was_and_nothing_is_there_in_half(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "there"
    target.mkdir()
    (target / "weights").write_bytes(b"the old ones")
    cut(source, target, CHUNK)
    assert (target / "weights").read_bytes() == b"the old ones"
    done = copied(source, target)
    assert done["resumed"] == 1 and done["bytes"] < len(BYTES)
    assert tree(target) == tree(source)


def test_what_arrived_of_another_file_is_not_built_upon(source: Path, tmp_path: Path) -> None:
    cut(source, tmp_path / "there", CHUNK)
    (source / "weights").write_bytes(BYTES[::-1])
    done = copied(source, tmp_path / "there")
    assert done["resumed"] == 0
    assert tree(tmp_path / "there") == tree(source)


def test_a_whole_file_that_only_lacked_its_name_gets_it(source: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / draft_name("weights")).write_bytes(BYTES)
    copied(source, tmp_path / "there")
    assert tree(tmp_path / "there") == tree(source)


def test_a_file_goes_by_the_name_of_the_target(source: Path, tmp_path: Path) -> None:
    copied(source / "weights", tmp_path / "w2")
    assert (tmp_path / "w2").read_bytes() == BYTES


def test_a_target_that_ends_with_a_slash_is_the_folder_to_put_it_into_and_any_other_its_new_name(source: Path, tmp_path: Path) -> None:
    for target in (f"{tmp_path}/models/", f"{tmp_path}/models/model"):
        ends = Ends(lambda wire: carry.give(wire, source), lambda wire, target=target: carry.take(wire, target))  # type: ignore[misc]
        ends.run()
        assert tree(tmp_path / "models" / "model") == tree(source)
    copied(source / "weights", tmp_path / "models")
    assert (tmp_path / "models" / "weights").is_file(), "a file goes into a folder that is there"


@pytest.mark.parametrize("name", ["a b\n'\"$(x)*", "-rf", "naïve – 東京", os.fsdecode(b"latin-\xe9"), "x" * 255])
def test_odd_names_arrive_as_they_are(tmp_path: Path, name: str) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / name).write_text("1")
    copied(tmp_path / "here", tmp_path / "there")
    assert (tmp_path / "there" / name).read_text() == "1"


def test_links_that_stay_inside_are_links_and_others_are_what_they_lead_to(source: Path, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"blob")
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/a").write_bytes(b"a")
    (source / "inner").symlink_to("sub/run.sh")
    (source / "outer").symlink_to("../blob")
    (source / "folder").symlink_to(tmp_path / "blobs")
    copied(source, tmp_path / "there")
    found = tree(tmp_path / "there")
    assert (found["inner"], found["outer"], found["folder/a"]) == ("sub/run.sh", b"blob", b"a")


@pytest.mark.parametrize(("link", "said"), [("nowhere", "does not exist"), ("..", "a folder that it is in")])
def test_links_that_lead_nowhere_or_round_and_round_are_named(source: Path, tmp_path: Path, link: str, said: str) -> None:
    (source / "sub" / "l").symlink_to(source / link if link == "nowhere" else source.resolve().parent / "model")
    with pytest.raises(CarryError, match=f"sub/l is a link to .*{said}"):
        copied(source, tmp_path / "there")


def below(root: Path) -> Callable[[Path], bool]:
    return lambda path: root == path or root in path.parents


def test_a_link_on_the_way_leads_no_file_outside(source: Path, tmp_path: Path) -> None:
    (tmp_path / "volume/there").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "volume/there/sub").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CarryError, match="outside"):
        copied(source, tmp_path / "volume/there", allowed=below((tmp_path / "volume").resolve()))
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_what_is_read_stays_in_the_volumes_too(source: Path) -> None:
    (source / "secrets").symlink_to("/etc")
    with pytest.raises(CarryError, match="/etc is outside of the job's volumes"):
        carry.entries_below(source, below(source.resolve()))


def test_too_little_room_is_said_before_a_byte_travels(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(CarryError, match=r"0\.00 GB are needed: free some space there first"):
        copied(source, tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_damage_on_the_way_is_found_and_the_draft_thrown_away(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = lambda wire, chunk: wire._write(len(chunk).to_bytes(4, "big") + chunk.replace(b"\x07", b"\x08"))  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(Wire, "pass_on", damaged)
        with pytest.raises(CarryError, match="weights was damaged on the way"):
            copied(source / "weights", tmp_path / "weights")
    assert not (tmp_path / "weights").exists() and not (tmp_path / draft_name("weights")).exists()


def test_a_file_that_changes_while_it_is_sent_is_named_and_keeps_its_old_self_there(source: Path, tmp_path: Path) -> None:
    entries = carry.entries_below(source)
    (source / "weights").write_bytes(BYTES[:100])
    ends = Ends(lambda wire: give_these(wire, entries), lambda wire: carry.take(wire, str(tmp_path / "there")))
    ends.run()
    assert any("weights was changed while it was sent" in str(error) for error in ends.raised)
    assert not (tmp_path / "there/weights").exists()


def give_these(wire: Wire, entries: list[Entry]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(carry, "entries_below", lambda source, allowed: entries)
        return carry.give(wire, Path("unused"))


@contextlib.contextmanager
def pods_end(request: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    """The pod's end, as the program that it is there: its text, and Python with nothing beside it."""
    command = [sys.executable, "-I", "-c", source_of(carry).decode(), json.dumps(request)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        yield process


def test_the_pods_end_takes_and_gives_as_a_program_of_its_own(source: Path, tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    request = {"take": f"{tmp_path}/volume/", "roots": [str(tmp_path / "volume")]}
    with pods_end(request) as process:
        carry.give(Wire(process.stdout.fileno(), process.stdin.fileno()), source)
        assert process.wait() == 0
    with pods_end({"give": f"{tmp_path}/volume/model", "roots": [str(tmp_path / "volume")]}) as process:
        carry.take(Wire(process.stdout.fileno(), process.stdin.fileno()), str(tmp_path / "back"))
        assert process.wait() == 0
    assert tree(tmp_path / "back") == tree(source)


def test_the_pods_end_says_why_it_refuses(tmp_path: Path) -> None:
    refused = pytest.raises(CarryError, match="/etc is outside of the job's volumes")
    with pods_end({"give": "/etc", "roots": [str(tmp_path)]}) as process, refused:
        carry.take(Wire(process.stdout.fileno(), process.stdin.fileno()), str(tmp_path / "back"))


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """Half a gigabyte through a taker that may have 200 MB of memory in all."""
    with (tmp_path / "large").open("wb") as file:
        file.truncate(512 << 20)
    request = {"take": f"{tmp_path}/volume/", "roots": [str(tmp_path / "volume")]}
    (tmp_path / "volume").mkdir()
    program = "from __future__ import annotations\nimport resource; resource.setrlimit(resource.RLIMIT_AS, (200 << 20, 200 << 20))\n"
    command = [
        sys.executable,
        "-I",
        "-c",
        program + source_of(carry).decode().replace("from __future__ import annotations\n", ""),
        json.dumps(request),
    ]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        carry.give(Wire(process.stdout.fileno(), process.stdin.fileno()), tmp_path / "large")
        assert process.wait() == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
    assert hashlib.sha256((tmp_path / "volume/large").read_bytes()).digest() == hashlib.sha256(bytes(512 << 20)).digest()


def test_an_end_that_hears_nothing_gives_up() -> None:
    here, there = socket.socketpair()
    with here, there, pytest.raises(Gone, match="nothing heard"):
        Wire(here.fileno(), here.fileno(), 0.05).hear()


def test_a_large_file_is_on_the_disk_every_256_mebibytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for the disk at its end is short then, whatever its size. Here nothing is written, and nothing hashed."""
    chunk, synced, taken = bytes(64 << 20), list[int](), [0]

    class File:
        def __enter__(self) -> File:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def fileno(self) -> int:
            return 0

        def truncate(self, size: int) -> None:
            pass

        seek = truncate

        def write(self, view: memoryview) -> int:
            taken[0] += len(view)
            return len(view)

    digest = SimpleNamespace(update=lambda data: None, hexdigest=lambda: "d")
    wire = SimpleNamespace(frames=lambda: iter([chunk] * 16), hear=lambda: {"sha256": "d"})
    target = SimpleNamespace(path=lambda name: tmp_path / name, holder=lambda name: (os.open(tmp_path, os.O_RDONLY), name))
    monkeypatch.setattr(carry, "_opened_draft", lambda *_: 0)
    monkeypatch.setattr(carry, "_lock", lambda *_: None)
    for name, action in {
        "fdopen": lambda *_, **__: File(), "fsync": lambda _: synced.append(taken[0]), "fchmod": lambda *_: None, "replace": lambda *_,
            **__: None,
        "fstat": lambda _: SimpleNamespace(st_size=0),
    }.items():  # fmt: skip
        monkeypatch.setattr(carry.os, name, action)
    entry: Any = {"name": "x", "size": 1 << 30}
    carry._take_file(wire, target, entry, 0, digest, 0o644, lambda size: None)  # type: ignore[arg-type]
    assert synced == [256 << 20, 512 << 20, 768 << 20, 1 << 30, 1 << 30]


def test_after_64_files_the_answer_to_the_first_is_awaited() -> None:
    files: list[int] = []
    sent_at_an_answer: list[int] = []

    class Answering:
        def hear(self) -> Entry:
            sent_at_an_answer.append(len(files))
            return {"ended": True}

        def say_all(self, *_: object) -> None:
            pass

        def say(self, message: Entry) -> None:
            files.append(1)

        pass_on = say_all

    given = carry.Stored([{"path": os.devnull, "size": 0}] * 100, "x")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(carry, "hear_held", lambda *_: {})
        carry.give_all(Answering(), given)  # type: ignore[arg-type]
    assert sent_at_an_answer[:3] == [0, 64 + 1, 64 + 2]
