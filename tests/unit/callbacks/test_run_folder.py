"""The files of a run, and secrets that are never in them."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import string

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvdtrain.callbacks import Callback, RunFolder, Schedule, run_folder
from hvdtrain.system.settings import RUN_NAME

X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
Y = np.arange(12) % 3
_numbers = itertools.count()


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_keeps_what_it_was_and_how_it_went(make, tmp_path):
    folder = tmp_path / "runs" / "first"
    kept = RunFolder(folder, every_s=0, options={"width": 3})
    trainer = make(clip_norm=1.0)
    history = trainer.fit((X, Y), epochs=2, batch_size=4, callbacks=[kept], progress=False)
    config = json.loads((folder / "config.json").read_text())
    assert (config["clip_norm"], config["epochs"], config["batch_size"], config["options"]) == (1.0, 2, 4, {"width": 3})
    assert config["data"]["number of samples"] == 12
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["ranks"] == len(environment["hosts"]) == 1
    assert {"hvdtrain", "torch", "numpy"} <= environment["packages"].keys()
    told = lines(folder)
    epochs = [line for line in told if line["kind"] == "epoch"]
    assert [line["metrics"]["loss"] for line in epochs] == history["loss"]
    assert [line["global_step"] for line in epochs] == [3, 6]
    assert {line["memory"]["weights"] for line in epochs} == {4 * sum(p.numel() for p in trainer.model.parameters())}
    first = told[0]
    assert (first["kind"], first["epoch"], first["step"], first["global_step"]) == ("interval", 0, 1, 1)
    assert first["samples_per_s"] > 0
    assert {name: len(each) for name, each in first["rank_s"].items()} == dict.fromkeys(
        ("step", "data", "compute", "reduction", "other"), 1
    )


def test_an_epochs_last_interval_is_kept_however_short_the_epoch(make, tmp_path, monkeypatch):
    monkeypatch.setattr("hvdtrain.telemetry.interval.INTERVAL_S", 0)
    make().fit((X, Y), epochs=2, batch_size=4, callbacks=[RunFolder(tmp_path, every_s=1000)], progress=False)
    told = [(line["kind"], line["global_step"]) for line in lines(tmp_path)]
    assert told == [("interval", 1), ("interval", 3), ("epoch", 3), ("interval", 6), ("epoch", 6)]


def rates(folder):
    return [(line["global_step"], line["learning_rate"]) for line in lines(folder) if line["kind"] == "step"]


def rates_by_step(make, net, folder, epochs, stop=None, **options):
    """Train 3 steps an epoch with a rate of its own for each step; return the rows of the rate."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    callbacks = [Schedule(scheduler, every="step"), RunFolder(folder), *([] if stop is None else [stop])]
    make(model, optimizer=optimizer).fit(
        (X, Y), epochs=epochs, batch_size=4, callbacks=callbacks, progress=False, **options
    )
    return rates(folder)


def test_a_schedule_by_steps_gives_the_same_rows_in_each_run(make, net, tmp_path):
    one, other = (rates_by_step(make, net, tmp_path / name, 50) for name in ("one", "other"))
    assert [step for step, _ in one] == [*range(2, 128), *range(128, 151, 2)]
    assert one == other
    assert [rate for _, rate in one] == pytest.approx([0.1 / (1 + step) for step, _ in one])
    steps = [line["global_step"] for line in lines(tmp_path / "one")]
    assert steps == sorted(steps)


def test_a_resumed_run_has_the_rows_that_are_left(make, net, tmp_path):
    straight = rates_by_step(make, net, tmp_path / "straight", 6)
    rates_by_step(make, net, tmp_path / "resumed", 2, checkpoint_dir=str(tmp_path / "c"))
    resumed = rates_by_step(make, net, tmp_path / "resumed", 6, checkpoint_dir=str(tmp_path / "c"))
    # An interval has the rate of the first step after the resume.
    assert resumed == [row for row in straight if row[0] != 7]


def test_a_run_that_is_stopped_has_the_rows_until_then(make, net, tmp_path):
    class Stop(Callback):
        def on_step_end(self, trainer, step):
            if trainer.global_step == 7:
                raise KeyboardInterrupt

    straight = rates_by_step(make, net, tmp_path / "straight", 3)
    with pytest.raises(KeyboardInterrupt):
        rates_by_step(make, net, tmp_path / "stopped", 3, stop=Stop())
    assert rates(tmp_path / "stopped") == [row for row in straight if row[0] <= 7]


