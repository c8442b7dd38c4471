"""A list of machines that another tool reads, as a cluster file of hosts: a hostfile, ssh's configuration, a config.yaml with
cluster.nodes. Text in, text out.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address
from posixpath import commonpath
from typing import Any

from lockstep.api.errors import ConfigError
from lockstep.api.hosts import GPUS_MAX, HOST_NAME_PATTERN
from lockstep.api.names import HOSTS
from lockstep.plan.discovery.draft import Entry, Item, left_out, stated, write
from lockstep.plan.translate.leaves import Leaf, Leftover, leaves_of

RDMA_OFF = "left out, ranks send over TCP. Say true if the hosts have InfiniBand or RoCE between them: lockstep doctor names those that do"
MASTER_PORTS = 100
"""Ports of the range that begins at a launcher's master port."""
_SLOTS = re.compile(r"slots\s*=\s*(\d{1,5})", re.IGNORECASE)
_LIMIT = re.compile(r"(max[-_]slots)\s*=\s*\d+", re.IGNORECASE)
_WORD = re.compile(r"(?P<key>[A-Za-z]+)(?:\s*=\s*|\s+)(?P<value>.*)")
BYTE_ORDER_MARK = "\ufeff"
RANGE_MAX = 1024
BETWEEN = r",(?![^\[]*\])"
"""Commas between hosts, and not those within the brackets of a range."""
FORGES = re.compile(r"(^|\.)(github|gitlab|bitbucket|gitee|codeberg|huggingface|hf|azure|visualstudio)\.(com|org|co|io)$", re.IGNORECASE)
_SSH_HOST = re.compile(r"^\s*(host|match)[\s=]", re.IGNORECASE | re.MULTILINE)
SSH_PORT = 22
SSH_OWN = "ssh reads it itself where ~/.ssh/config has it, or includes this file"


@dataclass(frozen=True)
class Machines:
    """Machines that a file lists."""

    hosts: tuple[Mapping[str, Any], ...]
    """Keys of each host, in the order of the nodes."""
    sources: tuple[str, ...]
    """Place of each host in the file."""
    entries: tuple[Entry, ...] = ()
    """Further keys of the cluster file."""
    leftovers: tuple[Leftover, ...] = ()
    """Everything in the file that the cluster file doesn't have."""

    def only(self, names: Sequence[str]) -> Machines:
        """Return the same with these hosts alone, in this order. Raises ConfigError for a name that isn't there."""
        places = {host["name"]: place for place, host in enumerate(self.hosts)}
        if absent := [name for name in names if name not in places]:
            raise ConfigError(f"there is no host {', '.join(absent)}; there are {', '.join(places)}")
        chosen = [places[name] for name in dict.fromkeys(names)]
        return replace(self, hosts=tuple(self.hosts[place] for place in chosen), sources=tuple(self.sources[place] for place in chosen))


def cluster_text(name: str, origin: str, machines: Machines, path: str | None = None) -> str:
    """The text of a cluster file. `origin`: where the hosts come from, for its first line. `path`: of the file; None:
    clusters/NAME.yaml.
    """
    items = [Item(dict(host), source) for host, source in zip(machines.hosts, machines.sources, strict=True)]
    order = "the order is that of a job's nodes; the first has the coordinator, so it should be one that stays on"
    if len(items) > 1 and not any("address" in host for host in machines.hosts):
        order += (
            ". Give one of them its address, by number, as the other hosts reach it (address: 192.168.1.100): the others' follow from their"
            " routes to it"
        )
    entries = [
        stated("cluster.name", name, ""),
        stated("cluster.platform", HOSTS, ""),
        left_out("cluster.description", "what people should know", "one line for `lockstep cluster list`"),
        stated("hosts", items, order),
        left_out("network.rdma.enabled", True, RDMA_OFF),
        *machines.entries,
    ]
    header = [
        f"The hosts {name}, {origin}.",
        f"Every key is explained in docs/reference/hosts.md. Next: read it, then `lockstep hosts setup {shlex.quote(path or name)}`.",
    ]
    return write(header, entries)


