"""The log of a job: live from its pods, or the last lines that are kept when the pods are gone."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from lockstep.api.names import CONTAINER, log_name, pod_name

RETRY_SECONDS = 0.5
STAMP = re.compile(r"^\d{4}-\d{2}-\d{2}T")
"""How every line of a container's log begins when it is asked for with timestamps. The kubelet's own complaints (the log file isn't
there yet, the container is gone) come in the same stream without one."""


def follow(core: Any, namespace: str, job: str, node: int, over: Callable[[], bool], follow: bool = True) -> Iterator[str]:
    """Lines of the pod of `node`, from its first, through restarts of its container, until `over()` says the job has ended.

    A pod that isn't there yet or isn't running yet is waited for. `follow` False: what there is now.
    """
    seen: str | None = None
    while True:
        for stamp, line in _stamped(core, namespace, pod_name(job, node), seen, follow):
            seen = stamp
            yield line
        if over():
            return
        time.sleep(RETRY_SECONDS)


def _stamped(core: Any, namespace: str, pod: str, after: str | None, follow: bool) -> Iterator[tuple[str, str]]:
    """(time, line) of a running pod's log, newer than `after`; nothing when there is no log (yet)."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        response = core.read_namespaced_pod_log(pod, namespace, container=CONTAINER, follow=follow, timestamps=True, _preload_content=False)
        for raw in response:
            stamp, _, line = raw.decode(errors="replace").rstrip("\n").partition(" ")
            if STAMP.match(stamp) and (after is None or stamp > after):
                yield stamp, line
    except (ApiException, HTTPError):  # no pod, no container yet, or the connection broke: the caller comes back
        return


def last_lines(core: Any, namespace: str, job: str) -> list[str] | None:
    """The lines kept in ConfigMap x-log after the end; None when there are none."""
    from kubernetes.client.exceptions import ApiException

    try:
        data = core.read_namespaced_config_map(log_name(job), namespace).to_dict()["data"] or {}
    except ApiException as error:
        if error.status == 404:
            return None
        raise
    return [line for key in sorted(data) for line in data[key].splitlines()]
