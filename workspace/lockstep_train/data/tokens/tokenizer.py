"""The tokenizer of the model's folder, offline, reduced to what the data needs; its chat template; and the tokens at which its model stops
writing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from lockstep_spec.words import any_of
from lockstep_train.base.cache import refuse_pointers
from lockstep_train.base.errors import ConfigError, first_line, reason_of, refusal
from lockstep_train.base.imports import OF_FOLDER
from lockstep_train.data.tokens.turns import ChatTemplate, Message, Span, TemplateChoice

FILES = any_of(
    r"(tokenizer|special_tokens|added_tokens|vocab|merges|chat_template|sentencepiece|spiece)[^/]*",
    r"[^/]*\.(model|tiktoken|jinja)",
)


@dataclass(frozen=True)
class Tokenizer:
    """Tokenizer, reduced to what the data needs, so that its users need no transformers."""

    encode: Callable[[str], list[int]]
    """Text to token ids, without special tokens."""
    begin: tuple[int, ...]
    """Tokens that the model expects before every text (BOS of Llama, [gMASK]<sop> of GLM, nothing for Qwen)."""
    end: int | None
    pad: int
    chat: ChatTemplate | None = None
    encode_many: Callable[[list[str]], list[list[int]]] | None = None
    """Encoder of many texts at once, which fast tokenizers do on several cores."""
    places: Callable[[list[str]], list[tuple[list[int], list[Span]]]] | None = None
    """Ids of each text, without special tokens, and where in it each token stands; None: the tokenizer doesn't know."""
    decode: Callable[[list[int]], str] = str
    digest: str = ""
    """Digest that tells one tokenizer from another."""
    folder: Path | None = None
    """Folder from which it was loaded, and can be loaded again."""
    choice: TemplateChoice = field(default_factory=TemplateChoice)
    """Chat template that it was loaded with."""
    vocabulary: int | None = None
    """Rows of the model's embedding; None: it can't be told before the model is loaded."""
    stops: frozenset[int] = frozenset()
    """The tokens at which the model stops writing."""

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        return self.encode_many(texts) if self.encode_many is not None else [self.encode(text) for text in texts]


def load_tokenizer(folder: Path, choice: TemplateChoice = TemplateChoice()) -> Tokenizer:  # noqa: B008 (never changed)
    """Load the folder's tokenizer, with the chat template that the run states, or its own. Raises ConfigError when the folder has no
    tokenizer, TrainerError when it can't be read now.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import AutoTokenizer

    refuse_pointers(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), **OF_FOLDER)
    except Exception as error:  # also KeyError, TypeError and others: whatever its files lead to
        raise refusal(f"training.model.name {folder} holds no tokenizer that transformers can load: {reason_of(error)}", error) from error
    if tokenizer.is_fast:
        keep_white_space_in_places(tokenizer.backend_tokenizer)
    tokenizer.model_max_length = int(1e30)  # a sample longer than the model's context is counted and told by us, not warned of
    end = tokenizer.eos_token_id
    begin = [token for token in tokenizer.encode("") if token != end]
    if choice.path is not None:
        tokenizer.chat_template = own_template(Path(choice.path))
    vocabulary = vocabulary_size(folder)
    stops = stop_tokens(folder, tokenizer)
    return Tokenizer(
        encode=lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
        begin=tuple(begin),
        end=end,
        pad=padding(tokenizer.pad_token_id, end, vocabulary),
        chat=chat_template(tokenizer, stops, choice.variables),
        encode_many=lambda texts: encode_many(tokenizer, texts),
        places=(lambda texts: place_many(tokenizer, texts)) if tokenizer.is_fast else None,
        decode=lambda ids: str(tokenizer.decode(ids)),
        digest=tokenizer_digest(folder, stops, tokenizer.chat_template if choice.path else None, choice.variables),
        folder=folder,
        choice=choice,
        vocabulary=vocabulary,
        stops=frozenset(stops),
    )


def keep_white_space_in_places(backend: Any) -> None:
    """Have a token's place in the text hold its white space, too. Tokenizers with `trim_offsets` (Llama 3) place a token of spaces
    nowhere.
    """
    processor = backend.post_processor
    if processor is not None:
        processor.__setstate__(json.dumps(_untrimmed(json.loads(processor.__getstate__()))).encode())
        backend.post_processor = processor


def _untrimmed(state: Any) -> Any:
    """Change a post-processor's state, which may hold those of others."""
    if isinstance(state, dict):
        return {name: False if name == "trim_offsets" else _untrimmed(value) for name, value in state.items()}
    return [_untrimmed(value) for value in state] if isinstance(state, list) else state


def vocabulary_size(folder: Path) -> int | None:
    """Rows of the embedding, as the model's config.json has them; None where that can't be told."""
    from transformers import AutoConfig

    try:
        size = AutoConfig.from_pretrained(str(folder), **OF_FOLDER).get_text_config().vocab_size
    except Exception:  # whatever a model's own code raises; loading it will say what is wrong
        return None
    return size if isinstance(size, int) else None


def padding(pad: int | None, end: int | None, vocabulary: int | None) -> int:
    """Token that fills rows up. No token sees it, so any does that the model has: pad tokens are often added to a tokenizer alone."""
    usable = (token for token in (pad, end) if token is not None and (vocabulary is None or token < vocabulary))
    return next(usable, 0)


