"""Disk that every host of the bed begins with: a Debian with systemd, sshd and Python, made once by debootstrap."""

from __future__ import annotations

import hashlib
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

from lockstep.devcluster.hosts.layout import USERS
from lockstep.devcluster.images import debootstrap, run_isolated

PACKAGES = (
    "ca-certificates", "dbus", "dbus-user-session", "fish", "iproute2", "iputils-ping", "libpam-systemd", "nftables", "openssh-client",
    "openssh-server", "procps", "python3", "python3-venv", "systemd", "systemd-sysv", "tcsh", "zsh",
)  # fmt: skip
"""Fish, tcsh and zsh are there for the tests of login shells."""
DISABLED = (
    "apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "fstrim.timer", "systemd-networkd",
    "systemd-resolved", "systemd-timesyncd",
)  # fmt: skip
MASKED = (
    "console-getty.service", "dev-hugepages.mount", "getty.target", "sys-kernel-debug.mount", "sys-kernel-tracing.mount",
    "systemd-modules-load.service", "systemd-sysctl.service", "systemd-udev-trigger.service", "systemd-udevd-control.socket",
    "systemd-udevd-kernel.socket", "systemd-udevd.service",
)  # fmt: skip
"""Units that need a kernel or a console of their own."""
SSHD = "PasswordAuthentication no\nPermitRootLogin no\nUsePAM yes\n"
ENVIRONMENT = "/opt/env"
"""Python environment with this machine's packages and Lockstep's own code, as `lockstep hosts setup` makes one elsewhere."""
SITE, CODE = "/opt/lockstep/site", "/opt/lockstep/code"
"""Folders where a host sees the packages and the code, read-only."""
UNUSED = ("usr/share/doc", "usr/share/locale", "usr/share/man", "var/cache/apt", "var/lib/apt/lists")
FORM = "1"  # raise it when the way the tree is made changes
Say = Callable[[str], None]


def tree_path(root: Path) -> Path:
    facts = platform.freedesktop_os_release()
    text = f"{FORM}|{facts['ID']}|{facts['VERSION_CODENAME']}|{PACKAGES}|{DISABLED}|{MASKED}|{SSHD}|{USERS}"
    return root / "devcluster" / "images" / f"host-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def host_tree(root: Path, say: Say) -> Path:
    """Folder of the tree; made once, then cached. Raises RuntimeError with the last words of the program that failed."""
    tree = tree_path(root)
    if tree.is_dir():
        return tree
    facts, draft = platform.freedesktop_os_release(), tree.with_suffix(".draft")
    say(f"making the hosts' disk from {facts['VERSION_CODENAME']} packages (two minutes, cached afterwards)")
    log = debootstrap(draft, PACKAGES, f"--components={'main,universe' if facts['ID'] == 'ubuntu' else 'main'}")
    for command in _preparation():
        run_isolated(log, "chroot", str(draft), *command)
    (draft / "etc/ssh/sshd_config.d/lockstep.conf").write_text(SSHD)
    for key in (draft / "etc/ssh").glob("ssh_host_*"):
        key.unlink()  # every host makes its own
    (draft / "etc/machine-id").write_text("")
    packages = next((draft / ENVIRONMENT.lstrip("/") / "lib").glob("python3.*")) / "site-packages"
    (packages / "lockstep.pth").write_text(f"{SITE}\n{CODE}/code\n")
    for name in UNUSED:
        shutil.rmtree(draft / name, ignore_errors=True)
    draft.rename(tree)
    return tree


def _preparation() -> list[list[str]]:
    return [
        *(["useradd", "--create-home", "--shell", "/bin/bash", "--uid", str(number), name] for name, number in USERS.items()),
        *(["systemctl", "disable", "--quiet", unit] for unit in DISABLED),
        ["systemctl", "mask", "--quiet", *MASKED],
        ["systemctl", "enable", "--quiet", "ssh"],
        ["python3", "-m", "venv", "--without-pip", ENVIRONMENT],
        ["mkdir", "-p", SITE, CODE, "/shared"],
    ]
