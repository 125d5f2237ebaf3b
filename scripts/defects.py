"""The defects of `make mutants`, and which part of `make test` catches each; scripts/mutants.py runs them."""

from __future__ import annotations

import sys
from dataclasses import dataclass

Command = tuple[str, ...]


def unit(*files: str) -> Command:
    """Return the command that runs tests of one process."""
    paths = [f"tests/unit/{file}" for file in files]
    return (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *paths)


def ranks(group: str, words: str, *, np: int = 2) -> Command:
    """Return the command that runs a group's rank tests whose names hold these words, with pytest's -k."""
    limits = ("--max-failures", "1", "--test-limit", "40")
    return (sys.executable, "tests/ranks/run.py", "--np", str(np), "--only", group, *limits, "--", "-k", words)


@dataclass(frozen=True)
class Defect:
    """A wrong program: `before`, which stands once in `file`, becomes `after`; `command` must then fail."""

    name: str
    file: str
    before: str
    after: str
    command: Command


SHARDING = unit("data/test_sharding.py")
LEARNING_RATE = unit("training/test_learning_rate.py")
FILES = unit("checkpoint")
TORCH = ranks("torch", "uneven or bf16 or join or options or predivide or shape or resume")
TRAINER = ranks("trainer-torch", "weights_of_one_process or metrics or disagree or skip or stopped or statistics")
ALONE = ranks("trainer-torch", "test_sync.py")
GRID = ranks("torch", "test_grid_trainer")
REPLICAS = ranks("torch-grid", "test_grid_trainer", np=4)
KERAS = ranks("keras-tensorflow", "uneven_and_empty or overflow_together or groups")

FEEDBACK = unit("torch/test_error_feedback.py")
KERAS_FEEDBACK = unit("keras/test_error_feedback.py")

