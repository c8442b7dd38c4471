"""The images of the embedded cluster: `pause`, and a base with Python made from the distribution's own packages."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.devcluster.host.processes import TIED

BASE = "localhost/lockstep/base:1"
PAUSE = "localhost/lockstep/pause:1"
PACKAGES = ("python3-minimal", "python3", "libpython3-stdlib", "ca-certificates", "iproute2", "procps")
UNUSED = ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "var/cache", "var/lib/apt/lists")
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
FORM = "3"  # raise it when the way an image is made changes


def base_path(root: Path) -> Path:
    facts = platform.freedesktop_os_release()
    key = hashlib.sha256(f"{FORM}|{facts['ID']}|{facts['VERSION_CODENAME']}|{PACKAGES}".encode()).hexdigest()[:12]
    return root / "devcluster" / "images" / f"base-{key}.tar"


def base_archive(root: Path, say: Callable[[str], None]) -> Path:
    """The base image as an archive for `ctr images import`; made with debootstrap once, then cached."""
    archive = base_path(root)
    if not archive.exists():
        codename = platform.freedesktop_os_release()["VERSION_CODENAME"]
        say(f"making the base image {BASE} from {codename} packages (under a minute, cached afterwards)")
        tree = archive.with_suffix(".tree")
        debootstrap(tree, PACKAGES)
        for name in UNUSED:
            shutil.rmtree(tree / name, ignore_errors=True)
        layer = tree.with_suffix(".layer")
        subprocess.run(["tar", "--numeric-owner", "-C", str(tree), "-cf", str(layer), "."], check=True)
        _write_archive(archive, BASE, layer, {"Cmd": ["/bin/bash"]})
        shutil.rmtree(tree)
    return archive


def debootstrap(tree: Path, packages: Sequence[str], *options: str) -> Path:
    """Make a tree of these packages and what they need, anew, and return the log. Raises RuntimeError with debootstrap's last words."""
    log = tree.with_suffix(".log")
    shutil.rmtree(tree, ignore_errors=True)
    tree.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    form = ["--variant=minbase", *options, f"--include={','.join(packages)}"]
    run_isolated(log, "debootstrap", *form, platform.freedesktop_os_release()["VERSION_CODENAME"], str(tree))
    return log


def run_isolated(log: Path, *command: str) -> None:
    """Run a step of making a tree. Raises RuntimeError with the program's last words."""
    # debootstrap mounts /proc in the tree: in a mount namespace of its own that ends with it, even when it is killed.
    isolated = [*TIED, "unshare", "--mount", "--propagation", "private", *command]
    with log.open("ab") as output:
        code = subprocess.run(isolated, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False).returncode
    if code != 0:
        lines = log.read_text(errors="replace").strip().splitlines() or [f"exit code {code}"]
        raise RuntimeError(f"{command[0]} failed: {lines[-1]} (see {log})")


def pause_archive(binary: Path, root: Path) -> Path:
    """The image that holds pods' namespaces: one static program."""
    archive = root / "devcluster" / "images" / f"pause-{hashlib.sha256(binary.read_bytes()).hexdigest()[:12]}.tar"
    if not archive.exists():
        archive.parent.mkdir(parents=True, exist_ok=True)
        layer = archive.with_suffix(".layer")
        with tarfile.open(layer, "w") as tar:
            _add(tar, "pause", binary.read_bytes(), 0o755)
        _write_archive(archive, PAUSE, layer, {"Entrypoint": ["/pause"], "User": "65535:65535"})
    return archive


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), mode
    tar.addfile(member, io.BytesIO(data))


def _write_archive(archive: Path, reference: str, layer: Path, config: dict[str, object]) -> None:
    """Layer and configuration in the form of `docker save`, which containerd imports."""
    with layer.open("rb") as content:
        diff_id = f"sha256:{hashlib.file_digest(content, 'sha256').hexdigest()}"
    environment = ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]
    body = json.dumps(
        {
            "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {"Env": environment, **config},
            "rootfs": {"type": "layers", "diff_ids": [diff_id]},
            "history": [{"created_by": "lockstep devcluster"}],  # buildah takes no base whose layers it doesn't explain
        }
    ).encode()
    config_name = f"{hashlib.sha256(body).hexdigest()}.json"
    manifest = json.dumps([{"Config": config_name, "RepoTags": [reference], "Layers": ["layer.tar"]}]).encode()
    temporary = archive.with_suffix(".tmp")
    with tarfile.open(temporary, "w") as tar:
        _add(tar, config_name, body)
        _add(tar, "manifest.json", manifest)
        tar.add(layer, arcname="layer.tar")
    layer.unlink()
    temporary.replace(archive)
