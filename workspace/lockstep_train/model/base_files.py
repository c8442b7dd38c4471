"""Identity of a base model: a SHA-256 over every byte of each file that decides what is computed.

Each file is hashed by one rank of all the nodes that see the same one, in a thread beside the load, which needs the same pages; at later
starts a note says what is known (base/cache.py). Nodes with a copy of their own are compared with each other.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep_train.base import limits
from lockstep_train.base.cache import file_hash, stamp
from lockstep_train.base.errors import ConfigError, Problem, TrainerError, gravest, problem_of, refusal
from lockstep_train.base.limits import Watch
from lockstep_train.data.tokens.tokenizer import tokenizer_files
from lockstep_train.model.stored import CONFIG, INDEX, weight_paths

if TYPE_CHECKING:
    from lockstep_train.base.ranks import Ranks

RECORD = "base_files.json"
"""File beside an exported adapter: the files of the base model that it was trained on."""
READERS = 4
SHOWN = 16
"""Digits of a SHA-256 in a message."""

Files = Mapping[str, str]
"""Path below the model's folder → SHA-256."""


@dataclass(frozen=True)
class Copy:
    """Files that some nodes have in the model's folder, alike on all of them."""

    nodes: tuple[int, ...]
    files: Files


def base_files(folder: Path) -> dict[str, Path]:
    """The files that decide what is computed, by their path below `folder`, largest first: configuration, weights and tokenizer.

    Raises ConfigError for an index of weight files that can't be read or names a file that isn't there.
    """
    weights = weight_paths(folder) or sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    others = [path for path in (folder / CONFIG, folder / INDEX) if path.is_file()]
    files = {str(path.relative_to(folder)): path for path in (*weights, *others, *tokenizer_files(folder))}
    return dict(sorted(files.items(), key=lambda item: (-item[1].stat().st_size, item[0])))


def hash_base(folder: Path) -> dict[str, str]:
    """Hash all files of a base model, by this process alone. Raises ConfigError, or TrainerError for what can't be read now."""
    files = _present_files(folder)
    with ThreadPoolExecutor(READERS) as pool:
        return dict(zip(files, pool.map(lambda path: _hashed(path, None), files.values()), strict=True))


def _present_files(folder: Path) -> dict[str, Path]:
    try:
        return base_files(folder)
    except OSError as error:
        raise refusal(f"training.model.name: {error.filename} can't be read: {error.strerror}", error) from error


def refuse_other_base(folder: Path, recorded: Files, trained: str, remedy: str) -> None:
    """Hash `folder` and raise ConfigError unless it is what `recorded` says. `trained`: what was trained on it."""
    problem = base_problem(folder, [Copy((0,), hash_base(folder))], recorded, trained, remedy)
    if problem is not None:
        raise ConfigError(problem)


def base_problem(folder: Path, copies: Sequence[Copy], recorded: Files, trained: str, remedy: str) -> str | None:
    """Problem of the base model, by what `recorded` says of it (nothing: only the nodes are compared); pure."""
    if recorded:
        wrong = [copy for copy in copies if copy.files != recorded]
        if not wrong:
            return None
        where = f" on {_nodes(wrong[0].nodes)}" if len(copies) > 1 else ""
        differences = _differences(recorded, wrong[0].files)
        return f"{folder} is not the base model that {trained} was trained on: {differences}{where}; {remedy}"
    if len(copies) == 1:
        return None
    first, other = copies[0], copies[1]
    name = next(name for name in sorted({*first.files, *other.files}) if first.files.get(name) != other.files.get(name))
    each = " and ".join(f"{_has(copy.files.get(name))} on {_nodes(copy.nodes)}" for copy in (first, other))
    return f"the base model {folder} is not the same on all nodes: {name} {each}; copy the same files to all of them"


def _differences(recorded: Files, present: Files) -> str:
    names = [name for name in sorted({*recorded, *present}) if recorded.get(name) != present.get(name)]
    name = names[0]
    more = f" ({len(names) - 1} more files differ)" if len(names) > 1 else ""
    return f"{name} {_had(recorded.get(name))}, and now {_has(present.get(name))}{more}"


def _had(digest: str | None) -> str:
    return "was not there" if digest is None else f"had SHA-256 {digest[:SHOWN]}"


def _has(digest: str | None) -> str:
    return "is not there" if digest is None else f"has SHA-256 {digest[:SHOWN]}"


