"""Ranks tell each other which GPU they compute on; what the driver would say is faked, the exchange is not."""

from __future__ import annotations

from typing import Any

import pytest

from hvdtrain.distributed import devices, world
from hvdtrain.errors import LaunchError
from hvdtrain.torch import collectives
from hvdtrain.torch.ops import engine


def introduce(monkeypatch: pytest.MonkeyPatch, uuid: str, *, nccl: bool = False) -> None:
    monkeypatch.setattr(devices, "picked", "cuda:0")
    said = devices.introduce(engine.native(), collectives.run, gpu=lambda _: (uuid, "NVIDIA H100"), nccl=nccl)
    assert said == "cuda:0 (NVIDIA H100)"


@pytest.mark.world_size(2, 3)
def test_ranks_on_one_gpu_are_named_on_rank_0(
    hvd: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    introduce(monkeypatch, "GPU-1")
    devices.compare_once()
    ranks = ", ".join(map(str, range(hvd.size())))
    if hvd.rank() == 0:
        assert f"ranks {ranks} on host" in caplog.text
        assert "share GPU-1: NVIDIA H100" in caplog.text
    else:
        assert caplog.messages == []


@pytest.mark.world_size(2)
def test_ranks_on_one_gpu_are_refused_with_nccl_on_every_rank(hvd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    introduce(monkeypatch, "GPU-1", nccl=True)
    with pytest.raises(LaunchError, match=r"ranks 0, 1 on host .* share GPU-1: NVIDIA H100"):
        devices.compare_once()


@pytest.mark.world_size(2)
def test_ranks_on_their_own_gpus_are_left_alone(
    hvd: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    introduce(monkeypatch, f"GPU-{hvd.rank()}", nccl=True)
    devices.compare_once()
    assert caplog.messages == []


@pytest.mark.world_size(2)
def test_ranks_that_could_not_compare_at_init_do_before_the_first_collective(
    hvd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    introduce(monkeypatch, "GPU-1", nccl=True)
    here = world.World("torch", engine.native(), "cuda:0")
    with pytest.raises(LaunchError, match="share GPU-1"):
        here.barrier()
    here.barrier()
