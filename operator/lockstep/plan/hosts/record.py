"""job.json: the record that every host of a job keeps of its start, so that anybody with a login knows the job and can start it again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lockstep_spec.codec import ContractError, from_json, to_json

FORMAT = "lockstep-host-job/1"


class Coordinator(NamedTuple):
    """Address and port of a job's coordinator."""

    address: str
    port: int


@dataclass(frozen=True)
class JobRecord:
    """A job as it was started on one host."""

    job: dict[str, Any]
    """The TrainingJob, as an API server would have it."""
    cluster: str
    """Name of the cluster file that it was started with."""
    hosts: tuple[str, ...]
    """Names of its hosts, in the order of its nodes."""
    ranks: tuple[int, ...]
    """Number of ranks of each node."""
    node: int
    """Node that this host is."""
    workspace: str
    """Folder of this host that stands for /workspace."""
    datasets: str
    supervised: bool
    """True if a session keeps the agent, because no systemd can: it doesn't come back after a reboot."""
    command: tuple[str, ...]
    environment: dict[str, str]
    """Variables of the agent, and so of its ranks."""
    coordinator: Coordinator
    unit: str = ""
    """Text of the systemd unit; '' for a supervised one."""
    unkept: str = ""
    """Reason why a supervised one doesn't come back after a reboot, and what would change that."""
    format: str = FORMAT

    @property
    def name(self) -> str:
        return str(self.job["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.job["metadata"]["uid"])


def record_text(record: JobRecord) -> str:
    """The text of job.json."""
    return json.dumps(to_json(record), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def read_record(value: Mapping[str, Any]) -> JobRecord:
    """Read the object in job.json. Raises ContractError, which is a ValueError, for what is none."""
    record = from_json(JobRecord, dict(value), "job.json")
    if record.format != FORMAT or not isinstance(record.job.get("metadata"), dict) or not {"name", "uid"} <= record.job["metadata"].keys():
        raise ContractError(f"job.json has format {record.format} and not {FORMAT}: use the version of Lockstep that wrote it")
    return record
