"""A process that tokenizes for a rank: python -m lockstep_train.data.tokens.worker TOKENIZER-FOLDER TRAIN-ON SOURCE TEMPLATE VARIABLES

Batches of samples come on its standard input, answers go to its standard output, until the input ends: with the rank, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import BinaryIO

from lockstep_spec.choices import TrainOn
from lockstep_train.data.tokens.pool import answer_line, batch_of, encode_batch
from lockstep_train.data.tokens.tokenizer import Tokenizer, load_tokenizer
from lockstep_train.data.tokens.turns import TemplateChoice


def serve(tokenizer: Tokenizer, train_on: TrainOn, name: str, batches: BinaryIO, answers: BinaryIO) -> None:
    for line in batches:
        if not line.endswith(b"\n"):  # the rank was killed while it wrote
            return
        answers.write(answer_line(encode_batch(batch_of(line), tokenizer, train_on, name)))
        answers.flush()


def main(folder: str, train_on: str, name: str, template: str, variables: str) -> None:
    """`template` is the file of a chat template, or nothing for the tokenizer's own; `variables` are its variables as JSON."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the rank is asked to stop, too, and decides
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints is no answer
    with contextlib.suppress(BrokenPipeError):
        choice = TemplateChoice(template or None, json.loads(variables))
        serve(load_tokenizer(Path(folder), choice), TrainOn(train_on), name, sys.stdin.buffer, answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
