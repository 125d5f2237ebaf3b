"""Read from the environment how this process was launched, and which engine its framework needs."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Literal, NamedTuple

from hvdtrain.system.settings import RANK_VARIABLES


class Launcher(NamedTuple):
    """A launcher that left its mark in the environment."""

    name: str
    variable: str
    size: int | None  # number of ranks announced; None where the launcher does not say

    def __str__(self) -> str:
        ranks = count_ranks(self.size) if self.size else "an unknown number of ranks"
        return f"{self.name} ({self.variable}={os.environ.get(self.variable)}, {ranks})"


# In this order: horovodrun inside a Slurm allocation is horovodrun's. SLURM_STEP_NUM_TASKS is srun's own step,
# SLURM_NTASKS the whole allocation's, and may be all that a container passes on.
_LAUNCHERS = {
    "HOROVOD_SIZE": "horovodrun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec",
    "MV2_COMM_WORLD_SIZE": "mpirun", "SLURM_STEP_NUM_TASKS": "srun", "SLURM_NTASKS": "Slurm",
}  # fmt: skip

Engine = Literal["torch", "tensorflow"]
_ENGINES: dict[str | None, Engine | None] = {"torch": "torch", "tensorflow": "tensorflow", None: None}
# What says how many ranks there are, and how many of them are on this host.
_LOCAL_SIZE_VARIABLES = (
    ("HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_SIZE", "MPI_LOCALNRANKS"),
)


def detect() -> Launcher | None:
    """Return the launcher that started this process, or None."""
    for variable, name in _LAUNCHERS.items():
        if (value := os.environ.get(variable, "")).isdigit():
            return Launcher(name, variable, int(value))
    if os.environ.get("HOROVOD_RANK"):
        return Launcher("horovodrun", "HOROVOD_RANK", None)
    # WORLD_SIZE alone is too common a name; torchrun also sets its run id.
    if (value := os.environ.get("WORLD_SIZE", "")).isdigit() and "TORCHELASTIC_RUN_ID" in os.environ:
        return Launcher("torchrun", "WORLD_SIZE", int(value))
    return None


def rank() -> str:
    """Return this process's number as its launcher gave it, for messages before Horovod knows it; "?" for none."""
    return next((os.environ[name] for name in (*RANK_VARIABLES, "SLURM_PROCID") if os.environ.get(name)), "?")


def count_ranks(size: int) -> str:
    """Return "1 rank", or "4 ranks"."""
    return f"{size} rank{'s' * (size != 1)}"


def named(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 0, 1"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def is_alone() -> bool:
    """True where no launcher has announced another process, nor may do so later."""
    found = detect()
    return found is None or (found.size == 1 and not is_elastic())


def on_one_host() -> bool:
    """True if the launcher says that all ranks are on this host; False where it does not say."""
    for size, local_size in _LOCAL_SIZE_VARIABLES:
        if os.environ.get(size, "").isdigit() and os.environ.get(local_size, "").isdigit():
            return os.environ[size] == os.environ[local_size]
    return os.environ.get("SLURM_STEP_NUM_NODES") == "1"


def lacks_pmix() -> bool:
    """True under an srun whose tasks do not know each other: MPI would end the process with its own message."""
    found = detect()
    is_srun = found is not None and found.name == "srun" and found.size != 1
    return is_srun and not any(name.startswith(("PMIX_", "PMI_")) for name in os.environ)


def is_elastic() -> bool:
    """True under an elastic horovodrun, where the announced size goes stale."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def reduces_alone() -> bool:
    """True if one rank alone reduces too: an elastic one may get company; HVDTRAIN_REDUCE_ALONE=1 is for tests."""
    return is_elastic() or os.environ.get("HVDTRAIN_REDUCE_ALONE") == "1"


def engine_for(framework: str | None) -> Engine | None:
    """Return which Horovod library serves `framework`; None when no framework is installed at all."""
    if framework is None:
        framework = _guess_framework()
    if framework == "keras":
        framework = keras_backend()
    if framework == "jax":  # Horovod has no library for JAX: host arrays are sent with either library
        framework = "torch" if importlib.util.find_spec("torch") else "tensorflow"
    if framework not in _ENGINES:
        raise ValueError(f'framework must be "torch", "keras", "tensorflow" or "jax". Received: {framework!r}')
    return _ENGINES[framework]


def runs_on_jax(framework: str | None) -> bool:
    """Return whether `framework`, as `engine_for` takes it, computes with JAX."""
    framework = _guess_framework() if framework is None else framework
    return framework == "jax" or (framework == "keras" and keras_backend() == "jax")


def keras_backend() -> str:
    """Return Keras's backend, asking Keras itself where it is imported: its config file may choose too."""
    keras = sys.modules.get("keras")
    if keras is not None and hasattr(keras, "config"):
        return str(keras.config.backend())
    return os.environ.get("KERAS_BACKEND", "tensorflow")


def _guess_framework() -> str | None:
    # Keras before torch: with the torch backend both are imported, and the model is Keras's.
    for name in ("keras", "torch", "tensorflow"):
        if name in sys.modules:
            return name
    if "KERAS_BACKEND" in os.environ:
        return "keras"
    return next((name for name in ("torch", "tensorflow") if importlib.util.find_spec(name)), None)
