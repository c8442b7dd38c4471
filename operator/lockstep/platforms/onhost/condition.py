"""Condition of a host, for `doctor`: firewall, sleep, sshd, limits, and the packages of its ranks' Python. It changes nothing.

Its argument is `{"python": path or ""}`; it prints one line of JSON. Pythons that are too old for everything else (3.6 or newer)
read it, too.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from lockstep_machine.cards import nvidia_cards
from lockstep_machine.commands import output
from lockstep_machine.gpus import nvidia_smi
from lockstep_machine.readings import file_words

Json = Any
LIBRARY_SECONDS, TORCH_SECONDS = 10.0, 40.0
TEXT_MAX = 300
INCLUDES_MAX = 64
ERRORS_MAX = 256
PACKAGES = ("torch", "deepspeed", "transformers", "peft", "accelerate", "numpy", "safetensors", "lockstep-trainer")
LIBRARIES = """
import json, platform, sys
from importlib import metadata
versions = {}
for name in sys.argv[1:]:
    try:
        versions[name] = str(metadata.version(name))
    except metadata.PackageNotFoundError:
        pass
print(json.dumps({"python": platform.python_version(), "packages": versions}))
"""
TORCH = """
import json, torch
flags = getattr(torch._C, "_cuda_getArchFlags", lambda: "")()
print(json.dumps({"cuda": torch.version.cuda or "", "architectures": (flags or "").split()}))
"""
_PCI = re.compile(r"\b([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})\b")
_XID, _CAUSE = re.compile(r"NVRM: Xid \([^)]*\): (\d+)"), re.compile(r"caused by previous Xid (\d+)")
_OFF_THE_BUS = "fallen off the bus"
SLEEP_ACTIONS = ("suspend", "hibernate", "hybrid-sleep", "suspend-then-hibernate", "sleep")
SHM = "/dev/shm"  # noqa: S108 (nothing is written there)


def paths(pattern: str) -> list[Path]:
    """Files and folders of an absolute pattern, sorted."""
    try:
        return sorted(Path("/").glob(pattern.lstrip("/")))
    except OSError:
        return []


def firewall() -> str:
    """The tool by which the host's firewall is kept; '' if none is known to be on."""
    if re.search(r"^ENABLED=yes", file_words("/etc/ufw/ufw.conf"), re.MULTILINE | re.IGNORECASE):
        return "ufw"
    if output("systemctl", "is-active", "firewalld").strip() == "active":
        return "firewalld"
    return ""


def power() -> Json:
    """Signs that the machine may fall asleep: a battery that empties, and why systemd would put it to sleep; ''."""
    supplies = [path.parent for path in paths("/sys/class/power_supply/*/type") if file_words(path) == "Battery"]
    batteries = [supply for supply in supplies if file_words(supply / "scope") != "Device"]  # (a mouse has one, too)
    settings = settings_of("/etc/systemd/logind.conf", "/usr/lib/systemd/logind.conf.d/*.conf", "/etc/systemd/logind.conf.d/*.conf")
    sleeps = "nobody uses it for a while" if settings.get("IdleAction") in SLEEP_ACTIONS else ""
    if paths("/proc/acpi/button/lid/*") and settings.get("HandleLidSwitch", "suspend") not in ("ignore", "lock"):
        sleeps = "its lid is shut"
    if all(os.path.realpath("/etc/systemd/system/" + unit) == "/dev/null" for unit in ("sleep.target", "suspend.target")):
        sleeps = ""
    return {
        "discharging": any(file_words(battery / "status") == "Discharging" for battery in batteries),
        "sleeps": sleeps,
    }


def settings_of(*patterns: str) -> Json:
    """Settings of systemd's files, the last one of each name."""
    found = {}
    for pattern in patterns:
        for path in paths(pattern):
            for name, value in re.findall(r"^\s*(\w+)\s*=\s*(\S*)", file_words(path), re.MULTILINE):
                found[name] = value
    return found


