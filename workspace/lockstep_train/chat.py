"""Answer with a run's adapter on its base model, both loaded once. Requests and answers are lines of JSON on standard input and output:

python -m lockstep_train.chat runs/demo

→ {"adapter": …, "model": …, "chats": …}    what will be loaded; refusals that need no weights come before, and before torch is imported
→ {"ready": true}
← {"messages": [{"role": …, "content": …}, …]}, written by the run's chat template, or {"prompt": …}, continued as it stands;
  "tokens": the most of an answer, "base": true for an answer without the adapter
→ {"piece": …} …, then {"end": true} or {"refused": reason}
← {"stop": true} ends the answer that is being written, as the end of standard input does
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from lockstep_spec.words import listed
from lockstep_train.base.errors import ConfigError, TrainerError, leave_process, print_problem, refusal
from lockstep_train.checkpoint.commits import Commit, collect
from lockstep_train.checkpoint.format.layout import ADAPTER_WEIGHTS, MANIFEST
from lockstep_train.checkpoint.format.views import CHATS, TOKENIZER
from lockstep_train.data.tokens.turns import Chat, ChatTemplate, Unmasked
from lockstep_train.generate import CONTINUED, OTHER_BASE, base_of, load, refuse_no_model, write
from lockstep_train.merge import is_adapter
from lockstep_train.model.base_files import adapter_record

TEMPLATE = "chat_template.jinja"
OF_WEIGHTS = (".safetensors", ".bin")
TOKENS = 100
Json = dict[str, Any]
Say = Callable[[Json], None]


@dataclass(frozen=True)
class Source:
    """Adapter to load, or a commit to make it of, with its base model, and what its run says about chats."""

    folder: Path
    commit: Commit | None
    model: Path
    base_files: Mapping[str, str]
    template: Path | None
    """Chat template of the run; None: the model's own."""
    variables: Mapping[str, Any] | None
    """Those of the template; None: the run has learned no chats."""


def find_source(folder: Path, step: int | None, model: Path | None) -> Source | None:
    """Find the adapter that `folder` is, or the newest of the run there, or that of a step. None: there is none yet. Raises ConfigError."""
    if step is None and is_adapter(folder):
        return _source(folder, None, model)
    every = collect([folder]).chain()
    chain = [commit for commit in every if step in (None, commit.name.step)]
    if step is not None and not chain:
        steps = listed([str(commit.name.step) for commit in reversed(every)])
        raise ConfigError(f"{folder} has no commit of step {step}" + (f": there are those of {steps}" if steps else " and no other"))
    adapter = folder / "adapter"
    is_whole = step is None and is_adapter(adapter) and (adapter / ADAPTER_WEIGHTS).is_file()
    if is_whole and not (chain and (chain[0].folders[0] / MANIFEST).stat().st_mtime > (adapter / ADAPTER_WEIGHTS).stat().st_mtime):
        return _source(adapter, None, model)
    return _source(chain[0].folders[0], chain[0], model) if chain else None


def _source(folder: Path, commit: Commit | None, model: Path | None) -> Source:
    config, base_files, kept = None, adapter_record(folder), (folder, folder.parent / TOKENIZER)
    if commit is not None:
        try:
            manifest = commit.manifest()
        except ValueError as error:
            raise refusal(f"{commit.name} can't be read: {error}", error) from error
        config, base_files, kept = manifest.adapter["config"], dict(manifest.identity.base_files), (folder.parents[1] / TOKENIZER, folder)
        if config is None:
            raise ConfigError(f"{folder} was trained with method Full and holds a whole model, no adapter; use `lockstep adapter merge`")
    template, record = (next((path for place in kept if (path := place / name).is_file()), None) for name in (TEMPLATE, CHATS))
    return Source(folder, commit, model or base_of(folder, config), base_files, template, None if record is None else _json(record) or {})


def _json(path: Path) -> Json | None:
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_bytes())
        return content if isinstance(content, dict) else None
    return None


def refuse_unfit(source: Source, *, chat: bool) -> None:
    """Raise ConfigError for what can be told without weights: another base model, or for a chat that there is no template."""
    refuse_no_model(source.model)
    for name, digest in source.base_files.items():
        path = source.model / name
        if not path.is_file() or not (name.endswith(OF_WEIGHTS) or hashlib.sha256(path.read_bytes()).hexdigest() == digest):
            raise ConfigError(f"{source.model} is not the base model that {source.folder} was trained on: its {name} differs; {OTHER_BASE}")
    own = (source.model / TEMPLATE).is_file() or "chat_template" in (_json(source.model / "tokenizer_config.json") or {})
    if chat and source.template is None and not own:
        raise ConfigError(
            f"{source.model} has no chat template, and the run of {source.folder} stated none: a chat needs a run with"
            " training.data.chatTemplate"
        )