def encode_many(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Encode many texts. Fast tokenizers are asked directly, since what transformers lays around their answers costs as much as tokenizing
    on many cores.
    """
    if not tokenizer.is_fast:
        return [list(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    with on_all_cores(tokenizer) as backend:
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]


def place_many(tokenizer: Any, texts: list[str]) -> list[tuple[list[int], list[Span]]]:
    with on_all_cores(tokenizer) as backend:
        return [(encoding.ids, encoding.offsets) for encoding in backend.encode_batch(texts, add_special_tokens=False)]


@contextlib.contextmanager
def on_all_cores(tokenizer: Any) -> Iterator[Any]:
    """Give the library's own tokenizer, on all cores: only the process that builds the token cache comes here, and it starts no others
    meanwhile.
    """
    before = os.environ.get("TOKENIZERS_PARALLELISM", "false")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    try:
        yield backend
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = before


def tokenizer_files(folder: Path) -> list[Path]:
    """Files of a model's folder that decide which tokens a text becomes."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and FILES.fullmatch(path.name))


def tokenizer_digest(folder: Path, stops: list[int], template: str | None, variables: Mapping[str, Any]) -> str:
    """Digest over the tokenizer's files, stop tokens, the template that the run states with its variables, and the versions of the
    libraries that read them: another one means other tokens.
    """
    import tokenizers
    import transformers

    digest = hashlib.sha256(f"{tokenizers.__version__} {transformers.__version__} {stops}".encode())
    if template is not None or variables:
        digest.update(json.dumps([template, variables], sort_keys=True).encode())
    for path in tokenizer_files(folder):
        digest.update(f"{path.relative_to(folder)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
ASKS_FOR_TODAY = re.compile(r"strftime_now\(\s*([\"'])(.*?)\1\s*\)")
TODAY = datetime(2025, 1, 1)
"""The day that templates write which ask for today's (gpt-oss, Llama 3.2): the same data must give the same tokens on every day."""


def chat_template(tokenizer: Any, stops: Sequence[int], stated: Mapping[str, Any]) -> ChatTemplate | None:
    """The tokenizer's template with the variables that the run states; None without one, or without the offsets that only fast tokenizers
    know.
    """
    if not tokenizer.is_fast or tokenizer.chat_template is None:
        return None
    from transformers.utils.chat_template_utils import render_jinja_template

    variables = {**tokenizer.special_tokens_map, **stated}

    def template(tools: Sequence[Any]) -> str:
        return on_one_day(tokenizer.get_chat_template(None, list(tools) or None))  # some tokenizers have one for tools

    def rendered(messages: Sequence[Message], tools: Sequence[Any], options: Mapping[str, Any], **how: bool) -> Any:
        return render_jinja_template(
            conversations=[list(messages)], tools=list(tools) or None, chat_template=template(tools), **how, **{**variables, **options}
        )

    def render(messages: Sequence[Message], tools: Sequence[Any], generation_prompt: bool, options: Mapping[str, Any]) -> str:
        return str(rendered(messages, tools, options, add_generation_prompt=generation_prompt)[0][0])

    def marked(messages: Sequence[Message], tools: Sequence[Any], options: Mapping[str, Any]) -> list[Span]:
        return [(start, end) for start, end in rendered(messages, tools, options, return_assistant_tokens_mask=True)[1][0]]

    def encode(text: str) -> tuple[list[int], list[Span]]:
        tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(tokens["input_ids"]), [(start, end) for start, end in tokens["offset_mapping"]]

    special = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if str(token).strip()}
    return ChatTemplate(
        render=render,
        marked=marked if MARKS.search(template(())) else None,
        encode=encode,
        stops=tuple(special.get(stop) or str(tokenizer.decode([stop])) for stop in stops),
        special=frozenset(special.values()),
        thinks="</think>" in template(()),
    )


def own_template(path: Path) -> str:
    """The text of a template that the run states. Raises ConfigError for what is no template; another error where reading it again may
    help.
    """
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        text = path.read_text(encoding="utf-8")
        _compile_jinja_template(text)
    except OSError as error:
        raise refusal(
            f"training.data.chatTemplate {path} can't be read: {error.strerror}; every node must see the file there", error
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"training.data.chatTemplate {path} is not UTF-8; it must be a Jinja template as tokenizers have them") from error
    except TemplateSyntaxError as error:
        raise ConfigError(f"training.data.chatTemplate {path}:{error.lineno} is not a Jinja template: {first_line(error)}") from error
    if not text.strip():
        raise ConfigError(f"training.data.chatTemplate {path} is empty; it must be a Jinja template as tokenizers have them")
    return text


def on_one_day(template: str) -> str:
    """The template with a function of its own in the place of the one that gives today's date."""
    formats = {match[2]: TODAY.strftime(match[2]) for match in ASKS_FOR_TODAY.finditer(template)}
    if "strftime_now" not in template:
        return template
    dates = json.dumps(formats, ensure_ascii=False)
    return f"{{%- macro strftime_now(format) -%}}{{{{ {dates}.get(format, '{TODAY:%Y-%m-%d}') }}}}{{%- endmacro +%}}{template}"


def stop_tokens(folder: Path, tokenizer: Any) -> list[int]:
    """Tokens that servers stop at: `eos_token_id` of generation_config.json and config.json, and the tokenizer's own. Raises
    ConfigError.
    """
    stated = {number for name in ("generation_config.json", "config.json") for number in _stated(folder / name)}
    if tokenizer.eos_token_id is not None:
        stated.add(tokenizer.eos_token_id)
    return sorted(number for number in stated if number < len(tokenizer) and str(tokenizer.decode([number])).strip())


def _stated(path: Path) -> Iterator[int]:
    """The ids that a file states for all of the model, or for its part that reads and writes text."""
    if not path.is_file():
        return
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); copy the model's folder again") from error
    for section in (config, config.get("text_config")) if isinstance(config, dict) else ():
        stated = section.get("eos_token_id") if isinstance(section, dict) else None
        yield from (number for number in (stated if isinstance(stated, list) else [stated]) if isinstance(number, int))