def test_rows_are_in_the_order_of_steps_with_validations_within_an_epoch(make, tmp_path, monkeypatch):
    monkeypatch.setattr("hvdtrain.telemetry.interval.INTERVAL_S", 0)

    class EndIntervals(Callback):
        def on_step_end(self, trainer, step):
            if step == 2:
                monkeypatch.setattr("hvdtrain.telemetry.interval.INTERVAL_S", 1000)

    callbacks = [EndIntervals(), RunFolder(tmp_path, every_s=1000)]
    make().fit((X, Y), validation=(X, Y), validate_every=4, batch_size=2, callbacks=callbacks, progress=False)
    told = [(line["kind"], line["global_step"]) for line in lines(tmp_path)]
    assert told == [("interval", 1), ("interval", 3), ("validation", 4), ("epoch", 6)]


def test_run_dir_is_short_for_it_and_a_second_fit_appends(make, tmp_path):
    trainer = make()
    for _ in range(2):
        trainer.fit((X, Y), epochs=1, run_dir=str(tmp_path / "run"), progress=False)
    assert [line["kind"] for line in lines(tmp_path / "run")].count("epoch") == 2


def test_what_json_does_not_know_is_null_and_numpys_numbers_are_numbers(make, tmp_path):
    class Bad(Callback):
        def on_epoch_end(self, trainer, epoch, logs):
            logs |= {"score": float("nan"), "lr": np.float32(0.5), "each": np.ones(2), "odd": object}

    make().fit((X, Y), epochs=1, callbacks=[Bad(), RunFolder(tmp_path)], progress=False)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    metrics = json.loads(text.splitlines()[-1])["metrics"]
    assert (metrics["score"], metrics["lr"], metrics["each"]) == (None, 0.5, [1.0, 1.0])


def test_a_disk_that_takes_nothing_costs_a_warning(make, tmp_path, caplog, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "gone").symlink_to(tmp_path / "not" / "mounted")
    monkeypatch.setenv(run_folder.RUNS, str(tmp_path / "gone"))
    make().fit((X, Y), epochs=1, progress=False)
    monkeypatch.setenv(run_folder.RUNS, "")
    assert "this run is not recorded in a run folder" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "hvdtrain"):
        history = make().fit((X, Y), epochs=1, run_dir=str(tmp_path / "file" / "run"), progress=False)
    assert len(history["loss"]) == 1
    assert [f"this run is not recorded in {tmp_path}" in record.getMessage() for record in caplog.records] == [True]


def test_secrets_are_not_kept(make, tmp_path, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_API_KEY", "hunter2")
    monkeypatch.setenv("OTHER_VARIABLE", "hunter2")
    monkeypatch.setattr(
        "sys.argv", ["train.py", "--token", "hunter2", "--api-key=hunter2", "--wandb-key", "hunter2", "--author", "me"]
    )
    make().fit((X, Y), epochs=1, run_dir=str(tmp_path), progress=False)
    text = (tmp_path / "environment.json").read_text()
    assert "hunter2" not in text
    assert json.loads(text)["command"] == [
        "train.py", "--token", "(hidden)", "--api-key=(hidden)", "--wandb-key", "(hidden)", "--author", "me"
    ]  # fmt: skip


def test_secrets_in_options_and_logs_are_not_kept(make, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "hunter2-hunter2")
    options = {"password": "hunter2", "logger": [{"api_key": "hunter2"}], "cmd": "x --token hunter2", "num_tokens": 2}

    class Says(Callback):
        def on_epoch_end(self, trainer, epoch, logs):
            logs |= {"said": "to hunter2-hunter2", "token": 0.5}

    callbacks = [Says(), RunFolder(tmp_path, options=options)]
    make().fit((X, Y), epochs=1, callbacks=callbacks, progress=False)
    assert "hunter2" not in "".join(path.read_text() for path in tmp_path.iterdir())
    assert json.loads((tmp_path / "config.json").read_text())["options"]["num_tokens"] == 2
    assert lines(tmp_path)[-1]["metrics"]["token"] == 0.5


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    secret=st.text(string.ascii_letters + string.digits + "!#$%*+./:;<=>?@^_~|\\\"'{}[],é", min_size=10, max_size=30),
    name=st.sampled_from(["password", "pat", "logger.api_key", "HF_TOKEN", "clientSecret"]),
    where=st.sampled_from(["options", "argument", "json", "environment"]),
)
def test_a_secret_planted_anywhere_is_in_no_file_of_a_run(make, tmp_path, monkeypatch, secret, name, where):
    secret = f"Q{secret}7"
    folder = tmp_path / str(next(_numbers))
    options, words = {"n": 1, "note": f"see {secret}"}, ["train.py"]
    if where == "options":
        options["nested"] = [{name: secret}]
    elif where == "argument":
        words += [f"--override={name}={secret}", f"--{name}", secret]
    elif where == "json":
        words += ["--cfg=" + json.dumps({name: secret})]
    monkeypatch.setattr("sys.argv", words)
    monkeypatch.setenv("SOME_API_KEY", secret if where == "environment" else "")
    monkeypatch.setenv("HVDTRAIN_SAID", f"is {secret}" if where == "environment" else "")
    make().fit((X, Y), epochs=1, callbacks=[RunFolder(folder, options=options)], progress=False)
    kept = "".join(path.read_text() for path in folder.iterdir())
    assert "(hidden)" in kept
    assert secret not in kept
    assert json.dumps(secret)[1:-1] not in kept


