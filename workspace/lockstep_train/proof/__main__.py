"""Export a run's adapter for an engine, and prove that the engine reads it as it was trained:

python -m lockstep_train.proof runs/my-job --output adapter --for vllm --verify
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep_spec.choices import Precision, Quantization
from lockstep_spec.exits import DONE, FAILED
from lockstep_spec.files import make_directory
from lockstep_train.base.errors import ConfigError, TrainerError, print_problem, reason_of, refusal
from lockstep_train.base.imports import import_bitsandbytes, import_peft
from lockstep_train.card import kept_tokenizers, make_whole, provenance_of
from lockstep_train.checkpoint.commits import Commit, newest_whole
from lockstep_train.checkpoint.format.manifest import Manifest
from lockstep_train.checkpoint.format.shards import ShardReader
from lockstep_train.export import export, write_streaming
from lockstep_train.logprobs import FOLDER, LOGPROBS, put_beside, top_of
from lockstep_train.merge import merge
from lockstep_train.model.base_files import refuse_other_base
from lockstep_train.model.load import load_whole
from lockstep_train.model.merger import updates_of_commit
from lockstep_train.model.quantize import keep_trainable, loading_options
from lockstep_train.model.stored import CONFIG, read_headers, weight_paths
from lockstep_train.model.updates import build_skeleton
from lockstep_train.model.weight_files import PRECISIONS
from lockstep_train.proof.compare import Verdict, compare
from lockstep_train.proof.layouts import VLLM_STACKED, EngineRefusal, refuse_half, refuse_settings, stored_factors
from lockstep_train.zero.kinds import MASTER

ENGINES = {"peft": "PEFT", "merged": "transformers", "vllm": "vLLM 0.32", "gguf": "llama.cpp"}
GGUF = "adapter.gguf"


@dataclass(frozen=True)
class ExportedCommit:
    """The commit that is exported, and the folder of its base model."""

    paths: Sequence[Path]
    commit: Commit
    manifest: Manifest
    shards: Sequence[Path]
    stated_base: Path | None

    @property
    def base(self) -> Path:
        """Return the base model's folder: the one that is stated, or where the run had it. Raises ConfigError for another model's."""
        folder, step = self.stated_base or Path(self.manifest.base_model), f"step {self.manifest.step}"
        if not (folder / CONFIG).is_file():
            raise ConfigError(f"{folder} holds no {CONFIG}; say with --base where the base model of {step} is")
        if self.manifest.identity.base_files:
            refuse_other_base(folder, self.manifest.identity.base_files, step, "give that one with --base")
        return folder

    @property
    def recording(self) -> Path | None:
        """Return the recording of this commit, in its run's folder."""
        places = (folder.absolute().parents[1] / FOLDER / f"{self.commit.name}.json" for folder in self.commit.folders)
        return next((place for place in places if place.is_file()), None)


def export_for(engine: str, source: ExportedCommit, output: Path, converter: Sequence[str] = ()) -> str:
    """Export for one of ENGINES; what was done, in words. `converter`: the command that makes a GGUF file of an adapter's folder.

    Raises ConfigError where the engine can't take it, and what `export` and `merge` raise.
    """
    words = f"Exported step {source.manifest.step} (attempt {source.manifest.attempt}) to {output}"
    if engine == "merged":
        words = merge(source.paths, output, source.stated_base)
    elif engine == "peft":
        export(source.paths, output)
    else:
        _export_stored(engine, source, output, converter)
    put_beside(source.recording, output)
    return words


def _export_stored(engine: str, source: ExportedCommit, output: Path, converter: Sequence[str]) -> None:
    """Write an adapter under the names of the base model's files, or as PEFT has it where vLLM takes that; for llama.cpp convert it."""
    manifest, base = source.manifest, source.base
    config = manifest.adapter["config"]
    if config is None:
        raise ConfigError(f"{source.commit.name} was trained with method Full and holds a whole model, no adapter; use --for merged")
    reader = ShardReader(source.shards[0].parent, manifest, source.shards)
    skeleton = build_skeleton(base, read_headers(weight_paths(base)))
    updates = updates_of_commit(skeleton, manifest, source.shards)
    try:
        refuse_settings(engine, config)
        if engine == "vllm" and skeleton.model.config.model_type in VLLM_STACKED:
            refuse_half(updates)
            export(source.paths, output)
            return
        factors = {factor.name: factor for factor in stored_factors(updates, reader.shapes, skeleton.layouts)}
    except EngineRefusal as error:
        size = sum(path.stat().st_size for path in weight_paths(base))
        raise ConfigError(f"{ENGINES[engine]} can't read this adapter: {error}; use --for merged ({size:,} bytes)") from error
    # (rsLoRA's scale becomes alpha's: llama.cpp knows no other)
    alpha = config["lora_alpha"] * (math.sqrt(config["r"]) if config["use_rslora"] else 1)
    modules = sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in factors})
    plain = {"target_parameters": None, "target_modules": modules, "use_rslora": False, "lora_alpha": alpha}
    adapter = {"config": config | plain, "names": {name: name for name in factors}}
    shapes = {name: factor.shape for name, factor in factors.items()}

    def read(name: str) -> torch.Tensor:
        factor = factors[name]
        if factor.source is None:
            return torch.zeros(factor.shape)
        return factor.cut(reader.read(factor.source, MASTER).view(reader.shapes[factor.source])).contiguous()

    with source.commit.held("export"), tempfile.TemporaryDirectory(prefix="lockstep-export-") as draft:
        if engine == "vllm":
            make_whole(output, provenance_of(manifest), base, kept_tokenizers(source.commit.folders))
        write_streaming(
            output if engine == "vllm" else Path(draft), shapes, read, adapter, manifest.precision, manifest.identity.base_files
        )
        if engine == "gguf":
            make_directory(output)
            code, _, words = _ran([*converter, "--base", str(base), "--outfile", str(output / GGUF), draft])
            if code:
                raise ConfigError(f"llama.cpp's converter refuses this adapter: {words}; use --for merged")


