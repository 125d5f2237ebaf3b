"""What CUDA shows a process is read from the driver's list; nvidia-smi is a script here, and no GPU has run this."""

from __future__ import annotations

import pytest

from hvdtrain.system import gpus

FOUR = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5c0d9f1e-0000-0000-0000-000000000000)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-a17b2c3d-1111-1111-1111-111111111111)
GPU 2: NVIDIA A100-SXM4-80GB (UUID: GPU-b2222222-2222-2222-2222-222222222222)
GPU 3: NVIDIA A100-SXM4-80GB (UUID: GPU-c3333333-3333-3333-3333-333333333333)
"""
SLICED = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5c0d9f1e-0000-0000-0000-000000000000)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 1c.3g.20gb  Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-a17b2c3d-1111-1111-1111-111111111111)
"""
OLD_NAMES = """\
GPU 0: A100-SXM4-40GB (UUID: GPU-5c0d9f1e)
  MIG 3g.20gb Device 0: (UUID: MIG-GPU-5c0d9f1e/1/0)
  MIG 3g.20gb Device 1: (UUID: MIG-GPU-5c0d9f1e/2/0)
"""


@pytest.mark.parametrize(
    ("visible", "shown"),
    [
        (None, ["GPU-5", "GPU-a", "GPU-b", "GPU-c"]),
        ("2,0", ["GPU-b", "GPU-5"]),
        ("GPU-c3333333-3333-3333-3333-333333333333, GPU-a17b2c3d", ["GPU-c", "GPU-a"]),
        ("GPU-b2,1", ["GPU-b", "GPU-a"]),
        ("1,7,0", ["GPU-a"]),  # CUDA stops at a name that it does not know
        ("1,-1,0", ["GPU-a"]),
        ("GPU-dead,0", []),
        ("", []),
        ("-1", []),
    ],
)
def test_gpus_are_shown_by_number_and_by_uuid_in_the_order_of_their_names(nvidia_smi, monkeypatch, visible, shown):
    nvidia_smi(FOUR)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [each.uuid[:5] for each in gpus.visible()] == shown


@pytest.mark.parametrize(
    ("listed", "visible", "shown"),
    [
        (SLICED, "MIG-cba663e8", [("MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb", "40GB MIG 1c.3g.20gb")]),
        (SLICED, "MIG-cba663e8,MIG-c6d4f1ef", [("MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb", "40GB MIG 1c.3g.20gb")]),
        (SLICED, "0", [("MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", "40GB MIG 3g.20gb")]),
        (SLICED, "1", [("GPU-a17b2c3d-1111-1111-1111-111111111111", "80GB")]),
        (OLD_NAMES, "MIG-GPU-5c0d9f1e/2/0", [("MIG-GPU-5c0d9f1e/2/0", "40GB MIG 3g.20gb")]),
    ],
)
def test_of_mig_instances_a_process_has_the_first_that_is_named(nvidia_smi, monkeypatch, listed, visible, shown):
    nvidia_smi(listed)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [(each.uuid, each.name.rpartition("SXM4-")[2]) for each in gpus.visible()] == shown


def test_without_a_driver_there_are_no_gpus(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert gpus.visible() == []


LOST = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5c0d9f1e-0000-0000-0000-000000000000)
Unable to determine the device handle for GPU 0000:C1:00.0: Unknown Error
"""


@pytest.mark.parametrize(
    "said",
    [
        "Unable to determine the device handle for GPU 0000:C1:00.0: Unknown Error",
        "Unable to determine the device handle for gpu 0000:02:00.0: GPU is lost.  Reboot the system",
    ],
)
def test_a_gpu_that_fell_off_the_bus_is_told_of_in_the_drivers_words(nvidia_smi, said):
    nvidia_smi(f"{FOUR}{said}\n")
    assert gpus.lost() == (
        f"a GPU no longer answers (nvidia-smi: {said}): `dmesg | grep Xid` has the cause, a reboot helps"
    )
    nvidia_smi(FOUR)
    assert gpus.lost() == ""


@pytest.mark.parametrize(
    ("driver", "cuda", "said"),
    [
        (
            "575.57.08",
            "13.0",
            "the NVIDIA driver is 575.57.08, and CUDA 13.0 needs 580 or newer: apt-get install",
        ),
        ("515.1", "12.8", "the NVIDIA driver is 515.1, and CUDA 12.8 needs 525 or newer"),
        ("580.65.06", "13.0", ""),
        ("575.57.08", "12.8", ""),
        ("575.57.08", "14.0", ""),  # of which nobody knows
    ],
)
def test_a_driver_that_is_too_old_is_why_there_is_no_gpu(nvidia_smi, monkeypatch, driver, cuda, said):
    nvidia_smi(FOUR, f"{driver}\n" * 4)
    found = gpus.why_unusable(cuda)
    assert (said in found) if said else found == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus.why_unusable(cuda) == ""


def test_without_a_driver_nothing_is_lost_nor_too_old(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert (gpus.lost(), gpus.why_unusable("13.0")) == ("", "")


def test_a_lost_gpu_comes_before_an_old_driver(nvidia_smi):
    nvidia_smi(LOST, "515.1\n")
    assert "no longer answers" in gpus.why_unusable("13.0")
