"""Host keys: their fingerprints as ssh shows them, and a cluster file's text with other keys in it (pure)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping

import yaml

from lockstep.api.errors import ConfigError

KEY = re.compile(r"(?:ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp(?:256|384|521)) [A-Za-z0-9+/]{40,1200}={0,2}")
"""A public host key as known_hosts has it: type and base64."""
FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}=?")


def fingerprint(key: str) -> str:
    """Return the key's fingerprint as `ssh-keygen -l` shows it. Raises ConfigError for text that is no key."""
    try:
        data = base64.b64decode(key.split()[1], validate=True)
    except (IndexError, binascii.Error, ValueError):
        raise ConfigError(f"{key[:60]!r} is no public host key: it must be its type and base64, such as ssh-ed25519 AAAA…") from None
    return "SHA256:" + base64.b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def read_fingerprints(words: list[str], names: list[str]) -> dict[str, str]:
    """Fingerprint by host of --fingerprint NAME=SHA256:…. Raises ConfigError for other words, and names that are no host of the file."""
    stated: dict[str, str] = {}
    for word in words:
        name, _, value = word.partition("=")
        if not FINGERPRINT.fullmatch(value):
            raise ConfigError(f"--fingerprint {word}: it must be NAME=SHA256:…, as ssh-keygen -lf shows it on the host itself")
        if name not in names:
            raise ConfigError(f"--fingerprint {word}: there is no host {name}: the cluster file has {', '.join(names)}")
        stated[name] = value.rstrip("=")
    return stated


def is_of_host_key(problem: str) -> bool:
    """Return True if a host can't be asked because ssh doesn't know its key, or knows another one."""
    return "host key" in problem


def asks_at_login(problem: str) -> bool:
    """Return True if a host can't be asked because it lets in only who answers something."""
    return "doesn't let you in" in problem or "your key may want a touch" in problem


def with_host_keys(text: str, keys: Mapping[str, str]) -> str:
    """The cluster file's text with these host keys, by the hosts' names; every other character, comments too, as it was.

    Raises ConfigError naming the hosts whose place in the text isn't plain, as behind an alias.
    """
    root = yaml.compose(text, Loader=yaml.CSafeLoader if hasattr(yaml, "CSafeLoader") else yaml.SafeLoader)
    hosts = _value(root, "hosts")
    changes: list[tuple[int, int, str]] = []
    left = dict(keys)
    for host in hosts.value if isinstance(hosts, yaml.SequenceNode) else []:
        name, place = _value(host, "name"), _key(host, "name")
        if name is None or place is None or name.value not in left:
            continue
        key = left.pop(name.value)
        before = _value(host, "host_key")
        if before is not None:
            changes.append((before.start_mark.index, before.end_mark.index, key))
        elif host.flow_style:
            changes.append((name.end_mark.index, name.end_mark.index, f", host_key: {key}"))
        else:
            end = text.find("\n", name.end_mark.index)
            end = len(text) if end < 0 else end
            changes.append((end, end, f"\n{' ' * place.start_mark.column}host_key: {key}"))
    if left:
        lines = "; ".join(f"{name}: host_key: {key}" for name, key in left.items())
        raise ConfigError(f"the cluster file can't be changed in these places only; write them by hand: {lines}")
    for start, end, new in sorted(changes, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _key(node: yaml.Node | None, key: str) -> yaml.Node | None:
    return next((name for name, _ in node.value if name.value == key), None) if isinstance(node, yaml.MappingNode) else None


def _value(node: yaml.Node | None, key: str) -> yaml.Node | None:
    return next((value for name, value in node.value if name.value == key), None) if isinstance(node, yaml.MappingNode) else None
