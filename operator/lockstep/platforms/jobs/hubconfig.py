"""The config.json of a model of the hub, which a plan reads the model's sizes from: one request, and no library of the hub's."""

from __future__ import annotations

import json
import os
from base64 import b64encode
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote, unquote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from lockstep.api.errors import ConfigError

SECONDS = 5.0
BYTES_MAX = 4 << 20
PORTS = {"http": 80, "https": 443}


def hub_config(name: str, revision: str | None) -> tuple[dict[str, Any], str]:
    """config.json, and its address. Raises ConfigError, in a few words, where it can't be had: HF_HUB_OFFLINE, no network, no access, no
    such model.
    """
    endpoint, login = _endpoint()
    address = f"{endpoint}/{quote(name)}/resolve/{quote(revision or 'main', safe='')}/config.json"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        raise ConfigError("HF_HUB_OFFLINE is set")
    if not endpoint.startswith(("https://", "http://")) or "/" in login:
        raise ConfigError(f"HF_ENDPOINT {endpoint} is not the address of a hub")
    request = Request(address)  # noqa: S310 (checked above)
    authorization = _authorization(login)
    if authorization is not None:
        # Such a header is of this request alone: urllib takes all others along to whichever host it is redirected to.
        request.add_unredirected_header("Authorization", authorization)
    try:
        with build_opener(_Redirects()).open(request, timeout=SECONDS) as answer:
            content = answer.read(BYTES_MAX)
    except HTTPError as error:
        error.close()
        access = "; a gated or private one needs HF_TOKEN in this shell" if error.code in {401, 403} else ""
        raise ConfigError(f"{endpoint} answers {error.code} when asked for its config.json{access}") from None
    except OSError as error:
        raise ConfigError(f"{endpoint} can't be asked for its config.json ({getattr(error, 'reason', None) or error})") from None
    except (HTTPException, ValueError) as error:
        # Its text may quote what was sent.
        raise ConfigError(f"{endpoint} can't be asked for its config.json ({type(error).__name__}); check HF_ENDPOINT") from None
    return _object(content, address), address


def _object(content: bytes, address: str) -> dict[str, Any]:
    try:
        config = json.loads(content)
    except ValueError as error:
        raise ConfigError(f"{address} holds no JSON ({error})") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{address} holds no JSON object")
    return config


def _endpoint() -> tuple[str, str]:
    """The hub's address as it may be printed, and the `user:password` that HF_ENDPOINT has in it."""
    scheme, mark, rest = (os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co").rpartition("://")
    login, _, host = rest.rpartition("@")
    return f"{scheme}{mark}{host}", login


def _authorization(login: str) -> str | None:
    """The header's value. Raises ConfigError for a token that can't be sent."""
    if login:
        return f"Basic {b64encode(unquote(login).encode()).decode()}"
    token = os.environ.get("HF_TOKEN", "").strip()
    if not token:
        return None
    if not (token.isascii() and token.isprintable()):
        raise ConfigError("HF_TOKEN in this shell holds characters that no token has; set it again")
    return f"Bearer {token}"


class _Redirects(HTTPRedirectHandler):
    """Keeps the token for the hub itself: where content lies elsewhere, its address is enough."""

    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Request | None:
        redirected = super().redirect_request(req, fp, code, msg, headers, newurl)
        authorization = req.unredirected_hdrs.get("Authorization")
        if redirected is not None and authorization is not None and _origin(newurl) == _origin(req.full_url):
            redirected.add_unredirected_header("Authorization", authorization)
        return redirected


def _origin(address: str) -> tuple[str, str | None, int | None]:
    """Scheme, host and port."""
    parts = urlsplit(address)
    return parts.scheme, parts.hostname, parts.port or PORTS.get(parts.scheme)
