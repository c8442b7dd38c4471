"""The job that is drilled, and how its pods are reached."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lockstep.api.errors import Failed
from lockstep.api.names import CONTAINER, pod_name
from lockstep.api.objects import Object
from lockstep.kube import exec as pods
from lockstep.kube.client import Client
from lockstep.kube.exec import answer_of
from lockstep.kube.jobs import job_status
from lockstep.plan.pages.logs import node_of_rank
from lockstep.platforms.files.files import run_in_pod
from lockstep.platforms.inpod import drill

T = TypeVar("T")
SOURCE = Path(drill.__file__)
POLL_SECONDS = 0.2
Say = Callable[[str], None]


@dataclass(frozen=True)
class Place:
    """The job that is drilled, and how its cluster is reached."""

    client: Client
    job: Object
    timeout_seconds: float
    say: Say

    @property
    def name(self) -> str:
        return str(self.job["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.job["metadata"]["namespace"])

    @property
    def attempt(self) -> int:
        return int(self.job["status"]["attempts"])

    @property
    def tells_steps(self) -> bool:
        return "step" in (self.job["status"].get("trainer") or {})

    def status(self) -> Object:
        return job_status(self.client, self.namespace, self.name)

    def pod_of(self, rank: int) -> str:
        """Raises ConfigError for a rank that the job doesn't have."""
        status = self.job["status"]
        return pod_name(self.name, node_of_rank(status["ranks"], int(status["nodes"]), rank))

    def trainer(self, pod: str) -> pods.Place:
        return pods.Place(self.namespace, pod, CONTAINER)

    def in_pod(self, pod: str, verb: str, **arguments: Any) -> Object:
        """The last answer. Raises ProgramFailed."""
        lines = run_in_pod(self.client, self.trainer(pod), command_of(verb, arguments)).strip().splitlines()
        answer = answer_of(lines[-1] if lines else "", f"pod {pod}")
        if any(
            not (answer[key] is None or (isinstance(answer[key], int) and not isinstance(answer[key], bool)))
            for key in ("step", "hit")
            if key in answer
        ):
            raise pods.ProgramFailed(f"python3 in pod {pod} answers {verb} with {str(answer)[:100]}: look at the image's python3")
        return answer

    def until(self, what: str, look: Callable[[], T | None]) -> T:
        """The first result that is neither None nor False. Raises Failed after the time that was given."""
        end = time.monotonic() + self.timeout_seconds
        while time.monotonic() < end:
            found = look()
            if found:
                return found
            time.sleep(POLL_SECONDS)
        raise Failed(
            f"waited {self.timeout_seconds:.0f} s (--timeout) for {what}, which did not come: lockstep why {self.name} -n {self.namespace}"
        )


def command_of(verb: str, arguments: Object) -> list[str]:
    return ["python3", "-I", "-c", SOURCE.read_text(encoding="utf-8"), verb, json.dumps(arguments)]
