"""Make a full model folder from a training and the base model, on a CPU, tensor by tensor (model/merger.py):

python -m lockstep_train.merge runs/my-job --output merged       # of the newest commit's shards
python -m lockstep_train.merge my-adapter --output merged        # of a PEFT adapter's folder

What needs no weights is refused before torch is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep_spec.files import make_directory, why_unwritten, write_durably
from lockstep_train.base.errors import ConfigError, TrainerError, print_problem, refusal
from lockstep_train.base.limits import Say
from lockstep_train.card import Provenance, kept_tokenizers, make_whole, provenance_of, step_of
from lockstep_train.checkpoint.commits import newest_whole
from lockstep_train.checkpoint.format.layout import ADAPTER_CONFIG, ADAPTER_WEIGHTS, MANIFEST
from lockstep_train.generate import base_of
from lockstep_train.model.base_files import adapter_record, refuse_other_base
from lockstep_train.model.stored import CONFIG, StoredTensor, copy_others, read_header, read_headers, weight_paths

if TYPE_CHECKING:
    from lockstep_train.model.updates import Skeleton, Update

READ = (
    "peft_type", "task_type", "r", "lora_alpha", "target_modules", "exclude_modules", "target_parameters", "modules_to_save",
    "fan_in_fan_out", "use_rslora", "use_dora", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
)  # fmt: skip
"""Keys of adapter_config.json that say how an adapter changes its base model."""
UNREAD = (
    "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "runtime_config",
    "megatron_core", "qalora_group_size", "eva_config",
)  # fmt: skip
"""Keys that change nothing of a trained adapter."""
BASE_KEPT = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the base model's weights as they were."""
APART = (
    "; embeddings and head were one and differ now (tie_word_embeddings: false): where an engine has one for both, as for Gemma, vLLM"
    " refuses the model, and llama.cpp leaves the head out"
)


@dataclass(frozen=True)
class Trained:
    """A training that can be merged: a commit, or an adapter's folder."""

    words: str
    """Words for it in messages: `step 100`."""
    base: Path
    """Folder of the base model, where nothing else is said."""
    origin: Provenance
    tokenizers: Sequence[Path]
    updates: Callable[[Skeleton], dict[str, Update]]
    held: AbstractContextManager[None]
    digest: str = ""
    """Hash of a sample of the base model, of commits that have none of its files."""


def merge(paths: Sequence[Path], output: Path, base: Path | None = None, say: Say = lambda line: None) -> str:
    """Merge the newest whole commit in `paths`, or the adapter in the only folder; what was done, in words. `say` hears what it is at.

    Raises ConfigError when there is none, when `base` (default: where the run had it) is another model or can't be merged into,
    and when `output` holds something. After any error, nothing is left in `output`.
    """
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty; give a new folder")
    trained = _adapter(paths[0], base) if len(paths) == 1 and is_adapter(paths[0]) else _commit(paths)
    folder = base or trained.base
    say(f"reading {folder}, to compare it with the base model of {trained.words}")
    _refuse_another_base(folder, trained)
    tensors = read_headers(weight_paths(folder))
    if not tensors:
        raise ConfigError(f"{folder} has no safetensors weights; convert the base model to safetensors first")
    with trained.held, nothing_half(output):
        from lockstep_train.model.merger import write_merged

        full = trained.origin.config is None
        changed, untied = write_merged(folder, output, tensors, trained.updates, full=full, say=say)
        copy_others(folder, output)
        make_whole(output, trained.origin, folder, trained.tokenizers, merged=True)
        config = json.loads((folder / CONFIG).read_text()) | ({"tie_word_embeddings": False} if untied else {})
        write_durably(output / CONFIG, json.dumps(config, indent=2).encode())  # last: without it, a folder is no model
    return f"Merged {trained.words} into {output}: {changed} tensors changed{APART if untied else ''}"


