"""Start of an attempt from a commit: all ranks agree, through the store, on one that is whole and undamaged, and load it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep_spec.codec import from_json, to_json
from lockstep_spec.files import write_durably
from lockstep_train.base.errors import ConfigError, refusal
from lockstep_train.base.limits import Say
from lockstep_train.base.ranks import Ranks, refused_together
from lockstep_train.checkpoint.format.identity import Identity
from lockstep_train.checkpoint.format.layout import CHAIN, MANIFEST, record_file
from lockstep_train.checkpoint.format.manifest import Manifest, decode, encode, shapes
from lockstep_train.checkpoint.format.readers import reading
from lockstep_train.checkpoint.format.shards import ShardReader, exchanging_fetch, local_fetch
from lockstep_train.checkpoint.format.views import behind_view
from lockstep_train.checkpoint.format.volume import (
    MISSING,
    Claim,
    Record,
    VolumeView,
    candidates,
    follows_chain,
    merge_views,
    next_attempt,
    read_chain,
    read_view,
    shard_problem,
    size_problem,
    sweep,
    write_record,
)
from lockstep_train.zero import zero_access


@dataclass(frozen=True)
class VerifiedCommit:
    """A verified commit."""

    folder: Path
    manifest: Manifest
    holders: list[list[int]]
    """Ranks that found a shard undamaged, for each shard, one a node whose volume has it. On one volume another rank may have read it."""
    nodes: list[int]
    """Each rank's node."""

    @property
    def everywhere(self) -> bool:
        """True if every node sees every shard."""
        return all(len(holders) == len(set(self.nodes)) for holders in self.holders)


@dataclass(frozen=True)
class Start:
    """Beginning of this attempt: its number in the folder, and the commit, or None for step 0."""

    attempt: int
    source: VerifiedCommit | None
    view: VolumeView
    """Commits and records on any of the volumes."""


def choose_start(ranks: Ranks, checkpoints: Path, resume_from: str, claim: Claim, say: Say, *, shared: bool = False) -> Start:
    """Agree on the start. A damaged commit is named through `say` and the one before it is tried. `shared`: all nodes see these
    checkpoints.

    Raises, on every rank, ConfigError when the attempt is stale or the path in `resumeFrom` can't be used, and TrainerError when no commit
    can be read for a fault that may pass.
    """
    with refused_together(ranks, "start"):
        return _choose_start(ranks, checkpoints, resume_from, claim, say, shared=shared)


def _choose_start(ranks: Ranks, checkpoints: Path, resume_from: str, claim: Claim, say: Say, *, shared: bool) -> Start:
    view = _merged_view(ranks, checkpoints, say)
    names, records = view.commits, view.records
    attempt = next_attempt(records, claim, used=[*view.damaged, *(name.attempt for name in names)])
    follow = follows_chain(records, resume_from, claim)
    folders = [checkpoints / str(name) for name in candidates(names, records)] if follow else []
    explicit = resume_from not in {"Auto", "None"}
    if explicit and not folders:
        folders = _named(ranks, Path(resume_from))
    source, problems = _first_whole(ranks, folders, say, checkpoints if shared else None)
    if source is None and explicit:
        raise refusal(
            f"training.checkpoint.resumeFrom {resume_from} holds no commit that can be read; give a step-N.aM or checkpoint-N folder, or a"
            " checkpoints folder",
            problems,
        )
    if source is None and folders:
        raise refusal(
            f"none of the {len(folders)} commits in {checkpoints} can be read; repair them, or set training.checkpoint.resumeFrom to None"
            " to start again",
            problems,
        )
    return Start(attempt, source, view)


def record_start(ranks: Ranks, checkpoints: Path, start: Start, claim: Claim) -> None:
    """Durably record the start on each node's volume, before any rank may write a commit of this attempt.

    A volume that is new, or lost something, gets the earlier records and the manifest of the start too.
    """
    if ranks.first_of_node:
        sweep(checkpoints, start.view.commits)
        _heal(checkpoints, start.source)
        present = read_view(checkpoints).records
        for record in [*start.view.records, Record(start.attempt, claim.given, claim.job_uid, _start_name(start.source, checkpoints))]:
            if record not in present:
                write_record(checkpoints, record)
    ranks.gather("start/recorded", True)
    ranks.publish("start/go", True)


def _start_name(source: VerifiedCommit | None, checkpoints: Path) -> str | None:
    if source is None:
        return None
    return source.folder.name if _is_own(source, checkpoints) else str(source.folder)


