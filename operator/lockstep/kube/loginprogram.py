"""Credential plugins: the programs by which `oc`, EKS, GKE and OIDC logins work (a kubeconfig user's `exec`).

The protocol is that of https://kubernetes.io/docs/reference/access-authn-authz/authentication/#client-go-credential-plugins.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from lockstep.api.errors import ConfigError

Values = dict[str, Any]
RENEWED_SECONDS = 60.0
"""A credential is fetched anew this long before its end."""
PLUGIN_SECONDS = 300.0
"""A plugin may open a browser and wait for a person."""
VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")
EXTENSION = "client.authentication.k8s.io/exec"
"""The cluster's extension that is handed to the plugin as `spec.cluster.config`."""


class Credential:
    """Proof of who asks: the same Authorization header each time, or none where a client certificate says it."""

    header: str | None = None

    def __init__(self, header: str | None = None) -> None:
        self.header = header

    async def authorization(self) -> str | None:
        """Return the header as it has to be now."""
        return self.header

    async def renew(self, since: float) -> bool:
        """Get another credential after a 401 to a request that began at this monotonic second; return False if there is none."""
        return False


@dataclass
class LoginProgram(Credential):
    """One user's plugin. Its credential is kept while it lasts, and fetched anew when the server refuses it."""

    stated: Values
    cluster: Values
    user: str
    folder: Path
    """Folder of the file that names the user: a relative path of the program starts there."""
    authority: bytes | None
    """The cluster's CA certificate, for a plugin that asks for it."""
    on_certificate: Callable[[str, str], None] = lambda certificate, key: None
    """Is called with each new client certificate and its key (PEM)."""
    status: Values = field(default_factory=dict)
    until: float | None = None
    """Unix time, seconds."""
    fetched_at: float = 0.0
    """Monotonic time, seconds."""
    _alone: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """Check the settings. Raises ConfigError where kubectl wouldn't take what the kubeconfig says either."""
        place = f"exec of user {self.user} in the kubeconfig"
        if self.stated.get("apiVersion") not in VERSIONS:
            raise ConfigError(f"{place} has apiVersion {self.stated.get('apiVersion')}, must be one of {', '.join(VERSIONS)}")
        if not self.stated.get("command"):
            raise ConfigError(f"{place} names no command")
        if any(not item.get("name") for item in self.stated.get("env") or []):
            raise ConfigError(f"{place} has an env entry without a name")
        if self._mode() not in ("Never", "IfAvailable", "Always"):
            raise ConfigError(f"{place} has interactiveMode {self._mode()}, must be Never, IfAvailable or Always")

    async def authorization(self) -> str | None:
        token = (await asyncio.to_thread(self.credential)).get("token")
        return None if not token else f"Bearer {token}"

    async def renew(self, since: float) -> bool:
        """Fetch a credential anew, unless that was done after `since` (monotonic seconds), when the refused request began."""
        await asyncio.to_thread(self._renew, since)
        return True

    def _renew(self, since: float) -> None:
        with self._alone:
            if self.fetched_at <= since:
                self._fetch()

    def credential(self) -> Values:
        """The status of the plugin's ExecCredential. Raises ConfigError with the plugin's own words."""
        with self._alone:
            if not self.status or (self.until is not None and time.time() >= self.until - RENEWED_SECONDS):
                self._fetch()
            return self.status

    def _fetch(self) -> None:
        command = [self._program(), *map(str, self.stated.get("args") or [])]
        extra = {str(item["name"]): str(item.get("value") or "") for item in self.stated.get("env") or []}
        interactive = self._interactive()
        request = json.dumps({"apiVersion": self.stated["apiVersion"], "kind": "ExecCredential", "spec": self._spec()})
        try:
            ended = subprocess.run(
                command, env={**os.environ, **extra, "KUBERNETES_EXEC_INFO": request}, stdout=subprocess.PIPE,
                stdin=None if interactive else subprocess.DEVNULL, timeout=PLUGIN_SECONDS, check=False,
                stderr=None if interactive else subprocess.PIPE,  # (where it says which page to open, and what to enter there)
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"the login program {command[0]} of the kubeconfig can't be run: {error}") from None
        if ended.returncode != 0:
            raise ConfigError(
                f"the login program {command[0]} of the kubeconfig failed: {_last_words(ended.stderr) or f'exit code {ended.returncode}'}"
            )
        status, until = self._read(command[0], ended.stdout)
        if status.get("clientCertificateData") and status != self.status:
            try:
                self.on_certificate(status["clientCertificateData"], status["clientKeyData"])
            except (ssl.SSLError, ValueError) as error:
                raise ConfigError(
                    f"the login program {command[0]} of the kubeconfig gave a certificate that can't be used: {error}"
                ) from None
        self.status, self.until, self.fetched_at = status, until, time.monotonic()

    def _read(self, program: str, output: bytes) -> tuple[Values, float | None]:
        """The credential, and the Unix time at which it ends."""
        wrong = f"the login program {program} of the kubeconfig printed no ExecCredential"
        try:
            printed = json.loads(output)
            kind, version, status = printed["kind"], printed["apiVersion"], dict(printed["status"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(f"{wrong} with a kind, an apiVersion and a status") from None
        if (kind, version) != ("ExecCredential", self.stated["apiVersion"]):
            raise ConfigError(f"{wrong} of {self.stated['apiVersion']}, which the kubeconfig asks for: it is {kind} of {version}")
        texts = [status.get(key) or "" for key in ("token", "clientCertificateData", "clientKeyData")]
        if not (all(isinstance(text, str) for text in texts) and texts[0].isprintable()):
            raise ConfigError(f"{wrong} that can be used: its token and certificate must be texts, the token without line ends")
        if bool(status.get("clientCertificateData")) != bool(status.get("clientKeyData")):
            raise ConfigError(f"{wrong} that can be used: of clientCertificateData and clientKeyData it has only one")
        if not status.get("token") and not status.get("clientCertificateData"):
            raise ConfigError(f"{wrong} with a token or a certificate")
        ends = status.get("expirationTimestamp")
        try:
            return status, None if ends is None else _time_of(ends)
        except ValueError:
            raise ConfigError(f"{wrong} that can be used: expirationTimestamp {ends} is not an RFC 3339 time") from None

    def _mode(self) -> str:
        return str(self.stated.get("interactiveMode") or "IfAvailable")

    def _interactive(self) -> bool:
        """Return True if the plugin may ask the person at the terminal."""
        terminal = sys.stdin is not None and sys.stdin.isatty()
        if self._mode() == "Always" and not terminal:
            raise ConfigError(
                f"the login program {self.stated['command']} of the kubeconfig must ask a person (interactiveMode Always), "
                "but the standard input is not a terminal"
            )
        return terminal and self._mode() != "Never"

    def _program(self) -> str:
        stated = str(self.stated["command"])
        path = str(self.folder / stated) if "/" in stated else shutil.which(stated)
        if (
            not path or not Path(path).is_absolute() or not Path(path).exists()
        ):  # (kubectl, too, runs nothing of this folder by a "." in PATH)
            advice = self.stated.get("installHint")
            hint = f": {' '.join(str(advice).split())}" if advice else "; install it, or log in again"
            raise ConfigError(f"the kubeconfig logs in by the program {stated}, which is not installed{hint}")
        return path

    def _spec(self) -> Values:
        spec: Values = {"interactive": self._interactive()}
        if self.stated.get("provideClusterInfo"):
            keys = ("server", "tls-server-name", "insecure-skip-tls-verify", "proxy-url", "disable-compression")
            shown = {key: self.cluster.get(key) for key in keys}
            shown["certificate-authority-data"] = base64.b64encode(self.authority).decode() if self.authority else None
            extensions = self.cluster.get("extensions") or []
            shown["config"] = next((item.get("extension") for item in extensions if item.get("name") == EXTENSION), None)
            spec["cluster"] = {key: value for key, value in shown.items() if value is not None}
        return spec


def _time_of(text: object) -> float:
    """Unix time of an RFC 3339 time. Raises ValueError."""
    if not isinstance(text, str) or (time := datetime.fromisoformat(text)).tzinfo is None:
        raise ValueError("no zone")
    return time.timestamp()


def _last_words(errors: bytes | None) -> str:
    if errors is None:  # (a person has seen them)
        return ""
    return " ".join(errors.decode(errors="replace").split())[-300:]
