"""Upkeep of a commit once it counts: older ones are rotated away, and its view appears.

All of it in the background of training, once on each volume, and nothing of it can undo the commit or stop the run.
"""

from __future__ import annotations

from pathlib import Path

from lockstep_train.base.limits import Say
from lockstep_train.base.ranks import Ranks
from lockstep_train.base.runfile import RunConfig
from lockstep_train.checkpoint.format.layout import MANIFEST
from lockstep_train.checkpoint.format.manifest import ShardRecord, decode
from lockstep_train.checkpoint.format.views import keep_tokenizer, refresh_views
from lockstep_train.checkpoint.format.volume import read_chain, read_view
from lockstep_train.checkpoint.save.replicas import Replicas, connect, local_only
from lockstep_train.checkpoint.save.rotation import Rotation
from lockstep_train.report import print_error


class Upkeep:
    """Maintain one volume's commits: rotation, views, copies. One rank a volume looks after it (`mine`); the others only send
    copies of shards.
    """

    def __init__(self, checkpoints: Path, keep: int, replicas: Replicas, tell: Say, *, mine: bool = True) -> None:
        self._checkpoints = checkpoints
        self.mine = mine
        self._rotation = Rotation(checkpoints, keep)
        self._replicas = replicas
        self._tell = tell

    def copy(self, folder: Path, shard: ShardRecord) -> ShardRecord:
        """Send a shard that is durable here where `replicas` wants it; the record says who has it."""
        return self._replicas.copy(folder, shard)

    def refresh(self) -> None:
        """Make the views as they should be."""
        if not self.mine:
            return
        try:
            refresh_views(self._checkpoints.parent, self._checkpoints, read_chain(self._checkpoints))
        except OSError as error:
            self._tell(f"{self._checkpoints.parent}: the checkpoint-N views can't be kept: {error}")

    def committed(self, folder: Path) -> None:
        """Look after the volume after a save. It did not come to a commit where the manifest is not there."""
        if not self.mine or not (folder / MANIFEST).exists():
            return
        try:
            self._rotation.rotate()
            manifest = decode((folder / MANIFEST).read_bytes())
        except (OSError, ValueError) as error:
            self._tell(f"{self._checkpoints}: older commits can't be rotated away: {error}")
            return
        self.refresh()
        lacking = self._replicas.lacking(manifest)
        if lacking:
            self._tell(
                f"CHECKPOINT step {manifest.step} | {', '.join(lacking)} of {folder} has only one copy: the neighbor could not keep the"
                " other"
            )
        newest = max((record.attempt for record in read_view(self._checkpoints).records), default=0)
        if newest > manifest.attempt:
            self._tell(
                f"CHECKPOINT step {manifest.step} | attempt {newest} has started in {self._checkpoints}: commits of this attempt no longer"
                " count"
            )


def start_upkeep(
    config: RunConfig, ranks: Ranks, attempt: int, master: tuple[str, int], model: Path, *, chats: bool, shared: bool, say: Say
) -> Upkeep:
    """Start the upkeep of this rank. A collective through the store. `master`: where rank 0 is reached; `model`: the base model's
    folder; `chats`: the run learns conversations.
    """
    settings, checkpoints = config.training.checkpoint, config.run_dir / "checkpoints"
    if shared and settings.replicas > 1:
        say("checkpoint.replicas has no effect: all nodes save to the same volume")
    mine = ranks.first if shared else ranks.first_of_node
    tell = say if ranks.first else lambda line: print_error(f"lockstep_train: node {ranks.node}: {line}")
    apart = not shared and settings.replicas > 1
    replicas = connect(ranks, checkpoints, attempt, settings.replicas, master) if apart else local_only(ranks)
    upkeep = Upkeep(checkpoints, settings.keep, replicas, tell, mine=mine)
    if mine:
        try:
            data = config.training.data
            variables = dict(data.chat_template_kwargs or {}) if chats else None
            keep_tokenizer(model, config.run_dir, Path(data.chat_template) if data.chat_template is not None else None, variables)
        except OSError as error:
            tell(f"{config.run_dir}: the tokenizer's files can't be kept beside the checkpoints: {error}")
    upkeep.refresh()
    return upkeep
