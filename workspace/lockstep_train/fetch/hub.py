"""A repository of the Hugging Face hub, or of a mirror that HF_ENDPOINT names, through the hub's own client.

Content comes over plain HTTP by ranges, not by the client's snapshot_download: since 2026 the client begins a file anew when its process
was killed, checks sizes only, and its Xet transfers need a second server that mirrors don't have. Nor by its http_get, which refuses files
over 50 GB. Every wait and every second attempt is the caller's: the client's own would be silent.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from lockstep_spec.modelnames import COMMIT, MODELS
from lockstep_train.base.errors import ConfigError, TrainerError, first_line
from lockstep_train.fetch.remote import ByteSink, Cancelled, MayPass, RemoteFile, matches

DATASETS = "datasets"
_KINDS = {MODELS: "model", DATASETS: "dataset"}
OK, UNAUTHORIZED, FORBIDDEN, TIMEOUT, NO_SUCH_RANGE, THROTTLED, SERVER = 200, 401, 403, 408, 416, 429, 500
LIMITS_SECONDS = {"connect": 10.0, "read": 30.0, "write": 30.0, "pool": 30.0}
"""Time limits without a byte. The client itself waits for ever."""
THROTTLED_SECONDS = 30.0
"""Wait where a server answers 429 and doesn't say for how long."""


