"""Errors that reach the end of a verb: one sentence with what to do next, and the exit code."""

from __future__ import annotations

import json
from typing import Any

from lockstep.api.errors import ConfigError, Failed

EXIT_FAILED = 1
EXIT_USAGE = 2
CLIENT_LIBRARIES = ("aiohttp", "kubernetes", "urllib3")
"""Not imported here: `lockstep --help` is fast. Only the embedded cluster and logins of old use the last two."""
NO_ANSWER = "is the cluster up, and is --context, or KUBECONFIG, the right one? (kubectl cluster-info)"
LOG_IN = "your login is not accepted: log in again (oc login, or your provider's command), or use another --context"
LACKING = "an administrator of the namespace can grant it (the built-in roles view and edit), or use another namespace with -n"


def explanation(error: BaseException) -> tuple[int, str] | None:
    """Return the exit code and text that can be printed. None: nothing that a person could have caused; a traceback says more."""
    from lockstep_gang.contract import printable_line

    if isinstance(error, ConfigError) or (type(error) is Failed and len(error.args) > 1):
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED, "\n".join(printable_line(str(line)) for line in error.args)
    sentence = _of_cluster(error)
    return None if sentence is None else (EXIT_FAILED, printable_line(sentence))


def _of_cluster(error: BaseException) -> str | None:
    if isinstance(error, Failed):
        if isinstance(error, OSError):
            return f"the cluster can't be reached: {error}: {NO_ANSWER}"
        return _with_advice(getattr(error, "status", None), str(error))
    if type(error).__module__.partition(".")[0] not in CLIENT_LIBRARIES:
        return None
    return f"the cluster can't be reached or refused: {_message(error)}"


def _with_advice(status: int | None, message: str) -> str:
    advice = LOG_IN if status == 401 else LACKING if status == 403 and " cannot " in message else None
    return f"{message}: {advice}" if advice else message


def _message(error: Any) -> str:
    """The API server's own words, out of the reply of the client library; else the error's."""
    try:
        return f"{json.loads(error.body)['message']} ({error.status} {error.reason})"
    except (AttributeError, KeyError, TypeError, ValueError):
        return str(error)
