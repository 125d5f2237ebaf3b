"""Ranks that share a GPU are named; GPUs are faked here."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest

from hvdtrain.distributed import devices
from hvdtrain.distributed.devices import RankDevice
from hvdtrain.errors import LaunchError
from hvdtrain.system import gpus

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
def test_the_driver_names_the_gpu_that_cuda_will_take(nvidia_smi, monkeypatch, visible, index, expected):
    nvidia_smi(LISTED)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.from_driver(index) == expected


FOUR = "".join(f"GPU {n}: {H100} (UUID: GPU-{n})\n" for n in range(4))
SLICED = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa)
  MIG 3g.20gb     Device  0: (UUID: MIG-1111)
  MIG 3g.20gb     Device  1: (UUID: MIG-2222)
"""


def ranks_of_a_host(monkeypatch, *visible):
    """Return what local ranks compute on that see these CUDA_VISIBLE_DEVICES, as frameworks choose it."""
    found = []
    for local_rank, value in enumerate(visible):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        index = devices.gpu_of(local_rank, len(gpus.visible()))
        found.append(RankDevice("cuda", "f" * 32, "x", *devices.from_driver(index)))
    return found


@pytest.mark.parametrize("two", [["0,1", "2,3"], ["GPU-0,GPU-1", "GPU-2,GPU-3"]], ids=["by number", "by UUID"])
def test_ranks_that_have_several_gpus_each_compute_on_their_own(nvidia_smi, monkeypatch, two):
    nvidia_smi(FOUR)
    found = ranks_of_a_host(monkeypatch, *two)
    assert [each.uuid for each in found] == ["GPU-0", "GPU-3"]
    compare(*found, nccl=True)


def test_the_third_rank_of_a_host_may_have_two_gpus_too(nvidia_smi, monkeypatch):
    nvidia_smi("".join(f"GPU {n}: {H100} (UUID: GPU-{n})\n" for n in range(8)))
    found = ranks_of_a_host(monkeypatch, "0,1", "2,3", "4,5", "6,7")
    assert [each.uuid for each in found] == ["GPU-0", "GPU-3", "GPU-4", "GPU-7"]
    compare(*found, nccl=True)


def test_ranks_that_see_the_same_uuids_have_one_each_and_no_more_ranks_than_gpus(nvidia_smi, monkeypatch):
    nvidia_smi(FOUR)
    found = ranks_of_a_host(monkeypatch, *["GPU-3,GPU-1"] * 2)
    assert [each.uuid for each in found] == ["GPU-3", "GPU-1"]
    with pytest.raises(LaunchError, match=rf"^ranks 0, 2 on host x share GPU-3: {H100}.*as many ranks.*as it has GPUs"):
        compare(*ranks_of_a_host(monkeypatch, *["GPU-3,GPU-1"] * 3), nccl=True)


def test_ranks_that_all_see_a_hosts_gpus_are_no_more_than_these(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [devices.gpu_of(local_rank, 4) for local_rank in range(4)] == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match=r"local rank 4 has no GPU: this host shows 4\. Launch at most 4 ranks"):
        devices.gpu_of(4, 4)


def test_a_rank_whose_gpu_fell_off_the_bus_is_told_so(nvidia_smi):
    nvidia_smi(f"{FOUR}Unable to determine the device handle for GPU 0000:C1:00.0: Unknown Error\n")
    with pytest.raises(RuntimeError, match=r"rank 4 has no GPU: this host shows 4\. A GPU no longer answers .*Xid"):
        devices.gpu_of(4, 4)


def test_ranks_have_a_mig_instance_each_where_each_is_shown_its_own(nvidia_smi, monkeypatch):
    nvidia_smi(SLICED)
    found = ranks_of_a_host(monkeypatch, "MIG-1111", "MIG-2222")
    assert [each.uuid for each in found] == ["MIG-1111", "MIG-2222"]
    compare(*found, nccl=True)
    with pytest.raises(LaunchError, match=r"^ranks 0, 1 on host x share MIG-1111.*CUDA shows a process the first one"):
        compare(*ranks_of_a_host(monkeypatch, *["MIG-1111,MIG-2222"] * 2), nccl=True)


def test_torch_names_the_mig_instance_and_not_the_gpu_that_it_is_a_part_of(monkeypatch):
    collectives = pytest.importorskip("hvdtrain.torch.collectives")
    card = SimpleNamespace(uuid="aaaa", name="NVIDIA A100 MIG 3g.20gb")
    monkeypatch.setattr(collectives.torch.cuda, "get_device_properties", lambda index: card)
    found = {}
    for visible in ("MIG-1111", "MIG-2222,MIG-1111", "GPU-aa", "0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found[visible] = collectives.gpu(0)[0]
    assert list(found.values()) == ["MIG-1111", "MIG-2222", "GPU-aaaa", "GPU-aaaa"]


def test_without_a_driver_no_gpu_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert devices.from_driver(0) == ("", "")


def test_one_rank_alone_compares_nothing(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(devices, "picked", "cuda:0")
    assert devices.introduce(SimpleNamespace(size=lambda: 1), None, gpu=None, nccl=True) == "cuda:0"
    devices.compare_once()
