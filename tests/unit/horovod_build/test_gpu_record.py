"""A proof on GPUs counts for the GPUs, driver and builds that it was made with. nvidia-smi is a script here."""

from __future__ import annotations

import json
import os
import stat

import pytest

from hvdtrain.horovod_build import find, gpu_record, installed
from hvdtrain.horovod_build.find import Framework
from hvdtrain.horovod_build.gpu_proof import Proof

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
RIGHT = Proof("cuda", 2, (), 60.0)


def listed(*names, first=0):
    return "".join(f"GPU {n}: {name} (UUID: GPU-{n + first})\n" for n, name in enumerate(names))


@pytest.fixture
def host(nvidia_smi, monkeypatch, tmp_path):
    """Return what changes this host: two H100s, driver 580, NCCL 2.28, torch for CUDA 13."""
    facts = {"driver": "580.65.06", "nccl": "2.28.3", "torch": "2.13.0+cu130", "key": "k" * 64}

    def change(*gpus, first=0, **changes):
        facts.update(changes)
        nvidia_smi(listed(*(gpus or (H100, H100)), first=first), f"{facts['driver']}\n" if facts["driver"] else "")
        monkeypatch.setattr(find, "nccl_version", lambda: facts["nccl"])
        monkeypatch.setattr(find, "find_torch", lambda: Framework("torch", facts["torch"], "13.0"))
        monkeypatch.setattr(installed, "record", lambda: {"key": facts["key"]})

    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    change()
    return change


def test_a_host_without_a_record_has_no_proof(host):
    assert gpu_record.answer() == (False, "no proof for this host's GPUs: hvdtrain doctor --gpu")


def test_a_proof_holds_where_nothing_has_changed(host, monkeypatch):
    gpu_record.keep(RIGHT)
    holds, why = gpu_record.answer()
    assert holds
    assert why.startswith("proven here on 20")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # as launchers show a rank its own
    assert gpu_record.answer().holds


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"driver": "590.10"}, "with driver 580.65.06, now 590.10"),
        ({"nccl": "2.29.1"}, "with NCCL 2.28.3, now 2.29.1"),
        ({"torch": "2.14.0+cu130"}, "with torch 2.13.0+cu130, now 2.14.0+cu130"),
        ({"key": "other"}, "with another build of Horovod"),
        ({"driver": ""}, "now unknown"),
    ],
)
def test_a_proof_no_longer_holds_where_something_has_changed(host, change, said):
    gpu_record.keep(RIGHT)
    host(**change)
    holds, why = gpu_record.answer()
    assert not holds
    assert said in why
    assert why.endswith(": hvdtrain doctor --gpu")


def test_a_proof_of_another_version_of_hvdtrain_does_not_hold(host, monkeypatch):
    gpu_record.keep(RIGHT)
    monkeypatch.setattr("hvdtrain.__version__", "99.0")
    assert "now 99.0" in gpu_record.answer().why


def test_a_proof_is_of_the_gpus_that_took_part(host):
    gpu_record.keep(RIGHT)
    host(H100, H100, H100)
    assert gpu_record.answer() == (False, "no proof for this host's GPUs: hvdtrain doctor --gpu")
    host(H100, H100, first=2)  # another host, which shares the home folder
    assert not gpu_record.answer().holds
    host(H200, H100)
    assert not gpu_record.answer().holds


def test_the_latest_proof_of_these_gpus_counts_and_a_failed_one_says_what_failed(host):
    gpu_record.keep(RIGHT)
    path = gpu_record.keep(Proof("cuda", 2, ("asynchronous, fp16: 0.weight of rank 1 differs\nmore",), 60.0))
    assert len(list(path.parent.glob("*.json"))) == 1
    holds, why = gpu_record.answer()
    assert not holds
    assert why.endswith("failed: asynchronous, fp16: 0.weight of rank 1 differs")


def test_a_proof_on_cpus_is_never_one_on_gpus(host):
    with pytest.raises(ValueError, match="one on cpu"):
        gpu_record.keep(Proof("cpu", 2, (), 1.0))
    path = gpu_record.keep(RIGHT)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"device": "cpu"}))
    assert not gpu_record.answer().holds


def test_a_record_is_this_users_alone(host):
    path = gpu_record.keep(RIGHT)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]
    path.chmod(0o666)
    holds, why = gpu_record.answer()
    assert not holds
    assert f"every user can write to {path}" in why


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"device": "cuda", "gpus": ["GPU-0", "GPU-1"], "time": 1}'])
def test_a_damaged_record_is_no_proof_and_no_error(host, text):
    gpu_record.keep(RIGHT).write_text(text)
    holds, why = gpu_record.answer()
    assert not holds
    assert "cannot be read" in why


def test_without_a_gpu_there_is_no_proof(host, monkeypatch):
    gpu_record.keep(RIGHT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not gpu_record.answer().holds