def _is_own(source: VerifiedCommit, checkpoints: Path) -> bool:
    """Return True for a commit of this folder, however the path to it was spelled."""
    return source.folder.parent.resolve() == checkpoints.resolve()


def refuse_another(manifest: Manifest, mine: Identity, folder: Path) -> None:
    """Raise ConfigError naming every difference between the commit and this run."""
    differences = manifest.identity.differences(mine)
    if differences:
        raise ConfigError(
            f"{folder} is a commit of another run: in it "
            + ", and ".join(differences)
            + "; put that back, or set training.checkpoint.resumeFrom to None"
        )


def _merged_view(ranks: Ranks, checkpoints: Path, say: Say) -> VolumeView:
    """Collect what is on any node's volume, the same on every rank. What is damaged everywhere is named through `say`."""
    mine = read_view(checkpoints) if ranks.first_of_node else VolumeView()
    views = ranks.gather("start/view", to_json(mine))
    merged = to_json(merge_views([from_json(VolumeView, view, "view") for view in views])) if views is not None else None
    view = from_json(VolumeView, ranks.publish("start/merged", merged), "view")
    for _, problem in view.unreadable:  # to leave its commits out would start the run from an older one, or anew
        raise refusal(problem, problem)
    for attempt in view.damaged:
        say(f"{checkpoints / CHAIN / record_file(attempt)} is damaged: commits of attempt {attempt} don't count")
    for name in view.unrecorded:
        words = "the record of its attempt is missing; to go on from a copied one, set training.checkpoint.resumeFrom to its path"
        say(f"{checkpoints / str(name)} doesn't count: {words}")
    return view


def _named(ranks: Ranks, path: Path) -> list[Path]:
    """The commits that `resumeFrom` names, the same on every rank: volumes differ, so the first node that has any decides."""
    mine = [str(folder) for folder in _explicit(path)] if ranks.first_of_node else []
    answers = ranks.gather("start/named", mine)
    chosen: list[str] = next((answer for answer in answers or [] if answer), [])
    return [Path(name) for name in ranks.publish("start/named-chosen", chosen)]


def _explicit(path: Path) -> Iterator[Path]:
    """The commit the user named, itself or by its view, or the commits of the checkpoints (or run) folder the user named."""
    path = behind_view(path)
    if (path / MANIFEST).exists():
        yield path
        return
    for folder in (path, path / "checkpoints"):
        for name in read_chain(folder):
            yield folder / str(name)


def _first_whole(ranks: Ranks, folders: list[Path], say: Say, shared: Path | None) -> tuple[VerifiedCommit | None, str]:
    """Return the first commit that is whole, and the problems of those before it. `shared`: a folder that all nodes see; one that somebody
    named elsewhere may not be.
    """
    problems: list[str] = []
    for number, folder in enumerate(folders):
        source, problem = _verified(ranks, folder, f"start/{number}", shared=folder.parent == shared)
        if source is not None:
            return source, "; ".join(problems)
        say(f"{folder.name} can't be used ({problem}); trying the commit before it")
        problems.append(f"{folder.name}: {problem}")
    return None, "; ".join(problems)


def _verified(ranks: Ranks, folder: Path, key: str, *, shared: bool) -> tuple[VerifiedCommit | None, str | None]:
    """Check manifest and shards. The same answer on every rank.

    The ranks of a node share the reading, or all ranks do where all nodes see the same files. If one of them then meets anything wrong,
    each node reads for itself after all: it may be that node's, and what it can't read others send.
    """
    manifest, problem = _agreed_manifest(ranks, folder, key)
    if manifest is None:
        return None, problem
    if shared and ranks.nodes > 1:
        answers = ranks.gather(f"{key}/read-once", _read_once(ranks, folder, manifest))
        once = _verdict_of_all(answers, len(manifest.shards)) if answers is not None else None
        once = ranks.publish(f"{key}/verdict-once", once)
        if once["problem"] is None:
            return VerifiedCommit(folder, manifest, once["holders"], once["nodes"]), None
    share = range(ranks.local_rank, len(manifest.shards), ranks.local_world_size)
    mine = {str(index): shard_problem(folder, manifest.shards[index]) for index in share}
    answers = ranks.gather(f"{key}/verified", {"node": ranks.node, "shards": mine})
    verdict = _verdict(answers, len(manifest.shards)) if answers is not None else None
    verdict = ranks.publish(f"{key}/verdict", verdict)
    if verdict["problem"] is not None:
        return None, verdict["problem"]
    return VerifiedCommit(folder, manifest, verdict["holders"], verdict["nodes"]), None