def _nodes(nodes: Sequence[int]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"


def _hashed(path: Path, cache: Path | None) -> str:
    try:
        return file_hash(path, cache)
    except OSError as error:
        raise refusal(f"training.model.name: {path} can't be read: {error.strerror}", error) from error


def node_groups(marks: Sequence[tuple[int, str]]) -> dict[int, int]:
    """Lowest node, for every node, whose files have the same stamps, which no two files on different volumes have. `marks`: (node,
    stamps).
    """
    lowest: dict[str, int] = {}
    for node, mark in sorted(marks):
        lowest.setdefault(mark, node)
    return {node: lowest[mark] for node, mark in marks}


def merged_copies(groups: Mapping[int, int], hashes: Sequence[tuple[int, Files]]) -> list[Copy]:
    """Merge what each rank hashed, by its node: nodes whose files have the same content make one copy."""
    by_group: dict[int, dict[str, str]] = {}
    for node, files in hashes:
        by_group.setdefault(groups[node], {}).update(files)
    copies: dict[str, Copy] = {}
    for node in sorted(groups):
        files = by_group[groups[node]]
        key = json.dumps(files, sort_keys=True)
        copies[key] = Copy((*(copies[key].nodes if key in copies else ()), node), files)
    return list(copies.values())


def encode_record(files: Files) -> bytes:
    """Content of the file beside an adapter."""
    return json.dumps(dict(files), indent=2, sort_keys=True).encode()


def adapter_record(adapter: Path) -> Files:
    """The files of the base model that an exported adapter was trained on; empty for an adapter that doesn't say."""
    try:
        record = json.loads((adapter / RECORD).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return {str(name): str(digest) for name, digest in record.items()} if isinstance(record, dict) else {}


class BaseHash:
    """Hash of a run's base model, begun before the data and the model are loaded. Every rank takes part; nothing of it is a collective."""

    def __init__(self, ranks: Ranks, folder: Path, cache: Path) -> None:
        """Begin. Raises ConfigError where a file is missing, TrainerError where it can't be read now."""
        self._ranks = ranks
        self._folder = folder
        self._files = _present_files(folder)
        self._stamps = self._stamped()
        mark = hashlib.sha256(json.dumps(self._stamps).encode()).hexdigest()
        marks = ranks.gather("base/stamps", [ranks.node, mark])
        groups: dict[str, int] = ranks.publish("base/groups", node_groups(sorted(set(map(tuple, marks)))) if marks is not None else None)
        self._groups = {int(node): lowest for node, lowest in groups.items()}
        self._nodes: list[int] = ranks.publish("base/nodes", [node for node, _ in marks] if marks is not None else None)
        self._hashes: dict[str, str] = {}
        self._problem: Problem | None = None
        self._thread = threading.Thread(target=self._hash, args=(self._share(), cache), name="lockstep-base", daemon=True)
        self._thread.start()

    def _share(self) -> dict[str, Path]:
        """This rank's part of the files, among all ranks that see the same ones."""
        mine = self._groups[self._ranks.node]
        sharing = [rank for rank, node in enumerate(self._nodes) if self._groups[node] == mine]
        return dict(list(self._files.items())[sharing.index(self._ranks.rank) :: len(sharing)])

    def _stamped(self) -> list[Any]:
        try:
            return [[name, *stamp(path)] for name, path in self._files.items()]
        except OSError as error:
            raise refusal(f"training.model.name: {error.filename} can't be read: {error.strerror}", error) from error

    def _hash(self, share: Mapping[str, Path], cache: Path) -> None:
        try:
            with ThreadPoolExecutor(READERS) as pool:
                self._hashes |= zip(share, pool.map(lambda path: _hashed(path, cache), share.values()), strict=True)
        except Exception as error:  # whatever it is, all ranks must hear of it, or they would wait for the rest
            unforeseen = Problem(f"the base model {self._folder} can't be hashed: {error}", final=False)
            self._problem = problem_of(error) if isinstance(error, TrainerError) else unforeseen

    def finish(self, recorded: Files, commit: str, watch: Watch) -> Files:
        """Wait for the hashes, and return those that all nodes have. Raises ConfigError, on every rank, where it isn't what `commit` has
        recorded (empty: no commit, or one from before files were recorded), where nodes have another one, and where files were changed
        meanwhile; TrainerError where one can't be read now.
        """
        watch.begin("Hash of the base model", limits.LOAD_SECONDS)
        self._thread.join()
        try:
            changed = self.changed()
        except TrainerError as error:
            self._problem = self._problem or problem_of(error)
        else:
            if self._problem is None and changed is not None:
                self._problem = Problem(f"{changed} while it was loaded; start again when nothing writes to it")
        from lockstep_train.base.ranks import refused_together  # (which needs torch, as nothing else here does)

        ranks = self._ranks
        ranks.store.set(f"base/hashes/{ranks.rank}", json.dumps([ranks.node, self._hashes, self._problem]))
        with refused_together(ranks, "base"):
            return dict(ranks.decide("base/verdict", lambda: self._verdict(recorded, commit)))

    def changed(self) -> str | None:
        """Name the file of this node that was changed since the start. Raises TrainerError when that can't be told now."""
        try:
            stamps = self._stamped()
        except ConfigError as error:
            return str(error)
        name = next((mine[0] for mine, now in zip(self._stamps, stamps, strict=True) if mine != now), None)
        return f"{self._folder / name} of the base model was changed" if name is not None else None

    def _verdict(self, recorded: Files, commit: str) -> Files:
        """Return what all nodes have, on rank 0. Raises as `finish`."""
        answers = []
        for rank in range(self._ranks.world_size):
            self._ranks.wait_for(f"base/hashes/{rank}")
            answers.append(json.loads(self._ranks.store.get(f"base/hashes/{rank}")))
        unread = gravest(Problem(*problem) for _, _, problem in answers if problem is not None)
        if unread is not None:
            raise unread.error()
        copies = merged_copies(self._groups, [(node, files) for node, files, _ in answers])
        remedy = "put the recorded files back, or set training.checkpoint.resumeFrom to None to train anew on these"
        problem = base_problem(self._folder, copies, recorded, commit, remedy)
        if problem is not None:
            raise ConfigError(problem)
        return copies[0].files
