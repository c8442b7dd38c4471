"""Ranks that join: on the devices the node holds, or not at all."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

from lockstep_train.base import volumes
from lockstep_train.base.errors import ConfigError, TrainerError
from lockstep_train.base.ranks import join
from lockstep_train.base.runfile import rank_environment
from unit.virtual_time import VirtualClock

DRIVER = "The NVIDIA driver on your system is too old (found version 12080). Please update your GPU driver"


def refusal(monkeypatch: pytest.MonkeyPatch, cuda: str | None, words: str = DRIVER) -> TrainerError:
    def init() -> None:
        raise RuntimeError(words) if cuda else AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(TrainerError) as refused:
        join(rank_environment({"GPUS_PER_NODE": "4"}))
    return refused.value


def test_gpus_that_the_driver_is_too_old_for_are_refused_in_torch_s_words(monkeypatch: pytest.MonkeyPatch) -> None:
    error = refusal(monkeypatch, "13.2")
    assert isinstance(error, ConfigError)
    assert str(error).startswith(f"this node holds 4 GPUs (GPUS_PER_NODE), but torch {torch.__version__} can't use them: {DRIVER}; ")
    assert "CUDA 13.2 needs a driver that is new enough" in str(error)


def test_gpus_with_an_image_whose_torch_has_no_cuda_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    error = refusal(monkeypatch, None)
    assert isinstance(error, ConfigError)
    assert "is built without CUDA; use an image whose torch is built with it, or set gpusPerNode to 0" in str(error)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("Error 2: out of memory", 77),
        ("Error 3: initialization error", 1),
        ("Error 35: CUDA driver version is insufficient for CUDA runtime version", 78),
        ("Error 36: API call is not supported in the installed CUDA driver", 78),
        ("Error 46: CUDA-capable device(s) is/are busy or unavailable", 1),
        ("Error 100: no CUDA-capable device is detected", 1),
        ("Error 101: invalid device ordinal", 1),
        ("Error 802: system not yet initialized", 1),
        ("Error 803: system has unsupported display driver / cuda driver combination", 78),
        ("Error 804: forward compatibility was attempted on non supported HW", 78),
        ("Error 999: unknown error", 1),
        ("No CUDA GPUs are available", 1),
    ],
)
def test_gpus_that_are_not_ready_end_the_attempt_and_not_the_job(monkeypatch: pytest.MonkeyPatch, words: str, code: int) -> None:
    asked = (
        "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that might have"
        " already set an error? "
    )
    error = refusal(monkeypatch, "13.2", words if words.startswith("No") else asked + words)
    assert error.exit_code == code
    assert words in str(error)
    assert ("this may pass, and the next attempt tries it again" in str(error)) is (code == 1)


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


def test_marks_on_a_volume_are_looked_for_ten_times_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looks = VirtualClock(), list[float]()
    monkeypatch.setattr(volumes, "time", clock)
    monkeypatch.setattr(volumes, "_present", lambda *_: looks.append(clock.now) or [])
    assert volumes._lowest_seen(tmp_path, ["a"], 1.0, 3) == 3
    assert len(looks) in (11, 12)
