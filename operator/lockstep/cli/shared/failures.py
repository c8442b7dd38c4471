"""What went wrong, in one sentence with what to do next, and the exit code: for everything that reaches the end of a verb."""

from __future__ import annotations

import json
from typing import Any

from lockstep.api.errors import ConfigError, Failed

EXIT_FAILED = 1
EXIT_USAGE = 2
CLIENT_LIBRARIES = ("kubernetes", "urllib3", "aiohttp", "websocket")  # not imported here: `lockstep --help` is fast
NO_ANSWER = "is the cluster up, and is --context, or KUBECONFIG, the right one? (kubectl cluster-info)"
LOG_IN = "your login is not accepted: log in again (oc login, or your provider's command), or say another --context"
LACKING = "an administrator of the namespace can grant it (the built-in roles view and edit), or say another namespace with -n"


def told(error: BaseException) -> tuple[int, str] | None:
    """As text that can be printed. None: nothing that a person could have caused; a traceback says more."""
    from lockstep_gang.contract import printable_line

    if isinstance(error, ConfigError) or (type(error) is Failed and len(error.args) > 1):
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED, "\n".join(printable_line(str(line)) for line in error.args)
    refused = _of_cluster(error)
    return None if refused is None else (EXIT_FAILED, printable_line(refused))


def _of_cluster(error: BaseException) -> str | None:
    if isinstance(error, Failed):
        unreachable = isinstance(error, OSError)
        if unreachable:
            return f"the cluster can't be reached: {error}: {NO_ANSWER}"
        return _with_advice(getattr(error, "status", None), str(error))
    if type(error).__module__.partition(".")[0] not in CLIENT_LIBRARIES:
        return None
    pool = getattr(error, "pool", None)
    if pool is not None:  # urllib3 gave up
        return f"the cluster can't be reached: {pool.scheme}://{pool.host}:{pool.port} doesn't answer ({_reason(error)}): {NO_ANSWER}"
    status = getattr(error, "status", None)
    if isinstance(status, int) and status:
        return _with_advice(status, f"the cluster refused: {_message(error)} ({status} {getattr(error, 'reason', '')})")
    return f"the cluster can't be reached or refused: {error}"


def _with_advice(status: object, said: str) -> str:
    advice = {401: LOG_IN, 403: LACKING if " cannot " in said else None}.get(status) if isinstance(status, int) else None
    return f"{said}: {advice}" if advice else said


def _reason(error: Any) -> str:
    """`HTTPConnection(host=…): Failed to establish a new connection: [Errno 111] Connection refused` → what stands at its end."""
    return str(getattr(error, "reason", None) or error).rpartition(": ")[2] or type(error).__name__


def _message(error: Any) -> str:
    """The API server's own words, out of the reply."""
    try:
        return str(json.loads(error.body)["message"])
    except (AttributeError, KeyError, TypeError, ValueError):
        return str(error).splitlines()[0]
