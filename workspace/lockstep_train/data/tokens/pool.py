"""Conversations tokenized by several processes: rendering a chat template is work of Python's own, of which threads do no more.

They are programs of their own and no forks, since a rank has threads of torch and NCCL when its data is prepared; each has a tokenizer of
its own. They start when a source turns out to take long, and the results come in the order of the data, as one process gives them. Where
one ends before its work is done, the rank goes on alone.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, BinaryIO, cast

from lockstep_machine.limits import usable_cores
from lockstep_spec.choices import TrainOn
from lockstep_train.base.limits import Say
from lockstep_train.data.read.records import AnySample, Conversation, Sample
from lockstep_train.data.read.text_files import Broken
from lockstep_train.data.tokens.chat import Encoded
from lockstep_train.data.tokens.encode import encode_samples
from lockstep_train.data.tokens.tokenizer import Tokenizer, load_tokenizer
from lockstep_train.data.tokens.turns import TemplateChoice

AFTER_SECONDS = 20.0
"""Seconds before processes are started: small data is done before they have imported what they need."""
PROCESSES = 8
"""Most processes: each takes some 400 MB, and a hundred thousand samples a minute are enough."""

Batch = list[AnySample]
Answer = tuple[list[Encoded], Broken]


def batch_line(batch: Batch) -> bytes:
    """Batch as a line of JSON. Raises TypeError or ValueError where a message holds what JSON has no form for."""
    return _line([vars(sample) for sample in batch])


def batch_of(line: bytes) -> Batch:
    return [Conversation(**_tuples(fields)) if "messages" in fields else Sample(**fields) for fields in json.loads(line)]


def answer_line(answer: Answer) -> bytes:
    encoded, broken = answer
    samples = [[item.ids, base64.b64encode(item.learned).decode(), item.line, item.remarks] for item in encoded]
    return _line({"samples": samples, "broken": vars(broken)})


def answer_of(line: bytes) -> Answer:
    """Answer from its line. Raises ValueError for half a line."""
    answer = json.loads(line)
    samples = [Encoded(ids, base64.b64decode(learned), number, tuple(remarks)) for ids, learned, number, remarks in answer["samples"]]
    reasons = [(number, reason) for number, reason in answer["broken"].pop("reasons")]
    return samples, Broken(**answer["broken"], reasons=reasons)


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, **{name: tuple(fields[name]) for name in ("messages", "tools", "untrained")}}


def _line(value: Any) -> bytes:
    """Line of JSON; lone surrogates, which no UTF-8 has, pass as escapes."""
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


class Lost(Exception):
    """Process that ended before it answered."""


def encode_batch(batch: Batch, tokenizer: Tokenizer, train_on: TrainOn, name: str) -> Answer:
    """Encode a batch: the samples that can be used, and the others."""
    broken = Broken(name)
    return encode_samples(batch, tokenizer, train_on, broken), broken


class Process:
    """Process that tokenizes, as `main` does."""

    def __init__(self, folder: Path, train_on: TrainOn, name: str, choice: TemplateChoice) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [
            sys.executable,
            "-m",
            "lockstep_train.data.tokens.pool",
            str(folder),
            train_on.value,
            name,
            choice.path or "",
            json.dumps(choice.variables),
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._batches, self._answers = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)

    def encode(self, line: bytes) -> Answer:
        """Encode a batch as `batch_line` gives it. Raises Lost."""
        try:
            self._batches.write(line)
            self._batches.flush()
            return answer_of(self._answers.readline())
        except (OSError, ValueError) as error:
            raise Lost from error

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close its streams, after nobody reads from them any more."""
        for stream in (self._batches, self._answers):
            with contextlib.suppress(OSError):  # what was still to be written
                stream.close()


class Pool:
    """Pool of processes, with a thread for each that only waits for it."""

    def __init__(self, processes: list[Process]) -> None:
        self.size = len(processes)
        self._processes = processes
        self._idle: SimpleQueue[Process] = SimpleQueue()
        for process in processes:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(self.size, "lockstep-tokenize")

    def submit(self, batch: Batch) -> Future[Answer] | None:
        """Hand a batch to a process; None for one that can't be handed over."""
        try:
            line = batch_line(batch)
        except (TypeError, ValueError):
            return None
        return self._threads.submit(self._encode, line)

    def close(self) -> None:
        for process in self._processes:
            process.end()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.close()

    def _encode(self, line: bytes) -> Answer:
        process = self._idle.get()
        try:
            return process.encode(line)
        finally:
            self._idle.put(process)


class Encoder:
    """Encoder of batches: by this process, and by a pool once it has taken long."""

    def __init__(self, here: Callable[[Batch], Answer], start: Callable[[], Pool | None], say: Say) -> None:
        self._here = here
        self._start = start
        self._say = say
        self._pool: Pool | None = None
        self._started = False
        self._waiting: deque[tuple[Batch, Future[Answer]]] = deque()

    def run(self, batches: Iterable[Batch]) -> Generator[tuple[int, Answer], None, None]:
        """Yield how many samples each batch has, and what became of it, in their order."""
        began = time.monotonic()
        try:
            for batch in batches:
                if (
                    not self._started
                    and time.monotonic() - began >= AFTER_SECONDS
                    and any(isinstance(item, Conversation) for item in batch)
                ):
                    self._started = True
                    self._pool = self._start()
                future = self._pool.submit(batch) if self._pool is not None else None
                if self._pool is not None and future is not None:
                    self._waiting.append((batch, future))
                    yield from self._answers(self._pool.size + 1)
                else:
                    yield from self._answers(0)
                    yield len(batch), self._here(batch)
            yield from self._answers(0)
        finally:
            self._close()

    def _answers(self, left: int) -> Iterator[tuple[int, Answer]]:
        """Yield the oldest answers, until so many are still waited for."""
        while len(self._waiting) > left:
            batch, future = self._waiting.popleft()
            try:
                answer = future.result()
            except (Lost, CancelledError):
                if self._pool is not None:
                    self._say("A tokenizing process ended early: this rank goes on alone, which takes longer")
                self._close()
                answer = self._here(batch)
            yield len(batch), answer

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def start_pool(tokenizer: Tokenizer, train_on: TrainOn, name: str, say: Say) -> Pool | None:
    """Start a pool; None where there is no core for it besides the one of this process, or the tokenizer is nowhere to be loaded from."""
    count = min(PROCESSES, int(usable_cores()) - 1)
    if count < 2 or tokenizer.folder is None:
        return None
    say(f"Tokenizing {name} with {count} processes")
    return Pool([Process(tokenizer.folder, train_on, name, tokenizer.choice) for _ in range(count)])


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
