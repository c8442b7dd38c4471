"""What travels to a pod, what is deleted there, and what is left alone. The pod's end runs here as the program that it is there."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.api.errors import ConfigError
from lockstep.platforms.files.sync import _asked, _sent, scan
from lockstep.platforms.inpod import carry, source_of, synced
from lockstep.platforms.inpod.entries import DRAFT
from lockstep_machine.wire import CarryError, Gone, Wire
from lockstep_spec.senders import SOURCES, write_json
from support.checkout import ROOT


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_py", ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def sync(
    source: Path, target: Path, force: bool = False, *, alone: bool = False, umask: int = 0o022, own_umask: bool = False
) -> dict[str, Any]:
    """One sync, both ends. The taker is a process of its own that has only its text."""
    request = {"take": str(target), "source": str(source), "force": force, "alone": alone}
    options = json.dumps({"syncs": True, "roots": ["/"], "ownUmask": own_umask})
    command = [sys.executable, "-I", "-c", source_of(carry).decode(), options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, umask=umask) as process:
        wire, files = Wire(process.stdout.fileno(), process.stdin.fileno()), scan(source)
        changes = _asked(request, files, wire)
        if not changes.done:
            _sent(files, changes.names["wanted"], [name for name in changes.names["removed"] if (source / name).is_file()], wire)
        process.stdin.close()
    return {**changes.names, "theirs": changes.theirs}


def contents(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and ".lockstep" not in path.parts and not path.name.startswith(DRAFT)
    }


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A volume with things of other people's."""
    return write(tmp_path / "pod", runs__demo__log="theirs")


def test_only_what_differs_travels(tmp_path: Path, target: Path) -> None:
    source = write(tmp_path / "here", a_py="1", pkg__b_py="2")
    assert sync(source, target)["wanted"] == ["a.py", "pkg/b.py"]
    assert sync(source, target) == {"wanted": [], "removed": [], "changed": [], "others": [], "theirs": {}}
    write(source, a_py="one")
    assert sync(source, target)["wanted"] == ["a.py"]
    assert contents(target) == {"a.py": "one", "pkg/b.py": "2", "runs/demo/log": "theirs"}


def test_only_what_a_sync_has_sent_is_ever_deleted(tmp_path: Path, target: Path) -> None:
    source = write(tmp_path / "here", a_py="1", pkg__b_py="2")
    sync(source, target)
    (source / "pkg/b.py").unlink()
    assert sync(source, target)["removed"] == ["pkg/b.py"]
    assert contents(target) == {"a.py": "1", "runs/demo/log": "theirs"}
    assert not (target / "pkg").exists()


NOTHING: dict[str, Any] = {"wanted": [], "removed": [], "changed": [], "others": [], "theirs": {}}


def test_what_another_folder_has_sent_is_neither_written_over_nor_removed_until_it_is_forced(tmp_path: Path, target: Path) -> None:
    mine, theirs = write(tmp_path / "mine", a_py="1", main_py="1", same="="), write(tmp_path / "theirs", b_py="2", main_py="2", same="=")
    sync(mine, target)
    before = contents(target)
    refused = sync(theirs, target)
    assert refused["theirs"] == {"main.py": [str(mine)]} and contents(target) == before
    (theirs / "main.py").unlink()
    assert sync(theirs, target) == {**NOTHING, "wanted": ["b.py"], "others": ["a.py", "main.py"]}
    write(mine, same="changed")
    assert sync(mine, target)["theirs"] == {"same": [str(theirs)]}, "both have sent it"
    (mine / "same").unlink()
    (mine / "a.py").unlink()
    again = sync(mine, target)
    assert (again["removed"], again["others"]) == (["a.py"], ["b.py", "same"]), "each folder's own is its own to remove"
    write(theirs, main_py="2")
    sync(theirs, target, force=True)
    write(theirs, main_py="3", same="3")
    assert sync(theirs, target)["wanted"] == ["main.py", "same"], "what was forced is its own"
    assert sync(mine, target)["theirs"] == {"main.py": [str(theirs)]}


@pytest.mark.parametrize(("first", "second"), [("", "sub"), ("sub", "")])
def test_files_of_another_folder_are_seen_above_and_below_the_target(tmp_path: Path, target: Path, first: str, second: str) -> None:
    inner, outer = ("sub__main_py", "main_py") if not first else ("main_py", "sub__main_py")
    mine, theirs = write(tmp_path / "mine", **{inner: "1"}), write(tmp_path / "theirs", **{outer: "2"})
    sync(mine, target / first)
    assert [*sync(theirs, target / second)["theirs"].values()] == [[str(mine)]]
    assert sync(theirs, target / second, force=True)["theirs"] == {}
    assert [*sync(mine, target / first)["theirs"].values()] == [[str(theirs)]]


