"""Proxy that leads to the API server: HTTPS_PROXY, HTTP_PROXY and NO_PROXY as kubectl reads them (pure).

The rules are those of Go's golang.org/x/net/http/httpproxy. Python's libraries know no CIDR in NO_PROXY, and it is by those that OpenShift
and most laptops behind a proxy leave out a cluster's addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import urlsplit

_PORTS = {"http": "80", "https": "443"}


def proxy_of(url: str, variables: Mapping[str, str]) -> str | None:
    """The proxy's URL, or None: `url` is reached directly."""
    parts = urlsplit(url)
    proxy = _stated(f"{parts.scheme}_proxy", variables)
    host, port = parts.hostname or "", str(parts.port) if parts.port else _PORTS.get(parts.scheme, "")
    direct = [entry for part in _stated("no_proxy", variables).split(",") if (entry := part.strip().lower())]
    if not proxy or _is_this_machine(host) or any(_leaves_out(entry, host, port) for entry in direct):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _stated(name: str, variables: Mapping[str, str]) -> str:
    return variables.get(name.upper()) or variables.get(name.lower()) or ""


def _is_this_machine(host: str) -> bool:
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _leaves_out(entry: str, host: str, port: str) -> bool:
    """An address, a network (CIDR) or a name with those below it, the first and the last with a port or without. A leading dot: only those
    below.
    """
    address = _address(host)
    if entry == "*":
        return True
    if "/" in entry:
        return address is not None and _is_in(address, entry)
    name, wanted_port = _parted(entry)
    if wanted_port and wanted_port != port:
        return False
    if address is not None:
        return _address(name) == address
    name = name.removeprefix("*")
    return host == name or host.endswith(name if name.startswith(".") else f".{name}")


def _parted(entry: str) -> tuple[str, str]:
    """Host and port, "" where it names none. Colons that are not followed by a port are an IPv6 address's."""
    if entry.startswith("["):
        host, _, rest = entry[1:].partition("]")
        return host, rest.removeprefix(":")
    host, _, port = entry.partition(":")
    return (entry, "") if ":" in port else (host, port)


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def _is_in(address: IPv4Address | IPv6Address, network: str) -> bool:
    try:
        return address in ip_network(network, strict=False)
    except ValueError:
        return False
