"""Recording of the live model's log-probabilities: runs/<job>/logprobs/step-N.aM.json, and logprobs.json beside an adapter of that step."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lockstep_spec.choices import Method
from lockstep_spec.files import make_directory, write_durably
from lockstep_train.base.errors import reason_of
from lockstep_train.base.ranks import vote
from lockstep_train.checkpoint.format.layout import CommitName, parse_commit
from lockstep_train.data.tokens.tokenizer import Tokenizer
from lockstep_train.run import Run

FOLDER = "logprobs"
LOGPROBS = "logprobs.json"
"""File beside an adapter."""
KEPT = 2
"""Newest recordings that stay though no commit of their step is there: it may be on its way."""
COUNT, POSITIONS, MOST_TOKENS = 64, 4, 96
"""Log-probabilities at a position, positions in a prompt, and tokens of one."""
DIGITS = 4
TEXTS = (
    "The lighthouse keeper wrote down the wind and the weather every evening, and in the morning he read it to the fishermen.",
    "To bake bread you need flour, water, salt and yeast. Mix them, let the dough rest for an hour, then put it into a hot oven.",
    "def area(width, height):\n    return width * height\n\nprint(area(3, 4))  # prints 12\n",
    "In 1969 two people walked on the Moon for the first time. Their flight home to the Earth took almost three days.",
    '{"name": "Ada", "languages": ["English", "French"], "born": 1815, "city": "London"}',
)
CHATS = (
    ("Which planet is closest to the Sun?", "Mercury is closest to the Sun. It goes around it once in 88 days."),
    ("Please write one sentence about rivers.", "A river begins as a small spring in the hills and ends in the sea."),
    ("What is seven times six?", "Seven times six is forty-two."),
)
"""Questions with answers; in the run's chat template where it has one. Nothing of a user's data is in any prompt."""


def prompts_of(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return eight fixed prompts as `tokens`, each with four `positions` whose next tokens are predicted.

    Raises ValueError for a tokenizer that leaves too little of a text or doesn't fit the model, and what a chat template raises.
    """
    chat, texts, tokens = tokenizer.chat, list(TEXTS), []
    for question, answer in CHATS:
        if chat is None:
            texts.append(f"{question}\n{answer}")
        else:
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            tokens.append(chat.encode(chat.render(messages, (), False, {}))[0])
    tokens += [[*tokenizer.begin, *tokenizer.encode(text)] for text in texts]
    most = max(itertools.chain(*tokens))
    if tokenizer.vocabulary is not None and most >= tokenizer.vocabulary:
        raise ValueError(f"the tokenizer gives token {most}, and the model has {tokenizer.vocabulary}")
    return [{"tokens": ids[:MOST_TOKENS], "positions": positions_of(len(ids[:MOST_TOKENS]))} for ids in tokens]