@dataclass(frozen=True)
class Loaded:
    model: Any
    tokenizer: Any
    template: ChatTemplate | None
    stops: Sequence[int]

    def tokens_of(self, request: Json) -> tuple[list[int], int]:
        """Return the tokens to go on from, and how many may follow. The first messages go where there is no room. Raises ValueError."""
        room = int(getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize)
        messages = tuple(request.get("messages", ()))
        if self.template is None and messages:
            raise ValueError("the tokenizer has no chat template that says where tokens stand: state training.data.chatTemplate")
        while True:
            ids = self._encoded(messages) if messages else self.tokenizer.encode(request["prompt"])
            if not ids:
                raise ValueError("there is no text to go on from")
            if len(ids) < room:
                return ids, room - len(ids)
            if len(messages) < 3:
                raise ValueError(f"that is {len(ids):,} tokens, and the model has room for {room:,} with its answer: say it in fewer words")
            messages = messages[2:]

    def _encoded(self, messages: tuple[Json, ...]) -> list[int]:
        assert self.template is not None  # noqa: S101 (the caller has looked)
        return self.template.encode(Chat(messages, (), {}, self.template).beginning(len(messages), prompted=True))[0]


def load_source(source: Source) -> Loaded:
    """Load the model with the adapter, which is made of the commit's shards first where there is none. Raises ConfigError, TrainerError."""
    from lockstep_train.data.tokens.tokenizer import chat_template, own_template, stop_tokens

    with tempfile.TemporaryDirectory(prefix="lockstep-adapter-") as made:
        if source.commit is not None:
            from lockstep_train.export import export

            export(source.commit.folders, Path(made))
        model, tokenizer = load(source.model, source.folder if source.commit is None else Path(made), str(source.folder))
    if source.template is not None:
        tokenizer.chat_template = own_template(source.template)
    stops = stop_tokens(source.model, tokenizer)
    return Loaded(model, tokenizer, chat_template(tokenizer, stops, source.variables or {}), stops)


class Requests:
    """Lines of standard input as they come; None at the end. `stopped`: the answer to the newest one is to end."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self.queue: SimpleQueue[Json | None] = SimpleQueue()
        self.stopped = threading.Event()
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()

    def _read(self, lines: Iterable[bytes]) -> None:
        try:
            for line in lines:
                request = json.loads(line)
                if "stop" in request:
                    self.stopped.set()
                else:
                    self.stopped.clear()
                    self.queue.put(request)
        finally:  # also after a line that is no request
            self.stopped.set()
            self.queue.put(None)


class Pieces:
    """Streamer of transformers: it says each piece of text once all bytes of its last letter are there."""

    def __init__(self, tokenizer: Any, ids: Sequence[int], say: Say) -> None:
        """`ids`: tokens that are said, too."""
        self._tokenizer, self._ids, self._say = tokenizer, list(ids), say
        self._said, self._is_prompt = 0, True

    def put(self, tokens: Any) -> None:
        self._ids += [] if self._is_prompt else tokens.tolist()
        self._is_prompt = False
        self.end(cut="\N{REPLACEMENT CHARACTER}")

    def end(self, cut: str | None = None) -> None:
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if len(text) > self._said and not (cut and text.endswith(cut)):
            self._say({"piece": text[self._said :]})
            self._said = len(text)


def answer(loaded: Loaded, request: Json, stopped: threading.Event, say: Say) -> None:
    """Say an answer to a request in pieces, or why there is none."""
    try:
        ids, room = loaded.tokens_of(request)
    except (ValueError, Unmasked) as error:
        return say({"refused": str(error)})
    import torch

    is_text = "prompt" in request
    options = CONTINUED if is_text else {"eos_token_id": list(loaded.stops)} if loaded.stops else {}
    with loaded.model.disable_adapter() if request.get("base") else nullcontext():
        write(
            loaded.model, loaded.tokenizer, ids, min(request.get("tokens", TOKENS), room), **options,
            streamer=Pieces(loaded.tokenizer, ids if is_text else (), say),
            stopping_criteria=[lambda given, *_, **__: torch.full((len(given),), stopped.is_set(), device=given.device)],
        )  # fmt: skip
    say({"end": True})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lockstep_train.chat", description="Answer requests with a run's adapter.")
    parser.add_argument("folder", type=Path, help="a run's folder, or an adapter's")
    parser.add_argument("--step", type=int, help="the commit to make the adapter of (default: the newest adapter)")
    parser.add_argument("--model", type=Path, help="the base model's folder (default: what the adapter names)")
    parser.add_argument("--chat", action="store_true", help="refuse a model without a chat template")
    parser.add_argument("--check", action="store_true", help="say what would be loaded, and end")
    options = parser.parse_args(arguments)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print where answers go

    def say(answer: Json) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        source = find_source(options.folder, options.step, options.model)
        if source is None:
            say({"none": True})
            return 0
        refuse_unfit(source, chat=options.chat)
        say({"adapter": str(source.folder), "model": str(source.model), "chats": source.variables is not None})
        if not options.check:
            requests, loaded = Requests(sys.stdin.buffer), load_source(source)
            say({"ready": True})
            while (request := requests.queue.get()) is not None:
                answer(loaded, request, requests.stopped, say)
    except (TrainerError, OSError) as error:
        return print_problem(error)
    return 0


if __name__ == "__main__":
    leave_process(main())
