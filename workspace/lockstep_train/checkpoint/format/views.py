"""runs/<job>/checkpoint-N beside runs/<job>/checkpoints: what people and tools look for, pointing at the commit of step N.

checkpoint-100 → checkpoints/step-100.a1     the shards and the manifest, and beside them, once the commit counts:
    metadata.json                            in short what the manifest says, for tools that know no manifests
    adapter_config.json                      peft's
    tokenizer.json …                         hard links into runs/<job>/tokenizer, copied once from the model's folder

Nothing here is needed to resume: what a power loss takes is made again at the next start. Where a volume has no symbolic
links, checkpoint-N is a folder with the small files, and metadata.json says where the commit is.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep_spec.files import make_directory, write_durably
from lockstep_train.checkpoint.format.layout import ADAPTER_CONFIG, MANIFEST, CommitName, parse_commit
from lockstep_train.checkpoint.format.manifest import Manifest, decode

METADATA = "metadata.json"
TOKENIZER = "tokenizer"
CHATS = "chat_template_kwargs.json"
"""File there of a run that has learned conversations: the variables of its chat template."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_VIEW = re.compile(r"checkpoint-(\d+)")


def keep_tokenizer(model: Path, run_dir: Path, template: Path | None = None, variables: Mapping[str, Any] | None = None) -> None:
    """Copy the tokenizer's files beside the checkpoints, once, with the chat template that the run was trained with. Raises OSError.

    `variables`: of the template; None: the run learns no conversations.
    """
    target = run_dir / TOKENIZER
    if template is not None:
        make_directory(target)
        write_durably(target / "chat_template.jinja", template.read_bytes())
    for name in TOKENIZER_FILES:
        if (model / name).is_file() and not (target / name).exists():
            make_directory(target)
            write_durably(target / name, (model / name).read_bytes())
    if variables is None:
        (target / CHATS).unlink(missing_ok=True)
    else:
        make_directory(target)
        write_durably(target / CHATS, json.dumps(dict(variables)).encode())


def metadata(manifest: Manifest) -> dict[str, Any]:
    return {
        "format": "sharded_lora" if manifest.adapter.get("config") else "sharded_full",
        "num_shards": len(manifest.shards),
        "commit": str(CommitName(attempt=manifest.attempt, step=manifest.step)),
        "step": manifest.step,
        "samples_consumed": manifest.samples_consumed,
        "eval_loss": manifest.eval_loss,
        "eval_step": manifest.eval_step,
        "content": manifest.content,
        "precision": manifest.precision,
        "zero_stage": manifest.zero_stage,
        "world_size": manifest.world_size,
        "global_batch_size": manifest.identity.global_batch_size,
        "base_model": manifest.base_model,
        "files": {shard.file: {"bytes": shard.bytes, "nodes": list(shard.nodes)} for shard in manifest.shards},
    }


def refresh_views(run_dir: Path, checkpoints: Path, chain: Iterable[CommitName]) -> None:
    """Make the view of every step of the chain (newest first) point at its newest commit, and remove views of what is gone.

    A checkpoint-N that somebody else put there is left alone. Raises OSError.
    """
    newest: dict[int, CommitName] = {}
    for name in chain:
        newest.setdefault(name.step, name)
    for entry in run_dir.iterdir():
        match = _VIEW.fullmatch(entry.name)
        if match and (target := _target(entry)) is not None and newest.get(int(match[1])) != target:
            _remove(entry)
    for step, name in newest.items():
        view = run_dir / f"checkpoint-{step}"
        _dress(checkpoints / str(name), run_dir)
        if not os.path.lexists(view):
            _point(view, checkpoints / str(name))


def behind_view(path: Path) -> Path:
    """The commit's folder that a view shows, so that the commit outlives the view; any other path but a link as it is."""
    if path.is_symlink():
        return Path(os.path.realpath(path))
    commit = None if (path / MANIFEST).exists() else _target(path)
    return path.parent / "checkpoints" / str(commit) if commit is not None else path


def _target(view: Path) -> CommitName | None:
    """The commit that one of our views is of; None for anything else."""
    if view.is_symlink():
        target = view.readlink()
        return parse_commit(target.name) if target.parent.name == "checkpoints" else None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return parse_commit(json.loads((view / METADATA).read_text())["commit"])
    return None


def _remove(view: Path) -> None:
    if view.is_symlink():
        view.unlink(missing_ok=True)
    else:
        shutil.rmtree(view, ignore_errors=True)


def _dress(commit: Path, run_dir: Path) -> None:
    """The small files beside the shards, where they are missing."""
    if (commit / METADATA).exists():
        return
    try:
        manifest = decode((commit / MANIFEST).read_bytes())
    except ValueError:
        return  # damaged: nobody should find it dressed up
    _write_small(commit, manifest, run_dir)


def _write_small(folder: Path, manifest: Manifest, run_dir: Path) -> None:
    """metadata.json last: where it is, the others are."""
    for file in sorted((run_dir / TOKENIZER).glob("*")):
        _link(file, folder / file.name)
    if manifest.adapter.get("config"):
        write_durably(folder / ADAPTER_CONFIG, json.dumps(manifest.adapter["config"], indent=2, sort_keys=True).encode())
    write_durably(folder / METADATA, json.dumps(metadata(manifest), indent=2).encode())


def _link(file: Path, to: Path) -> None:
    """A hard link costs no space and survives a copy of the folder; not every file system has them."""
    if to.exists():
        return
    try:
        to.hardlink_to(file)
    except OSError:
        with contextlib.suppress(FileExistsError):
            shutil.copyfile(file, to)


def _point(view: Path, commit: Path) -> None:
    """Made beside the name and renamed onto it: two nodes may do this at once."""
    temporary = view.with_name(f".{view.name}.{secrets.token_hex(8)}.tmp")
    try:
        temporary.symlink_to(Path(commit.parent.name) / commit.name)
    except OSError:
        temporary.mkdir()
        _write_small(temporary, decode((commit / MANIFEST).read_bytes()), view.parent)
    try:
        temporary.rename(view)
    except OSError:
        _remove(temporary)  # the other node was first
