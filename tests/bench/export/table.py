"""Let PEFT, vLLM and llama.cpp read what Lockstep exports of each family and each kind of adapter, and print a table in Markdown.

A run of each kind is a commit with random weights, whose live model is recorded as a run does it. `--family`, `--kind`: only these.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests/train/ranks"), str(ROOT / "tests/support"), str(ROOT / "tests")]

from cases_merge import commit_state, randomize, recording  # noqa: E402
from cases_models import settings  # noqa: E402
from families import DENSE, SPARSE, VARIANTS, make_base, variant_of  # noqa: E402

from lockstep.platforms.engines.environments import Engine, converter, reader  # noqa: E402
from lockstep_train.base.errors import ConfigError  # noqa: E402
from lockstep_train.checkpoint.commits import newest_whole  # noqa: E402
from lockstep_train.model.load import model_class, quiet_transformers  # noqa: E402
from lockstep_train.model.trained import describe_trained, make_trainable  # noqa: E402
from lockstep_train.model.weight_files import PRECISIONS  # noqa: E402
from lockstep_train.proof.__main__ import ExportedCommit, export_for, verify  # noqa: E402
from lockstep_train.proof.compare import Verdict, compare  # noqa: E402

COLUMNS = ("PEFT", "vLLM", "merged BF16", "GGUF")
ABSENT = "no such module"
Ask = Callable[[Path, Path | None, Path], dict[str, Any]]


class Vllm:
    """A process of vLLM's environment that has imported it, and forks a reader for each question."""

    def __init__(self) -> None:
        python, program = reader(Engine.VLLM)
        command = [python, Path(__file__).with_name("forks.py"), program]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._until("ready")

    def _until(self, end: str) -> str:
        """Return the last JSON before the line that is `end`."""
        assert self.process.stdout is not None
        last = "{}"
        for line in self.process.stdout:
            if line.strip() == end:
                return last
            last = line if line.startswith("{") else last
        raise RuntimeError("vLLM's process has ended")

    def ask(self, model: Path, adapter: Path | None, prompts: Path) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(json.dumps(arguments_of(model, adapter, prompts)), file=self.process.stdin, flush=True)
        return json.loads(self._until("done"))


def ask_llama(model: Path, adapter: Path | None, prompts: Path) -> dict[str, Any]:
    done = subprocess.run([*reader(Engine.LLAMA_CPP), *arguments_of(model, adapter, prompts)], capture_output=True, text=True, check=False)
    return json.loads(done.stdout.splitlines()[-1])


def gguf_of(base: Path) -> Path:
    """Return a folder with the base as a GGUF file, made for the first kind of a family; the others have the same base."""
    made = base.parents[1] / f"{base.parent.name.partition('-')[0]}.gguf"
    if not made.exists():
        python, program = converter()
        made.mkdir()
        command = [python, program.with_name("convert_hf_to_gguf.py"), base, "--outtype", "f32", "--outfile", made / "base.gguf"]
        subprocess.run(command, check=False, capture_output=True)  # where it can't, the reader tries it again, and says why
    return made if any(made.iterdir()) else base


def arguments_of(model: Path, adapter: Path | None, prompts: Path) -> list[str]:
    return ["--model", str(model), *(["--adapter", str(adapter)] if adapter else []), "--prompts", str(prompts)]


def make_run(folder: Path, family: str, variant: dict[str, Any], tokenizers: Path) -> tuple[Path, dict[str, Any]]:
    """Return the commit of a run with random weights, and what its live model gives."""
    base = folder / "base"
    training = settings(base, "Stage2", variant)
    dtype = PRECISIONS[training.precision]
    make_base(base, family, dtype, tokenizers)
    model = make_trainable(model_class(base).from_pretrained(base, dtype=dtype), training, fresh=True)
    adapter = describe_trained(model, training)
    commit = folder / "run/checkpoints/step-7.a1"
    commit_state(commit, randomize(model, adapter["config"] is None), training, base, adapter)
    recorded = recording(model, training.precision.value)
    (folder / "run/logprobs").mkdir()
    (folder / "run/logprobs/step-7.a1.json").write_text(json.dumps(recorded))
    (folder / "prompts.json").write_text(json.dumps(recorded))
    return commit, recorded