def _read_once(ranks: Ranks, folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Each node looks at the names and sizes of all shards (`shards`), and each shard is read by one rank (`read`)."""
    count = len(manifest.shards)
    sizes = {str(index): size_problem(folder, manifest.shards[index]) for index in range(ranks.local_rank, count, ranks.local_world_size)}
    read = {str(index): shard_problem(folder, manifest.shards[index]) for index in range(ranks.rank, count, ranks.world_size)}
    return {"node": ranks.node, "shards": sizes, "read": read}


def _verdict_of_all(answers: list[dict[str, Any]], shards: int) -> dict[str, Any]:
    """Judge as `_verdict` does, but one problem of one rank is enough for a problem, and so is a shard that nobody has read."""
    read = {index: problem for answer in answers for index, problem in answer["read"].items()}
    problems = [problem for answer in answers for problem in answer["shards"].values()]
    problem = next((problem for problem in [*read.values(), *problems] if problem is not None), None)
    unread = [index for index in range(shards) if str(index) not in read]
    if problem is not None or unread:
        return {"problem": problem or f"nobody has read shard {unread[0]}"}
    return _verdict(answers, shards)


def _verdict(answers: list[dict[str, Any]], shards: int) -> dict[str, Any]:
    """Judge by every rank's findings who can read which shard. A shard that nobody can read is a problem."""
    holders: list[list[int]] = []
    for index in range(shards):
        by_rank = {rank: answer["shards"][str(index)] for rank, answer in enumerate(answers) if str(index) in answer["shards"]}
        holders.append([rank for rank, problem in by_rank.items() if problem is None])
        if not holders[-1]:
            damaged = [problem for problem in by_rank.values() if not problem.endswith(MISSING)]
            return {"problem": (damaged or list(by_rank.values()))[0]}
    return {"problem": None, "holders": holders, "nodes": [answer["node"] for answer in answers]}


def _agreed_manifest(ranks: Ranks, folder: Path, key: str) -> tuple[Manifest | None, str | None]:
    """The manifest from the first node whose copy is whole; one is enough, since it was written only when all shards were."""
    text, problem = _read_manifest(folder / MANIFEST) if ranks.first_of_node else (None, None)
    answers = ranks.gather(f"{key}/manifest", [text, problem]) or []
    texts = [text for text, _ in answers if text is not None]
    problems = [problem for _, problem in answers if problem is not None]
    chosen, reason = ranks.publish(f"{key}/chosen", [texts[0] if texts else None, problems[0] if problems else None])
    return (decode(chosen), None) if chosen is not None else (None, reason)


def _read_manifest(path: Path) -> tuple[str | None, str | None]:
    """The text of a whole manifest; or what is wrong with it."""
    try:
        text = path.read_text()
        shapes(decode(text).shards)
    except OSError as error:
        return None, f"{path} can't be read: {error.strerror or error}"
    except ValueError as error:
        return None, f"{path}: {error}"
    return text, None


def _heal(checkpoints: Path, source: VerifiedCommit | None) -> None:
    """Write the manifest of the start where this volume has shards of it, but no whole manifest."""
    if source is not None and _is_own(source, checkpoints) and source.folder.is_dir():
        text, _ = _read_manifest(source.folder / MANIFEST)
        if text is None:
            write_durably(source.folder / MANIFEST, encode(source.manifest))


def restore_commit(engine: Any, source: VerifiedCommit, ranks: Ranks, say: Say) -> None:
    """Load a verified commit. A collective where a node's volume lacks a shard. The commit is held meanwhile: it may be one of a running
    job.
    """
    manifest = source.manifest
    reader = ShardReader(source.folder, manifest)
    with contextlib.ExitStack() as stack:
        if ranks.first_of_node and source.folder.is_dir():
            stack.enter_context(reading(source.folder, f"job {manifest.job}, resuming"))
        mine = zero_access.needs(engine)
        fetch = local_fetch(reader) if source.everywhere else exchanging_fetch(reader, source.holders, source.nodes, mine, ranks)
        zero_access.restore(engine, fetch, 0 if reader.lite else manifest.optimizer_step)
        ranks.gather("load/done", True)
        ranks.publish("load/over")
    zero_access.restore_loss_scaler(engine, manifest.loss_scaler)
    if reader.lite:
        say(f"{source.folder} is Lite: its weights are loaded, and the optimizer's moments start at zero")
