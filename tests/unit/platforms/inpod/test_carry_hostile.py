"""An end of `lockstep cp` or `sync` that lies: nothing is written outside of the target, no file runs as somebody else, memory stays small,
one sentence says why.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import socket
import stat
import threading
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.platforms.files.sync import _asked
from lockstep.platforms.inpod import carry
from lockstep.platforms.inpod.entries import stays_below
from lockstep_machine import wire as protocol
from lockstep_machine.wire import CarryError, Gone, Wire

CONTENT = b"evil\n"
SHA256 = hashlib.sha256(CONTENT).hexdigest()
SURPRISES: list[Any] = [None, True, -1, 1.5, "5", [], {}, 1 << 70, "x" * 5000, [[]], {"name": ""}]
NAMES = [
    "..", ".", "/", "//", "", "../x", "../../.bashrc", "../../../x", "a/../../x", "a/..", "a/../b", "./x", "x/.", "x/", "/x", "//x",
        "/etc/lockstep-x",
    "..\\x/..", "\0", "x\0y", "../\0", "x" * 300, "x/" * 3000 + "x", "/".join("d" * 250), "\ud800", "l/x", "l/../x", "L/x", "l", "m/x",
        ".lockstep-cp-0123456789abcdef",
    "d/.lockstep-cp-0", "~/x", "~", "$HOME/x", "-rf", "\x1b[2J", "a\nb", "CON", "home/.bashrc", " ", "…", "../target/../x", "..//x", "a//b",
        "x/../../../../../../tmp/lockstep-x",
]  # fmt: skip
LINKS = [
    "..", "../..", "../x", "/etc", "/", "", ".", "a/../..", "a/../../..", "l", "l/x", "../../.bashrc", "m/../..", "./../..", "\0", "x\0",
        "x" * 5000, "\ud800", "l/../..",
    "../target/../..", "../there/../../x",
]  # fmt: skip


def line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def frames(data: bytes = CONTENT) -> bytes:
    return len(data).to_bytes(4, "big") + data + bytes(4)


def file(at: str = "", **other: Any) -> dict[str, Any]:
    return {"size": len(CONTENT), "mode": 0o644, "sha256": SHA256, **other} | ({} if "name" in other else {"name": at})


def offer(*entries: object, name: object = "x") -> bytes:
    """All that a giver says of these entries, every file of which it sends."""
    sent = [number for number, entry in enumerate(entries) if isinstance(entry, dict) and "size" in entry]
    files = b"".join(frames() + line({"sha256": SHA256}) for _ in sent)
    return line({"name": name, "entries": list(entries)}) + line({"plan": [[number, 0] for number in sent]}) + files


ROOT = {"name": "", "dir": True}


def corpus() -> Iterator[bytes]:
    for name in NAMES:
        yield offer(file(), name=name)
        yield offer(ROOT, name=name)
        yield offer(ROOT, file(name))
        yield offer(ROOT, {"name": name, "dir": True}, file(f"{name}/below"))
        yield offer(ROOT, {"name": name, "link": "x"})
    for link in LINKS:
        yield offer(ROOT, {"name": "e", "link": link}, file("e/x"))
        yield offer(ROOT, file("e/x"), {"name": "e", "link": link})
        yield offer(ROOT, {"name": "d", "dir": True}, {"name": "d/e", "link": link})
        yield offer({"name": "", "link": link})
    for value in SURPRISES:
        for key in ("name", "size", "mode", "dir", "link", "sha256"):
            yield offer(ROOT, file("y", **{key: value}))
        yield offer(file(), name=value)
        yield offer(value)
        yield line(value)
        yield line({"name": "x", "entries": value})
        yield line({"name": "x", "entries": [ROOT, file("y")]}) + line({"plan": value})
        yield line({"name": "x", "entries": [ROOT, file("y")]}) + line({"plan": [value]})
        yield line({"name": "x", "entries": [ROOT, file("y")]}) + line({"plan": [[1, value]]})
        yield line({"name": "x", "entries": [ROOT, file("y")]}) + line({"plan": [[value, 0]]})
        yield line({"name": "x", "entries": [ROOT, file("y")]}) + line({"plan": [[1, 0]]}) + frames() + line({"sha256": value})
        yield line({"failed": value})
        yield line({"busy": value})
    for mode in (0o4755, 0o2755, 0o1777, 0o7777, 0o777, 0, 1 << 40):
        yield offer(ROOT, file("y", mode=mode))
    yield from (
        offer(file(), file("y")),
        offer(ROOT, ROOT),
        offer(ROOT, file("y"), file("y")),
        offer(ROOT, file("y"), file("Y")),
        offer(ROOT, file("y"), file("y/z")),
        offer(ROOT, file("y/z"), file("y")),
        offer(file("y")),
        line({"plan": []}),
        line({"sha256": SHA256}),
        line({"name": "x", "entries": [ROOT], "more": True}) + line({"name": "../y", "entries": [file("../y")]}),
        line({"name": "x", "entries": [ROOT], "more": True}) + line({"entries": [], "more": True}) * 100,
        line({"name": "x", "entries": [ROOT, file("y")]}) + line({"plan": [[1, 0], [1, 0]]}),
        line({"name": "x", "entries": [ROOT, file("y")]}) + line({"plan": [[0, 0]]}),
        line({"name": "x", "entries": [ROOT, file("y")]}) + line({"plan": [[1, 3]]}) + frames(b"l\n"),
        line({"name": "x", "entries": [ROOT, file("y")]}) + line({"plan": [[1, 0]]}) + frames(CONTENT * 1000) + line({"sha256": SHA256}),
        line({"name": "x", "entries": [ROOT, file("y")]}) + line({"plan": [[1, 0]]}) + b"\xff\xff\xff\xff",
        line({"name": "x", "entries": [ROOT, file("y", size=1 << 61)]}) + line({"plan": [[1, 0]]}),
        b"{" * 100_000 + b"\n",
        b"[" * 100_000 + b"\n",
        b'{"a":' * 100_000 + b"\n",
        b'{"name": ' + b"9" * 10_000 + b"}\n",
        b"\xff\xfe\n",
        b"\0\n",
        b"\n" * 100,
        b"{}\n" * 100,
        b"",
    )


def mutated(count: int) -> Iterator[bytes]:
    """What an honest giver says, with some of its bytes changed, doubled or left out."""
    honest = offer(ROOT, {"name": "d", "dir": True}, file("d/y"), file("z", mode=0o755), {"name": "s", "link": "d/y"})
    for seed in range(count):
        chance = random.Random(seed)  # noqa: S311 (repeatable, not secret)
        data = bytearray(honest)
        for _ in range(chance.randint(1, 6)):
            at = chance.randrange(len(data))
            change = chance.choice((b"", b'"', b"..", b"/", b"0", b"-", b"\n", b"\0", b"}", b"[", data[: chance.randrange(40)]))
            data[at : at + chance.choice((0, 1, 1, 4))] = change
        yield bytes(data)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A person's files, and `projects/demo/there`, which holds a link that leads outside and one that stays inside."""
    home = tmp_path / "home"
    there = home / "projects/demo/there"
    (there / "m").mkdir(parents=True)
    (home / ".bashrc").write_text("# mine\n")
    (home / ".ssh").mkdir()
    (home / ".ssh/authorized_keys").write_text("mine\n")
    (there / "l").symlink_to(home / ".ssh")
    (there / "m/inner").symlink_to("../l")
    return home


