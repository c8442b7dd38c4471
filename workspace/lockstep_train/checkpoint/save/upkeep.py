"""Upkeep of a commit once it counts: older ones are rotated away, its view appears, its adapter is exported.

All of it in the background of training, once on each volume, and nothing of it can undo the commit or stop the run.
"""

from __future__ import annotations

import queue
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep_spec.choices import Method
from lockstep_train.base.limits import END_SECONDS, Say
from lockstep_train.base.ranks import Ranks
from lockstep_train.base.runfile import RunConfig
from lockstep_train.checkpoint.format.layout import MANIFEST, TRASH
from lockstep_train.checkpoint.format.manifest import Manifest, ShardRecord, decode
from lockstep_train.checkpoint.format.readers import reading
from lockstep_train.checkpoint.format.views import keep_tokenizer, refresh_views
from lockstep_train.checkpoint.format.volume import read_chain, read_view
from lockstep_train.checkpoint.save.replicas import Replicas, connect, local_only
from lockstep_train.checkpoint.save.rotation import Rotation
from lockstep_train.report import print_error

WriteAdapter = Callable[[Path, Manifest, Sequence[Path]], None]
"""Writer of the adapter of a commit into its folder, from shards at these paths: export.export_shards."""


class Upkeep:
    """Maintain one volume's commits: rotation, views, copies, exports. One rank a volume looks after it (`mine`); the others only send
    copies of shards.
    """

    def __init__(
        self, checkpoints: Path, keep: int, replicas: Replicas, tell: Say, *, mine: bool = True, exporter: Exporter | None = None
    ) -> None:
        self._checkpoints = checkpoints
        self.mine = mine
        self._rotation = Rotation(checkpoints, keep)
        self._replicas = replicas
        self._tell = tell
        self._exporter = exporter

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
        if self._exporter is not None:
            self._exporter.begin(folder, manifest)

    def close(self) -> None:
        """Wait for an export under way."""
        if self._exporter is not None:
            self._exporter.close()  # the server stays: other nodes may still be fetching, until all ranks leave


class Exporter:
    """Adapter folders, one after the other; a commit that comes while two are waiting takes the place of the waiting one."""

    def __init__(self, replicas: Replicas, write: WriteAdapter, tell: Say, patience_seconds: float = END_SECONDS) -> None:
        self._replicas = replicas
        self._write = write
        self._tell = tell
        self._patience = patience_seconds
        self._waiting: queue.Queue[tuple[Path, Manifest] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="lockstep-export", daemon=True)
        self._thread.start()

    def begin(self, folder: Path, manifest: Manifest) -> None:
        self._waiting.put((folder, manifest))

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join(self._patience)
        if self._thread.is_alive():
            self._tell(
                f"an adapter beside the checkpoints is not exported: it takes longer than {self._patience:.0f} s, and the run is over"
            )

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            following = list(self._waiting.queue)
            if any(following):
                self._tell(f"CHECKPOINT step {item[1].step} | its adapter is not exported: a newer commit is there already")
                continue
            try:
                self._export(*item)
            except (OSError, ValueError) as error:
                self._tell(f"CHECKPOINT step {item[1].step} | its adapter can't be exported: {error}")

    def _export(self, folder: Path, manifest: Manifest) -> None:
        """Export from the shards: those that other volumes have are fetched first. The commit is held, so that rotation leaves it alone."""
        with (
            reading(folder, f"job {manifest.job}, exporting"),
            tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{TRASH}fetched-") as fetched,
        ):
            Path(fetched).chmod(Path(fetched).stat().st_mode | 0o070)  # left behind by a kill, a later run may remove it as another user
            paths = [self._here(folder, shard, Path(fetched)) for shard in manifest.shards]
            self._write(folder, manifest, paths)

    def _here(self, folder: Path, shard: ShardRecord, fetched: Path) -> Path:
        if (folder / shard.file).is_file():  # written by this run just now
            return folder / shard.file
        self._replicas.fetch(folder, shard, fetched / shard.file)
        return fetched / shard.file


def start_upkeep(
    config: RunConfig, ranks: Ranks, attempt: int, master: tuple[str, int], model: Path, write: WriteAdapter, *, shared: bool, say: Say
) -> Upkeep:
    """Start the upkeep of this rank. A collective through the store. `master`: where rank 0 is reached; `model`: the base model's folder;
    `write`: makes an adapter of a commit's shards."""
    settings, checkpoints = config.training.checkpoint, config.run_dir / "checkpoints"
    if shared and settings.replicas > 1:
        say("checkpoint.replicas has no effect: all nodes save to the same volume")
    exports = settings.export_adapter and config.training.method is Method.LORA
    if settings.export_adapter and not exports:
        say("checkpoint.exportAdapter has no effect: method Full trains no adapter")
    mine = ranks.first if shared else ranks.first_of_node
    tell = say if ranks.first else lambda line: print_error(f"lockstep_train: node {ranks.node}: {line}")
    apart = not shared and (settings.replicas > 1 or exports)
    replicas = connect(ranks, checkpoints, attempt, settings.replicas, master) if apart else local_only(ranks)
    patience = min(0.9 * END_SECONDS, config.training.limits.collective_timeout_seconds / 2)  # the other ranks are at the end already
    exporter = Exporter(replicas, write, tell, patience) if mine and exports else None
    upkeep = Upkeep(checkpoints, settings.keep, replicas, tell, mine=mine, exporter=exporter)
    if mine:
        try:
            template = config.training.data.chat_template
            keep_tokenizer(model, config.run_dir, Path(template) if template is not None else None)
        except OSError as error:
            tell(f"{config.run_dir}: the tokenizer's files can't be kept beside the checkpoints: {error}")
    upkeep.refresh()
    return upkeep