def test_a_folder_inside_a_project_is_another_sender(tmp_path: Path, target: Path) -> None:
    project = write(tmp_path / "mine", main_py="1", sub__main_py="2")
    sync(project, target)
    assert sync(project / "sub", target)["theirs"] == {"main.py": [str(project)]}
    assert sync(project / "sub", target / "sub") == NOTHING, "these are the files that the project sent there"


def test_a_folder_of_its_own_has_no_files_of_others(tmp_path: Path, target: Path) -> None:
    mine, theirs = write(tmp_path / "mine", a_py="1"), write(tmp_path / "theirs", b_py="2")
    assert sync(mine, target, alone=True)["theirs"] == {"": []} and "a.py" not in contents(target)
    assert sync(mine, target / "x", alone=True)["wanted"] == ["a.py"]
    assert sync(theirs, target / "x", alone=True)["theirs"] == {"": [str(mine)]}
    write(target / "x", out="a job's")
    assert sync(write(mine, a_py="2"), target / "x", alone=True)["wanted"] == ["a.py"]


def test_a_folder_that_a_project_s_data_was_copied_to_is_its_own(tmp_path: Path, target: Path) -> None:
    mine = write(tmp_path / "mine", a_py="1")
    write(target / "x" / "data", train_bin="1")
    write_json(f"{target}/{SOURCES}", {"x/data/train.bin": f"{mine}/data"})
    assert sync(mine, target / "x", alone=True)["wanted"] == ["a.py"]
    assert sync(write(tmp_path / "theirs", b_py="2"), target / "x", alone=True)["theirs"] == {"": [str(mine), f"{mine}/data"]}


def test_what_is_ignored_now_and_still_here_is_not_removed_there(tmp_path: Path, target: Path) -> None:
    source = write(tmp_path / "here", a_py="1", data="2")
    sync(source, target)
    (source / ".gitignore").write_text("data\n")
    sync(source, target)
    assert contents(target)["data"] == "2"
    (source / "data").unlink()
    sync(source, target)
    assert "data" not in contents(target)


def test_what_was_changed_in_the_pod_stays_until_it_is_forced(tmp_path: Path, target: Path) -> None:
    source = write(tmp_path / "here", a_py="1", b_py="1")
    sync(source, target)
    write(target, a_py="edited there", b_py="edited there")
    write(source, a_py="2")
    (source / "b.py").unlink()
    assert sync(source, target) == {"wanted": [], "removed": [], "changed": ["a.py", "b.py"], "others": [], "theirs": {}}
    assert (contents(target)["a.py"], contents(target)["b.py"]) == ("edited there", "edited there")
    assert sync(source, target)["changed"] == ["a.py", "b.py"], "it is not forgotten the next time"
    sync(source, target, force=True)
    assert contents(target) == {"a.py": "2", "runs/demo/log": "theirs"}


def test_a_file_of_others_is_not_written_over_by_the_first_sync(tmp_path: Path, target: Path) -> None:
    source = write(tmp_path / "here", runs__demo__log="mine")
    assert sync(source, target)["changed"] == ["runs/demo/log"]
    assert contents(target) == {"runs/demo/log": "theirs"}


def test_the_checkout_s_own_packages_stay_here_for_pods_have_them_from_the_image() -> None:
    workspace = ROOT / "workspace"
    sent = set(scan(workspace))
    assert sent >= {"train_multi_node.py", "ds_config.json", "launch_deepspeed.sh"}
    assert [name for name in sent if name.startswith("lockstep_")] == []


def look(target: Path, *names: str) -> None:
    """One look at these files, remembered."""
    digests = synced.Digests(target)
    for name in names:
        assert digests.of(name)[0] is not None
    digests.remember()


def test_what_was_read_once_is_not_read_again_while_it_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, a_py="1", b_py="2")
    monkeypatch.setattr(synced, "SETTLED_SECONDS", -1.0)
    look(tmp_path, "a.py", "b.py")
    read = synced.digest
    monkeypatch.setattr(synced, "digest", lambda path, is_link: pytest.fail(f"{path} was read"))
    assert synced.Digests(tmp_path).of("a.py") == (hashlib.sha256(b"1").hexdigest(), False)
    monkeypatch.setattr(synced, "digest", read)
    write(tmp_path, a_py="one")
    assert synced.Digests(tmp_path).of("a.py")[0] == hashlib.sha256(b"one").hexdigest()


