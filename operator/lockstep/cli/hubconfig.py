"""The config.json of a model of the hub, which a plan reads the model's sizes from: one request, and no library of the hub's."""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

from lockstep.api.errors import ConfigError

SECONDS = 5.0
BYTES_MAX = 4 << 20


def hub_config(name: str, revision: str | None) -> tuple[dict[str, Any], str]:
    """config.json, and its address. Raises ConfigError, in a few words, where it can't be had: HF_HUB_OFFLINE, no network, no access, no such model."""
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"
    address = f"{endpoint}/{quote(name)}/resolve/{quote(revision or 'main', safe='')}/config.json"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        raise ConfigError("HF_HUB_OFFLINE is set")
    if not endpoint.startswith(("https://", "http://")):
        raise ConfigError(f"HF_ENDPOINT {endpoint} is no address of a hub")
    token = os.environ.get("HF_TOKEN")
    request = Request(address, headers={} if token is None else {"Authorization": f"Bearer {token}"})  # noqa: S310 (checked above)
    try:
        with urlopen(request, timeout=SECONDS) as answer:  # noqa: S310
            found = json.loads(answer.read(BYTES_MAX))
    except HTTPError as error:
        error.close()
        access = "; a gated or private one needs HF_TOKEN in this shell" if error.code in {401, 403} else ""
        raise ConfigError(f"{endpoint} answers {error.code} when asked for its config.json{access}") from None
    except (URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(f"{endpoint} can't be asked for its config.json ({reason})") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{address} holds no JSON object")
    return found, address