DEFECTS = (
    # Which ranks wait for their GPUs
    Defect(
        "gpu path: a host without a proof runs ahead too",
        "hvdtrain/distributed/gpu_path.py",
        "    if not waits:\n",
        "    if len(waits) < len(choices):\n",
        unit("distributed/test_gpu_path.py"),
    ),
    Defect(
        "gpu path: a proof outlives its driver",
        "hvdtrain/horovod_build/gpu_record.py",
        "if not value or then.get(name) != value",
        "if not value",
        unit("horovod_build/test_gpu_record.py"),
    ),
    Defect(
        "gpu path: a proof counts for GPUs that took no part",
        "hvdtrain/horovod_build/gpu_record.py",
        'uuids <= set(each["gpus"])',
        'uuids & set(each["gpus"])',
        unit("horovod_build/test_gpu_record.py"),
    ),
    # How samples are shared out
    Defect(
        "sharding: the short tail of an epoch is skipped",
        "hvdtrain/data/sharding.py",
        "return -(-num_samples // (batch_size * size))",
        "return num_samples // (batch_size * size)",
        SHARDING,
    ),
    Defect(
        "sharding: every epoch has the order of the first",
        "hvdtrain/data/sharding.py",
        "% (seed, epoch))",
        "% (seed, 0))",
        SHARDING,
    ),
    Defect(
        "sharding: each rank begins one sample too late",
        "hvdtrain/data/sharding.py",
        "range(min(start + rank, num_samples)",
        "range(min(start + rank + 1, num_samples)",
        SHARDING,
    ),
    Defect(
        "sources: a short batch weighs as much as a full one",
        "hvdtrain/data/sharding.py",
        "return max(0, min(batch_size * size, num_samples - step * batch_size * size))",
        "return batch_size * size",
        TRAINER,
    ),
    Defect(
        "contents: samples that differ between ranks are accepted",
        "hvdtrain/data/contents.py",
        "if not differing or contents is None:",
        "if True:",
        ranks("torch", "test_trainer_contents.py"),
    ),
    Defect(
        "contents: random augmentation is taken for a difference",
        "hvdtrain/data/contents.py",
        "if len(changed) == len(suspects):",
        "changed.clear()\n        if len(changed) == len(suspects):",
        ranks("torch", "test_trainer_contents.py"),
    ),
    Defect(
        "sources: an epoch ends with the first rank that has no more batches",
        "hvdtrain/data/sources.py",
        "if not going_on:",
        "if going_on < self._ranks.size:",
        ranks("trainer-torch", "iterables"),
    ),
    # What is read ahead
    Defect(
        "prefetch: a batch is taken before it is gathered",
        "hvdtrain/data/prefetch.py",
        "        batch.gathered.result()\n",
        "",
        unit("data/test_prefetch.py"),
    ),
    Defect(
        "prefetch: the next batch is copied before it is gathered",
        "hvdtrain/data/prefetch.py",
        "if asked and asked[0].gathered.done() and",
        "if asked and",
        unit("data/test_prefetch.py"),
    ),
    Defect(
        "device copies: a step does not wait for the copy of its batch",
        "hvdtrain/torch/ops/device_copies.py",
        "        self._device.expect(copy)\n",
        "",
        unit("torch/test_prefetch.py"),
    ),
    # What a loss weighs
    Defect(
        "losses: targets that are ignored count",
        "hvdtrain/torch/reduction/loss_weights.py",
        "kept = targets != loss.ignore_index",
        "kept = targets == targets",
        unit("torch/test_losses.py"),
    ),
    Defect(
        "losses: gradients are not multiplied by the number of ranks",
        "hvdtrain/torch/reduction/loss_weights.py",
        "(self._share if self.alone else size) / self.expected",
        "(self._share if self.alone else 1) / self.expected",
        TRAINER,
    ),
    Defect(
        "metrics: each rank reports the mean of its own samples",
        "hvdtrain/torch/steps/metrics.py",
        "totals = reduce(np.concatenate([mine, self.stateful.numbers]))",
        "totals = np.concatenate([mine, self.stateful.numbers])",
        TRAINER,
    ),
    Defect(
        "metrics: states that are not sums are this rank's own",
        "hvdtrain/torch/steps/stateful_metrics.py",
        'for data in self._ranks.allgather_bytes(mine, name="metrics") for',
        "for data in [mine] for",
        unit("torch/test_metrics.py"),
    ),
    Defect(
        "metrics: any state of a Keras metric is added up",
        "hvdtrain/keras/metrics.py",
        "if not np.allclose(total, one + other, rtol=_TOLERANCE, atol=_TOLERANCE):",
        "if False:",
        unit("keras/test_metrics.py"),
    ),
    Defect(
        "metrics: samples without labels are left out",
        "hvdtrain/torch/adapter.py",
        "if batch.local_count:  # also",
        "if weights.counted[index].weight:  # also",
        ranks("torch", "samples_without_labels"),
    ),
    Defect(
        "LBFGS: each rank searches by its own loss",
        "hvdtrain/torch/steps/closure.py",
        'loss = ranks.allreduce(loss, "mean", name="closure.loss")',
        'ranks.allreduce(loss, "mean", name="closure.loss")',
        ranks("torch", "lbfgs_equals"),
    ),
    Defect(
        "checkpoints: frozen weights that have changed are left out",
        "hvdtrain/checkpoint/files.py",
        "in left_out if digest(array) == known}",
        "in left_out}",
        unit("torch/test_frozen.py"),
    ),
    Defect(
        "own step: a loss weighs the samples of its batch, not its count",
        "hvdtrain/torch/adapter.py",
        "if found.count is not None:",
        "if found.count is None:",
        ranks("torch", "own_step"),
    ),
    Defect(
        "micro-batches: a repeated step counts what the failed attempt has counted",
        "hvdtrain/torch/steps/micro_batches.py",
        "attempt.repeat()",
        "pass",
        unit("torch/test_micro_batches.py"),
    ),
    # How gradients are reduced on PyTorch
    Defect(
        "reducer: ranks that have joined count in the mean",
        "hvdtrain/torch/reduction/reducer.py",
        "correction = size / active",
        "correction = 1.0",
        TORCH,
    ),
    Defect(
        "reducer: what was divided before the sum is not multiplied after it",
        "hvdtrain/torch/reduction/reduction_unit.py",
        "return Reduction(options.op, 1.0 / predivide, scale * predivide, options.process_set)",
        "return Reduction(options.op, 1.0 / predivide, scale, options.process_set)",
        TORCH,
    ),
    Defect(
        "bucket: the last gradient of each bucket is that of an earlier step",
        "hvdtrain/torch/reduction/bucket.py",
        "torch._foreach_copy_(self._views, self._whole() or [dense_gradient(p) for p in self.params])",
        "torch._foreach_copy_(self._views[:-1], [dense_gradient(p) for p in self.params[:-1]])",
        TRAINER,
    ),
    Defect(
        "bucket: ranks whose weights lie otherwise in memory add up numbers that do not belong together",
        "hvdtrain/torch/reduction/bucket.py",
        "if any(orders) else",
        "if False else",
        TORCH,
    ),
    Defect(
        "bucket: a parameter of a new shape is sent in the old one's place",
        "hvdtrain/torch/reduction/bucket.py",
        "        self._check_shapes()\n",
        "",
        TORCH,
    ),
    Defect(
        "gradient flags: a gradient that a rank lacks counts as if it had it",
        "hvdtrain/torch/reduction/reducer.py",
        "one = factor / size if how.op == Average else factor",
        "one = factor",
        TORCH,
    ),
    Defect(
        "gradient flags: weights travel in torch's default type, in which they may be infinite",
        "hvdtrain/torch/reduction/reducer.py",
        'torch.tensor(numbers, dtype=torch.float32, device="cpu")',
        'torch.tensor(numbers, device="cpu")',
        ranks("torch", "large_weights_come_with_gradients"),
    ),
    Defect(
        "channels_last: a rank without a gradient sends its zeros in another order",
        "hvdtrain/torch/reduction/reduction_unit.py",
        "tensors = [in_order(each, self._order) for each in tensors]",
        "tensors = [each.unsqueeze(-1) for each in tensors]",
        ranks("torch", "a_rank_whose_gradient_lies_otherwise"),
    ),
    Defect(
        "error feedback: what was not sent is forgotten",
        "hvdtrain/torch/ops/compression/memory.py",
        "whole.append(real if error is None else real.add_(error, alpha=scale))",
        "whole.append(real)",
        FEEDBACK,
    ),
    Defect(
        "error feedback: a gradient that is not finite gets into the memory",
        "hvdtrain/torch/ops/compression/memory.py",
        "torch.where(is_finite, error, 0.0 if before is None else before)",
        "error",
        FEEDBACK,
    ),
    Defect(
        "error feedback: a refused step changes the memory",
        "hvdtrain/torch/reduction/reducer.py",
        "self.options.compression.rollback()  # of an earlier step that was not taken",
        "self.options.compression.commit()",
        ranks("torch", "leaves_the_memory_as_it_was"),
    ),
    Defect(
        "error feedback: what was not sent of changes of weights is in no checkpoint",
        "hvdtrain/torch/adapter.py",
        "        held |= self._changes.compressor.state()\n",
        "",
        ranks("torch", "compressed_changes and resumes"),
    ),
    Defect(
        "int8: the rounding of the mean is not remembered",
        "hvdtrain/torch/ops/compression/int8.py",
        "+= (mine - _numbers(shared, whole.dtype)) * size",
        "+= (mine - _numbers(shared, whole.dtype)) * 0",
        FEEDBACK,
    ),
    Defect(
        "powersgd: each step begins with the first directions",
        "hvdtrain/torch/ops/compression/powersgd.py",
        "_drawn(name, like) if q is None else q",
        "_drawn(name, like)",
        FEEDBACK,
    ),
    Defect(
        "error feedback on Keras: a refused step changes the memory",
        "hvdtrain/keras/optimizer.py",
        "        memory.refuse()\n",
        "        pass\n",
        ranks("keras-torch", "leaves_the_memory_as_it_was"),
    ),
    Defect(
        "error feedback on Keras: a rank's errors are in no checkpoint",
        "hvdtrain/keras/memories.py",
        "for name, array in memory.state().items()}",
        "for name, array in {}.items()}",
        ranks("keras-torch", "test_a_compressed_run_resumes"),
    ),
    Defect(
        "int8 in NumPy: the rounding of the mean is not remembered",
        "hvdtrain/keras/error_feedback/schemes.py",
        "+= (mine - _numbers(shared, dtype)) * size",
        "+= (mine - _numbers(shared, dtype)) * 0",
        KERAS_FEEDBACK,
    ),
    Defect(
        "shards: parts begin anywhere, not at a multiple of a kernel's width",
        "hvdtrain/distributed/division.py",
        "_ALIGNED = 64",
        "_ALIGNED = 1",
        ranks("torch", "test_weights_and_state_have_the_bits"),
    ),
    Defect(
        "shards: a rank's state is that of the first part",
        "hvdtrain/torch/reduction/sharded.py",
        "flat(laid_out(parameter, as_read(value)))[begin:end]",
        "flat(laid_out(parameter, as_read(value)))[: end - begin]",
        ranks("torch", "a_state_that_is_loaded_is_divided"),
    ),
    Defect(
        "shards: a rank without a part of a weight chooses kernels without it",
        "hvdtrain/torch/reduction/sharded.py",
        "part.grad = flat_gradient(parameter, parameter.grad)[begin:end]",
        "part.grad = flat_gradient(parameter, parameter.grad)[begin:end] if begin < end else None",
        ranks("torch", "whose_first_gradient_comes_late"),
    ),
    Defect(
        "shards: the other ranks' weights are not put in place",
        "hvdtrain/torch/reduction/publish.py",
        "if rank != own and begin < end:",
        "if rank == own and begin < end:",
        ranks("torch", "test_weights_and_state_have_the_bits"),
    ),
    Defect(
        "shards on Keras: a state that is loaded is that of the first part",
        "hvdtrain/keras/shards/__init__.py",
        "whole.reshape(-1)[begin:end])",
        "whole.reshape(-1)[: end - begin])",
        ranks("keras-torch", "what_is_saved_is_whole_or_refused"),
    ),
    Defect(
        "shards on Keras: a piece of another rank's part comes to lie where the part begins",
        "hvdtrain/keras/shards/__init__.py",
        "for first in range(begin, numel, length)",
        "for first in range(0, numel, length)",
        ranks("keras-torch", "sent_in_many_pieces"),
    ),
    Defect(
        "shards on Keras: the root reads each whole value to send its pieces",
        "hvdtrain/keras/training_state.py",
        "partial(held.piece, name)",
        "partial(lambda name, first, last: held[name].reshape(-1)[first:last], name)",
        ranks("keras-torch", "test_loading_takes_the_memory"),
    ),
    Defect(
        "Keras: pieces of a weight that the root has loaded are those of its beginning",
        "hvdtrain/keras/variables.py",
        "_from_root(flat[begin : begin + length].view",
        "_from_root(flat[:length].view",
        ranks("keras-torch", "sent_in_many_pieces"),
    ),
    Defect(
        "shards on Keras: parts of gradients are this rank's own on TensorFlow",
        "hvdtrain/keras/backends/tensorflow.py",
        "tf.add_n(rows)",
        "rows[how.rank()] * len(rows)",
        ranks("keras-tensorflow", "gets_its_part_of_gradients"),
    ),
    Defect(
        "shards on Keras: parts of gradients lack the last rank's on JAX",
        "hvdtrain/keras/shards/jax.py",
        "for row in others:",
        "for row in others[:-1]:",
        ranks("keras-jax", "gets_its_part_of_gradients"),
    ),
    Defect(
        "Keras on JAX: a call in a step does not wait for those before it",
        "hvdtrain/keras/backends/host_calls.py",
        "begun = io_callback(_zero, mark, ordered=True)",
        "begun = jnp.zeros((), jnp.float32)",
        ("env", "KERAS_BACKEND=jax", *unit("keras/test_host_calls.py")),
    ),
    Defect(
        "shards on Keras: the norm of gradients is that of this rank's parts",
        "hvdtrain/keras/shards/__init__.py",
        "optimizer.clipnorm or optimizer.global_clipnorm or optimizer.reports_updates",
        "optimizer.reports_updates",
        ranks("keras-jax", "norms_and_reports_are_of_whole"),
    ),
    Defect(
        "shards on Keras: what was gathered before a step is saved after it",
        "hvdtrain/keras/shards/__init__.py",
        "return self._values if iterations == self._iterations else {}",
        "return self._values",
        ranks("keras-torch", "what_is_saved_is_whole_or_refused"),
    ),
    Defect(
        "shards: the norm of gradients is that of this rank's parts",
        "hvdtrain/torch/reduction/sharded.py",
        "return self._sum(norm.double().square()).sqrt().to(norm.dtype)",
        "return norm",
        ranks("torch", "sharded_gradients_give"),
    ),
    Defect(
        "shards: a rank skips a step alone, because of a number in its own part",
        "hvdtrain/torch/steps/loss_scaling.py",
        "tensors.add_up(found_inf)",
        "pass",
        ranks("torch", "loss_scaling_skips_a_step"),
    ),
    Defect(
        "shards: gradients of ranks with other weights are not corrected",
        "hvdtrain/torch/reduction/scattered.py",
        "part.mul_(correction) if correction != 1.0 else part",
        "part",
        ranks("torch", "sharded_gradients_are_weighed"),
    ),
    Defect(
        "elastic shards: copies are on the host of the rank whose part they are of",
        "hvdtrain/distributed/keepers.py",
        "by_host[(place + most) % size]",
        "by_host[(place + 1) % size]",
        unit("torch/test_shard_commits.py"),
    ),
    Defect(
        "elastic shards: the earlier commit is dropped before all ranks have saved the new one",
        "hvdtrain/distributed/shard_commits.py",
        "        self._commits[layout.number] = commit\n",
        "        self._commits = {layout.number: commit}\n",
        unit("torch/test_shard_commits.py"),
    ),
    Defect(
        "elastic shards: a rank puts the parts of the ranks before into its optimizer",
        "hvdtrain/distributed/shard_commits.py",
        "yield Move(entry, part, sender, receiver, max(first, begin), min(last, end))",
        "yield Move(entry, part, sender, receiver, first, last)",
        unit("torch/test_shard_commits.py"),
    ),
    Defect(
        "shards: whole gradients stay until the step",
        "hvdtrain/torch/reduction/scattered.py",
        "        param.grad = None\n",
        "",
        ranks("torch", "backward_frees_gradients"),
    ),
    Defect(
        "bf16: the first rank's part is left out of the sum",
        "hvdtrain/torch/ops/compression/bf16.py",
        ".float().sum(0)",
        ".float()[1:].sum(0)",
        TORCH,
    ),
    Defect(
        "whole numbers: above 2^53 their products pass through a double",
        "hvdtrain/torch/ops/whole_numbers.py",
        "        if large.any():\n",
        "        if False:\n",
        unit("torch/test_whole_numbers.py"),
    ),
    Defect(
        "sync batch norm: each rank's mean weighs the same",
        "hvdtrain/torch/ops/norm_kernels.py",
        "mean = (means * weights).sum(0) / count",
        "mean = means.mean(0)",
        ranks("torch", "batch_norm and uneven"),
    ),
    Defect(
        "sync batch norm: torch's kernel divides by the count of a rank without samples",
        "hvdtrain/torch/ops/sync_batch_norm.py",
        ".clamp(min=_NO_SAMPLES)",
        "",
        ranks("torch", "batch_norm and empty"),
    ),
    # What all ranks begin with, and must agree on
    Defect(
        "adapter: weights are not broadcast",
        "hvdtrain/torch/adapter.py",
        "hvd.broadcast_parameters([*names.parameters(self._model), *names.buffers(self._model)], root_rank=0)",
        "hvd.broadcast_parameters(names.buffers(self._model), root_rank=0)",
        TRAINER,
    ),
    Defect(
        "optimizer state: the root's moments do not arrive",
        "hvdtrain/torch/ops/functions.py",
        "optimizer.state.update(new_state)",
        "pass",
        ranks("torch", "resume or optimizer_state"),
    ),
    Defect(
        "agreement: each rank is compared with itself",
        "hvdtrain/distributed/agreement.py",
        "if value != seen[0]]",
        "if value != seen[rank]]",
        TRAINER,
    ),
    Defect(
        "world: the greatest number over ranks is their sum",
        "hvdtrain/distributed/world.py",
        '"op": _OPS[op]',
        '"op": _OPS["sum"]',
        ranks("trainer-torch", "healthy or flipped"),
    ),
    Defect(
        "average_buffers: running statistics are the largest over ranks, not the mean",
        "hvdtrain/torch/ops/average_buffers.py",
        'ranks.allreduce(flat.numpy(), "mean", name="average_buffers")',
        'ranks.allreduce(flat.numpy(), "max", name="average_buffers")',
        unit("torch/test_dtypes.py"),
    ),
    # Where a run resumes
    Defect(
        "training state: a resumed run has no moments",
        "hvdtrain/torch/steps/training_state.py",
        'optimizer.load_state_dict({"state": entries,',
        'optimizer.load_state_dict({"state": {},',
        TRAINER,
    ),
    Defect(
        "progress: only this rank's samples count as done",
        "hvdtrain/sync/steps.py",
        "sum(batch.global_count for batch in group)",
        "sum(batch.local_count for batch in group)",
        TRAINER,
    ),
    Defect(
        "progress: a resumed run counts its steps from 0",
        "hvdtrain/training/progress.py",
        'for name in ("epoch", "step", "global_step", "seconds")',
        'for name in ("epoch", "step", "seconds")',
        unit("training/test_progress.py", "training/test_resuming.py"),
    ),
    Defect(
        "rank state: all ranks draw the root's random numbers",
        "hvdtrain/distributed/rank_state.py",
        "return before[rank]",
        "return before[0]",
        unit("distributed/test_rank_state.py"),
    ),
    Defect(
        "NaN policy: a step that is skipped leaves its samples in the metrics",
        "hvdtrain/torch/adapter.py",
        "self._attempt.undo()\n        update.optimizer.zero_grad()",
        "pass\n        update.optimizer.zero_grad()",
        TRAINER,
    ),
    # Rates and signals
    Defect(
        "learning rate: the warmup is one step late",
        "hvdtrain/training/learning_rate.py",
        "* (step + 1) / ramp",
        "* step / ramp",
        LEARNING_RATE,
    ),
    Defect(
        "learning rate: it is scaled unasked",
        "hvdtrain/training/learning_rate.py",
        '"none": lambda size: 1.0',
        '"none": float',
        LEARNING_RATE,
    ),
    Defect(
        "heartbeat: a request to stop stays on its rank",
        "hvdtrain/telemetry/interval.py",
        "vector[:3] = stop, spent_s,",
        "vector[:3] = 0.0, spent_s,",
        ranks("trainer-torch", "test_stop"),
    ),
    Defect(
        "preemption: SIGUSR1 is not taken",
        "hvdtrain/training/preemption.py",
        "_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)",
        "_SIGNALS = (signal.SIGTERM,)",
        unit("training/test_preemption.py"),
    ),
    # Files
    Defect(
        "store: the last finite checkpoint is pruned",
        "hvdtrain/checkpoint/store.py",
        "if path not in (best, finite)",
        "if path not in (best,)",
        FILES,
    ),
    Defect(
        "lock: two runs may write to one folder",
        "hvdtrain/checkpoint/lock.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        FILES,
    ),
    Defect(
        "files: a hash is not compared",
        "hvdtrain/checkpoint/files.py",
        "sha256_of(file) != entry.sha256",
        "not entry.sha256",
        FILES,
    ),
    # Keras
    Defect(
        "Keras on TensorFlow: NaN of a rank without samples is sent",
        "hvdtrain/keras/backends/__init__.py",
        "ops.where(weight == 0, ops.zeros_like(g), g * ops.cast(weight, g.dtype))",
        "g * ops.cast(weight, g.dtype)",
        KERAS,
    ),
    Defect(
        "Keras: each rank decides alone whether a gradient is finite",
        "hvdtrain/keras/optimizer.py",
        'finite = _backend.true_on_all_ranks(finite, f"{self._prefix}.finite", how)',
        "finite = finite",
        KERAS,
    ),
    Defect(
        "Keras: an optimizer that has trained loses its state as it is wrapped",
        "hvdtrain/keras/wrapping.py",
        "_track(twin, list(optimizer._variables))",
        "_track(twin, [])",
        ranks("keras-torch", "mid_training"),
    ),
    Defect(
        "Keras: predivision is not undone",
        "hvdtrain/keras/reduction.py",
        '"postscale_factor": self.predivide * self.factor',
        '"postscale_factor": self.factor',
        KERAS,
    ),
    Defect(
        "Keras on JAX: gradients travel in every pass of an accumulation",
        "hvdtrain/keras/backends/jax.py",
        "return jax.lax.cond(_is_update_step(optimizer, steps), function, otherwise, list(gradients))",
        "return function(gradients)",
        ranks("keras-jax", "timeline"),
    ),
    Defect(
        "Keras on torch: a rank's batch weighs nothing special",
        "hvdtrain/keras/adapter.py",
        "weight * self._ranks.size if batch.local_count else 0.0",
        "1.0 if batch.local_count else 0.0",
        ranks("trainer-keras-torch", "weights_of_one_process"),
    ),
    # Steps that close early
    Defect(
        "cutoff: a mean is divided by what was planned, not by what came",
        "hvdtrain/torch/reduction/cut.py",
        "mean.correction(rounding=0.0)",
        "1.0",
        ranks("torch", "cutoff and the_mean_of_a_step"),
    ),
    Defect(
        "cutoff: a batch that comes too late counts in metrics",
        "hvdtrain/torch/steps/open_steps.py",
        "        self._attempt.repeat()\n",
        "",
        ranks("torch", "cutoff and counted_once"),
    ),
    Defect(
        "cutoff: a batch that comes too late draws random numbers",
        "hvdtrain/torch/steps/open_steps.py",
        "self._attempt.begin(draws=True)",
        "self._attempt.begin()",
        ranks("torch", "cutoff and record_of_a_run"),
    ),
    Defect(
        "cutoff: what was left over once is lost when the rest is assigned again",
        "hvdtrain/data/assignment.py",
        "max(len(self.left), max(self.taken) * self.size)",
        "max(self.taken) * self.size",
        unit("data/test_assignment.py"),
    ),
    # Ranks that step alone
    Defect(
        "sync: a rank that steps alone does not weigh its share of a tail",
        "hvdtrain/torch/reduction/loss_weights.py",
        "(self._share if self.alone else size)",
        "(1.0 if self.alone else size)",
        ALONE,
    ),
    Defect(
        "sync: a rank without samples takes no step",
        "hvdtrain/torch/reduction/alone.py",
        "            self._fill_gradients()\n",
        "",
        ranks("trainer-torch", "one_step_is_synchronous", np=3),
    ),
    Defect(
        "sync: momentum stays each rank's own",
        "hvdtrain/sync/periodic.py",
        "access.set_moments(moments())",
        "moments()",
        ALONE,
    ),
    Defect(
        "sync: the outer momentum is not in checkpoints",
        "hvdtrain/sync/periodic.py",
        "arrays=state.arrays | self._host_velocities()",
        "arrays=state.arrays",
        ALONE,
    ),
    Defect(
        "sync: a checkpoint is written while ranks hold different weights",
        "hvdtrain/training/saver.py",
        "while self._due.checkpoints and self._context.in_sync:",
        "while self._due.checkpoints:",
        ALONE,
    ),
    Defect(
        "sync: what a rank learns during an exchange is lost",
        "hvdtrain/sync/outer.py",
        "                value -= sent\n                value += new",
        "                value *= 0\n                value += new",
        ranks("torch", "trainer_sync and fragments"),
    ),
    Defect(
        "sync: other ranks do not learn of a gradient that is not finite",
        "hvdtrain/sync/periodic.py",
        "        if found:\n",
        "        if mine:\n",
        ALONE,
    ),
    Defect(
        "sync: gradients go to ranks of other hosts",
        "hvdtrain/torch/reduction/host_mean.py",
        "if host == hosts[self._world.rank]]",
        "]",
        ranks("torch", "and_hosts_alone", np=3),
    ),
    Defect(
        "sync: the mean over a host reads its flags from the device",
        "hvdtrain/torch/reduction/host_mean.py",
        "if members[0].is_cpu:",
        "if members:",
        unit("torch/test_no_host_sync.py"),
    ),
    Defect(
        "sync: the gradient in flight is not in checkpoints",
        "hvdtrain/torch/adapter.py",
        "arrays=state.arrays | arrays, ",
        "",
        ALONE,
    ),
    Defect(
        "sync: a delayed gradient is unscaled by the loss scale of another step",
        "hvdtrain/torch/reduction/delayed.py",
        "factor = made.scale() / origin.scale",
        "factor = 1.0",
        unit("sync/test_delayed.py"),
    ),
    Defect(
        "seam: a delayed step with a gradient that is not finite keeps what it has counted",
        "hvdtrain/torch/adapter.py",
        "if applied.must_undo and",
        "if False and",
        unit("sync/test_delayed.py"),
    ),
    Defect(
        "Keras: the first step of Delayed changes weights",
        "hvdtrain/keras/optimizer.py",
        "grads, state.may_change = state.exchange.finish(self, grads)",
        "grads, _ = state.exchange.finish(self, grads)",
        unit("keras/test_delayed.py"),
    ),
    Defect(
        "seam: the last delayed gradient is not applied",
        "hvdtrain/torch/reduction/delayed.py",
        "applied = self._put(self._take(), made)",
        "applied = self._put(None, made)",
        unit("sync/test_delayed.py"),
    ),
    Defect(
        "seam: the gradient in flight is not in checkpoints",
        "hvdtrain/torch/adapter.py",
        "arrays, meta = self._update.exchanges.used.state()",
        "arrays, meta = {}, {}",
        unit("sync/test_delayed.py"),
    ),
    Defect(
        "seam: ranks that step alone reduce with backward",
        "hvdtrain/torch/steps/exchanges.py",
        "self.used = self._by_ranks[ranks]",
        'self.used = self._by_ranks["all"]',
        ALONE,
    ),
    Defect(
        "seam: a rank that gives up takes no part in the exchange",
        "hvdtrain/torch/steps/update.py",
        "        self.exchanges.used.give_up()\n",
        "",
        ranks("torch", "micro_batches"),
    ),
    Defect(
        "seam: a step that repeats after too little memory draws other numbers",
        "hvdtrain/torch/adapter.py",
        "begin(draws=self._micro_batches.adapts)",
        "begin()",
        ranks("torch", "micro_batches"),
    ),
    Defect(
        "seam: a resumed run packs its gradients anew",
        "hvdtrain/torch/reduction/exchange.py",
        "self.packed = held[_PACKED]",
        "pass",
        ranks("trainer-torch", "resumed_run_sums_as", np=3),
    ),
    # Activations that backward computes again
    Defect(
        "activations: the second computation draws other numbers of Python and NumPy",
        "hvdtrain/torch/steps/activations.py",
        "_set_random_states(self._random)",
        "pass",
        unit("torch/test_activations.py"),
    ),
    Defect(
        "activations: running statistics count a batch twice",
        "hvdtrain/torch/steps/activations.py",
        "if isinstance(each, _NormBase) and each.training]",
        "if isinstance(each, _NormBase) and not each.training]",
        unit("torch/test_activations.py"),
    ),
    Defect(
        "activations: the second computation draws a seed generator's next numbers, on Keras",
        "hvdtrain/keras/activations.py",
        "self._scope.state_mapping[id(variable)] = value",
        "pass",
        unit("keras/test_activations.py"),
    ),
    # What is said when memory runs out
    Defect(
        "memory: an error that ends a script says nothing of what took the memory",
        "hvdtrain/distributed/watchdog/rank_exit.py",
        "tracebacks.explain(error)",
        "pass",
        unit("distributed/watchdog/test_rank_exit.py"),
    ),
    Defect(
        "memory: a rank that somebody killed on another host is said to lack memory",
        "hvdtrain/launch/out_of_memory.py",
        'found.get("oom_kills_since", 0) > 0',
        "True",
        unit("launch/test_out_of_memory.py"),
    ),
    Defect(
        "memory: what a killed rank wrote is gone before anybody has read it",
        "hvdtrain/distributed/watchdog/shared_facts.py",
        ' and not pids.keys() & self.all("memory").keys()',
        "",
        unit("distributed/watchdog/test_shared_facts.py"),
    ),
    # How many samples of a step each rank takes
    Defect(
        "balance: a resumed run begins with equal parts",
        "hvdtrain/training/run_state.py",
        '"shares": self.shares,',
        '"shares": None,',
        ranks("trainer-torch", "test_balance.py"),
    ),
    Defect(
        "balance: all ranks take a step's first samples",
        "hvdtrain/data/plan.py",
        "first, last = ends[self._rank : self._rank + 2]",
        "last = first + ends[self._rank + 1] - ends[self._rank]",
        unit("sync/test_balance.py"),
    ),
    # Models that a Grid divides
    Defect(
        "grid: gradients are not clipped",
        "hvdtrain/torch/reduction/grid_part.py",
        "self._grid.clip_grad_norm_(parameters, largest)",
        "pass",
        GRID,
    ),
    Defect(
        "grid: the norm is that of one stage",
        "hvdtrain/torch/grid/grid.py",
        "if self.stages > 1:\n            how",
        "if self.stages > 9:\n            how",
        GRID,
    ),
    Defect(
        "grid: shards do not know how many labels count",
        "hvdtrain/torch/reduction/divided.py",
        "divided.local(each.grad).mul_(factor)",
        "pass",
        GRID,
    ),
    Defect(
        "grid: micro-batches weigh the same",
        "hvdtrain/torch/steps/stage_step.py",
        "return scaled(found.mean, weights.factor(index))",
        "return scaled(found.mean)",
        GRID,
    ),
    Defect(
        "grid: a stage alone skips a step in which fp16 overflows",
        "hvdtrain/torch/steps/update.py",
        "or tensors.are_parts or tensors.is_divided:",
        "or tensors.are_parts:",
        GRID,
    ),
    Defect(
        "grid: stages of shards count the rows that fill up",
        "hvdtrain/torch/steps/stage_step.py",
        "found = self._loss_of(move(lambda each: each[: batch.local_count], outputs), batch)",
        "found = self._loss_of(outputs, batch)",
        REPLICAS,
    ),
    Defect(
        "grid: stages save the optimizer's state under each other's numbers",
        "hvdtrain/torch/steps/grid_state.py",
        "return before + sum(each[group] for each in counts[:stage]) + index",
        "return before + index",
        GRID,
    ),
    Defect(
        "grid: a stage alone refuses a step whose gradient is not finite",
        "hvdtrain/torch/reduction/grid_part.py",
        'return not self._over_replica(float(not finite), "max")',
        "return finite",
        ranks("torch", "test_grid_policies and overflows_in_one_stage"),
    ),
    Defect(
        "grid: shards train the weights that they have gathered of the averages",
        "hvdtrain/torch/averaging.py",
        "divided.reshard(self._model)",
        "pass",
        ranks("torch", "test_grid_policies and gathered"),
    ),
    Defect(
        "grid: replicas of a part are not compared",
        "hvdtrain/callbacks/sync_check.py",
        "return not differ, found",
        "return True, found",
        REPLICAS,
    ),
)
