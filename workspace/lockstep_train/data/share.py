"""The data prepared once on every volume: by the first rank of the first node that sees it, while all others wait.

Who shares a volume is found out by trying: every node puts a file of a random name into the cache folder and looks for those of
the others. The ranks talk through the store, not by collectives, so nobody waits inside one while gigabytes are tokenised.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistStoreError

from lockstep_train.base.config import RunConfig
from lockstep_train.base.durable import make_directory
from lockstep_train.base.errors import Problem, TrainerError, gravest, problem_of, refusal
from lockstep_train.base.ranks import Ranks
from lockstep_train.base.together import refused_together
from lockstep_train.data.cache.cachefolder import cache_folder
from lockstep_train.data.load import Dataset, from_json, open_dataset, prepare, refuse_unknown_tokens, to_json
from lockstep_train.data.progress import Progress
from lockstep_train.data.read.pins import Asked, agreed_commits, at_commits, remember_commits
from lockstep_train.data.tokens.source import Say
from lockstep_train.data.tokens.tokenize import Tokeniser
from lockstep_train.watch import UNWATCHED, Watch

PATIENCE = timedelta(seconds=30)


def load_dataset(config: RunConfig, tokeniser: Tokeniser, ranks: Ranks, say: Say, watch: Watch = UNWATCHED) -> Dataset:
    """The same dataset on every rank. Raises, on all of them alike, ConfigError when it can't be used or differs between volumes, and
    TrainerError for a fault that may pass."""
    with refused_together(ranks, "data"):
        dataset = _loaded(config, tokeniser, ranks, say, watch)
        refuse_unknown_tokens(dataset, tokeniser)
    return dataset


def _loaded(config: RunConfig, tokeniser: Tokeniser, ranks: Ranks, say: Say, watch: Watch) -> Dataset:
    cache = cache_folder(config.run_dir)
    commits = agreed_commits(config, ranks, cache, say)
    builders = find_builders(ranks, cache)
    progress = Progress(ranks, watch)

    def tell(line: str) -> None:
        say(line)
        progress.told(line)

    if ranks.first_of_node and ranks.node == builders[ranks.node]:
        ranks.store.set(f"data/made/{ranks.node}", json.dumps(attempt(config, commits, tokeniser, cache, tell)))
    made = await_made(ranks, sorted(set(builders)), progress)
    problem = first_problem(made)
    if problem is not None:
        raise problem.error()
    return open_dataset(from_json(made[builders[ranks.node]]["prepared"]), tokeniser)


def attempt(config: RunConfig, commits: Mapping[Asked, str], tokeniser: Tokeniser, cache: Path, say: Say) -> dict[str, Any]:
    """What was prepared, or why it can't be."""
    training = at_commits(config, commits).training
    try:
        remember_commits(commits, config.run_dir, cache)
        return {"prepared": to_json(prepare(training.data, training.evaluation, tokeniser, cache, say))}
    except TrainerError as error:
        return {"problem": problem_of(error)}
    except OSError as error:
        message = f"the data can't be prepared in {cache}: {error}; the folder must be writable and have room for 5 bytes a token"
        return {"problem": problem_of(refusal(message, error))}


def find_builders(ranks: Ranks, cache: Path, topic: str = "data") -> list[int]:
    """For every node the lowest node that has the same volume. `topic`: of the store's keys, once each."""
    marks = cache / "volume"
    mine = marks / f"{ranks.node}.{secrets.token_hex(8)}"
    if ranks.first_of_node:
        make_directory(marks)
        mine.touch()
    names = ranks.gather(f"{topic}/marks", mine.name if ranks.first_of_node else None)
    seen = ranks.publish(f"{topic}/seen", [name for name in names if name is not None] if names is not None else None)
    builder = min((int(name.split(".")[0]) for name in seen if (marks / name).exists()), default=ranks.node)
    if ranks.first_of_node:
        ranks.store.set(f"{topic}/builder/{ranks.node}", str(builder))
    builders = [int(ranks.store.get(f"{topic}/builder/{node}")) for node in range(ranks.nodes)]
    everyone_looked(ranks, topic)
    if ranks.first_of_node:
        with contextlib.suppress(OSError):
            mine.unlink()
    return builders


def everyone_looked(ranks: Ranks, topic: str) -> None:
    ranks.gather(f"{topic}/looked", True)
    ranks.publish(f"{topic}/all-looked", True)


def first_problem(made: dict[int, dict[str, Any]]) -> Problem | None:
    """The first problem of any volume, one that is final before others; None when all volumes hold the same data."""
    problem = gravest(Problem(*outcome["problem"]) for outcome in made.values() if "problem" in outcome)
    if problem is not None:
        return problem
    if len({outcome["prepared"]["digest"] for outcome in made.values()}) > 1:
        files = {node: outcome["prepared"]["files"] for node, outcome in made.items()}
        first = next(iter(files.values()))
        other = next(((path, node) for node, theirs in files.items() for path in first if theirs.get(path) != first[path]), None)
        which = f"{other[0]} of node {other[1]} is another one than that of node {next(iter(files))}; " if other is not None else ""
        return Problem(
            f"the data differs between the volumes of nodes {', '.join(map(str, made))}: {which}copy the same files to all of them"
        )
    return None


def await_made(ranks: Ranks, builders: Sequence[int], progress: Progress, topic: str = "data") -> dict[int, dict[str, Any]]:
    """What each builder has made, after what may be hours. A builder that dies ends all ranks: that is the agent's to see."""
    keys = [f"{topic}/made/{builder}" for builder in builders]
    while True:
        progress.follow(builders)
        try:
            ranks.store.wait(keys, PATIENCE)
        except DistStoreError:
            continue
        progress.follow(builders)  # the last of it, so that all ranks have come to the same place
        return {builder: json.loads(ranks.store.get(key)) for builder, key in zip(builders, keys, strict=True)}
