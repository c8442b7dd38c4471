"""Event files for TensorBoard, which is a process of its own: `tensorboard --logdir runs/x/logs/tensorboard`."""

from __future__ import annotations

import warnings
from pathlib import Path

from lockstep_train.report.sinks.sink import Point


class TensorBoardWriter:
    """Writer by torch. After a resume, TensorBoard hides what an earlier attempt wrote of the steps that are done again."""

    def __init__(self, folder: Path, resumed_step: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resumed_step + 1)

    def write(self, points: list[Point]) -> None:
        for point in points:
            for name, value in point.values.items():
                self._writer.add_scalar(name, value, point.step, walltime=point.time)
        self._writer.flush()  # a kill loses no more than what is on its way

    def close(self, outcome: str) -> None:
        self._writer.close()
