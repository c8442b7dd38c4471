"""Id under which a run is known to MLflow or Weights & Biases: kept in the run's folder, so that a resumed run goes on there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from lockstep_train.base.durable import write_durably


@dataclass(frozen=True)
class ServiceRun:
    """Id of a run at one service, in a file."""

    path: Path
    job_uid: str | None
    resumed_step: int

    def recall(self) -> str | None:
        """Id that an earlier attempt kept; None for a run that starts anew, be it in an old folder."""
        try:
            record = json.loads(self.path.read_bytes())
            same_run = self.resumed_step > 0 or (self.job_uid is not None and record["jobUid"] == self.job_uid)
            return str(record["id"]) if same_run else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, run_id: str) -> None:
        write_durably(self.path, json.dumps({"jobUid": self.job_uid, "id": run_id}).encode())