REQUIRED = ("  name", "  platform", "  - name", "    address")
"""Keys of the template that stay in a file to fill in, with their place in the line; all other keys of it are optional."""


def text_to_fill_in(name: str, template: str) -> str:
    """Return the template of hosts with its optional keys commented out, so that only names and addresses are left to fill in."""
    lines = [
        f"# The hosts {name}. Write your hosts' names below, and the address of at least one.",
        "# All other keys are optional and commented out: remove the # of those that you need.",
    ]
    column: int | None = None  # of the key that is commented out, as all lines below it that are further to the right
    for line in template.splitlines()[len(lines) :]:
        indent = len(line) - len(line.lstrip())
        if not line or (line[indent] == "#" and (column is None or indent <= column)):
            lines.append(line)
            continue
        if column is None or indent <= column:
            is_kept = line.startswith(("cluster:", "hosts:", *(f"{key}:" for key in REQUIRED)))
            column = None if is_kept else indent
        lines.append(line if column is None else f"{line[:column]}# " + re.sub(r" {2}(?=  # )", "", line[column:], count=1))
    return re.sub(r"^  name: my-hosts\b", f"  name: {name}", "\n".join(lines) + "\n", count=1, flags=re.MULTILINE)


def read_machines(text: str, source: str) -> Machines:
    """Read a hostfile, ssh's configuration or a config.yaml with cluster.nodes; which one it is, its content says.

    Raises ConfigError where it is none of them, lists no host, or has a line that can't be read.
    """
    is_marked, text = text.startswith(BYTE_ORDER_MARK), text.removeprefix(BYTE_ORDER_MARK)
    if _SSH_HOST.search(text):
        if is_marked:
            raise ConfigError(f"{source}:1: begins with a byte order mark, and ssh refuses such a file: save it as UTF-8 without one")
        machines = from_ssh_config(text)
    elif re.search(r"^[A-Za-z_]+:\s*($|#|\{)", text, re.MULTILINE):
        machines = from_nodes(text, source)
    else:
        machines = from_hostfile(text, source)
    if not machines.hosts:
        raise ConfigError(f"{source}: lists no host", *(f"{source}:{one.line}: {one.what}: {one.reason}" for one in machines.leftovers))
    return machines


def from_words(words: Sequence[str]) -> Machines:
    """Hosts as one types them for mpirun: NAME, USER@NAME or NAME:SLOTS."""
    try:
        typed = [_host_of(one) for word in words for one in _expanded(word)]
    except ValueError as error:
        raise ConfigError(str(error)) from None
    hosts = [
        {"name": name, **_address(name), **({"user": user} if user else {}), **({} if slots is None else {"gpus": slots})}
        for name, user, slots in typed
    ]
    return Machines(tuple(hosts), ("",) * len(hosts))


def _expanded(word: str) -> list[str]:
    """Return the names of a range as SLURM writes it, such as gpu[01-04,7]; of any other word itself. Raises ValueError for a range that
    isn't one, or is too long.
    """
    match = re.fullmatch(r"([^\[\]]*)\[([\d,-]+)\](.*)", word)
    if match is None:
        return [word]
    ends = [part.partition("-")[::2] for part in match[2].split(",")]
    numbers = [range(int(first), int(last or first) + 1) for first, last in ends if first and len(first + last) < 12]
    if len(numbers) < len(ends) or not 0 < sum(map(len, numbers)) <= RANGE_MAX:
        raise ValueError(f"{word!r} is no range of up to {RANGE_MAX} hosts: scontrol show hostnames lists the hosts of one")
    rest = _expanded(match[3])
    each = [f"{number:0{len(first)}}" for (first, _), those in zip(ends, numbers, strict=True) for number in those]
    return [f"{match[1]}{number}{after}" for number in each for after in rest]


