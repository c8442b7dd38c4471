"""Lockstep's token cache against `datasets`: load_dataset, map(num_proc) and its Arrow cache, with the same tokenizer and the same samples.

.venv/bin/python tests/bench/data.py --samples 20000 --rounds 2

Both make the same token ids; the tokenizer of a model that has a template renders the chats for both. Each measurement is a process of its
own; they take turns, A B B A. Seconds of the machine and of its processors (children among them) are medians over the rounds.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = 2
LENGTH = 512
BATCH = 4
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
Measured = dict[str, float]


def make_inputs(folder: Path, samples: int) -> None:
    """Text of invented words, some frequent and most rare, as JSON lines; the same as chats; and a byte-level BPE tokenizer of 8,192
    tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    draw = random.Random(42)  # noqa: S311 (sample text)
    words = ["".join(draw.choices("etaoinshrdlucmfwypvbgkjqxz", range(26, 0, -1), k=draw.randint(2, 9))) for _ in range(20_000)]
    weights = [1 / (rank + 10) for rank in range(len(words))]

    def text(count: int) -> str:
        return " ".join(draw.choices(words, weights, k=count))

    with (folder / "text.jsonl").open("w") as lines, (folder / "chat.jsonl").open("w") as chats:
        for _ in range(samples):
            lines.write(json.dumps({"text": text(draw.randint(50, 350))}) + "\n")
            turns = [{"role": role, "content": text(draw.randint(10, 80))} for _ in range(2) for role in ("user", "assistant")]
            chats.write(json.dumps({"messages": turns}) + "\n")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8192, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator((text(200) for _ in range(500)), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(str(folder / "model"))
    LlamaConfig(vocab_size=8192).save_pretrained(str(folder / "model"))


def lockstep_open(folder: Path, kind: str) -> Any:
    """The training sequences: made now, or checked and mapped."""
    from lockstep_spec.training import DataConfig
    from lockstep_train.data.dataset import open_dataset, prepare

    tokenizer = tokenizer_of(folder / "model")
    data = DataConfig(path=str(folder / f"{kind}.jsonl"), max_length=LENGTH)
    return open_dataset(prepare(data, None, tokenizer, folder / "cache-lockstep", lambda line: None), tokenizer).training


def datasets_open(folder: Path, kind: str) -> Any:
    """The same as columns `ids` and `learned` of an Arrow file, as a map with a process for each core makes it."""
    import datasets

    from lockstep_spec.choices import TrainOn
    from lockstep_train.data.read.text_files import Broken, sample_of
    from lockstep_train.data.tokens.encode import encode_samples

    datasets.disable_progress_bars()
    model = folder / "model"

    def encode(batch: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
        name, values = next(iter(batch.items()))
        samples = [sample_of({name: value}, number) for value, number in zip(values, numbers, strict=True)]
        encoded = encode_samples(samples, tokenizer_of(model), TrainOn.ASSISTANT, Broken("bench"))
        return {"ids": [item.ids[:LENGTH] for item in encoded], "learned": [list(item.learned[:LENGTH]) for item in encoded]}

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    rows = datasets.load_dataset("json", data_files=str(folder / f"{kind}.jsonl"), split="train", cache_dir=str(folder / "cache-datasets"))
    made = rows.map(
        encode, batched=True, with_indices=True, num_proc=PROCESSES, remove_columns=rows.column_names, new_fingerprint=f"bench-{kind}"
    )
    return made.with_format("numpy")


@functools.cache
def tokenizer_of(model: Path) -> Any:
    """Loaded before anything is measured, since every rank does; forked processes have it, too."""
    from lockstep_train.data.tokens.tokenizer import load_tokenizer

    return load_tokenizer(model)


WAYS: dict[str, Callable[[Path, str], Any]] = {"lockstep": lockstep_open, "datasets": datasets_open}


def ids_of(row: Any) -> Any:
    return row["ids"] if isinstance(row, dict) else row.ids


def private_bytes() -> int:
    """Memory of this process that is no file's: what a mapped file holds can be dropped and read again."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon"))


def processor_seconds() -> float:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in usage)


def measure(way: str, folder: Path, kind: str, read: bool, gate: bool) -> Measured:
    """Open the data, and with `read` every sample of it once, in an order of chance."""
    import numpy
    import torch  # noqa: F401 (every rank has it)

    import lockstep_train.data.dataset  # noqa: F401 (imports are no part of what is compared)

    if way == "datasets":
        import datasets  # noqa: F401
    tokenizer_of(folder / "model")
    if gate:
        print("ready", flush=True)
        sys.stdin.readline()
    idle = processor_seconds()
    began, before = time.monotonic(), private_bytes()
    rows = WAYS[way](folder, kind)
    seconds = time.monotonic() - began
    found: Measured = {"seconds": seconds, "processor": processor_seconds() - idle, "samples": len(rows)}
    if read:
        order = numpy.random.default_rng(1).permutation(len(rows))
        began = time.monotonic()
        tokens = 0
        for first in range(0, len(rows) - BATCH, BATCH):
            batch = [ids_of(rows[int(index)]) for index in order[first : first + BATCH]]
            tokens += sum(map(len, batch))
        found["batch"] = (time.monotonic() - began) / (len(rows) // BATCH)
        found["memory"] = private_bytes() - before
        found["tokens"] = tokens
    return found


def command(way: str, folder: Path, kind: str, *options: str) -> list[str]:
    return [sys.executable, __file__, "--folder", str(folder), "--way", way, "--kind", kind, *options]


def run(way: str, folder: Path, kind: str, *options: str) -> Measured:
    output = subprocess.run(command(way, folder, kind, *options), check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])


def cache_of(way: str, folder: Path) -> Path:
    return folder / f"cache-{way}"


def start(way: str, folder: Path, kind: str, count: int) -> list[subprocess.Popen[str]]:
    """Processes that have all imports and the tokenizer, and begin now."""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    processes = [subprocess.Popen(command(way, folder, kind, "--gate"), text=True, start_new_session=True, **pipes) for _ in range(count)]
    for process in processes:
        while "ready" not in process.stdout.readline():
            assert process.poll() is None
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    return processes


def kill_halfway(way: str, folder: Path, kind: str, seconds: float) -> Measured:
    """Measure what a first start leaves when it is killed, and how long the next start takes."""
    (process,) = start(way, folder, kind, 1)
    time.sleep(seconds)
    os.killpg(process.pid, 9)
    process.wait()
    left = size_of(cache_of(way, folder))
    return {"left": left, **run(way, folder, kind)}


def size_of(folder: Path) -> int:
    """Size in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def together(way: str, folder: Path, kind: str) -> Measured:
    """Two processes that begin at once with nothing made: two jobs on one volume. The seconds of the later one."""
    processes = start(way, folder, kind, 2)
    outputs = [process.communicate()[0] for process in processes]
    whole = [json.loads(output.splitlines()[-1]) for process, output in zip(processes, outputs, strict=True) if process.returncode == 0]
    slowest = max(measured["seconds"] for measured in whole)
    return {"seconds": slowest, "processor": sum(measured["processor"] for measured in whole), "failed": 2 - len(whole)}


def turns(rounds: int) -> Iterator[str]:
    for number in range(rounds):
        yield from list(WAYS)[:: 1 if number % 2 == 0 else -1]


def compare(folder: Path, kind: str, rounds: int) -> dict[str, dict[str, Any]]:
    """way → part → the medians of its figures."""
    measured: dict[str, dict[str, list[Measured]]] = {way: {} for way in WAYS}
    for way in turns(rounds):
        shutil.rmtree(cache_of(way, folder), ignore_errors=True)
        first = run(way, folder, kind)
        first["disk"] = size_of(cache_of(way, folder))
        parts = {"first": first, "warm": run(way, folder, kind), "read": run(way, folder, kind, "--read")}
        shutil.rmtree(cache_of(way, folder))
        parts["killed"] = kill_halfway(way, folder, kind, first["seconds"] / 2)
        shutil.rmtree(cache_of(way, folder))
        parts["together"] = together(way, folder, kind)
        for part, figures in parts.items():
            measured[way].setdefault(part, []).append(figures)
    return {way: {part: medians(rows) for part, rows in parts.items()} for way, parts in measured.items()}


def medians(rows: list[Measured]) -> Measured:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def summary(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The figures of docs/benchmarks.md."""
    return {
        way: {
            "tokens_per_second": round(parts["read"]["tokens"] / parts["first"]["seconds"]),
            "first_start_seconds": round(parts["first"]["seconds"], 1),
            "first_start_processor_seconds": round(parts["first"]["processor"], 1),
            "disk_megabytes": round(parts["first"]["disk"] / 1e6, 1),
            "warm_start_seconds": round(parts["warm"]["seconds"], 2),
            "batch_milliseconds": round(parts["read"]["batch"] * 1e3, 2),
            "memory_of_a_rank_megabytes": round(parts["read"]["memory"] / 1e6, 1),
            "left_by_a_kill_megabytes": round(parts["killed"]["left"] / 1e6, 1),
            "start_after_a_kill_seconds": round(parts["killed"]["seconds"], 1),
            "two_at_once_seconds": round(parts["together"]["seconds"], 1),
            "two_at_once_processor_seconds": round(parts["together"]["processor"], 1),
            "two_at_once_failed": parts["together"]["failed"],
        }
        for way, parts in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kind", choices=["text", "chat"])
    for internal in ("--folder", "--way"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    for internal in ("--read", "--gate"):
        parser.add_argument(internal, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "workspace"))
    if options.way:
        print(json.dumps(measure(options.way, Path(options.folder), options.kind, options.read, options.gate)))
        return
    with tempfile.TemporaryDirectory() as folder:
        make_inputs(Path(folder), options.samples)
        for kind in [options.kind] if options.kind else ["text", "chat"]:
            print(json.dumps({kind: summary(compare(Path(folder), kind, options.rounds))}, indent=1), flush=True)


if __name__ == "__main__":
    main()
