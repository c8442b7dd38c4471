"""Print the commits of a run as JSON, for `lockstep checkpoint`:

python -m lockstep_train.inspect list runs/my-job
python -m lockstep_train.inspect verify runs/my-job [--all]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep_spec.exits import DONE, FAILED
from lockstep_train.base.errors import ConfigError, TrainerError, print_problem
from lockstep_train.checkpoint.commits import Collection, Commit, collect
from lockstep_train.checkpoint.format.layout import CHAIN, MANIFEST, CommitName, record_file
from lockstep_train.checkpoint.format.manifest import Manifest
from lockstep_train.checkpoint.format.readers import ReaderWatch
from lockstep_train.checkpoint.save.rotation import NEVER_ROTATED, best_commit, read_quality

Json = dict[str, Any]


def list_commits(collection: Collection) -> Json:
    """Every commit, newest first, those that no start would choose last; and what else is wrong in the folders."""
    chain = collection.chain()
    names = [commit.name for commit in chain]
    qualities = {commit.name: next(filter(None, map(read_quality, commit.folders)), None) for commit in chain}
    best = best_commit(names, qualities)
    being_read = {name for folder in collection.checkpoints for name in ReaderWatch(folder).held()}
    rows = [
        _row(commit) | {"onChain": True, "best": commit.name == best, "kept": keep_reasons(names, commit.name, best, being_read)}
        for commit in chain
    ]
    rows += [_row(commit) | {"onChain": False, "best": False, "kept": []} for commit in collection.off_chain()]
    return {"commits": rows, "problems": folder_problems(collection)}


def keep_reasons(chain: Sequence[CommitName], name: CommitName, best: CommitName | None, being_read: set[CommitName]) -> list[str]:
    """Reasons for rotation to keep it, whatever `checkpoint.keep` is (pure)."""
    reasons = {"newest": name in chain[:NEVER_ROTATED], "best": name == best, "being read": name in being_read}
    return [reason for reason, holds in reasons.items() if holds]


def folder_problems(collection: Collection) -> list[str]:
    view = collection.view
    damaged = [f"{CHAIN}/{record_file(attempt)} is damaged: commits of attempt {attempt} don't count" for attempt in view.damaged]
    return damaged + [f"{name} doesn't count: the record of its attempt is missing" for name in view.unrecorded]


def _row(commit: Commit) -> Json:
    """Row of a commit by names, sizes and the manifest; checksums are for `verify`."""
    name = commit.name
    row: Json = {"name": str(name), "step": name.step, "attempt": name.attempt, "folders": list(map(str, commit.folders))}
    try:
        manifest = commit.manifest()
    except ValueError as error:
        return row | {"problems": [str(error)], "shards": {}}
    return row | {
        "savedAt": max((folder / MANIFEST).stat().st_mtime for folder in commit.folders if (folder / MANIFEST).is_file()),
        **summary(manifest),
        **_problems(commit.problems(manifest, checksum=False)),
    }


def _problems(by_shard: Mapping[str, str | None]) -> Json:
    """Problems of a commit, and of each shard: whoever asks several volumes puts together what each has of it."""
    return {"problems": [problem for problem in by_shard.values() if problem is not None], "shards": dict(by_shard)}


def verify_commits(commits: Sequence[Commit]) -> Json:
    """Read every byte and compare checksums."""
    rows = []
    for commit in commits:
        try:
            manifest = commit.manifest()
            with commit.held("verify"):
                found = _problems(commit.problems(manifest))
            size = sum(shard.bytes for shard in manifest.shards)
        except (ValueError, TrainerError) as error:
            found, size = {"problems": [str(error)], "shards": {}}, 0
        rows.append({"name": str(commit.name), "bytes": size, **found})
    return {"commits": rows, "whole": bool(rows) and not any(row["problems"] for row in rows)}


def summary(manifest: Manifest) -> Json:
    elements = sum(item.numel for shard in manifest.shards for item in shard.fragments)
    return {
        "job": manifest.job,
        "samplesConsumed": manifest.samples_consumed,
        "baseModel": manifest.base_model,
        "method": "Full" if manifest.adapter["config"] is None else "LoRA",
        "settings": dict(manifest.identity.settings),
        "precision": manifest.precision,
        "content": manifest.content,
        "zeroStage": manifest.zero_stage,
        "ranks": manifest.world_size,
        "globalBatchSize": manifest.identity.global_batch_size,
        "seed": manifest.identity.seed,
        "evalLoss": manifest.eval_loss,
        "evalStep": manifest.eval_step,
        "evalLossBefore": manifest.eval_loss_before,
        "trainableParameters": elements,
        "bytes": sum(shard.bytes for shard in manifest.shards),
    }


def chosen_commits(collection: Collection, everything: bool) -> list[Commit]:
    """The newest, or all on the chain. Raises ConfigError when there is none."""
    chain = collection.chain()
    if not chain:
        raise ConfigError(f"{', '.join(map(str, collection.checkpoints))} holds no commit that a start would choose")
    return chain if everything else chain[:1]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lockstep_train.inspect", description="Print the commits of a run as JSON.")
    parser.add_argument("verb", choices=["list", "verify"])
    parser.add_argument("source", type=Path, nargs="+", help="runs' folders, checkpoints folders, or folders of one commit")
    parser.add_argument("--all", action="store_true", help="verify every commit that a start might choose, not only the newest")
    options = parser.parse_args(arguments)
    try:
        collection = collect(options.source)
        answer = list_commits(collection) if options.verb == "list" else verify_commits(chosen_commits(collection, options.all))
    except (TrainerError, OSError) as error:
        return print_problem(error)
    print(json.dumps(answer, indent=1))
    return DONE if answer.get("whole", True) else FAILED


if __name__ == "__main__":
    sys.exit(main())