def _host_of(word: str) -> tuple[str, str, int | None]:
    """Name, user ('': none) and slots of `[USER@]NAME[:SLOTS]`. Raises ValueError saying what is wrong."""
    user, _, place = word.rpartition("@")
    if _address(place.strip("[]")) and ":" in place:
        raise ValueError(
            f"{word!r}: an IPv6 address is no host's name: give it one in ~/.ssh/config (HostName {place.strip('[]')}), and write that"
        )
    name, mark, slots = place.partition(":")
    if not re.fullmatch(HOST_NAME_PATTERN, name) or (mark and not re.fullmatch("[0-9]{1,5}", slots)):
        raise ValueError(f"{word!r} is no host: write NAME, USER@NAME, or NAME:8 for one with 8 GPUs")
    if mark and (int(slots) > GPUS_MAX or int(slots) == SSH_PORT):  # (no machine has 22 GPUs)
        raise ValueError(
            f"{word!r}: the number behind a host's name is that of its GPUs, as in a hostfile, and at most {GPUS_MAX}; a port, such as"
            f" {SSH_PORT}, has its place in ~/.ssh/config, or in hosts[].port of a cluster file"
        )
    return name, user, int(slots) if mark else None


def _address(name: str) -> dict[str, str]:
    try:
        return {"address": str(ip_address(name))}
    except ValueError:
        return {}


def from_hostfile(text: str, source: str) -> Machines:
    """A hostfile of DeepSpeed or MPI: `name slots=2`, `name:2` or `name` a line. A name that is there several times has the slots of all
    its lines.

    Raises ConfigError for every line that is neither.
    """
    slots: dict[str, int | None] = {}
    users: dict[str, str] = {}
    lines: dict[str, int] = {}
    leftovers: list[Leftover] = []
    mistakes: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        host, *after = words.split(maxsplit=1)
        rest = after[0] if after else ""
        for limit in _LIMIT.finditer(rest):
            leftovers.append(Leftover(number, limit[0], "a job never starts more ranks than it has GPUs or states in ranksPerNode"))
        rest = _LIMIT.sub("", rest).strip()
        stated_slots = _SLOTS.fullmatch(rest)
        try:
            parts = re.split(BETWEEN, host) if "[" in host else [host]
            those = [_host_of(one) for part in parts for one in _expanded(part)]
            if rest and (not stated_slots or ":" in host):
                raise ValueError(f"{words!r} is no line of a hostfile: write NAME slots=2 or NAME:2")
            if stated_slots and int(stated_slots[1]) > GPUS_MAX:
                raise ValueError(f"{words!r}: a host has at most {GPUS_MAX} slots, one for each of its GPUs")
        except ValueError as error:
            mistakes.append(f"{source}:{number}: {error}")
            continue
        for name, user, own in those:
            count = int(stated_slots[1]) if stated_slots else own
            users |= {name: user} if user else {}
            lines.setdefault(name, number)
            slots[name] = count if name not in slots else (slots[name] or 1) + (count or 1)
    if mistakes:
        raise ConfigError(*mistakes)
    hosts = [
        {"name": name, **_address(name), **({"user": users[name]} if name in users else {}), **({} if count is None else {"gpus": count})}
        for name, count in slots.items()
    ]
    sources = tuple(
        f"line {lines[name]}" + ("" if count is None else f", a GPU for each of its {count} slots") for name, count in slots.items()
    )
    return Machines(tuple(hosts), sources, (), tuple(leftovers))


def from_ssh_config(text: str) -> Machines:
    """The Host entries of ssh's configuration without patterns. What it says about each stays there: ssh reads it itself.

    A numeric HostName becomes the host's address, unless a jump leads there: the other hosts may then reach it at another one.
    """
    reader = _SshReader()
    for number, line in enumerate(text.splitlines(), 1):
        match = _WORD.fullmatch(line.strip())
        if match is not None and not line.strip().startswith("#"):
            value = match["value"].strip()
            reader.read(number, match["key"], value if match["key"].lower() == "match" else _argument(value))
    return reader.machines()


def _argument(value: str) -> str:
    """Return what ssh reads of a line's value: without quotes, and without a comment behind it."""
    return value if "\\" in value or value.count('"') % 2 else " ".join(shlex.split(value.replace("'", "\\'"), comments=True))