def outside(home: Path) -> dict[str, tuple[int, bytes]]:
    """All of the person's files but those below the target, with their modes."""
    target = home / "projects/demo"
    paths = [path for path in home.parent.rglob("*") if target not in path.parents]
    return {str(path): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"") for path in paths}


@contextlib.contextmanager
def said(chunks: Iterable[bytes]) -> Iterator[Wire]:
    """A wire at whose other end these bytes are said, whatever is answered."""
    own, other = socket.socketpair()

    def say() -> None:
        with contextlib.suppress(OSError):
            for chunk in chunks:
                other.sendall(chunk)
            other.shutdown(socket.SHUT_WR)

    def drain() -> None:
        with contextlib.suppress(OSError):
            while other.recv(1 << 16):
                pass

    threads = [threading.Thread(target=act) for act in (say, drain)]
    for thread in threads:
        thread.start()
    try:
        yield Wire(own.fileno(), own.fileno(), 20.0)
    finally:
        own.close()
        for thread in threads:
            thread.join()
        other.close()


def taken(answer: Iterable[bytes], to: str, name: str | None, sync: dict[str, Any] | None = None) -> str:
    """What the laptop's end says of it; "" where all is well."""
    with said(answer) as wire:
        try:
            carry.take(wire, to, name=name, sync=sync)
        except (CarryError, Gone, OSError) as error:
            return str(error) or "nothing"
    return ""


