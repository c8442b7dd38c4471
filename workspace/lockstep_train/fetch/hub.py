"""A repository of the Hugging Face hub, or of a mirror that HF_ENDPOINT names, through the hub's own client.

Content comes over plain HTTP by ranges, not by the client's snapshot_download: since 2026 the client begins a file anew when its process was
killed, checks sizes only, and its Xet transfers need a second server that mirrors don't have.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep_sizes.modelnames import COMMIT, MODELS
from lockstep_train.errors import ConfigError, TrainerError, first_line
from lockstep_train.fetch.remote import Cancelled, MayPass, RemoteFile, Sink, matches

DATASETS = "datasets"
_KINDS = {MODELS: "model", DATASETS: "dataset"}
UNAUTHORIZED, FORBIDDEN, TIMEOUT, THROTTLED, SERVER = 401, 403, 408, 429, 500


@dataclass(frozen=True)
class HubRepository:
    """`name` at the hub. The token is HF_TOKEN's, or that of a login on this machine."""

    name: str
    kind: str = MODELS

    def is_pin(self, revision: str | None) -> bool:
        return revision is not None and COMMIT.fullmatch(revision) is not None

    def resolve(self, revision: str | None) -> str:
        from huggingface_hub import HfApi

        try:
            commit = HfApi(endpoint=endpoint()).repo_info(self.name, revision=revision, repo_type=_KINDS[self.kind]).sha
        except Exception as error:  # the client raises a dozen kinds, and those of its HTTP library
            raise self.problem(error, revision) from error
        if commit is None:
            raise MayPass(f"the hub {endpoint()} names no commit of {self.name}")
        return str(commit)

    def files(self, pin: str) -> Sequence[RemoteFile]:
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        try:
            tree = HfApi(endpoint=endpoint()).list_repo_tree(self.name, recursive=True, revision=pin, repo_type=_KINDS[self.kind])
            return [_remote_file(entry) for entry in tree if isinstance(entry, RepoFile)]
        except Exception as error:
            raise self.problem(error, pin) from error

    def read(self, file: RemoteFile, pin: str, sink: Sink, start: int) -> None:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        quiet_client()
        url = hf_hub_url(self.name, file.path, repo_type=_KINDS[self.kind], revision=pin, endpoint=endpoint())
        try:
            # The client drops the token where it is redirected to another host.
            http_get(url, sink, resume_size=start, headers=build_hf_headers(), expected_size=file.size)  # type: ignore[arg-type]
        except Cancelled:
            raise
        except Exception as error:
            if is_of_volume(error):
                raise
            raise self.problem(error, pin) from error

    def is_intact(self, file: RemoteFile, path: Path) -> bool:
        return matches(file.digest, path)

    def problem(self, error: Exception, revision: str | None) -> Exception:
        """What to raise for what the client has raised: ConfigError where only another name, revision or token helps."""
        if isinstance(error, TrainerError):
            return error
        final, status = self._final(error, revision), _status(error)
        if final is not None:
            return ConfigError(final)
        reason = f"it answers {status}" if status is not None else f"{type(error).__name__}: {first_line(error)}"
        return MayPass(f"{endpoint()} can't be asked for the {_KINDS[self.kind]} {self.name}: {reason}")

    def _final(self, error: Exception, revision: str | None) -> str | None:
        from huggingface_hub import errors, get_token

        kind, host, status = _KINDS[self.kind], endpoint(), _status(error)
        what, problem = f"the {kind} {self.name}", None
        if isinstance(error, errors.HFValidationError):
            problem = f"{self.name} is no name of the hub: {first_line(error)}; names are org/name, and a folder's path starts with /"
        elif isinstance(error, errors.RevisionNotFoundError):
            problem = f"{what} at {host} has no revision {revision}; name a branch, a tag or a commit of it"
        elif isinstance(error, errors.GatedRepoError) or status in {UNAUTHORIZED, FORBIDDEN}:
            problem = _no_access(what, host, error, status, has_token=get_token() is not None)
        elif isinstance(error, errors.RepositoryNotFoundError):
            problem = f"{host} has no {kind} {self.name}; check the name (org/name), and that a folder's path starts with /"
        elif isinstance(error, errors.EntryNotFoundError):
            problem = f"{what} at {host} lacks a file at {revision}: {first_line(error)}; name another revision"
        elif status is not None and status not in {TIMEOUT, THROTTLED} and status < SERVER:
            problem = f"{host} answers {status} when asked for {what}; check HF_ENDPOINT and the name"
        return problem


def _no_access(what: str, host: str, error: Exception, status: int | None, *, has_token: bool) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        why = "the token's account has no access to it" if has_token else "no token was given"
        return (
            f"{what} at {host} is gated and {why}: ask for access on its page there, and give a token of that account, in a Secret that "
            "training.model.tokenSecret names, or here as HF_TOKEN"
        )
    if status == UNAUTHORIZED and has_token and not isinstance(error, errors.RepositoryNotFoundError):
        return f"{host} does not accept the token (401) when asked for {what}: give a valid one as HF_TOKEN, or none for public models"
    given = "the token that was given may not read it" if has_token else "no token was given"
    return (
        f"{host} does not show {what} ({status}): there is none of this name, or it is private and {given}; check the name (a folder's path "
        "starts with /), and the token in the Secret that training.model.tokenSecret names, or here in HF_TOKEN"
    )


def _remote_file(entry: Any) -> RemoteFile:
    digest = f"git:{entry.blob_id}" if entry.lfs is None else f"sha256:{entry.lfs.sha256}"
    return RemoteFile(entry.path, entry.size, digest)


def _status(error: Exception) -> int | None:
    response = getattr(error, "response", None)
    return getattr(response, "status_code", None)


def is_of_volume(error: BaseException) -> bool:
    """Whether an error is one of writing here: the network's own have a response, or none of the system's numbers."""
    return (
        isinstance(error, OSError)
        and error.errno is not None
        and not isinstance(error, ConnectionError | TimeoutError)
        and not hasattr(error, "response")
    )


def endpoint() -> str:
    """The hub's address: that of HF_ENDPOINT, or https://huggingface.co."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def is_offline() -> bool:
    from huggingface_hub import constants

    return constants.is_offline_mode() or os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def quiet_client() -> None:
    """No progress bars in a pod's log, and no warnings for each retry, which are told otherwise."""
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    if "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ:
        disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