def positions_of(count: int) -> list[int]:
    """Spread positions over a prompt of `count` tokens (pure), without the last one: engines tell of a prompt's own tokens.

    Raises ValueError for too few.
    """
    if count <= POSITIONS:
        raise ValueError(f"a prompt has {count} tokens, and needs {POSITIONS + 1}")
    return [(count - 1) * place // POSITIONS - 1 for place in range(1, POSITIONS + 1)]


@torch.no_grad()
def top_of(model: Callable[..., Any], prompt: Mapping[str, Any], device: torch.device) -> list[list[tuple[int, float]]]:
    """Return the likeliest next tokens at each position with their log-probabilities; the model is in evaluation mode. Raises ValueError
    unless all are finite.
    """
    logits = model(input_ids=torch.tensor([prompt["tokens"]], device=device), use_cache=False).logits[0, prompt["positions"]]
    values, tokens = logits.float().log_softmax(-1).topk(min(COUNT, logits.shape[-1]))
    if not values.isfinite().all():
        raise ValueError("the model's log-probabilities aren't finite")
    rows = zip(tokens.tolist(), values.tolist(), strict=True)
    return [[(token, round(value, DIGITS)) for token, value in zip(*row, strict=True)] for row in rows]


@contextmanager
def as_base(model: torch.nn.Module) -> Iterator[None]:
    """Let a model wrapped by peft be its base within this. What is trained stays so, unlike within `disable_adapter`."""
    wrappers: list[Any] = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    try:
        for module in wrappers:
            module._disable_adapters = True
        yield
    finally:
        for module in wrappers:
            module._disable_adapters = False


def record(run: Run, step: int, limit_seconds: float) -> Path | None:
    """Record the model as it is after `step`, on all ranks; rank 0 writes, and returns where. A failure is one warning line."""
    ranks, problem, path, mine = run.ranks, "", None, []
    prompts: list[dict[str, Any]] = []
    try:
        prompts = prompts_of(run.tokenizer)
    except Exception as error:  # also what a chat template raises
        problem = reason_of(error)
    if vote(bool(problem), ranks):
        problem = problem or "another rank can't make its prompts"
    else:
        try:
            mine = _computed(run, prompts, lambda: run.watch.begin(f"Log-probabilities of step {step}", limit_seconds))
        except Exception as error:  # whatever a model does with a forward pass that its training didn't ask for
            problem = reason_of(error)
        parts = ranks.gather(f"logprobs/{step}", {"problem": problem, "prompts": mine}) or []
        problem = next((part["problem"] for part in parts if part["problem"]), "")
        if ranks.first and not problem:
            try:
                path = _write(run, step, [item for part in parts for item in part["prompts"]])
            except OSError as error:
                problem = reason_of(error)
    if problem:
        run.reporter.say(f"WARNING: log-probabilities of step {step} are not recorded, so no export of it can be verified: {problem}")
    return path


def _computed(run: Run, prompts: Sequence[dict[str, Any]], begin: Callable[[], None]) -> list[dict[str, Any]]:
    """Compute this rank's prompts, with the adapter and then without: a base's passes end the trace by which Stage3 fetches ahead. Each
    rank runs as many passes as the others, since under Stage3 each is a collective.
    """
    ranks = run.ranks
    rounds = -(-len(prompts) // ranks.world_size)
    numbers = range(ranks.rank, rounds * ranks.world_size, ranks.world_size)

    def tops() -> Iterator[Any]:
        for number in numbers:
            begin()
            yield top_of(run.engine, prompts[number % len(prompts)], ranks.device)

    run.engine.eval()
    try:
        live, bases = list(tops()), [None for _ in numbers]
        if run.config.training.method is Method.LORA:
            with as_base(run.engine.module):
                bases = list(tops())
    finally:
        run.engine.train()
    results = zip(numbers, live, bases, strict=True)
    return [{**prompts[number], "top": top, "base_top": base} for number, top, base in results if number < len(prompts)]


def _write(run: Run, step: int, prompts: Sequence[dict[str, Any]]) -> Path:
    model = run.config.training.model
    head = {"format": 1, "model_type": run.engine.module.config.model_type, "quantization": model.quantization.value}
    recording = {**head, "precision": run.config.training.precision.value, "prompts": prompts}
    folder = run.config.run_dir / FOLDER
    path = folder / f"{CommitName(attempt=run.describe.template.attempt, step=step)}.json"
    make_directory(folder)
    write_durably(path, json.dumps(recording, separators=(",", ":")).encode())
    commits = [item.name for item in (run.config.run_dir / "checkpoints").glob("step-*")]
    for name in stale([item.stem for item in folder.glob("step-*.json")], commits):
        (folder / f"{name}.json").unlink(missing_ok=True)
    return path


def stale(recorded: Iterable[str], commits: Iterable[str]) -> list[str]:
    """Return recordings that no commit needs any more, but for the newest (pure). All are named as commits are."""
    names = sorted(name for item in recorded if (name := parse_commit(item)) is not None)
    return [str(name) for name in names[:-KEPT] if str(name) not in set(commits)]


def put_beside(recording: Path | None, adapter: Path) -> None:
    """Copy a recording beside an adapter; where there is none, no other step's stays there. Raises OSError."""
    (adapter / LOGPROBS).unlink(missing_ok=True)
    if recording is not None:
        shutil.copyfile(recording, adapter / LOGPROBS)