class _SshReader:
    """Reads the lines of ssh's configuration one after the other."""

    def __init__(self) -> None:
        self.lines: dict[str, int] = {}
        """The line of each host, by its name."""
        self.addresses: dict[str, tuple[str, int]] = {}
        """Numeric HostName of hosts, and its line."""
        self.jumps: set[str] = set()
        """Hosts that others are reached through."""
        self.behind: set[str] = set()
        """Hosts that are reached through others."""
        self.block: list[str] = []
        """Hosts that the lines now are about."""
        self.forges: set[str] = set()
        """Hosts of git, on which nothing is started."""
        self.leftovers: list[Leftover] = []

    def read(self, line: int, key: str, value: str) -> None:
        """Take in one line: `key value`."""
        match key.lower():
            case "host":
                self._begin(line, value)
            case "match":
                self.block = []
                self.leftovers.append(Leftover(line, f"Match {value}", "a condition, and no host; ssh applies it itself"))
            case "include":
                self.leftovers.append(Leftover(line, f"Include {value}", "hosts of other files are not read: import that file, too"))
            case "hostname" if "%" not in value:
                self._name(line, value)
            case _:
                self._leave(line, key, value)
        places = value.split() if key.lower() in ("host", "hostname") else []
        if any(map(FORGES.search, places)) or (key.lower(), value) == ("user", "git"):
            self.forges |= set(self.block)

    def _begin(self, line: int, names: str) -> None:
        self.block = []
        for name in names.split():
            if re.fullmatch(HOST_NAME_PATTERN, name):
                self.block.append(name)
                self.lines.setdefault(name, line)
            else:
                self.leftovers.append(Leftover(line, f"Host {name}", "a pattern, and no host; ssh applies it itself"))

    def _name(self, line: int, place: str) -> None:
        """All names of the block are those of one machine."""
        for other in self.block[1:]:
            self.leftovers.append(Leftover(self.lines.pop(other, line), f"Host {other}", f"another name of {self.block[0]}"))
        self.block = self.block[:1]
        if self.block and _address(place):
            self.addresses.setdefault(self.block[0], (place, line))
        else:
            self._leave(line, "HostName", place)

    def _leave(self, line: int, key: str, value: str) -> None:
        if key.lower() in ("proxyjump", "proxycommand") and value.lower() != "none":
            self.behind |= set(self.block)
            hops = value.split(",") if key.lower() == "proxyjump" else []
            self.jumps |= {hop.rpartition("@")[2].partition(":")[0] for hop in hops}
        self.leftovers.append(Leftover(line, f"{key} {value}", SSH_OWN))

    def machines(self) -> Machines:
        """The hosts, without those that others are reached through."""
        for name in sorted(self.forges & set(self.lines)):
            self.leftovers.append(Leftover(self.lines.pop(name), f"Host {name}", "a server of git repositories, on which no job can run"))
        for name in sorted(self.jumps & set(self.lines)):
            self.leftovers.append(
                Leftover(self.lines.pop(name), f"Host {name}", "others are reached through it; add it to hosts if it trains, too")
            )
        for name in sorted(self.behind & set(self.lines) & set(self.addresses)):
            place, line = self.addresses.pop(name)
            reason = f"the address behind the jump to {name}; state address if the other hosts reach it there"
            self.leftovers.append(Leftover(line, f"HostName {place}", reason))
        hosts = [{"name": name, **({"address": self.addresses[name][0]} if name in self.addresses else {})} for name in self.lines]
        sources = [f"line {line}" + (", HostName as its address" if name in self.addresses else "") for name, line in self.lines.items()]
        return Machines(tuple(hosts), tuple(sources), (), tuple(sorted(self.leftovers, key=lambda one: one.line)))


