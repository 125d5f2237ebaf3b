"""Names of transformers and accelerate that no documentation promises, and which ranks need to train as one process."""

from __future__ import annotations

from typing import Any

import accelerate
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState

from hvdtrain.errors import HvdTrainError

_NAMES: dict[Any, tuple[str, ...]] = {
    transformers.Trainer: (
        "_finalize_training",
        "_get_num_items_in_batch",
        "_maybe_log_save_evaluate",
        "_save_checkpoint",
        "_track_num_input_tokens",
        "create_accelerator_and_postprocess",
        "set_initial_training_values",
    ),
    transformers.TrainingArguments: ("_setup_devices",),
    accelerate.Accelerator: ("num_processes", "prepare_data_loader", "prepare_model", "prepare_optimizer"),
    AcceleratorState: ("_reset_state",),
    PartialState: ("_shared_state",),
    GradientState: ("active_dataloader", "end_of_dataloader"),
}


def check() -> None:
    """Raise HvdTrainError if the classes of these versions lack what is overridden or read."""
    for owner, names in _NAMES.items():
        require(owner, *names)


def require(owner: Any, *names: str) -> None:
    """Raise HvdTrainError if a class or object of theirs lacks one of these attributes."""
    if missing := [name for name in names if not hasattr(owner, name)]:
        raise different(f"without {getattr(owner, '__name__', type(owner).__name__)}.{missing[0]}")


def different(how: str) -> HvdTrainError:
    """Return the error for versions that are built in another way."""
    return HvdTrainError(
        "These versions of transformers and accelerate are built in another way than those on which "
        f"hvdtrain.transformers was tested. Received: transformers {transformers.__version__}, accelerate "
        f"{accelerate.__version__}, {how}. Run: pip install transformers==5.23.0 accelerate==1.15.0"
    )
