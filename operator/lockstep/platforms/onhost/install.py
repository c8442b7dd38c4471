"""An environment for ranks on a host: what is there, and an environment made of files that came before. Each may be repeated after it broke
anywhere.

The request is one line of JSON on standard input; answers are lines of JSON, and the last one says `done` or `problem`. It runs on the
host's own Python, 3.6 or newer, before there is any other.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.platforms.onhost.readings import alone, glibc, lingers, state_folder
from lockstep_machine.cards import nvidia_cards
from lockstep_machine.commands import output
from lockstep_machine.gpus import nvidia_smi
from lockstep_machine.readings import file_words, user_name

Json = Any
ENVIRONMENT = re.compile(r"env-[0-9a-f]{16}")
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!%-]{0,250}")
RELEASE = re.compile(r"[0-9]{8}")
PIECE_BYTES = 1 << 20
SLOW_SECONDS = 10.0
LOCK_SECONDS = 10.0
WORDS_MAX = 1500
OLDEST, NEWEST = 10, 19
"""Minor versions of Python 3 that are looked for."""
ASKED = (
    "import platform,sys,sysconfig;print(platform.python_implementation(),'%d.%d'%sys.version_info[:2],sys.prefix==sys.base_prefix,"
    "sysconfig.get_config_var('Py_GIL_DISABLED')or 0,sys.maxsize>2**32)"
)
PLAIN = ["CPython", "True", "0", "True"]


class NotMade(Exception):
    """The request can't be done; the message says why."""


def data_folder() -> Path:
    return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "lockstep"


def pythons() -> Json:
    """Pairs of version and path of each CPython that is no virtual environment; that of `python3` first."""
    found: Json = {}
    folders = os.environ.get("PATH", os.defpath) + ":/usr/local/bin:/usr/bin"
    for name in ["python3"] + [f"python3.{minor}" for minor in range(OLDEST, NEWEST + 1)]:
        path = shutil.which(name, path=folders)
        words = output(path, "-I", "-S", "-c", ASKED, seconds=SLOW_SECONDS).split() if path else []
        if len(words) == 5 and words[:1] + words[2:] == PLAIN and words[1] not in found:
            found[words[1]] = path
    return list(found.items())


def environments() -> Json:
    """Names of environments that are complete: their folders get their names last."""
    return sorted(path.name for path in data_folder().glob("env-*") if ENVIRONMENT.fullmatch(path.name) and (path / "bin/python").exists())


def current() -> str:
    """Name of the environment that new jobs take."""
    try:
        return os.readlink(str(data_folder() / "env"))  # noqa: PTH115 (Path has it from 3.9 on)
    except OSError:
        return ""


def used() -> Json:
    """Environments that the settings of a job here name."""
    names = set()
    units = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "systemd" / "user"
    for path in [*state_folder().glob("*/*.json"), *units.glob("lockstep-*.service")]:
        names |= set(ENVIRONMENT.findall(file_words(path)))
    return sorted(names)


def files() -> Json:
    """Sizes of files that have come whole."""
    folder = data_folder() / "wheels"
    return {path.name: path.stat().st_size for path in folder.glob("*") if FILE_NAME.fullmatch(path.name)} if folder.is_dir() else {}


def facts(request: Json) -> Json:
    folders = [str(Path(path).expanduser()) for path in request["folders"]]
    return {
        "user": user_name(),
        "home": str(Path.home()),
        "system": platform.system(),
        "machine": platform.machine(),
        "glibc": glibc(),
        "data": str(data_folder()),
        "pythons": pythons(),
        "environments": environments(),
        "current": current(),
        "used": used(),
        "files": files(),
        "folders": [path for path in folders if Path(path).is_dir()],
        "units": bool(output("systemctl", "--user", "show", "--property=Version")),
        "linger": lingers(),
        "gpus": len(output(nvidia_smi(), "-L", seconds=SLOW_SECONDS).splitlines()),
        "devices": len(nvidia_cards()),
        "done": True,
    }


def digest_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for piece in iter(lambda: file.read(PIECE_BYTES), b""):
            digest.update(piece)
    return digest.hexdigest()