def check_target(home: Path) -> None:
    """Links that came stay inside, and nobody's rights come with a file."""
    demo = home / "projects/demo"
    for path in demo.rglob("*"):
        if path.is_symlink():
            assert path in (demo / "there/l", demo / "there/m/inner") or demo in Path(os.path.realpath(path)).parents, path
        else:
            assert stat.S_IMODE(path.stat().st_mode) & 0o7022 == 0, path


def kept(answer: bytes, *names: object) -> bytes:
    """What somebody says who syncs: after the entries, which files stay."""
    entries, end, rest = answer.partition(b"\n")
    return entries + end + line({"keep": list(names)}) + rest


SYNC = {"source": "laptop:/home/ada", "force": True, "alone": False}
SYNCS = [
    *(kept(offer(ROOT, file("y")), value) for value in SURPRISES),
    *(line({"entries": [ROOT]}) + line({"keep": value}) for value in SURPRISES),
]


@pytest.mark.parametrize(("name", "sync"), [(None, None), ("mine", None), (None, SYNC)])
@pytest.mark.parametrize("to", ["projects/demo/", "projects/demo/there", "projects/demo/new"])
def test_whatever_a_pod_answers_nothing_is_written_outside_of_the_target(
    to: str, name: str | None, sync: dict[str, Any] | None, home: Path
) -> None:
    before, answers = outside(home), [*corpus(), *mutated(200)]
    if sync:
        answers = [*(kept(answer, "y", "../x") for answer in answers), *SYNCS]
    assert len(answers) > 600
    previous, refused = os.umask(0o022), 0
    try:
        for answer in answers:
            problem = taken([answer], f"{home}/{to}", name, sync)
            assert outside(home) == before, (answer[:300], problem)
            check_target(home)
            assert len(problem) < 3000
            refused += problem != ""
    finally:
        os.umask(previous)
    assert refused > 400
    assert list(home.parent.iterdir()) == [home]


def test_the_mode_of_a_file_is_the_pods_less_all_that_runs_it_as_somebody_else(tmp_path: Path) -> None:
    previous = os.umask(0o022)
    try:
        for asked, given in ((0o4755, 0o755), (0o7777, 0o755), (0o666, 0o644), (0o400, 0o600)):
            assert taken([offer(file(mode=asked))], f"{tmp_path}/x", None) == ""
            assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == given
    finally:
        os.umask(previous)


def test_a_file_has_the_name_that_was_typed_whatever_the_pod_calls_it(home: Path) -> None:
    for called in ("../../.bashrc", str(home / ".ssh/authorized_keys"), ".bashrc"):
        assert taken([offer(file(), name=called)], f"{home}/projects/demo/", "x") == ""
    assert (home / "projects/demo/x").read_bytes() == CONTENT
    assert (home / ".bashrc").read_text() == "# mine\n"
    assert sorted(path.name for path in (home / "projects/demo").iterdir()) == ["there", "x"]


@pytest.mark.parametrize(
    ("name", "link", "stays"), [("a/b", "../c", True), ("b", "c/d", True), ("b", "../c", False), ("a/b", "c/../d", False)]
)
def test_a_link_may_go_up_at_its_beginning_only_and_no_further_than_its_target(name: str, link: str, stays: bool) -> None:
    assert stays_below(name, link) is stays


def test_a_link_that_an_earlier_transfer_left_is_replaced_and_never_followed(home: Path) -> None:
    there = home / "projects/demo/there"
    assert taken([offer(ROOT, file("l"))], str(there), None) == ""
    assert (there / "l").read_bytes() == CONTENT and not (there / "l").is_symlink()
    (there / "l").unlink()
    (there / "l").symlink_to("m")
    assert "l is a link or a file where a folder has to be" in taken([offer(ROOT, file("l/x"))], str(there), None)
    assert list((there / "m").iterdir()) == [there / "m/inner"]


@pytest.mark.parametrize("when", ["expected", "passed"])
def test_a_link_that_takes_a_folders_place_meanwhile_is_not_followed(when: str, home: Path) -> None:
    """Before anything is written, and between two files."""
    there = home / "projects/demo/there"
    (there / "d").mkdir()

    def swap(size: int) -> None:
        if not (there / "d").is_symlink():
            (there / "d").rename(there / "old")
            (there / "d").symlink_to(home / ".ssh")

    options: dict[str, Any] = {when: swap}
    with (
        said([offer(ROOT, file("d/a"), file("d/b"))]) as wire,
        pytest.raises(CarryError, match="d is a link or a file where a folder has to be"),
    ):
        carry.take(wire, str(there), **options)
    assert [path.name for path in (home / ".ssh").iterdir()] == ["authorized_keys"]


