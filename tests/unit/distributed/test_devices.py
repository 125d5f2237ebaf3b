"""Ranks that share a GPU are named; GPUs are faked here."""

from __future__ import annotations

import logging
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest

from hvdtrain.distributed import devices
from hvdtrain.distributed.devices import RankDevice
from hvdtrain.errors import LaunchError

H100 = "NVIDIA H100 80GB HBM3"


def rank_on(uuid="", kind="cuda", host="x"):
    return RankDevice(kind, host.encode().hex(), host, uuid, H100 if uuid else "")


def compare(*ranks, nccl=False, rank=0):
    """Let ranks compare as the collective would on `rank`."""
    everybody = np.concatenate([each.to_bytes() for each in ranks])
    horovod = SimpleNamespace(rank=lambda: rank)
    devices.compare(ranks[rank], horovod, lambda module, kind, array, name: everybody, nccl=nccl)


def test_names_of_any_length_and_script_go_over_the_ranks():
    there = RankDevice("cuda", "f" * 32, "host-" * 20, "MIG-GPU-1234/7/0", "zwölf\nlines " * 9)
    with pytest.raises(LaunchError, match=r"No GPU is visible to rank 1 on host h-1"):
        compare(there, rank_on("", "cpu", host="h-1"), nccl=True)
    assert there.name in devices.in_words([there, there])


def test_ranks_that_share_a_gpu_are_refused_by_name_with_nccl():
    four = [rank_on("GPU-1"), rank_on("GPU-1"), rank_on("GPU-1"), rank_on("GPU-2", host="y")]
    with pytest.raises(LaunchError, match=rf"^ranks 0, 1, 2 on host x share GPU-1: {H100}\. NCCL takes one rank a GPU"):
        compare(*four, rank=3, nccl=True)


def test_ranks_that_share_a_gpu_are_named_once_without_nccl(caplog):
    pairs = [rank_on("GPU-1"), rank_on("GPU-2"), rank_on("GPU-1"), rank_on("GPU-2")]
    compare(*pairs, rank=1)
    assert caplog.messages == []
    compare(*pairs)
    (line,) = caplog.messages
    assert f"ranks 0, 2 on host x share GPU-1: {H100}; ranks 1, 3 on host x share GPU-2: {H100}." in line


@pytest.mark.parametrize(
    "ranks",
    [
        [rank_on("GPU-1"), rank_on("GPU-2")],
        [rank_on("MIG-1"), rank_on("MIG-2")],
        [rank_on("GPU-1"), rank_on("GPU-1", host="y")],  # two virtual machines may show the same number
        [rank_on(), rank_on()],  # nobody knows
        [rank_on("", "cpu"), rank_on("", "cpu")],
        [rank_on("", ""), rank_on("", "")],
    ],
)
def test_ranks_that_do_not_share_a_gpu_are_left_alone(ranks, caplog):
    for nccl in (True, False):
        compare(*ranks, nccl=nccl)
    assert caplog.messages == []


def test_a_rank_without_a_gpu_beside_others_is_refused_with_nccl_alone():
    compare(rank_on("GPU-1"), rank_on("", "cpu", host="y"))
    with pytest.raises(LaunchError, match=r"No GPU is visible to rank 1 on host y"):
        compare(rank_on("GPU-1"), rank_on("", "cpu", host="y"), nccl=True)


LISTED = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa)
  MIG 3g.20gb     RankDevice  0: (UUID: MIG-1111)
  MIG 3g.20gb     RankDevice  1: (UUID: MIG-2222)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-bbbb)
"""


@pytest.mark.parametrize(
    ("visible", "index", "expected"),
    [
        (None, 1, ("GPU-bbbb", "NVIDIA A100-SXM4-80GB")),
        ("1,0", 0, ("GPU-bbbb", "NVIDIA A100-SXM4-80GB")),
        ("GPU-bb", 0, ("GPU-bbbb", "NVIDIA A100-SXM4-80GB")),
        (None, 0, ("MIG-1111", "NVIDIA A100-SXM4-40GB MIG 3g.20gb")),
        ("MIG-2222", 0, ("MIG-2222", "NVIDIA A100-SXM4-40GB MIG 3g.20gb")),
        ("1", 3, ("", "")),
        ("7", 0, ("", "")),
        ("", 0, ("", "")),
    ],
)
def test_the_driver_names_the_gpu_that_cuda_will_take(monkeypatch, visible, index, expected):
    monkeypatch.setattr(devices.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, LISTED))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.from_driver(index) == expected


def test_without_a_driver_no_gpu_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert devices.from_driver(0) == ("", "")


def test_one_rank_alone_compares_nothing(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(devices, "picked", "cuda:0")
    assert devices.introduce(SimpleNamespace(size=lambda: 1), None, gpu=None, nccl=True) == "cuda:0"
    devices.compare_once()
