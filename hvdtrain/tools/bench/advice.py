"""Explain the measured facts in plain words."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hvdtrain.system.quantities import format_size, format_time

# By rule, the gravest first; filled in with `StepFacts` and what `advise` makes of them.
RULES = {
    "not-reduced": "The optimizer does not reduce gradients: {ranks} ranks each train alone. Use hvdtrain.Trainer, "
    "hvdtrain.prepare or DistributedOptimizer.",
    "gloo-on-one-host": "Gloo carries the gradients {gloo}",
    "oversubscribed": "{local_ranks} ranks share {cores} cores: oversubscribed, so these times say nothing of a host "
    "with a core for each rank. Use -np {cores} here.",
    "too-many-threads": "{local_ranks} ranks of {threads} threads want {all_threads} of {cores} cores: run "
    "with {setting}.",
    "one-rank-lags": "Rank {slowest} takes {lag:.0%} of a step longer than the fastest, and all wait for it: look for "
    "other work on its host, a slower device, or larger samples in its share.",
    "waits-for-data": "Data wait is {data:.0%} of a step: more loader workers {workers}, or cheaper preprocessing.",
    "communication-exposed": "Communication is exposed for {communication:.0%} of a step: compute does not hide it. A "
    "larger batch a rank, or several batches a step (Trainer(accumulate=...), backward_passes_per_step), send "
    "gradients less often for the same work.",
    "latency-dominates": "An allreduce costs {latency} however small it is, and the {size} of gradients cost "
    "{bandwidth} on top: latency dominates. Compression would not help; fewer, larger steps do.",
    "slow-link": "float32 gradients cross a link of {gigabits:.3g} Gb/s. bf16 sends half the bytes: "
    'Trainer(compression="bf16") or compression=hvd.Compression.bf16.',
    "noisy": "The middle half of the steps spreads over {noise:.0%} of the median: other work disturbs them. Measure "
    "on a quiet machine, or more --steps.",
}
_GLOO = {
    True: "on one host, though Horovod has MPI built in, which uses shared memory: unset HOROVOD_CPU_OPERATIONS.",
    False: "through sockets on one host. Open MPI does it through shared memory: install it (Debian, Ubuntu: apt-get "
    "install openmpi-bin libopenmpi-dev), then run `hvdtrain build`.",
}


@dataclass(frozen=True)
class StepFacts:
    """The measured facts, of the slowest rank; zero or empty where not measured. Shares are of a step."""

    ranks: int = 1
    hosts: int = 1
    local_ranks: int = 1
    cores: int = 1
    threads: int = 0
    device: str = "cpu"  # or "cuda:0"
    data_plane: str = ""  # "mpi", "gloo"
    mpi_built: bool = False
    reduced: bool = True  # whether the optimizer reduces gradients
    wire: str = "none"  # "fp16", "bf16": what gradients are compressed to
    framework: str = "torch"  # or "keras/<backend>"
    noise: float = 0.0  # quartile distance over median
    communication: float = 0.0  # exposed, share
    data: float = 0.0  # wait, share
    data_s: float = 0.0
    slowest: int = 0  # the rank that takes longest by itself
    lag: float = 0.0  # by how much longer than the fastest, share
    gradient_bytes: int = 0
    alpha_s: float = 0.0  # the sweep's latency
    beta_s_per_byte: float = 0.0
    link_bytes_per_s: float = 0.0  # as --link says


def advise(facts: StepFacts) -> dict[str, str]:
    """Return {rule: sentence} of the rules that apply, the gravest first."""
    f, on_cpu, bandwidth_s = facts, facts.device == "cpu", facts.gradient_bytes * facts.beta_s_per_byte
    all_threads, gigabits = f.local_ranks * f.threads, f.link_bytes_per_s * 8 / 1e9
    applies = {
        "not-reduced": f.ranks > 1 and not f.reduced,
        "gloo-on-one-host": f.ranks > 1 and f.hosts == 1 and f.data_plane == "gloo" and on_cpu,
        "oversubscribed": f.local_ranks > f.cores and on_cpu,
        "too-many-threads": f.threads > 1 and all_threads > f.cores and on_cpu,
        "one-rank-lags": f.ranks > 1 and f.lag >= 0.1,
        # What workers take off a step, they put on it again where a batch is made in less than a millisecond.
        "waits-for-data": f.data >= 0.1 and f.data_s >= 1e-3,
        "communication-exposed": f.communication >= 0.15,
        "latency-dominates": f.communication >= 0.1 and f.alpha_s > bandwidth_s,
        "slow-link": f.communication >= 0.1 and f.hosts > 1 and 0 < gigabits < 100 and f.wire == "none",
        "noisy": f.noise >= 0.25,
    }
    names = (
        ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
        if f.framework == "keras/tensorflow"
        else ("OMP_NUM_THREADS",)
    )
    values = dataclasses.asdict(f) | {
        "gloo": _GLOO[f.mpi_built],
        "all_threads": all_threads,
        "setting": " ".join(f"{name}={max(1, f.cores // f.local_ranks)}" for name in names),
        "workers": "(DataLoader(num_workers=...))"
        if f.framework == "torch"
        else "(PyDataset(workers=...)) or tf.data's prefetch",
        "latency": format_time(f.alpha_s),
        "size": format_size(f.gradient_bytes),
        "bandwidth": format_time(bandwidth_s),
        "gigabits": gigabits,
    }
    return {rule: text.format(**values) for rule, text in RULES.items() if applies[rule]}
