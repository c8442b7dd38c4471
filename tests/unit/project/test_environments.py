"""Environments in the cache: made whole or not at all, announced with their size, one process at a time, and with this code before the
packages.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lockstep import environments
from lockstep.api.errors import ConfigError, Failed
from lockstep.environments import cache_root, environment_key, full_environment, packages
from support.checkout import ROOT

UV = """#!/bin/sh
for last; do :; done
echo "$*" >> {log}
if [ "$1" = venv ]; then mkdir -p "$last/bin"; else {install}; fi
"""
Usage = namedtuple("Usage", "total used free")


class Place:
    """A cache with a uv of its own, and a lock of one package."""

    def __init__(self, folder: Path) -> None:
        self.cache, self.log, self.told = folder / "cache", folder / "log", list[str]()
        self.locks = folder / "locks" / "requirements"
        self.locks.mkdir(parents=True)
        self.lock = self.locks / "small.lock"
        self.lock.write_text("# To fetch: 3000 MB; on disk: 6600 MB (Python 3.11, x86_64)\none==1\n")
        (self.locks / "bootstrap.lock").write_text("uv==1\n")
        self.installs("exit 0")

    def installs(self, script: str) -> None:
        home = self.cache / "bootstrap" / environment_key(self.locks / "bootstrap.lock")
        (home / "bin").mkdir(parents=True, exist_ok=True)
        (home / "bin" / "uv").write_text(UV.format(log=self.log, install=script))
        (home / "bin" / "uv").chmod(0o755)
        (home / "done").touch()

    @property
    def home(self) -> Path:
        return self.cache / "python" / environment_key(self.lock)

    def make(self) -> Path:
        return packages("small", self.cache, self.told.append)

    def calls(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def left(self) -> list[str]:
        """Folders of the cache's python/."""
        return sorted(path.name for path in (self.cache / "python").iterdir() if path.is_dir())


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    made = Place(tmp_path)
    monkeypatch.setattr(environments, "asset", lambda path: made.locks.parent / path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, 10**11))
    return made


def test_an_environment_is_announced_made_once_and_there_as_a_whole(place: Place) -> None:
    assert place.make() == place.home == place.make()
    assert place.calls() == 2 and (place.home / "done").exists() and place.left() == [place.home.name]
    [line] = place.told
    assert line == f"installing the packages of small.lock into {place.cache}/python (fetches up to 3.0 GB, takes 6.6 GB of 100.0 GB)"


def test_a_measured_size_makes_no_other_environment(place: Place) -> None:
    before = environment_key(place.lock)
    place.lock.write_text("# To fetch: 1 MB; on disk: 1 MB (Python 3.12, x86_64)\none==1\n")
    assert environment_key(place.lock) == before
    place.lock.write_text("one==2\n")
    assert environment_key(place.lock) != before


def test_what_broke_off_leaves_nothing_half_made_and_is_made_by_the_same_command(place: Place) -> None:
    place.installs("exit 3")
    with pytest.raises(Failed, match=r"`uv pip install …` ended with exit code 3; .* SSL_CERT_FILE="):
        place.make()
    assert place.left() == []
    place.installs("exit 0")
    assert place.make() == place.home


@pytest.mark.parametrize("old", ["home", "draft"])
def test_what_is_half_made_is_made_anew(old: str, place: Place) -> None:
    half = place.home if old == "home" else place.home.with_name(f".{place.home.name}.0a0b0c0d")
    (half / "lib").mkdir(parents=True)
    assert place.make() == place.home
    assert place.left() == [place.home.name] and not (place.home / "lib").exists()


def test_without_room_nothing_is_fetched_and_both_sizes_are_said(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, 4 * 10**9))
    with pytest.raises(Failed, match=r"take 6\.6 GB, and \S+ has 4\.0 GB left: .* \$LOCKSTEP_CACHE$"):
        place.make()
    assert place.calls() == 0 and place.left() == []


def test_room_is_looked_at_before_the_installer_is_made(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(place.cache)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, 10**9))
    with pytest.raises(Failed, match="make room"):
        place.make()
    assert not (place.cache / "bootstrap").exists()