def sshd() -> Json:
    """Words of sshd's files on passwords and root, as far as everybody may read them. The first word counts, and what only a Match changes
    doesn't.

    `sshd -T` would know, but only root may ask it.
    """
    lines = list(sshd_lines("/etc/ssh/sshd_config", INCLUDES_MAX))
    stated: Json = {}
    for words in lines:
        stated.setdefault(words[0].lower(), words[1].lower())
    if not lines:
        return {}
    return {
        "passwords": stated.get("passwordauthentication", "yes") == "yes",
        "rootLogin": stated.get("permitrootlogin", "prohibit-password"),
    }


def sshd_lines(path: Any, most: int) -> Any:
    for line in file_words(path).splitlines():
        words = line.replace("=", " ", 1).split()
        if not words or words[0].startswith("#"):
            continue
        if words[0].lower() == "match":
            return
        if words[0].lower() == "include" and most:
            for pattern in words[1:]:
                for included in paths(os.path.join("/etc/ssh", pattern)):  # noqa: PTH118
                    yield from sshd_lines(included, most // 8)
        elif len(words) > 1:
            yield words


def started(python: str, program: str, *arguments: str) -> Any:
    """A program of the ranks' Python that runs meanwhile; a text: why it could not be started."""
    try:
        return subprocess.Popen(
            [python, "-I", "-c", program, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            errors="replace",
        )  # fmt: skip
    except OSError as error:
        return "{} can't be run: {}".format(python, error.strerror)  # noqa: UP032


def answer_from(process: Any, seconds: float) -> Json:
    """Object that it prints; else {"problem": …}."""
    if isinstance(process, str):
        return {"problem": process}
    try:
        printed, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"problem": "it has not ended after {:.0f} s".format(seconds)}  # noqa: UP032
    try:
        return dict(json.loads(printed))
    except (ValueError, TypeError):
        words = errors.strip().splitlines()[-1:] or ["it printed nothing and ended with {}".format(process.returncode)]  # noqa: UP032
        return {"problem": words[0][:TEXT_MAX]}


def gpu_errors(log: str) -> Any:
    """First line of each error (Xid) of each GPU, as [PCI address, number, line], in their order; None without a log.

    A line that names an earlier Xid as its cause counts as that one, and a GPU off the bus as 79: older drivers write that in words alone.
    """
    first: dict[tuple[str, int], str] = {}
    gpu = ""
    for line in log.splitlines():
        if "NVRM: " not in line:
            continue
        named = _PCI.search(line)
        gpu = named.group(1).lower()[-10:] if named else gpu
        number = _CAUSE.search(line) or _XID.search(line)
        if number or _OFF_THE_BUS in line:
            first.setdefault((gpu, int(number.group(1)) if number else 79), line.strip()[:TEXT_MAX])
    return [[gpu, number, line] for (gpu, number), line in first.items()][:ERRORS_MAX] if log.strip() else None


def condition(request: Json) -> Json:
    """The whole answer."""
    python = os.path.expanduser(request["python"])  # noqa: PTH111
    libraries = started(python, LIBRARIES, *PACKAGES) if python else None
    cards = nvidia_cards()
    torch = started(python, TORCH) if python and (cards or output(nvidia_smi(), "-L")) else None
    shm = os.statvfs(SHM) if os.path.isdir(SHM) else None  # noqa: PTH112
    return {
        "firewall": firewall(),
        **power(),
        **sshd(),
        "openFiles": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "shm": None if shm is None else shm.f_blocks * shm.f_frsize,
        "hasRdma": bool(paths("/sys/class/infiniband/*")),
        "nvidiaCards": len(cards),
        "gpuErrors": gpu_errors(
            output("dmesg") or output("journalctl", "--dmesg", "--boot", "--quiet", "--no-pager", "--output=short-monotonic")
        ),
        "libraries": None if libraries is None else answer_from(libraries, LIBRARY_SECONDS),
        "torch": None if torch is None else answer_from(torch, TORCH_SECONDS),
    }


if __name__ == "__main__":
    print(json.dumps(condition(json.loads(sys.argv[1]))))
