"""Every example as a person types it, under horovodrun and as plain python."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.system import log_filter, open_mpi

ROOT = Path(__file__).resolve().parents[3]
GALLERY = ROOT / "examples"
EXAMPLES = GALLERY / "mnist"
HEADER = ["framework", "ranks", "loss", "accuracy", "images/s", "seconds"]
# What horovodrun puts before a rank's line, over MPI or Gloo; also after it, where print() sent the end separately.
LAUNCHER = r"\[(?:\d+,)?\d+\]<std(?:out|err)>:"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("horovod") is None, reason="needs Horovod: install it with hvdtrain build"
    ),
]


def run(command: str, folder: Path, *, limit_s: float = 240, **environment: str) -> tuple[int, str]:
    """Run a command line of bash in `folder`; return its exit status and output."""
    others = ("HOROVOD_", "OMPI_", "PMI_", "PMIX_", "TF_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    kept["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), kept["PATH"]])
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env={**kept, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the ranks too, which killing horovodrun alone would leave behind
        output, _ = process.communicate()
        pytest.fail(f"{command} did not end within {limit_s:g} s\n{output[-4000:]}")
    return process.returncode, output


def run_well(command: str, folder: Path, **environment: str) -> list[str]:
    """Run a command that must succeed quietly; return its lines without the launcher's prefixes."""
    status, output = run(command, folder, **environment)
    assert status == 0, output[-4000:]
    assert "Traceback" not in output, output[-4000:]
    mark = LAUNCHER + " ?" * open_mpi.spaces_marks()
    lines = [re.sub(mark, "", line) for line in output.splitlines()]
    assert not [line for line in lines if log_filter.is_note(line)]
    return [line for line in lines if line]


def table(lines: list[str]) -> dict[str, str]:
    """Return the one table that train.py prints. Launchers may bring lines of the log, which is stderr, after it."""
    (header,) = (index for index, line in enumerate(lines) if line.split() == HEADER)
    row = dict(zip(HEADER, lines[header + 1].split(), strict=True))
    assert float(row["images/s"].replace(",", "")) > 0
    assert float(row["seconds"]) >= 0  # a tenth of a second may round to none
    assert np.isfinite(float(row["loss"]))
    return row


def last_line(lines: list[str], *, ranks: int, saved: str) -> float:
    """Return the accuracy in the drop-in scripts' last line, which rank 0 alone prints."""
    pattern = rf"ranks {ranks}  loss \d\.\d{{4}}  accuracy (\d\.\d{{4}})  saved {re.escape(saved)}"
    found = [match for line in lines if (match := re.fullmatch(pattern, line))]
    assert len(found) == 1, "\n".join(lines[-10:])
    return float(found[0].group(1))


def require_equal_to_one_process(row: dict[str, str], folder: Path) -> None:
    """Compare two ranks with 32 images each with one process under plain python that takes 64."""
    one = table(run_well(f"python {EXAMPLES}/train.py --batch-size 64", folder))
    assert (one["framework"], one["ranks"]) == ("torch", "1")
    # Sums in another order round differently, and 276 steps of Adam amplify that a little.
    assert float(row["loss"]) == pytest.approx(float(one["loss"]), abs=2e-3)
    assert float(row["accuracy"]) == pytest.approx(float(one["accuracy"]), abs=0.003)  # one image in 360


def mnist_directory() -> Path | None:
    """Return a folder with MNIST's files, where there is one."""
    named = os.environ.get("HVDTRAIN_MNIST_DIR")
    folder = Path(named) if named else ROOT.parent / "shared/data/mnist-10k"
    return folder if named or folder.is_dir() else None


def write_idx(folder: Path, *, count: int = 70) -> Path:
    """Write four files like MNIST's: `count` images of 12 x 12, brighter where the label is higher."""
    folder.mkdir()
    labels = np.arange(count, dtype=np.uint8) % 10
    images = np.repeat(labels * 25, 144).reshape(count, 12, 12)
    for name in ("train", "t10k"):
        packed = gzip.compress(struct.pack(">4I", 2051, *images.shape) + images.tobytes())
        (folder / f"{name}-images-idx3-ubyte.gz").write_bytes(packed)
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, count) + labels.tobytes())
    return folder