def from_nodes(text: str, source: str) -> Machines:
    """A config.yaml with cluster.nodes: hostname, ip and gpus of each; beside it network and paths. Raises ConfigError where it lists no
    nodes.
    """
    leaves = {leaf.path: leaf for whole in leaves_of(text, source) for leaf in _names_apart(whole)}
    prefix = next((match[1] for path in leaves if (match := re.match(r"((?:cluster\.)?nodes)\[", path))), None)
    if prefix is None:
        raise ConfigError(f"{source}: is no list of machines: it has neither cluster.nodes, nor Host lines of ssh, nor lines NAME slots=2")
    hosts: dict[str, dict[str, Any]] = {}
    sources: dict[str, str] = {}
    for path in list(leaves):
        match = re.fullmatch(rf"({re.escape(prefix)}\[\d+\])(?:\.(\w+))?", path)
        if match is None:
            continue
        place, key = (
            match[1],
            {"hostname": "name", "name": "name", "ip": "address", "address": "address", "gpus": "gpus", None: "name"}.get(match[2]),
        )
        sources.setdefault(place, f"line {leaves[path].line}")
        host = hosts.setdefault(place, {})
        if key is not None and key not in host:
            host[key] = leaves.pop(path).value
    unnamed = [place for place, host in hosts.items() if "name" not in host and "address" not in host]
    if unnamed:
        raise ConfigError(*(f"{source}: {place} has neither a hostname nor an ip" for place in unnamed))
    named = [({"name": host.get("name", host.get("address")), **host}, sources[place]) for place, host in hosts.items()]
    entries, leftovers = _beside(leaves, named)
    return Machines(tuple(host for host, _ in named), tuple(line for _, line in named), tuple(entries), tuple(leftovers))


def _names_apart(leaf: Leaf) -> list[Leaf]:
    """A list of names under nodes as one value for each."""
    if re.fullmatch(r"(cluster\.)?nodes", leaf.path) and isinstance(leaf.value, list):
        return [Leaf(f"{leaf.path}[{place}]", name, leaf.line) for place, name in enumerate(leaf.value)]
    return [leaf]


def _beside(leaves: dict[str, Leaf], named: list[tuple[dict[str, Any], str]]) -> tuple[list[Entry], list[Leftover]]:
    """Keys made of what stands beside the nodes, and the rest. The node at master_addr becomes the first."""
    entries: list[Entry] = []
    leftovers: list[Leftover] = []
    folders = [str(leaf.value) for path, leaf in leaves.items() if path.split(".")[0] == "paths" and str(leaf.value).startswith("/")]
    shared = commonpath(folders) if len(folders) > 1 else "/"
    for path, leaf in leaves.items():
        key = path.removeprefix("cluster.")
        if key == "network.interface":
            entries.append(stated("defaults.interface", leaf.value, f"line {leaf.line}"))
        elif key == "network.master_addr":
            first = [pair for pair in named if leaf.value in (pair[0].get("address"), pair[0]["name"])]
            if first:
                named.sort(key=lambda pair: pair not in first)
            else:
                leftovers.append(Leftover(leaf.line, f"{path}: {leaf.value}", "no node is there; the first of hosts has the coordinator"))
        elif key == "network.master_port" and isinstance(leaf.value, int) and 1024 <= leaf.value <= 65536 - MASTER_PORTS:
            ports = f"{leaf.value}-{leaf.value + MASTER_PORTS - 1}"
            entries.append(stated("ports", ports, f"from line {leaf.line} on; each start of the ranks takes another one"))
        else:
            unknown = "hosts has no such key" if "nodes[" in key else "a cluster file of hosts has nothing like it"
            leftovers.append(Leftover(leaf.line, f"{path}: {leaf.value}", _ELSEWHERE.get(key) or unknown))
    if shared != "/":
        entries.append(stated("defaults.workspace", shared, "holds all of paths; it stands for /workspace"))
        entries.append(left_out("storage.mode", "rwx", f"if all hosts see one file system at {shared}"))
    return entries, sorted(leftovers, key=lambda one: one.line)


_ELSEWHERE = {
    "network.backend": "ranks with GPUs use NCCL, ranks without gloo",
    "model.name": "spec.training.model.name of a job",
    "model.tensor_parallel_size": "nothing cuts single layers; spec.training.zeroStage: Stage3 of a job cuts the model over all ranks",
    "model.pipeline_parallel_size": "no pipeline; spec.training.zeroStage: Stage3 of a job cuts the model over all ranks",
    "paths.checkpoint_dir": "checkpoints are in runs/JOB/checkpoints of the workspace",
    "paths.log_dir": "logs are in runs/JOB/logs of the workspace",
    "paths.model_cache": "models are in models of the workspace, and spec.training.model.name of a job names one",
    "network.master_port": "is no port from 1024 to 65436; ports names a range",
}