def test_programs_stay_programs_and_links_stay_links(tmp_path: Path, target: Path) -> None:
    source = write(tmp_path / "here", run="#!/bin/sh\n", data__x="1")
    (source / "run").chmod(0o755)
    (source / "link").symlink_to("data/x")
    sync(source, target)
    assert os.access(target / "run", os.X_OK) and not os.access(target / "data/x", os.X_OK)
    assert (target / "link").is_symlink() and (target / "link").read_text() == "1"
    (source / "run").chmod(0o644)
    assert sync(source, target)["wanted"] == ["run"]
    assert not os.access(target / "run", os.X_OK)


def test_what_was_sent_is_the_group_s_with_all_folders_and_records(tmp_path: Path) -> None:
    """The next sync may go to pods of another transport, which have another user."""
    sync(write(tmp_path / "here", src__a_py="a"), tmp_path / "pod" / "code")
    found = [tmp_path / "pod", *(tmp_path / "pod").rglob("*")]
    assert {"code", ".lockstep", "sync.json", "src", "a.py"} <= {path.name for path in found}
    wanted = {True: "0o775", False: "0o664"}
    assert [(path, oct(path.stat().st_mode & 0o777)) for path in found] == [(path, wanted[path.is_dir()]) for path in found]


@pytest.mark.parametrize(("umask", "file", "program"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700), (0o002, 0o664, 0o775)])
def test_on_a_person_s_own_machine_their_umask_says_who_may_write(tmp_path: Path, umask: int, file: int, program: int) -> None:
    source = write(tmp_path / "here", src__a_py="a", run="b")
    (source / "run").chmod(0o755)
    sync(source, tmp_path / "host", umask=umask, own_umask=True)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "host").rglob("*")}
    assert (modes["a.py"], modes["run"], modes["src"], modes["sync.json"]) == (file, program, program, file)


@pytest.mark.parametrize(("link", "ignored"), [("/etc/passwd", False), ("../out", False), ("sub/../../out", False), ("../out", True)])
def test_a_link_out_of_the_folder_is_named_before_anything_is_sent(tmp_path: Path, link: str, ignored: bool) -> None:
    source = write(tmp_path / "here", a_py="1")
    (source / "l").symlink_to(link)
    if ignored:
        (source / ".gitignore").write_text("/l\n")
        assert sorted(scan(source)) == [".gitignore", "a.py"]
        return
    with pytest.raises(
        ConfigError, match=f"{source}/l is a link to {link}, out of the folder that is sent: .* name it in {source}/.lockstepignore"
    ):
        scan(source)


def test_ignored_files_stay_here(tmp_path: Path) -> None:
    source = write(tmp_path / "here", a_py="", __pycache__="", big__x="", logs__y="", keep__z="")
    write(source / "deep", a="")
    (source / "deep" / "__pycache__").mkdir()
    (source / "deep" / "__pycache__" / "a.pyc").touch()
    (source / ".gitignore").write_text("nothing\n")
    (source / ".lockstepignore").write_text("big/\n/logs\n")
    assert sorted(scan(source)) == [".gitignore", ".lockstepignore", "a.py", "deep/a", "keep/z"]


def test_half_of_an_edit_does_not_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "here", a_py="1")
    before = scan(source)
    write(source, a_py="half")
    monkeypatch.setitem(globals(), "scan", lambda _: before)
    with pytest.raises(CarryError, match=r"a\.py was changed while it was sent"):
        sync(source, tmp_path / "pod")
    assert contents(tmp_path / "pod") == {}


def test_a_folder_takes_the_place_of_a_file_and_a_file_that_of_a_folder(tmp_path: Path) -> None:
    source = write(tmp_path / "here", x="1", data__y="2")
    sync(source, tmp_path / "pod")
    (source / "x").unlink()
    (source / "data" / "y").unlink()
    (source / "data").rmdir()
    write(source, x__z="3", data="4")
    sync(source, tmp_path / "pod")
    assert contents(tmp_path / "pod") == {"x/z": "3", "data": "4"}


def test_a_cut_connection_changes_nothing_and_the_next_sync_sends_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "here", a_py="1", b_py="2")

    def cut(*_: object) -> None:
        raise Gone

    with monkeypatch.context() as patch, pytest.raises(Gone):
        patch.setattr(Wire, "pass_on", cut)
        sync(source, tmp_path / "pod")
    assert contents(tmp_path / "pod") == {}
    assert sync(source, tmp_path / "pod")["wanted"] == ["a.py", "b.py"]
    assert contents(tmp_path / "pod") == contents(source)