def test_trainer_passes_97_percent_on_digits_with_pytorch_like_one_process(tmp_path: Path) -> None:
    lines = run_well(f"horovodrun -np 2 python {EXAMPLES}/train.py", tmp_path)
    row = table(lines)
    assert (row["framework"], row["ranks"]) == ("torch", "2")
    assert float(row["accuracy"]) >= 0.97
    require_equal_to_one_process(row, tmp_path)
    assert lines.count("effective batch 64 samples (32 x 2 ranks)") == 1
    assert sum(line.startswith("epoch 12/12  loss ") for line in lines) == 1


@pytest.mark.long  # make train does it, the rank tests train on each backend
@pytest.mark.tensorflow
def test_trainer_passes_97_percent_on_digits_with_keras(tmp_path: Path) -> None:
    command = f"horovodrun -np 2 python {EXAMPLES}/train.py --framework keras"
    row = table(run_well(command, tmp_path, KERAS_BACKEND="tensorflow"))
    assert (row["framework"], row["ranks"]) == ("keras/tensorflow", "2")
    assert float(row["accuracy"]) >= 0.97


@pytest.mark.long  # the rank tests train on each backend, with other models
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_trainer_runs_on_each_other_keras_backend(tmp_path: Path, backend: str) -> None:
    command = f"horovodrun -np 2 python {EXAMPLES}/train.py --framework keras --epochs 2"
    row = table(run_well(command, tmp_path, KERAS_BACKEND=backend))
    assert (row["framework"], row["ranks"]) == (f"keras/{backend}", "2")
    assert float(row["accuracy"]) >= 0.6


@pytest.mark.long  # as on the digits
@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_trainer_passes_97_percent_on_mnist(tmp_path: Path, framework: str) -> None:
    folder = mnist_directory()
    if folder is None:
        pytest.skip("needs MNIST's files: set HVDTRAIN_MNIST_DIR")
    command = f"horovodrun -np 2 python {EXAMPLES}/train.py --framework {framework} --data-dir {folder} --epochs 4"
    row = table(run_well(command, tmp_path))
    assert row["framework"].startswith(framework)
    assert float(row["accuracy"]) >= 0.97


def test_trainer_reads_idx_files_and_scales_the_learning_rate_when_asked(tmp_path: Path) -> None:
    folder = write_idx(tmp_path / "idx")
    options = f"--data-dir {folder} --epochs 2 --batch-size 5 --lr 0.001 --lr-scaling sqrt"
    lines = run_well(f"horovodrun -np 2 python {EXAMPLES}/train.py {options}", tmp_path)
    table(lines)
    assert lines.count("effective batch 10 samples (5 x 2 ranks)") == 1
    assert lines.count("lr 0.001 -> 0.00141421 (sqrt, 2 ranks)") == 1


def test_bad_data_ends_every_rank_with_one_line_that_names_the_file(tmp_path: Path) -> None:
    folder = write_idx(tmp_path / "idx")
    labels = folder / "train-labels-idx1-ubyte"
    labels.write_bytes(labels.read_bytes()[:-1])
    status, output = run(f"horovodrun -np 2 python {EXAMPLES}/train.py --data-dir {folder}", tmp_path)
    assert status != 0
    assert f"error: {labels} is truncated: its header says (70,), so 70 bytes were expected. Found: 69 bytes" in output
    assert not re.search(LAUNCHER + r".*Traceback", output, re.MULTILINE), output


def test_unknown_framework_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    status, output = run(f"python {EXAMPLES}/train.py --framework mxnet", tmp_path)
    assert status == 2
    assert re.search(r"--framework: invalid choice: 'mxnet' \(choose from '?keras'?, '?torch'?\)", output)


def test_pytorch_script_trains_and_saves_plain_weights(tmp_path: Path) -> None:
    lines = run_well(f"horovodrun -np 2 python {EXAMPLES}/torch_script.py", tmp_path)
    assert last_line(lines, ranks=2, saved="checkpoints/mnist.pt") >= 0.95
    check = "import torch; print(sorted(torch.load('checkpoints/mnist.pt', weights_only=True))[0])"
    assert run_well(f'python -c "{check}"', tmp_path) == ["conv1.bias"]