def source_of(commit: Path) -> ExportedCommit:
    return ExportedCommit([commit], *newest_whole([commit], "export"), None)


class Notes:
    """Refusals in an engine's words, or ours, by their number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def cell(self, state: str, words: str) -> str:
        """Return a cell that refers to why it isn't equal."""
        words = re.sub(r"/\S+/|[\d,]+(?= bytes)", "…", " ".join(words.split()))
        return f"{state} [{self.numbers.setdefault(words, len(self.numbers) + 1)}]"

    def judge(self, recorded: dict[str, Any], answer: dict[str, Any]) -> str:
        """Return the cell for what an engine answers."""
        layout = answer.get("layout")
        if layout and layout["read"] != layout["of"]:
            return f"DROPPED ({layout['read']} of {layout['of']} numbers are read)"
        if "refused" not in answer:
            return words_of(compare(recorded, answer["prompts"]))
        return self.cell("layout read" if layout else "refused by name", answer["refused"])


def words_of(verdict: Verdict) -> str:
    if verdict.equal and verdict.proves:
        return f"equal ({verdict.largest:.0e})"
    return f"{'proves nothing' if verdict.equal else 'not equal'} ({verdict.largest:.1g})"


def by_transformers(engine: str, commit: Path, output: Path) -> str:
    export_for(engine, source_of(commit), output)
    return words_of(verify(engine, source_of(commit), output)[1])


def row(folder: Path, family: str, variant: dict[str, Any], tokenizers: Path, ask_vllm: Ask, notes: Notes) -> dict[str, str]:
    commit, recorded = make_run(folder, family, variant, tokenizers)
    rounded, _ = make_run(folder / "bf16", family, variant | {"precision": "BF16"}, tokenizers)
    base, prompts = folder / "base", folder / "prompts.json"

    merged = folder / "merged"
    export_for("merged", source_of(commit), merged)

    def exported(engine: str, model: Path, ask: Ask, convert: Sequence[str] = ()) -> str:
        """Return what the engine makes of the adapter, and, where that isn't to be equal, of the merged model."""
        try:
            export_for(engine, source_of(commit), folder / engine, convert)
            found = notes.judge(recorded, ask(model, folder / engine, prompts))
        except ConfigError as error:
            found = notes.cell("refused by name", str(error))
        return found if found.startswith("equal") else f"{found}, merged: {notes.judge(recorded, ask(merged, None, prompts))}"

    return {
        "PEFT": by_transformers("peft", commit, folder / "peft"),
        "vLLM": exported("vllm", base, ask_vllm),
        "merged BF16": by_transformers("merged", rounded, folder / "bf16/merged"),
        "GGUF": exported("gguf", gguf_of(base), ask_llama, [*map(str, converter())]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", action="append", choices=[*DENSE, *SPARSE])
    parser.add_argument("--kind", action="append", choices=VARIANTS)
    arguments = parser.parse_args()
    quiet_transformers()
    vllm, notes = Vllm(), Notes()
    print(f"| family | trained | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|", sep="\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="export-table-") as draft:
        tokenizers = Path(draft) / "tokenizers"
        python, _ = converter()
        subprocess.run([python, Path(__file__).with_name("vocabularies.py"), tokenizers], check=True, capture_output=True)
        for family in arguments.family or [*DENSE, *SPARSE]:
            for kind in arguments.kind or VARIANTS:
                variant = variant_of(family, kind)
                folder = Path(draft) / f"{family}-{kind.replace(' ', '-')}"
                try:
                    cells = row(folder, family, variant, tokenizers, vllm.ask, notes) if variant else dict.fromkeys(COLUMNS, ABSENT)
                except ConfigError as error:  # (a model that this kind doesn't fit)
                    cells = dict.fromkeys(COLUMNS, notes.cell("refused by name", str(error)))
                shutil.rmtree(folder, ignore_errors=True)
                print(f"| {family} | {kind} | {' | '.join(cells[name] for name in COLUMNS)} |", flush=True)
    print("", *(f"{number}. {words}" for words, number in notes.numbers.items()), sep="\n")


if __name__ == "__main__":
    main()
