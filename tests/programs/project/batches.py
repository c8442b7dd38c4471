"""Rows for the scripts beside this file.

In the first attempt of a job each takes a while, so that a stop meets the script at work. $FAULTS says what happens at one row in each
attempt: raise, hang or nothing. A loop of accelerate gives this row to rank 1.
"""

import os
import time

import torch

ATTEMPT = int(os.environ.get("LOCKSTEP_ATTEMPT", "0"))
FAULTS = {attempt: fault for attempt, fault in enumerate(os.environ.get("FAULTS", "").split(","), 1) if fault}
BAD_ROW = 22


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == BAD_ROW and FAULTS.get(ATTEMPT) == "raise":
            raise KeyError("label")
        if index == BAD_ROW and FAULTS.get(ATTEMPT) == "hang":
            wait_for_row()
        if ATTEMPT == 1 and not FAULTS:
            time.sleep(0.3)
        row = torch.sin(torch.arange(4.0) * (index + 1))
        return row, row.sum().reshape(1)


def wait_for_row() -> None:
    while True:
        time.sleep(1)


def rows() -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(Rows(), batch_size=2)