@dataclass(frozen=True)
class HubRepository:
    """Repository `name` of the hub. The token is HF_TOKEN's, or that of a login on this machine."""

    name: str
    kind: str = MODELS

    def is_pin(self, revision: str | None) -> bool:
        return revision is not None and COMMIT.fullmatch(revision) is not None

    def resolve(self, revision: str | None) -> str:
        from huggingface_hub import HfApi

        prepared_session()
        try:
            commit = HfApi(endpoint=endpoint()).repo_info(self.name, revision=revision, repo_type=_KINDS[self.kind]).sha
        except Exception as error:  # the client raises a dozen kinds, and those of its HTTP library
            raise self.problem(error, revision) from error
        if commit is None:
            raise MayPass(f"the hub {shown_endpoint()} names no commit of {self.name}")
        return str(commit)

    def files(self, pin: str) -> Sequence[RemoteFile]:
        try:
            return [_remote_file(entry) for entry in self._entries(pin) if entry["type"] == "file"]
        except Exception as error:
            raise self.problem(error, pin) from error

    def _entries(self, pin: str) -> Iterator[dict[str, Any]]:
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, validate_repo_id  # type: ignore[attr-defined]

        validate_repo_id(self.name)
        url: str | None = f"{endpoint()}/api/{self.kind}/{self.name}/tree/{quote(pin, safe='')}?recursive=true"
        while url is not None:
            response = prepared_session().get(url, headers=build_hf_headers())
            hf_raise_for_status(response)
            yield from response.json()
            url = response.links.get("next", {}).get("url")
            if url is not None and urlsplit(url)[:2] != urlsplit(endpoint())[:2]:  # (it would get the token)
                raise ConfigError(f"{shown_endpoint()} leads to another server for the rest of its files: {urlsplit(url).hostname}")

    def read(self, file: RemoteFile, pin: str, sink: ByteSink, start: int) -> None:
        try:
            self._stream(file, pin, sink, start)
        except (Cancelled, MayPass):
            raise
        except Exception as error:
            if is_of_volume(error):
                raise
            if status_of(error) == NO_SUCH_RANGE:
                sink.restart()
            raise self._storage_problem(error, file) or self.problem(error, pin) from error

    def _stream(self, file: RemoteFile, pin: str, sink: ByteSink, start: int) -> None:
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

        url = hf_hub_url(self.name, file.path, repo_type=_KINDS[self.kind], revision=pin, endpoint=endpoint())
        headers = {**build_hf_headers(), "Accept-Encoding": "identity", **({"Range": f"bytes={start}-"} if start else {})}
        # The client drops the token where it is redirected to another host.
        with prepared_session().stream("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
            hf_raise_for_status(response)
            if start and response.status_code == OK:
                sink.restart()
            for chunk in response.iter_bytes(constants.DOWNLOAD_CHUNK_SIZE):
                sink.write(chunk)

    def is_intact(self, file: RemoteFile, path: Path) -> bool:
        return matches(file.digest, path)

    def problem(self, error: Exception, revision: str | None) -> Exception:
        """Error to raise for what the client has raised: ConfigError where only another name, revision or token helps."""
        if isinstance(error, TrainerError):
            return error
        final, status = self._final(error, revision), status_of(error)
        if final is not None:
            return ConfigError(final)
        reason = f"it answers {status}" if status is not None else f"{type(error).__name__}: {words_of(error)}"
        return MayPass(f"{shown_endpoint()} can't be asked for the {_KINDS[self.kind]} {self.name}: {reason}", _wait_seconds(error))

    def _storage_problem(self, error: Exception, file: RemoteFile) -> MayPass | None:
        """Problem of the server that the hub has redirected to, whose addresses expire: it knows nothing of names and tokens."""
        response = getattr(error, "response", None)
        if response is None or _is_of_hub(response):
            return None
        return MayPass(
            f"the hub's storage {response.url.host} answers {response.status_code} when asked for {file.path} of the {_KINDS[self.kind]}"
            f" {self.name}",
            _wait_seconds(error),
        )

    def _final(self, error: Exception, revision: str | None) -> str | None:
        from huggingface_hub import errors, get_token

        kind, host, status = _KINDS[self.kind], shown_endpoint(), status_of(error)
        what, problem = f"the {kind} {self.name}", None
        if isinstance(error, errors.HFValidationError):
            problem = f"{self.name} is not a valid hub name: {words_of(error)}; names are org/name, and a folder's path starts with /"
        elif isinstance(error, errors.RevisionNotFoundError):
            problem = f"{what} at {host} has no revision {revision}; name a branch, a tag or a commit of it"
        elif isinstance(error, errors.GatedRepoError) or status in {UNAUTHORIZED, FORBIDDEN}:
            problem = _no_access(kind, what, host, error, status, has_token=get_token() is not None)
        elif isinstance(error, errors.RepositoryNotFoundError):
            problem = f"{host} has no {kind} {self.name}; check the name (org/name), and that a folder's path starts with /"
        elif isinstance(error, errors.EntryNotFoundError):
            problem = f"{what} at {host} lacks a file at {revision}: {words_of(error)}; name another revision"
        elif type(error).__name__ in {"InvalidURL", "UnsupportedProtocol"}:
            problem = f"HF_ENDPOINT is not a valid address for {what}; write it as https://host, or leave it out"
        elif status is not None and status not in {TIMEOUT, NO_SUCH_RANGE, THROTTLED} and status < SERVER:
            problem = f"{host} answers {status} when asked for {what}; check HF_ENDPOINT and the name"
        return problem


def _no_access(kind: str, what: str, host: str, error: Exception, status: int | None, *, has_token: bool) -> str:
    from huggingface_hub import errors

    source = "a Secret that training.model.tokenSecret names"
    if kind == _KINDS[DATASETS]:
        source = f"a Secret that HF_TOKEN of spec.env takes it from (valueFrom), or, where the model is of the hub, too, {source}"
    if isinstance(error, errors.GatedRepoError):
        why = "the token's account has no access to it" if has_token else "no token was given"
        return (
            f"{what} at {host} is gated and {why}: ask for access on its page there, and give a token of that account, in {source}, "
            "or here as HF_TOKEN"
        )
    if status == UNAUTHORIZED and has_token and not isinstance(error, errors.RepositoryNotFoundError):
        return f"{host} does not accept the token (401) when asked for {what}: give a valid one as HF_TOKEN, or none for public {kind}s"
    token = "the token that was given may not read it" if has_token else "no token was given"
    return (
        f"{host} does not show {what} ({status}): there is none of this name, or it is private and {token}; check the name (a folder's path"
        f" starts with /), and the token, in {source}, or here in HF_TOKEN"
    )


def _remote_file(entry: dict[str, Any]) -> RemoteFile:
    large = entry.get("lfs")
    return RemoteFile(entry["path"], entry["size"], f"git:{entry['oid']}" if large is None else f"sha256:{large['oid']}")


def status_of(error: Exception) -> int | None:
    response = getattr(error, "response", None)
    return getattr(response, "status_code", None)


def _is_of_hub(response: Any) -> bool:
    """Return True if the hub itself has answered, and not the storage that it redirects to."""
    own, requested = urlsplit(endpoint()), urlsplit(str(response.url))
    path = requested.path.removeprefix(own.path)
    return "X-Error-Code" in response.headers or (own.hostname == requested.hostname and (path.startswith("/api/") or "/resolve/" in path))


def _wait_seconds(error: Exception) -> float:
    """Seconds for which the server asks to be left alone, in either of the two headers for it."""
    from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

    headers = getattr(getattr(error, "response", None), "headers", {})
    limit, after = parse_ratelimit_headers(headers), str(headers.get("Retry-After", "")).strip()
    if after.isdecimal():
        return float(after)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    return THROTTLED_SECONDS if status_of(error) == THROTTLED else 0.0


def words_of(error: Exception) -> str:
    """The first line of a library's error, without the token and the password of the endpoint."""
    text = first_line(error).replace(endpoint(), shown_endpoint())
    token = os.environ.get("HF_TOKEN", "").strip()
    return text.replace(token, "…") if token else text


def is_of_volume(error: BaseException) -> bool:
    """Return True if an error is one of writing here: the network's own have a response, or none of the system's numbers."""
    return (
        isinstance(error, OSError)
        and error.errno is not None
        and not isinstance(error, ConnectionError | TimeoutError)
        and not hasattr(error, "response")
    )


def endpoint() -> str:
    """The hub's address: that of HF_ENDPOINT, or https://huggingface.co."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def shown_endpoint() -> str:
    """The hub's address for people: without the name and password that it may hold."""
    return re.sub(r"//.*@", "//", endpoint())


def is_offline() -> bool:
    from huggingface_hub import constants

    return constants.is_offline_mode() or os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def prepared_session() -> Any:
    """Prepare the client's own session, which limits the time of each request from now on and writes no warnings into a pod's log."""
    from huggingface_hub import get_session

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    session = get_session()
    hooks = session.event_hooks
    if _limit not in hooks["request"]:
        session.event_hooks = {**hooks, "request": [*hooks["request"], _limit]}
    return session


def _limit(request: Any) -> None:
    """Limit a request; a hook, since callers inside the client ask for no limit by name."""
    stated = request.extensions.get("timeout", {})
    request.extensions["timeout"] = {phase: stated.get(phase) or seconds for phase, seconds in LIMITS_SECONDS.items()}
