"""Keeper of a run without an operator: it lets the run's nodes go when the run has ended. Runs in a pod of its own.

It may look at pod 0 of its run and scale its StatefulSet, and nothing else (keeper.py). Sent as text into whatever image the job has, so:
the standard library of Python 3.10, and nothing of Lockstep's.
"""

from __future__ import annotations

import json
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LOOK_SECONDS = 5.0
LINGER_SECONDS = 20.0
"""Seconds from the end of the run on in which whoever follows the log reads the rest of it, and scales to zero then."""
REQUEST_SECONDS = 20.0
NOT_FOUND, CONFLICT = 404, 409


def request(server: str, method: str, path: str, body: Any = None) -> Any:
    """Send a request and return the reply's object. The token is read each time: the kubelet renews it."""
    headers = {"Authorization": f"Bearer {(ACCOUNT / 'token').read_text().strip()}", "Content-Type": "application/merge-patch+json"}
    data = None if body is None else json.dumps(body).encode()
    message = urllib.request.Request(f"{server}{path}", data, headers, method=method)  # noqa: S310 (of the API server)
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt")) if server.startswith("https:") else None
    handlers = [urllib.request.ProxyHandler({}), *([] if context is None else [urllib.request.HTTPSHandler(context=context)])]
    with urllib.request.build_opener(*handlers).open(message, timeout=REQUEST_SECONDS) as reply:
        return json.load(reply)


def verdict(pod: Any, verdicts: list[int], saved: int | None) -> int | None:
    """Exit code of node 0's agent, also when the kubelet has started it again since (it finds the end record and ends, too).

    None while it runs or will run again. `saved` is the exit code of an agent that saved because its pod was evicted or drained: another
    pod follows that one. It is None if no other pod follows.
    """
    for status in (pod.get("status") or {}).get("containerStatuses") or []:
        for state in ("state", "lastState"):
            code = ((status.get(state) or {}).get("terminated") or {}).get("exitCode")
            if code in verdicts and not (code == saved and "deletionTimestamp" in pod["metadata"]):
                return int(code)
    return None


def let_go(server: str, path: str, uid: str) -> bool:
    """Scale the run's StatefulSet to zero, and return True once it has no pods any more. One of a later run is left alone."""
    try:
        scale = request(server, "GET", path)
        if scale["metadata"]["uid"] != uid or not scale["spec"].get("replicas"):
            return True
        request(server, "PATCH", path, {"metadata": {"resourceVersion": scale["metadata"]["resourceVersion"]}, "spec": {"replicas": 0}})
    except urllib.error.HTTPError as error:
        return error.code == NOT_FOUND
    return True


def main(server: str, pod_path: str, scale_path: str, uid: str, verdicts: list[int], saved: int) -> None:
    while True:
        try:
            end = verdict(request(server, "GET", pod_path), verdicts, saved)
            if end is not None:
                print(f"node 0 has ended with {end}: its nodes go in {LINGER_SECONDS:.0f} s", flush=True)
                time.sleep(LINGER_SECONDS)
                if let_go(server, scale_path, uid):
                    return
        except (OSError, ValueError, KeyError) as error:  # an API server that is away, a pod that is not there yet
            print(f"{type(error).__name__}: {error}", flush=True)
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