def test_keras_script_trains_and_saves_a_model_that_plain_keras_loads(tmp_path: Path) -> None:
    lines = run_well(f"horovodrun -np 2 python {EXAMPLES}/keras_script.py", tmp_path)
    assert last_line(lines, ranks=2, saved="checkpoints/mnist.keras") >= 0.95
    check = (
        "import sys, keras; model = keras.models.load_model('checkpoints/mnist.keras'); "
        "print(type(model.optimizer).__name__, int(model.optimizer.iterations), 'hvdtrain' in sys.modules)"
    )
    status, output = run(f'python -c "{check}"', tmp_path)  # plain Keras, so TensorFlow prints what it likes
    assert (status, output.splitlines()[-1]) == (0, f"Adam {12 * 23} False"), output


@pytest.mark.long  # as any script of one process: tests/unit/keras/test_one_process.py
def test_keras_script_runs_without_horovod(tmp_path: Path) -> None:
    lines = run_well(f"python {EXAMPLES}/keras_script.py --epochs 2", tmp_path, HVDTRAIN_SOLO="1")
    assert last_line(lines, ranks=1, saved="checkpoints/mnist.keras") >= 0.6


@pytest.mark.parametrize(("launcher", "ranks"), [("horovodrun -np 2 ", 2), ("HVDTRAIN_SOLO=1 ", 1)])
def test_own_loop_finds_the_same_coefficients_on_one_and_two_ranks(tmp_path: Path, launcher: str, ranks: int) -> None:
    lines = run_well(f"{launcher}python {EXAMPLES}/linear_regression.py", tmp_path)
    assert [line for line in lines if "ranks" in line] == [f"ranks {ranks}  y = 3.0000 x0 + -2.0000 x1 + 0.5000"]


def ranks_of(lines: list[str]) -> tuple[int, str]:
    """Return how many ranks the one line "ranks N: ..." names, and its rest."""
    ((ranks, rest),) = [match.groups() for line in lines if (match := re.fullmatch(r"ranks (\d): (.*)", line))]
    return int(ranks), rest


def in_double(set_type: str, script: Path) -> str:
    """Return a command: rounding is then far below the four digits that are printed; augmentation is not."""
    program = f"import runpy, sys, hvdtrain; {set_type}; sys.argv = sys.argv[1:]; "
    program += 'runpy.run_path(sys.argv[0], run_name="__main__")'
    return f"python -c {shlex.quote(program)} {script} --epochs 1"


def test_resnet_trains_the_same_numbers_on_two_ranks_and_resumes(tmp_path: Path) -> None:
    script = in_double("import torch; torch.set_default_dtype(torch.float64)", GALLERY / "images/train.py")
    lines = run_well(f"horovodrun -np 2 {script} --checkpoints two", tmp_path)
    ranks, two = ranks_of(lines)
    assert ranks == 2
    assert any(re.match(r"epoch 1/1 .* val_accuracy", line) for line in lines)
    assert ranks_of(run_well(f"{script} --checkpoints one", tmp_path)) == (1, two)
    again = run_well(f"{script} --checkpoints two", tmp_path)
    assert any("nothing is left to train with epochs=1" in line for line in again)
    assert ranks_of(again) == (1, two)


@pytest.mark.tensorflow
def test_keras_resnet_trains_the_same_numbers_on_two_ranks(tmp_path: Path) -> None:
    # On TensorFlow: elsewhere Keras computes float64 in float32, whose rounding reaches the printed digits.
    script = in_double('import keras; keras.config.set_floatx("float64")', GALLERY / "images/train_keras.py")
    script += " --batch-size 256"  # six steps
    two = ranks_of(run_well(f"horovodrun -np 2 {script} --checkpoints two", tmp_path, KERAS_BACKEND="tensorflow"))
    one = ranks_of(run_well(f"{script} --checkpoints one", tmp_path, KERAS_BACKEND="tensorflow"))
    assert (one[0], two) == (1, (2, one[1]))