def _ran(command: Sequence[str]) -> tuple[int, str, str]:
    """Run an engine's program, and return its exit code, its output, and the last line that it wrote."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    written = [f"exit code {ended.returncode}", *ended.stdout.splitlines(), *ended.stderr.splitlines()]
    return ended.returncode, ended.stdout, written[-1]


def verify(engine: str, source: ExportedCommit, output: Path, reader: Sequence[str] = ()) -> tuple[str, Verdict]:
    """Return the engine's name, and whether it reads `output` as the live model was. `reader`: the command that starts the engine.

    Raises ConfigError where nothing was recorded to compare with, and where the engine refuses.
    """
    step = f"step {source.manifest.step}"
    try:
        recorded = json.loads((output / LOGPROBS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        remedy = "export a step with an evaluation, or leave out --verify"
        raise ConfigError(
            f"{step} has no {LOGPROBS} to compare with, which runs record at their end and beside evaluations; {remedy}"
        ) from None
    if recorded["quantization"] != "None" and engine != "peft":
        raise ConfigError(f"{step} was trained on weights packed as {recorded['quantization']}: only --for peft can be verified")
    if recorded["prompts"][0]["base_top"] is None:  # (of method Full)
        bases = read_by_transformers(source.base, None, recorded)
        recorded["prompts"] = [{**prompt, "base_top": base["top"]} for prompt, base in zip(recorded["prompts"], bases, strict=True)]
    if engine == "merged":
        return ENGINES[engine], compare(recorded, read_by_transformers(output, None, recorded))
    if engine == "peft":
        return ENGINES[engine], compare(recorded, read_by_transformers(source.base, output, recorded))
    name, read = read_by_engine([*reader, "--model", str(source.base), "--adapter", str(output)], recorded)
    return name, compare(recorded, read)


def read_by_transformers(model: Path, adapter: Path | None, recorded: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Load a model's folder, with an adapter or without, in the precision of the run. Raises ConfigError for what can't be loaded."""
    precision, quantization = Precision(recorded["precision"]), Quantization(recorded["quantization"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if quantization is not Quantization.NONE:
        import_bitsandbytes()
    loaded: Any = load_whole(model, precision, device, **loading_options(quantization, PRECISIONS[precision]))
    if quantization is not Quantization.NONE:
        keep_trainable(loaded)
    if adapter is not None:
        try:
            loaded = import_peft().PeftModel.from_pretrained(loaded, str(adapter), autocast_adapter_dtype=False)
        except Exception as error:  # whatever a folder's files lead to
            raise refusal(f"peft can't load {adapter}: {reason_of(error)}", error) from error
        for name, parameter in loaded.named_parameters():
            if "lora_" in name:  # peft makes them FP32 where it can't read a dtype off packed weights
                parameter.data = parameter.data.to(PRECISIONS[precision])
    loaded.eval()
    return [{"top": top_of(loaded, prompt, device)} for prompt in recorded["prompts"]]


def read_by_engine(command: Sequence[str], recorded: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """Return an engine's name with its version, and what it reads. Raises ConfigError with the engine's own words where it refuses,
    TrainerError where its reader gives no answer.
    """
    asked = {**recorded, "prompts": [{key: prompt[key] for key in ("tokens", "positions")} for prompt in recorded["prompts"]]}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(asked, file)
        file.flush()
        _, output, words = _ran([*command, "--prompts", file.name])
    try:
        answer = json.loads(output.splitlines()[-1])
        name = f"{answer['engine']} {answer.get('version', '')}".strip()
        if "refused" in answer:
            layout = answer.get("layout")
            took = f" (its loader took {layout['read']} of the adapter's {layout['of']} numbers)" if layout else ""
            raise ConfigError(f"{name} refuses it: {answer['refused']}{took}")
        return name, answer["prompts"]
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise TrainerError(f"{command[1]} gave no answer: {words}") from error


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lockstep_train.proof", description="Export a run's adapter for an engine, on a CPU.")
    parser.add_argument("source", type=Path, nargs="+", help="a run's folder, or one step-N.aM folder; several where shards are spread")
    parser.add_argument("--output", type=Path, required=True, help="the folder to write")
    parser.add_argument("--for", dest="engine", choices=ENGINES, default="peft", help="the engine that is to read it (default: peft)")
    parser.add_argument("--base", type=Path, help="the base model's folder (default: where the run had it)")
    parser.add_argument("--verify", action="store_true", help="load it in the engine, and compare with the model that was trained")
    parser.add_argument("--reader", nargs=2, default=(), help="the engine's Python, and the program that reads by it")
    parser.add_argument("--converter", nargs=2, default=(), help="a Python, and llama.cpp's program that converts an adapter")
    options = parser.parse_args(arguments)
    try:
        source = ExportedCommit(options.source, *newest_whole(options.source, "export"), options.base)
        print(export_for(options.engine, source, options.output, options.converter), flush=True)
        if not options.verify:
            return DONE
        name, verdict = verify(options.engine, source, options.output, options.reader)
    except (TrainerError, OSError) as error:
        return print_problem(error)
    print(verdict.words(name))
    return DONE if verdict.equal and verdict.proves else FAILED


if __name__ == "__main__":
    sys.exit(main())
