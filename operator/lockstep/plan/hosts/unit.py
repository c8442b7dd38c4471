"""The systemd user unit of a job's agent on one host. A transient unit would be gone after a reboot; a file that is enabled comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.api.job import OwnAmounts
from lockstep.api.quantity import number

_SPECIAL = str.maketrans({"\\": "\\\\", '"': '\\"', "%": "%%", "\n": "\\n", "\t": "\\t", "\r": "\\r"})
UNIT = """\
[Unit]
Description=Lockstep job {job}, node {node}
StartLimitIntervalSec=0

[Service]
ExecStart={command}
{environment}WorkingDirectory={folder}
StandardOutput=append:{log}
StandardError=inherit
# Failed, saved as asked, refused: starting again would not help.
Restart=on-failure
RestartSec=2
RestartPreventExitStatus=1 75 78
# A stop that saved is no failure.
SuccessExitStatus=75
# SIGTERM for the agent alone: data loaders that get it too would break the save.
KillMode=mixed
TimeoutStopSec={stop_seconds}
# The kernel may kill one rank; the agent says so, and starts all again.
OOMPolicy=continue
LimitNOFILE=65536
{limits}
[Install]
WantedBy=default.target
"""


def unit_name(job: str) -> str:
    return f"lockstep-{job}.service"


def limit_lines(amounts: OwnAmounts) -> str:
    """Lines of a unit that limit CPU and memory of its processes together."""
    cpu, memory = number(amounts.cpu), number(amounts.memory)
    return (f"CPUQuota={max(1, round(cpu * 100))}%\n" if cpu else "") + (f"MemoryMax={int(memory)}\n" if memory else "")


def unit_text(
    job: str, node: int, command: Sequence[str], environment: Mapping[str, str], folder: str, log: str, stop_seconds: int, limits: str = ""
) -> str:
    """Text of the unit file: every word of `command` and every value is quoted for systemd, which then changes nothing in it. `limits`: see
    limit_lines.
    """
    return UNIT.format(
        job=_plain(job),
        node=node,
        command=" ".join(quoted(word).replace("$", "$$") for word in command),
        environment="".join(f"Environment={quoted(f'{name}={value}')}\n" for name, value in sorted(environment.items())),
        folder=_plain(folder),
        log=_plain(log),
        stop_seconds=stop_seconds,
        limits=limits,
    )


def quoted(word: str) -> str:
    """The word as systemd reads it back: quotes and specifiers mean nothing in it. `$` begins a variable in a command, and is itself in
    Environment=.
    """
    return f'"{word.translate(_SPECIAL)}"'


def _plain(text: str) -> str:
    """Return a text or a path for a place that takes specifiers and no quotes; newlines can't be in a cluster file's paths."""
    return text.replace("%", "%%")