class exclusive:
    """One setup of this user at a time; ends with the process, however that ends."""

    def __enter__(self) -> None:
        data_folder().mkdir(parents=True, exist_ok=True)
        self.lock = (data_folder() / "setup.lock").open("w")
        end = time.monotonic() + LOCK_SECONDS  # (one whose connection broke just now is about to end)
        while True:
            try:
                return fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() > end:
                    raise NotMade("another setup of yours runs there: wait for its end") from None
                time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        self.lock.close()


def make(request: Json) -> Json:
    """Make the environment, and let new jobs take it. The folder gets its name last, the link to it after that."""
    name = request["environment"]
    if not ENVIRONMENT.fullmatch(name):
        raise NotMade(f"{name!r} is not an environment's name")
    with exclusive():
        data = data_folder()
        if name not in environments():
            check_files(request["files"])
            build(request, data, data / name)
        for path in request["folders"]:
            Path(path).expanduser().mkdir(parents=True, exist_ok=True)
        point(data / "env", name)
        linger = lingers() or bool(request["linger"] and may_linger())
        tidy(request["keep"], name)
    return {"done": True, "linger": linger}


def check_files(wanted: Json) -> None:
    """Compare files with their digests: others than those that were sent may have written here."""
    for name, expected in wanted:
        path = data_folder() / "wheels" / name
        digest = digest_of(path) if path.exists() else "none"
        if digest != expected:
            if path.exists():
                path.unlink()
            raise NotMade(f"{name} has the SHA-256 {digest} here, and {expected} is expected: it was removed; type the command again")


def build(request: Json, data: Path, final: Path) -> None:
    draft = data / f".{final.name}.draft"
    shutil.rmtree(str(draft), ignore_errors=True)
    shutil.rmtree(str(final), ignore_errors=True)  # (incomplete: its Python has gone)
    uv = unpacked_uv(data, request["uv"])
    python = request["python"]
    own = {"UV_PYTHON_INSTALL_DIR": str(data / "python")}
    if not python:
        tell({"step": "bringing Python " + request["version"]})
        mirror(data, request["archive"], own)
        run([uv, "python", "install", "--no-bin", request["version"]], own, "automatic")
    tell({"step": f"installing {request['packages']} packages"})
    chosen = [python] if python else [request["version"], "--managed-python"]
    run([uv, "venv", "--quiet", "--relocatable", "--no-project", "--python", *chosen, str(draft)], own)
    inside = str(draft / "bin" / "python")
    source = ["--no-index", "--find-links", str(data / "wheels")] if request["offline"] else []
    if request["index"]:
        source += ["--default-index", request["index"]]
        own.update(trust_of_host())
    common = ["--quiet", "--require-hashes", "--compile-bytecode", "--python", inside, *source]
    lock = data / ".setup.lock.txt"
    lock.write_text(request["wheels"], encoding="utf-8")
    run([uv, "pip", "sync", "--only-binary", ":all:", *common, str(lock)], own)
    if request["sources"]:
        tell({"step": "building " + request["built"]})
        lock.write_text(request["sources"], encoding="utf-8")
        run([uv, "pip", "install", "--no-deps", "--no-build-isolation", *common, "-r", str(lock)], own)
    lock.unlink()
    site = next((draft / "lib").glob("python3.*")) / "site-packages"
    with zipfile.ZipFile(str(data / "wheels" / request["trainer"])) as archive:
        archive.extractall(str(site))
    run([inside, "-I", "-m", "compileall", "-q", *(str(site / folder) for folder in request["folders_of_trainer"])], own)
    run([inside, "-I", "-c", "import lockstep_train"], own)
    os.sync()
    draft.rename(final)


def unpacked_uv(data: Path, wheel: str) -> str:
    """Path of the program of uv's wheel."""
    program = data / "uv" / wheel.split("-")[1] / "uv"
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        draft = program.with_name(".uv")
        with zipfile.ZipFile(str(data / "wheels" / wheel)) as archive:
            entry = next(name for name in archive.namelist() if name.endswith(".data/scripts/uv"))
            with archive.open(entry) as source, draft.open("wb") as target:
                shutil.copyfileobj(source, target)
        draft.chmod(0o755)
        draft.replace(program)
    return str(program)