def test_what_uv_has_of_other_locks_makes_no_room(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    (place.cache / "uv").mkdir()
    (place.cache / "uv" / "archive").write_bytes(bytes(10**6))
    place.lock.write_text("# To fetch: 1 MB; on disk: 2 MB (Python 3.11, x86_64)\none==1\n")
    place.installs(f"echo {place.cache}/uv")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, 15 * 10**5))
    with pytest.raises(Failed, match="make room"):
        place.make()


def test_an_installer_without_its_program_is_made_anew(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    home = place.cache / "bootstrap" / environment_key(place.locks / "bootstrap.lock")
    (home / "bin" / "uv").unlink()

    def make(*command: str) -> None:
        if command[1:3] == ("-m", "venv"):
            (Path(command[3]) / "bin").mkdir(parents=True)
        else:
            Path(command[0]).with_name("uv").touch()

    monkeypatch.setattr(environments, "run", make)
    assert environments.installer(place.cache) == str(home / "bin" / "uv")
    assert (home / "bin" / "uv").exists() and (home / "done").exists()


def test_the_cache_of_another_user_is_one_sentence(place: Place) -> None:
    place.make()
    place.home.chmod(0o700)
    code = (
        "import sys; from pathlib import Path; from lockstep import environments; environments.asset = lambda path: Path(sys.argv[1]) /"
        " path\ntry: environments.packages('small', Path(sys.argv[2]), print)\nexcept environments.Failed as error: print(error)"
    )
    with ExitStack() as stack:
        for folder in (place.cache, *place.cache.parents):
            if folder.stat().st_uid == os.getuid() and folder.is_relative_to(tempfile.gettempdir()):
                stack.callback(folder.chmod, folder.stat().st_mode)
                folder.chmod(0o755 if folder != place.cache else 0)
        not_root = ("unshare", "--user", "--map-user=1000") if os.geteuid() == 0 else ()
        command = [*not_root, sys.executable, "-c", code, str(place.locks.parent), str(place.cache)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (
        done.stdout == f"{place.cache}, which keeps packages, can't be used (Permission denied): name another folder by $LOCKSTEP_CACHE\n"
    ), done.stderr


def test_an_error_of_the_body_that_says_nothing_of_the_cache_is_not_told_as_one(place: Place) -> None:
    with pytest.raises(FileNotFoundError), environments.alone(place.cache, place.told.append):
        Path(place.cache / "no" / "file").read_text()
    with pytest.raises(Failed, match="No space left"), environments.alone(place.cache, place.told.append):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_system_without_locks_is_said_and_needs_none(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    place.installs(f"mkdir -p {place.home} && touch {place.home}/done {place.home}/faster")  # by another process
    assert place.make() == place.home
    assert "can't be locked (No locks available): going on without" in place.told[0]
    assert (place.home / "faster").exists() and place.left() == [place.home.name]


def test_of_two_at_once_one_waits_says_so_and_takes_what_the_other_made(place: Place) -> None:
    waits = threading.Event()

    def say(text: str) -> None:
        place.told.append(text)
        waits.set()

    with (place.cache / "packages.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        waiting = threading.Thread(target=packages, args=("small", place.cache, say))
        waiting.start()
        assert waits.wait(30)
        place.home.mkdir(parents=True)
        (place.home / "done").touch()
    waiting.join(30)
    assert not waiting.is_alive() and place.calls() == 0
    assert place.told == [f"another process installs packages into {place.cache}: waiting until it has ended"]


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_cache_that_cannot_be_written_is_one_sentence(number: int, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(Failed) as refused:
        place.make()
    assert (
        str(refused.value)
        == f"{place.cache}, which keeps packages, can't be used ({os.strerror(number)}): name another folder by $LOCKSTEP_CACHE"
    )


def test_without_a_home_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(number: int) -> None:
        raise KeyError(number)

    for name in ("HOME", "LOCKSTEP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(ConfigError, match=r"no home folder .*\$LOCKSTEP_CACHE"):
        cache_root()


def test_a_cache_that_is_named_keeps_what_uv_downloads_too(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UV_CACHE_DIR", raising=False)
    monkeypatch.setenv("LOCKSTEP_CACHE", str(place.cache))
    place.installs(f"echo $UV_CACHE_DIR >> {place.log}")
    place.make()
    assert place.log.read_text().splitlines()[-1] == f"{place.cache}/uv"


def test_the_full_environment_has_this_code_alone_before_the_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    home = tmp_path / "python" / "home"
    (environments.site_packages(home) / "torch").mkdir(parents=True)
    monkeypatch.setattr(environments, "packages", lambda name, cache, say: home)
    python = full_environment(print)
    assert python == full_environment(print) and sorted(path.name for path in (python.parents[1] / "code").iterdir()) == sorted(
        environments.PACKAGES
    )
    code = "import os, sys, lockstep_train, lockstep_gang; print(os.path.realpath(lockstep_train.__path__[0])); print(sys.path)"
    done = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True).stdout.splitlines()
    assert done[0] == str(ROOT / "workspace/lockstep_train")
    assert str(ROOT / "operator") not in done[1] and str(environments.site_packages(home)) in done[1]
    assert {path.name for path in python.parent.iterdir()} >= {"lockstep", "kubectl-lockstep", "torchrun"}
    assert (python.parent / "lockstep").read_text().splitlines()[0] == f"#!{python}"
    assert not [path for path in python.parent.iterdir() if not path.is_symlink() and f".{python.parents[1].name}." in path.read_text()]
    assert not (python.parent / "pytest").exists(), "a program whose package isn't there"


def test_a_full_environment_that_is_half_made_is_made_anew_with_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    home = tmp_path / "python" / "home"
    environments.site_packages(home).mkdir(parents=True)
    monkeypatch.setattr(environments, "packages", lambda name, cache, say: home)
    target = full_environment(print).parents[1]
    (target / "done").unlink()
    (target / "packages").unlink()
    (target / "packages").symlink_to(tmp_path)
    assert full_environment(print).exists() and (target / "code" / "lockstep_train").exists()
    assert (target / "packages").readlink() == home


def test_of_two_that_make_the_full_environment_without_locks_one_wins_and_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    home = tmp_path / "python" / "home"
    environments.site_packages(home).mkdir(parents=True)
    monkeypatch.setattr(environments, "packages", lambda name, cache, say: home)
    monkeypatch.setattr(environments, "_lock", lambda *_: False)
    together, make = threading.Barrier(2), environments.thin_venv

    def both(*words: Any) -> None:
        together.wait(30)
        make(*words)

    monkeypatch.setattr(environments, "thin_venv", both)
    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(full_environment, print) for _ in range(2))
        assert first.result(60) == second.result(60)
    assert len(list((tmp_path / "full").iterdir())) == 1 and first.result().exists()


CALLER = """
import sys
from pathlib import Path
from lockstep import environments
from lockstep.platforms.local.environment import in_full_environment
environments.full_environment = lambda say: Path({python!r})
sys.argv = ["/usr/bin/kubectl-lockstep", "run", "--local", "a b"]
print("printed before")
in_full_environment(["no_such_package"])
"""


def _caller(folder: Path, script: str) -> list[str]:
    python = folder / "bin" / "python"
    python.parent.mkdir()
    (python.parent / "kubectl-lockstep").touch()
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return [sys.executable, "-c", CALLER.format(python=str(python))]


def test_a_verb_that_needs_torch_goes_on_as_the_same_command_line_with_its_input_and_exit_code(tmp_path: Path) -> None:
    command = _caller(tmp_path, 'printf "%s|" "$@"; cat; exit 7')
    done = subprocess.run(command, input="typed", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, f"printed before\n{tmp_path}/bin/kubectl-lockstep|run|--local|a b|typed")
    assert done.stderr == f"lockstep: {sys.executable} has no no_such_package: going on with {tmp_path}/bin/python\n"


def test_it_stays_the_process_that_signals_are_sent_to(tmp_path: Path) -> None:
    with subprocess.Popen(
        _caller(tmp_path, "echo $$; exec sleep 100"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert [process.stdout.readline() for _ in range(2)] == ["printed before\n", f"{process.pid}\n"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM


def test_an_environment_that_lacks_what_it_was_made_with_is_no_endless_loop(tmp_path: Path) -> None:
    command = _caller(tmp_path, "exit 9")
    command[2] = command[2].replace("sys.argv =", f"sys.prefix = {str(tmp_path)!r}\nsys.argv =")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and f"remove {tmp_path} and" in done.stderr.splitlines()[-1]