@pytest.mark.parametrize("what", ["fifo", "hard link", "link", "folder of the draft"])
def test_what_somebody_has_put_in_the_place_of_a_draft_is_neither_written_nor_waited_for(what: str, home: Path) -> None:
    demo = home / "projects/demo"
    draft, mine = demo / carry.draft_name("x"), home / ".bashrc"
    if what == "fifo":
        os.mkfifo(draft)
    elif what == "hard link":
        draft.hardlink_to(mine)
    elif what == "link":
        draft.symlink_to(mine)
    else:
        draft.mkdir()
    problem = taken([offer(file())], str(demo / "x"), None)
    assert mine.read_text() == "# mine\n" and stat.S_IMODE(mine.stat().st_mode) & 0o111 == 0
    assert bool(problem) == (what == "folder of the draft")
    assert problem or (demo / "x").read_bytes() == CONTENT


def test_a_draft_that_shrank_meanwhile_is_not_filled_with_zeros(tmp_path: Path) -> None:
    draft = tmp_path / carry.draft_name("x")
    draft.write_bytes(CONTENT[:3])
    rest = line({"name": "x", "entries": [file()]}) + line({"plan": [[0, 3]]}) + frames(CONTENT[3:]) + line({"sha256": SHA256})
    with said([rest]) as wire, pytest.raises(CarryError, match="was changed by somebody else"):
        carry.take(wire, str(tmp_path / "x"), expected=lambda size: draft.write_bytes(b""))
    assert not (tmp_path / "x").exists()


def test_a_file_that_ends_before_its_size_is_not_there(tmp_path: Path) -> None:
    assert "its size or SHA-256 is not the sender's" in taken([offer(file(size=len(CONTENT) + 1))], str(tmp_path / "x"), None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [[], {}, 5, "", None, True])
def test_a_giver_that_gives_up_without_words_is_told_so(value: object, tmp_path: Path) -> None:
    assert taken([line({"failed": value})], str(tmp_path / "x"), None) == "the other end has given up without a word"


