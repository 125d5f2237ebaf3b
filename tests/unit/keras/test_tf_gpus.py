"""A TensorFlow for GPUs that finds none says why before it trains on the host; GPUs and their driver are faked here."""

from __future__ import annotations

import pytest

pytest.importorskip("keras")

pytestmark = pytest.mark.tensorflow


@pytest.fixture
def collectives(monkeypatch):
    """hvdtrain's, on a TensorFlow that was built for CUDA and sees no GPU."""
    tf = pytest.importorskip("tensorflow")
    from hvdtrain.keras import collectives

    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: {"is_cuda_build": True, "cuda_version": "12.5.1"})
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [])
    return collectives


def test_a_driver_too_old_for_tensorflow_is_an_error_of_its_rank(collectives, nvidia_smi, monkeypatch):
    nvidia_smi(1, "515.1\n")
    why = collectives.why_not(None)
    assert why.startswith("the NVIDIA driver is 515.1, and CUDA 12.5.1 needs 525 or newer: apt-get install")
    assert why.endswith('Or train on CPUs: CUDA_VISIBLE_DEVICES=""')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert collectives.why_not(None) == ""


def test_a_tensorflow_for_cpus_or_one_that_sees_its_gpu_asks_no_driver(collectives, nvidia_smi, monkeypatch):
    nvidia_smi(1, "515.1\n")
    monkeypatch.setattr(collectives.tf.config, "list_physical_devices", lambda kind: ["GPU:0"])
    assert collectives.why_not(None) == ""
    monkeypatch.setattr(collectives.tf.config, "list_physical_devices", lambda kind: [])
    monkeypatch.setattr(collectives.tf.sysconfig, "get_build_info", lambda: {"is_cuda_build": False})
    assert collectives.why_not(None) == ""
