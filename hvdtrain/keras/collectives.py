"""Host (numpy) collectives over horovod.tensorflow, and the GPU that belongs to a local rank."""

from __future__ import annotations

import os
from types import ModuleType

import tensorflow as tf

from hvdtrain.distributed import devices
from hvdtrain.keras.ops import run as run
from hvdtrain.system import gpus

gpu = devices.from_driver  # TensorFlow knows neither UUID nor name before it runs


def has_gpu() -> bool:
    """Return whether TensorFlow sees a GPU."""
    return bool(tf.config.list_physical_devices("GPU"))


def why_not(horovod: ModuleType) -> str:
    """Return why TensorFlow, built for GPUs, finds none where there are some; "" if it finds them.

    Without GPU operations of Horovod's, TensorFlow copies gradients to the host for those it has.
    """
    cuda = tf.sysconfig.get_build_info().get("cuda_version", "")  # of a CPU build there is none
    return gpus.why_unusable(cuda) if cuda and not has_gpu() else ""


def put_off_loading() -> str:
    """Return "": TensorFlow is loaded as a whole."""
    return ""


def starts_with_threads() -> bool:
    """Return True: TensorFlow's threads are started with its first operation."""
    return True


def set_threads(threads: int) -> int | None:
    """Compute each operation with at most `threads` threads, unless the user chose or TensorFlow already started."""
    if "TF_NUM_INTRAOP_THREADS" in os.environ:
        return None
    threading = tf.config.threading
    try:
        if threading.get_intra_op_parallelism_threads() == 0:
            threading.set_intra_op_parallelism_threads(threads)
    except RuntimeError:  # its threads are running
        return None
    return int(threading.get_intra_op_parallelism_threads())


def pick_device(local_rank: int) -> str:
    """Show TensorFlow, which must not have started, only the GPU of `local_rank`; "cpu" without a GPU."""
    found = tf.config.list_physical_devices("GPU")
    if not found:
        return "cpu"
    index = devices.gpu_of(local_rank, len(found))
    tf.config.set_visible_devices(found[index], "GPU")
    for gpu in found:  # of all, as scripts do: once TensorFlow runs, none can be changed
        tf.config.experimental.set_memory_growth(gpu, True)
    return f"cuda:{index}"