def endless(chunk: bytes, most: int = 256 << 20) -> Iterator[bytes]:
    for _ in range(most // len(chunk)):
        yield chunk


ENDLESS = {
    "a line without an end": [b" " * (1 << 16)],
    "a name without an end": [b'{"name": "' + b"x" * (1 << 16)],
    "empty lines": [b"\n" * (1 << 16)],
    "busy for ever": [b'{"busy": true}\n' * 4000],
    "entries without an end": [line({"name": "x", "entries": [ROOT], "more": True}),
        *[line({"entries": [{"name": f"f{part}-{n}", "dir": True} for n in range(5000)], "more": True}) for part in range(9)]],
    "a file without an end": [line({"name": "x", "entries": [file()]}) + line({"plan": [[0, 0]]}),
        (1 << 20).to_bytes(4, "big") + bytes(1 << 20)],
    "a chunk of 4 GiB": [line({"name": "x", "entries": [file(size=1 << 33)]}) + line({"plan": [[0, 0]]}) + b"\xff\xff\xff\xff",
        bytes(1 << 20)],
}  # fmt: skip


@pytest.mark.parametrize("what", list(ENDLESS))
def test_what_has_no_end_ends_with_a_sentence_and_little_memory(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "ENTRIES_MAX", 20_000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1 << 60}))
    first, *rest = ENDLESS[what]

    def answer() -> Iterator[bytes]:
        yield first
        yield from rest
        yield from endless(rest[-1] if rest else first)

    tracemalloc.start()
    try:
        problem = taken(answer(), f"{tmp_path}/x", None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert problem and "broke" not in problem, "it was the laptop's end that gave up"
    assert peak < 32 << 20
    assert not any(path.stat().st_size > len(CONTENT) for path in tmp_path.iterdir())


TAKERS = [
    *(line({"have": [value]}) for value in SURPRISES),
    *(line({"have": value}) for value in SURPRISES if value != []),
    *(line({"have": [[value, 0, "", False]]}) for value in [*SURPRISES, 0, 2, 9]),
    *(line({"have": [[1, value, "", False]]}) for value in [*SURPRISES, 6]),
    line({"have": [[1, 0, "", False], [1, 0, "", False]]}),
    line({"have": []}) + line({"ready": True}) + line({"done": 1}) + line({"done": 1}),
    line({"have": []}) + line({"failed": "no room"}),
    line({"ended": {}}),
    b"[" * 100_000 + b"\n",
    b" " * (3 << 20),
    b"",
]


@pytest.mark.parametrize("number", range(len(TAKERS)))
def test_a_pod_that_takes_can_neither_break_the_giver_nor_have_what_it_didn_t_offer(number: int, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/y").write_bytes(CONTENT)
    with said([TAKERS[number]]) as wire, pytest.raises((CarryError, Gone)) as raised:
        carry.give(wire, tmp_path / "source")
    assert str(raised.value)


@pytest.mark.parametrize("record", ["../../../.bashrc", "l/authorized_keys"])
def test_a_sync_deletes_nothing_outside_of_the_target_whatever_its_record_says(record: str, home: Path) -> None:
    there, before = home / "projects/demo/there", outside(home)
    (there / ".lockstep").mkdir()
    (there / ".lockstep/sync.json").write_text(json.dumps({record: SHA256}))
    assert taken([kept(offer(ROOT, file("y")))], str(there), None, SYNC)
    assert outside(home) == before


def test_a_sync_is_of_a_folder(tmp_path: Path) -> None:
    assert "it syncs no folder" in taken([kept(offer(file()))], f"{tmp_path}/x", None, SYNC)
    assert list(tmp_path.iterdir()) == []


ANSWERS = [
    *(line({"done": False}) + line({"changes": value}) for value in SURPRISES if value != []),
    *(line({"done": False}) + line({"changes": [value]}) for value in SURPRISES),
    *(line({"done": False}) + line({"changes": [["wanted", value]]}) for value in [*SURPRISES, *NAMES]),
    *(line({"done": False}) + line({"changes": [[value, "y"]]}) for value in SURPRISES),
    *(line({"done": False}) + line({"changes": [change]}) for change in (["sent", "y"], ["removed", "../a"], ["changed", 1])),
    *(line({"done": False}) + line({"changes": []}) + line({"theirs": value}) for value in SURPRISES if value != []),
    *(line({"done": False}) + line({"changes": []}) + line({"theirs": [value]}) for value in SURPRISES),
    *(line({"done": False}) + line({"changes": []}) + line({"theirs": [["y", value]]}) for value in SURPRISES if value != []),
    *(
        line({"done": False}) + line({"changes": []}) + line({"theirs": [[value, ["x"]]]})
        for value in SURPRISES
        if not isinstance(value, str)
    ),
    b"",
]


@pytest.mark.parametrize("number", range(len(ANSWERS)))
def test_a_pod_that_is_synced_to_has_nothing_that_was_not_offered(number: int) -> None:
    with said([ANSWERS[number]]) as wire, pytest.raises((CarryError, Gone)) as raised:
        _asked({}, {"y": {"name": "y", "link": "x"}}, wire)
    assert str(raised.value)


def test_counts_are_the_givers_own(tmp_path: Path) -> None:
    (tmp_path / "y").write_bytes(CONTENT)
    answers = line({"have": []}) + line({"ready": True}) + line({"done": 0}) + line({"ended": {"files": 10**9, "sent": "\x1b[2J"}})
    with said([answers]) as wire:
        assert carry.give(wire, tmp_path / "y") == {"files": 1, "sent": 1, "bytes": len(CONTENT), "resumed": 0}


@pytest.mark.parametrize(("line_bytes", "items", "lines"), [(1 << 20, 1, 65), (1, 10_000, 51)])
def test_a_listing_takes_at_most_64_mebibytes_and_half_a_million_names(line_bytes: int, items: int, lines: int) -> None:
    heard: list[int] = []
    made = Wire.__new__(Wire)
    made._heard = 0

    def hear() -> dict[str, Any]:
        heard.append(1)
        made._heard += line_bytes
        return {"x": [None] * items, "more": True}

    made.hear = hear  # type: ignore[method-assign]
    with pytest.raises(CarryError, match="more than 500000 files and folders, or their names take more than 64 MiB"):
        for _ in made.hear_all("x"):
            pass
    assert len(heard) == lines
