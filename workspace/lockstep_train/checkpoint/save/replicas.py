"""Volumes of their own: each node also keeps its neighbour's shards, so that any one volume may be lost.

A rank sends its shard to the next node once it is durable on its own volume, in the background of the save, and acknowledges when it is
durable there too. A neighbour that can't keep it costs the second copy, never the commit: the manifest names the nodes that
have each shard, and the log says where one copy is all there is.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path

from lockstep_train.base.ranks import Ranks
from lockstep_train.checkpoint.format.manifest import Manifest, ShardRecord
from lockstep_train.checkpoint.save.transfer import Place, Server, Shard, get, own_address, put
from lockstep_train.report import print_error


class Replicas:
    """This rank's way to the other nodes' volumes; the node's first rank serves them. One copy where nothing is shared, or all is."""

    def __init__(self, ranks: Ranks, copies: int, token: bytes, places: list[Place]) -> None:
        self._ranks = ranks
        self._copies = copies
        self._token = token
        self._places = places

    def copy(self, folder: Path, shard: ShardRecord) -> ShardRecord:
        """Put a shard that is durable here on the neighbours' volumes; the record says who has it."""
        nodes = [self._ranks.node]
        for distance in range(1, self._copies):
            node = (self._ranks.node + distance) % self._ranks.nodes
            try:
                put(self._places[node], self._token, _named(folder.name, shard), folder / shard.file)
                nodes.append(node)
            except OSError as error:
                print_error(f"lockstep_train: rank {self._ranks.rank}: node {node} keeps no copy of {folder / shard.file}: {error}")
        return replace(shard, nodes=tuple(nodes))

    def fetch(self, folder: Path, shard: ShardRecord, path: Path) -> None:
        """A shard that this node's volume lacks, from one that has it. Raises OSError."""
        errors: list[str] = []
        for node in (node for node in shard.nodes if node < len(self._places) and node != self._ranks.node):
            try:
                get(self._places[node], self._token, _named(folder.name, shard), path)
                return
            except OSError as error:
                errors.append(f"node {node}: {error}")
        raise OSError(f"no other node gives {shard.file}: {'; '.join(errors) or 'none has it'}")

    def lacking(self, manifest: Manifest) -> list[str]:
        """Shards with fewer copies than asked for."""
        return [shard.file for shard in manifest.shards if len(shard.nodes) < self._copies]


def _named(commit: str, shard: ShardRecord) -> Shard:
    return Shard(commit, shard.file, shard.bytes, shard.sha256)


def local_only(ranks: Ranks) -> Replicas:
    """For one volume: nothing travels."""
    return Replicas(ranks, 1, b"", [])


def connect(ranks: Ranks, checkpoints: Path, attempt: int, copies: int, master: tuple[str, int]) -> Replicas:
    """Start this node's server, which serves until the process ends, and learn of the others'. `master`: where rank 0 is reached, to choose the address others see."""
    token = bytes.fromhex(ranks.publish("replicas/token", secrets.token_hex(32) if ranks.first else None))
    server = Server(checkpoints, attempt, token, own_address(*master)) if ranks.first_of_node else None
    mine = [ranks.node, server.place.host, server.place.port] if server is not None else None
    answers = ranks.gather("replicas/place", mine)
    listed = ranks.publish("replicas/places", sorted(answer for answer in answers or [] if answer is not None))
    places = [Place(host, port) for _, host, port in listed]
    return Replicas(ranks, min(copies, ranks.nodes), token, places)