def mirror(data: Path, archive: Json, own: Json) -> None:
    """Let uv find the archive of a Python that was sent. It compares it with a digest of its own."""
    if archive:
        release, name = archive
        if not RELEASE.fullmatch(release):
            raise NotMade(f"{release!r} is not a release of Python")
        folder = data / "python-archives" / release
        folder.mkdir(parents=True, exist_ok=True)
        point(folder / name, str(data / "wheels" / name))
        own["UV_PYTHON_INSTALL_MIRROR"] = "file://" + str(data / "python-archives")


def archive_of(request: Json) -> Json:
    """Return the address of the archive that uv installs a Python from."""
    with exclusive():
        uv = unpacked_uv(data_folder(), request["uv"])
    listing = json.loads(
        output(uv, "python", "list", "--only-downloads", "--no-config", "--output-format", "json", request["version"], seconds=SLOW_SECONDS)
        or "[]"
    )
    for entry in listing:
        if entry.get("implementation") == "cpython" and entry.get("variant") == "default" and entry.get("url"):
            return {"done": True, "url": entry["url"]}
    raise NotMade(f"uv knows no Python {request['version']} for this machine")


def trust_of_host() -> Json:
    """Variables that let uv trust whom the host trusts, since an index of one's own often has a certificate of one's own; {} where the host
    trusts nobody.
    """
    import ssl  # (slow to import, and asked for here alone)

    paths = ssl.get_default_verify_paths()
    trusts = bool(paths.cafile) or bool(paths.capath and any(Path(paths.capath).iterdir()))
    return {"UV_SYSTEM_CERTS": "1"} if trusts and "UV_SYSTEM_CERTS" not in os.environ else {}


def run(command: Json, own: Json, downloads: str = "never") -> None:
    """Run a step. Raises NotMade with its last words."""
    data = data_folder()
    variables = {
        **os.environ,
        "UV_CACHE_DIR": str(data / "cache"),
        "UV_NO_PROGRESS": "1",
        "UV_PYTHON_DOWNLOADS": downloads,
        "NO_COLOR": "1",
        **own,
    }
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        variables.pop(name, None)
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=variables, cwd=str(data), check=False
    )
    if done.returncode != 0:
        words = " | ".join(line.strip() for line in done.stdout.decode(errors="replace").splitlines() if line.strip())
        raise NotMade(f"{Path(command[0]).name} {command[1]} failed: {words[-WORDS_MAX:] or done.returncode}")


def point(link: Path, target: str) -> None:
    """Let the link lead there, at once."""
    if link.is_symlink() and os.readlink(str(link)) == target:  # noqa: PTH115 (Path has it from 3.9 on)
        return
    draft = link.with_name("." + link.name + ".draft")
    if draft.is_symlink():
        draft.unlink()
    draft.symlink_to(target)
    draft.replace(link)


def may_linger() -> bool:
    """Ask to linger, which the host's rules allow or not."""
    if shutil.which("loginctl"):
        output("loginctl", "enable-linger", seconds=SLOW_SECONDS)
    return lingers()


def tidy(keep: Json, name: str) -> None:
    """Remove environments that no job names, and files that are of no use any more.

    The lock is that of starts. One that is under way looks for its Python once its record is there: the record is seen here, or its Python
    has gone there.
    """
    data = data_folder()
    with alone():
        names = {name, *used()}
        for path in data.glob("env-*"):
            if ENVIRONMENT.fullmatch(path.name) and path.name not in names:
                path.rename(data / f".{path.name}.gone")
    for path in [*data.glob(".env-*.gone"), *data.glob(".env-*.draft")]:
        shutil.rmtree(str(path), ignore_errors=True)
    for path in (data / "wheels").glob("*") if keep else []:
        if path.name not in keep:
            path.unlink()


def tell(value: Json) -> None:
    print(json.dumps(value), flush=True)


def main(stream: BinaryIO) -> None:
    os.environ.setdefault("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    request = json.loads(stream.readline().decode())
    try:
        tell({"facts": facts, "archive": archive_of, "make": make}[request["do"]](request))
    except NotMade as error:
        tell({"problem": str(error)})
    except OSError as error:
        tell({"problem": f"{error.filename or 'the disk'}: {error.strerror}"})


if __name__ == "__main__":
    main(sys.stdin.buffer)