@pytest.mark.parametrize(("share", "modes"), [("", {0o600, 0o700}), ("1", {0o664, 0o775})])
def test_a_runs_files_are_its_owners_alone_unless_they_are_shared(make, tmp_path, monkeypatch, share, modes):
    monkeypatch.setenv("HVDTRAIN_SHARE_FILES", share)
    before = os.umask(0o002)
    try:
        folders = {"run_dir": str(tmp_path / "runs" / "one"), "checkpoint_dir": str(tmp_path / "c")}
        make().fit((X, Y), epochs=1, progress=False, **folders)
    finally:
        os.umask(before)
    found = [path for path in tmp_path.rglob("*") if path.name != ".lock"]
    assert {"runs", "one", "config.json", "environment.json", "metrics.jsonl", "c", "meta.json"} <= {
        p.name for p in found
    }
    assert {path.stat().st_mode & 0o777 for path in found} == modes


def test_what_is_there_keeps_its_mode_and_new_files_in_it_are_private(make, tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "metrics.jsonl").touch(0o644)
    (tmp_path / ".config.json.new").touch(0o644)  # of a start that was killed
    make().fit((X, Y), epochs=1, run_dir=str(tmp_path), progress=False)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"config.json": 0o600, "environment.json": 0o600, "metrics.jsonl": 0o644}
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_settings_are_kept_and_not_what_a_launcher_tells_its_ranks(make, tmp_path, monkeypatch):
    of_the_launch = {
        "OMPI_MCA_orte_hnp_uri": "1.0;tcp://192.0.2.2:59905", "OMPI_MCA_ess_base_jobid": "138084353",
        "HOROVOD_RANK": "0", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
    }  # fmt: skip
    chosen = {"OMPI_MCA_btl": "^openib", "HOROVOD_CYCLE_TIME": "2", "HOROVOD_CPU_OPERATIONS": "gloo"}
    trainer = make()
    trainer.fit((X, Y), epochs=1, run_dir=None, progress=False)
    for name, value in {**of_the_launch, **chosen}.items():
        monkeypatch.setenv(name, value)
    kept = run_folder.describe_environment(trainer)["variables"]
    assert {name: kept.get(name) for name in chosen} == chosen
    assert not set(of_the_launch) & set(kept)


def test_a_run_has_a_folder_of_its_own_unless_the_job_names_one_or_wants_none(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(run_folder.RUNS)
    monkeypatch.setattr("sys.argv", ["some/where/train.py"])
    monkeypatch.setattr(run_folder, "default_name", lambda: "train-20261121-100000")
    trainer = make()
    for _ in range(2):
        trainer.fit((X, Y), epochs=1, progress=False)
    make().fit((X, Y), epochs=1, progress=False)
    first, second = sorted((tmp_path / "runs").iterdir())
    assert (first.name, second.name) == ("train-20261121-100000", "train-20261121-100000-2")
    assert [line["kind"] for line in lines(first)].count("epoch") == 2
    monkeypatch.setenv(RUN_NAME, "mine")
    for _ in range(2):  # starts of a job whose script makes two Trainers
        monkeypatch.setattr(run_folder, "_runs_here", itertools.count(1))
        for _ in range(2):
            make().fit((X, Y), epochs=1, progress=False)
    for name in ("mine", "mine-2"):
        assert [line["kind"] for line in lines(tmp_path / "runs" / name)].count("epoch") == 2
    monkeypatch.setenv(run_folder.RUNS, "")
    make().fit((X, Y), epochs=1, progress=False)
    make().fit((X, Y), epochs=1, run_dir=None, progress=False)
    assert len(list((tmp_path / "runs").iterdir())) == 4


def test_the_name_is_the_scripts_and_the_time(monkeypatch):
    monkeypatch.setattr("sys.argv", ["some/where/train.py"])
    assert re.fullmatch(r"train-20\d{6}-\d{6}", run_folder.default_name())


def test_what_is_not_json_is_refused_before_training():
    with pytest.raises(TypeError):
        RunFolder("x", options={"model": object()})
    with pytest.raises(ValueError, match="every_s must be >= 0"):
        RunFolder("x", every_s=-1)