def test_gpt_has_one_process_perplexity_on_two_ranks_and_writes_a_sample(tmp_path: Path) -> None:
    script = f"{GALLERY}/gpt/train.py --epochs 1"
    found = {}
    for launcher, folder in (("horovodrun -np 2 ", "two"), ("", "one")):
        lines = run_well(f"{launcher}python {script} --checkpoints {folder}", tmp_path)
        ranks, rest = ranks_of(lines)
        found[ranks] = float(rest.removeprefix("perplexity "))
        assert any(re.fullmatch(r"'The statement .{60,}'", line) for line in lines)
    assert found[2] == pytest.approx(found[1], rel=2e-4)
    assert found[1] < 20  # of 128 characters


def test_gpt_in_stages_has_one_process_perplexity_and_either_resumes_from_the_others_checkpoint(tmp_path: Path) -> None:
    script = f"python {GALLERY}/gpt/stages.py --batch-size 64"
    found = []
    for command, epochs, folder in (
        (f"horovodrun -np 2 {script} --stages 2", 1, "stages"),
        (script, 2, "stages"),
        (script, 1, "one"),
        (f"horovodrun -np 2 {script} --shards 2", 2, "one"),
    ):
        lines = run_well(f"{command} --epochs {epochs} --checkpoints {folder}", tmp_path)
        assert any("resumed run" in line for line in lines) == (epochs == 2)
        found += [float(line.partition("perplexity ")[2]) for line in lines if "perplexity" in line]
    in_stages, resumed_alone, alone, resumed_in_shards = found
    assert in_stages == pytest.approx(alone, rel=2e-4)
    assert resumed_alone == pytest.approx(resumed_in_shards, rel=2e-4)
    assert resumed_alone < alone < 30  # of 128 characters


def test_killed_sweep_trains_what_is_left_and_prints_the_whole_table(tmp_path: Path) -> None:
    sweep = [sys.executable, str(GALLERY / "sweep" / "sweep.py"), "--batch-size", "64", "--at-once", "1"]
    process = subprocess.Popen([*sweep, "--lr", "0.1", "0.01"], cwd=tmp_path, start_new_session=True)
    first = tmp_path / "runs/sweep/lr-0.1-batch-64/result.json"
    deadline = time.monotonic() + 100
    while not first.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    lines = run_well(f"{shlex.join(sweep)} --lr 0.1 0.01", tmp_path)
    assert [line.split() for line in lines[1:]] == [
        ["0.1", "64", *figures(first), "done", "before"],
        ["0.01", "64", *figures(tmp_path / "runs/sweep/lr-0.01-batch-64/result.json"), "trained"],
    ]
    status, output = run(f"{shlex.join(sweep)} --lr 0.1 -1", tmp_path)
    assert status == 1
    assert "lr -1, batch size 64: exit status" in output


def figures(result: Path) -> list[str]:
    found = json.loads(result.read_text())
    return [f"{found['loss']:.4f}", f"{found['accuracy']:.4f}"]


def test_training_of_the_sweep_has_one_process_result_on_two_ranks(tmp_path: Path) -> None:
    script = f"{GALLERY}/sweep/train.py --lr 0.1 --batch-size 64 --epochs 2"
    run_well(f"horovodrun -np 2 python {script} --folder two", tmp_path)
    run_well(f"python {script} --folder one", tmp_path)
    one, two = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "two"))
    assert two == pytest.approx(one, abs=1e-3)


def test_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    notebook = GALLERY / "notebook" / "train.ipynb"
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells), "the results are in examples/README.md"
    if importlib.util.find_spec("nbclient") and importlib.util.find_spec("ipykernel"):
        execute = (
            "import nbclient, nbformat, sys; notebook = nbformat.read(sys.argv[1], 4); "
            "nbclient.NotebookClient(notebook, timeout=200).execute(); "
            "print(*(output.text for cell in notebook.cells for output in cell.get('outputs', ())))"
        )
        status, output = run(f"python -c {shlex.quote(execute)} {notebook}", tmp_path)
    else:  # the same cells in one process
        (tmp_path / "cells.py").write_text("\n".join("".join(cell["source"]) for cell in cells))
        status, output = run("python cells.py", tmp_path)
    assert status == 0, output[-4000:]
    assert len(re.findall(r"epoch \d: one rank (\d\.\d{3})\d, two ranks \1", output)) == 3, output
    assert "'0.weight': (64, 64)" in output