def is_adapter(folder: Path) -> bool:
    """Return True for a PEFT adapter's folder. A commit's has its config, too."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / MANIFEST).exists()


def _commit(paths: Sequence[Path]) -> Trained:
    commit, manifest, shards = newest_whole(paths, "merge")

    def updates(model: Skeleton) -> dict[str, Update]:
        from lockstep_train.model.merger import updates_of_commit

        return updates_of_commit(model, manifest, shards)

    return Trained(
        f"step {manifest.step}",
        Path(manifest.base_model),
        provenance_of(manifest),
        kept_tokenizers(commit.folders),
        updates,
        commit.held("merge"),
        manifest.identity.base,
    )


def _adapter(folder: Path, base: Path | None) -> Trained:
    """Raises ConfigError for an adapter that can't be read, or not be merged."""
    config, tensors = read_adapter(folder)
    if problem := unmergeable(config):
        raise ConfigError(f"{folder} can't be merged: {problem}; load it with peft instead")

    def updates(model: Skeleton) -> dict[str, Update]:
        from lockstep_train.model.merger import updates_of_adapter

        return updates_of_adapter(model, {key: config[key] for key in READ if key in config}, tensors, folder)

    name = str(config.get("base_model_name_or_path") or "")
    origin = Provenance(name, config.get("revision"), adapter_record(folder), config, step_of(folder))
    return Trained(f"the adapter {folder}", base or _base_of(folder), origin, [folder], updates, nullcontext())


def read_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Return a PEFT adapter's config, and where its tensors are. Raises ConfigError for what is no whole adapter."""
    try:
        config = dict(json.loads((folder / ADAPTER_CONFIG).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise refusal(f"{folder / ADAPTER_CONFIG} can't be read ({error}); give the folder of a PEFT adapter", error) from error
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ConfigError(f"{folder} has no {ADAPTER_WEIGHTS}; save the adapter with safetensors")
    return config, read_header(folder / ADAPTER_WEIGHTS, "copy the adapter again")


def _base_of(adapter: Path) -> Path:
    try:
        return base_of(adapter)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--model", "--base")) from error


def unmergeable(config: Mapping[str, Any]) -> str:
    """Return the setting of a PEFT adapter that nothing here can merge; "" where there is none (pure)."""
    if (kind := config.get("peft_type")) != "LORA":
        return f"its peft_type is {kind}, and only LORA can be"
    if (start := config.get("init_lora_weights")) not in BASE_KEPT:
        return f"its init_lora_weights is {start}, which changed the base model"
    others = {key: value for key, value in config.items() if key not in (*READ, *UNREAD, "init_lora_weights")}
    return next((f"its {key} is {json.dumps(value)}" for key, value in others.items() if value and value != "none"), "")


def _refuse_another_base(folder: Path, trained: Trained) -> None:
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} holds no {CONFIG}; say where the base model {trained.origin.name} is with --base")
    remedy = f"give that one with --base (the run had it at {trained.base})"
    if trained.origin.base_files:
        refuse_other_base(folder, trained.origin.base_files, trained.words, remedy)
    elif trained.digest:
        from lockstep_train.model.load import base_digest

        if base_digest(folder) != trained.digest:
            raise ConfigError(
                f"{folder} is not the base model that {trained.words} was trained on: its {CONFIG} or weights differ; {remedy}"
            )


@contextlib.contextmanager
def nothing_half(output: Path) -> Iterator[None]:
    """Make a folder to be written, which is empty or not there; after an error it is so again. Raises TrainerError for a full disk."""
    was_there = output.exists()
    try:
        make_directory(output)
        yield
    except BaseException as error:
        words = why_unwritten(error, output) if isinstance(error, OSError) else ""  # (before there is room again)
        with contextlib.suppress(OSError):
            for path in output.glob("*"):
                path.unlink()
            if not was_there:
                output.rmdir()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise TrainerError(f"{output} can't be written: {words}; nothing of it is left") from error
        raise


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lockstep_train.merge",
        description="Make a full model folder from a training and the base model, on a CPU.",
    )
    parser.add_argument(
        "source",
        type=Path,
        nargs="+",
        help="a run's folder, one step-N.aM folder, or an adapter's folder; several where shards are spread",
    )
    parser.add_argument("--output", type=Path, required=True, help="the model's folder: a new or an empty one")
    parser.add_argument("--base", type=Path, help="the base model's folder (default: where the run had it)")
    options = parser.parse_args(arguments)
    try:
        done = merge(options.source, options.output, options.base, lambda line: print(line, flush=True))
    except (TrainerError, OSError) as error:
        return print_problem(error)
    print(done)
    return 0


if __name__ == "__main__":
    sys.exit(main())
