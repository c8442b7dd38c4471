"""Print the first samples as the model would learn them: tokens in brackets (bold on a terminal) are learned, « » mark the stop tokens
among them.

lockstep run -f job.yaml --local --preview 3
python -m lockstep_train --run run.json --preview 3          a run's file that is there already
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from lockstep_spec.choices import OnBroken
from lockstep_spec.training import DataConfig
from lockstep_train.base.cache import cache_folder
from lockstep_train.base.errors import ConfigError
from lockstep_train.base.runfile import RunConfig
from lockstep_train.data.dataset import resolve_source, sources_of, template_choice
from lockstep_train.data.read.files import DataSource
from lockstep_train.data.read.text_files import Broken
from lockstep_train.data.tokens.chat import Encoded
from lockstep_train.data.tokens.encode import encode_paragraphs, encode_samples
from lockstep_train.data.tokens.source import Remarks
from lockstep_train.data.tokens.tokenizer import Tokenizer, load_tokenizer
from lockstep_train.model.fetched import with_tokenizer_here

LEARNED, PLAIN = "\x1b[1;32m", "\x1b[0m"


def preview(config: RunConfig, count: int, output: TextIO = sys.stdout) -> None:
    """Print the first `count` samples of every source. Reads no more than it prints, and no model. Raises ConfigError."""
    config = with_tokenizer_here(config, lambda line: print(line, file=output))
    folder = Path(config.training.model.name)
    if not folder.is_dir():
        raise ConfigError(f"training.model.name {folder} is not a folder; give the model's folder, with its tokenizer")
    data = config.training.data
    tokenizer = load_tokenizer(folder, template_choice(data))
    for source in sources_of(data):
        # No digest: nothing is cached, so a file needn't be read to its end.
        resolved = resolve_source(source, cache_folder(config.run_dir), lambda line: print(line, file=output), lambda *_: "")
        samples, notes = first_samples(resolved, data, tokenizer, count)
        for encoded in samples:
            print(describe(encoded, resolved, data, tokenizer, output.isatty()), file=output)
        remarks = Remarks(resolved.name)
        remarks.include(samples)
        for note in [*notes, *remarks.notes()]:
            print(note, file=output)


def first_samples(source: DataSource, data: DataConfig, tokenizer: Tokenizer, count: int) -> tuple[list[Encoded], list[str]]:
    """Return the first samples, and the notes on those that are left out. Raises ConfigError when one of them is broken that may not be."""
    broken = Broken(source.name)
    samples = list(itertools.islice(source.samples(broken), count))
    encoded = encode_paragraphs(samples, tokenizer) if source.plain_text else encode_samples(samples, tokenizer, data.train_on, broken)
    if data.on_broken is OnBroken.FAIL:
        broken.refuse()
    return encoded, [*broken.left_out(), *broken.not_read()]


def describe(encoded: Encoded, source: DataSource, data: DataConfig, tokenizer: Tokenizer, color: bool) -> str:
    total, learned = len(encoded.ids), sum(encoded.learned[1:])
    heading = f"{source.name}:{encoded.line}: {total} tokens, {learned} learned"
    if total > data.max_length and not source.plain_text:
        heading += f"; longer than maxLength = {data.max_length}: {data.overlong.value}"
    return f"{heading}\n{marked_text(encoded, tokenizer, color)}\n"


def marked_text(encoded: Encoded, tokenizer: Tokenizer, color: bool) -> str:
    begin, end = (LEARNED, PLAIN) if color else ("[", "]")
    return "".join(f"{begin}{stops_marked(ids, tokenizer)}{end}" if learned else tokenizer.decode(ids) for learned, ids in runs(encoded))


def stops_marked(ids: list[int], tokenizer: Tokenizer) -> str:
    groups = itertools.groupby(ids, key=lambda token: token in tokenizer.stops)
    return "".join(
        "".join(f"«{tokenizer.decode([token])}»" for token in group) if stops else tokenizer.decode(list(group)) for stops, group in groups
    )


def runs(encoded: Encoded) -> Iterator[tuple[bool, list[int]]]:
    """Group neighboring tokens of one kind: a character may be made of several."""
    for learned, group in itertools.groupby(zip(encoded.learned, encoded.ids, strict=True), key=lambda pair: pair[0]):
        yield bool(learned), [token for _, token in group]
