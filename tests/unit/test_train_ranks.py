"""Ranks that join: on the devices the node holds, or not at all."""

from __future__ import annotations

import socket

import pytest
import torch

from lockstep_train.engine.ranks import join
from lockstep_train.environment import rank_environment
from lockstep_train.errors import ConfigError

DRIVER = "The NVIDIA driver on your system is too old (found version 12080). Please update your GPU driver"


def refusal(monkeypatch: pytest.MonkeyPatch, cuda: str | None) -> str:
    def init() -> None:
        raise RuntimeError(DRIVER) if cuda else AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(ConfigError) as refused:
        join(rank_environment({"GPUS_PER_NODE": "4"}))
    return str(refused.value)


def test_gpus_that_the_driver_is_too_old_for_are_refused_in_torch_s_words(monkeypatch: pytest.MonkeyPatch) -> None:
    said = refusal(monkeypatch, "13.2")
    assert said.startswith(f"this node holds 4 GPUs (GPUS_PER_NODE), but torch {torch.__version__} can't use them: {DRIVER}; ")
    assert "CUDA 13.2 needs a driver that is new enough" in said


def test_gpus_with_an_image_whose_torch_has_no_cuda_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is built without CUDA; use an image whose torch is built with it, or set gpusPerNode to 0" in refusal(monkeypatch, None)


def test_the_store_of_rank_zero_is_met_at_its_own_address_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DS_ACCELERATOR", "RANK", "WORLD_SIZE", "LOCAL_RANK"):  # `join` sets them
        monkeypatch.setenv(name, {"DS_ACCELERATOR": "cpu", "WORLD_SIZE": "1"}.get(name, "0"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        port = int(probe.getsockname()[1])
    ranks = join(rank_environment({"MASTER_ADDR": "127.0.0.2", "MASTER_PORT": str(port)}))
    try:
        ranks.store.set("key", "value")
        socket.create_connection(("127.0.0.2", port), 5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.3", port), 5)
    finally:
        torch.distributed.destroy_process_group()
