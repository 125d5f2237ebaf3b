"""What the measured facts mean, in plain words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hvdtrain.tools.quantities import format_size, format_time

_FAST_LINK_BYTES_PER_S = 100e9 / 8

RULES = (  # the gravest first
    "not-reduced", "gloo-on-one-host", "oversubscribed", "too-many-threads", "one-rank-lags", "waits-for-data",
    "communication-exposed", "latency-dominates", "slow-link", "noisy",
)  # fmt: skip


@dataclass(frozen=True)
class StepFacts:
    """What was measured, of the slowest rank; zero or empty where it was not. Shares are of a step."""

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
    said = dict([*_of_launch(facts), *_of_steps(facts), *_of_communication(facts)])
    return {rule: said[rule] for rule in RULES if rule in said}


def _of_launch(facts: StepFacts) -> Iterator[tuple[str, str]]:
    """Yield (rule, what it says): ranks that train alone, copy through sockets, or take cores from each other."""
    ranks, cores, on_cpu = facts.local_ranks, facts.cores, facts.device == "cpu"
    if facts.ranks > 1 and not facts.reduced:
        said = (
            f"The optimizer does not reduce gradients: {facts.ranks} ranks each train alone. Use hvdtrain.Trainer, "
            "hvdtrain.prepare or DistributedOptimizer."
        )
        yield "not-reduced", said
    if facts.ranks > 1 and facts.hosts == 1 and facts.data_plane == "gloo" and on_cpu:
        said = (
            "Gloo carries the gradients on one host, though Horovod has MPI built in, which uses shared memory: unset "
            "HOROVOD_CPU_OPERATIONS."
            if facts.mpi_built
            else "Gloo carries the gradients through sockets on one host. Open MPI does it through shared memory: "
            "install it (Debian, Ubuntu: apt-get install openmpi-bin libopenmpi-dev), then run `hvdtrain build`."
        )
        yield "gloo-on-one-host", said
    if ranks > cores and on_cpu:
        said = (
            f"{ranks} ranks share {cores} cores: oversubscribed, so these times say nothing of a host with a core for "
            f"each rank. Use -np {cores} here."
        )
        yield "oversubscribed", said
    if facts.threads > 1 and ranks * facts.threads > cores and on_cpu:
        tensorflow = facts.framework == "keras/tensorflow"
        names = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS") if tensorflow else ("OMP_NUM_THREADS",)
        setting = " ".join(f"{name}={max(1, cores // ranks)}" for name in names)
        want = f"{ranks} ranks of {facts.threads} threads want {ranks * facts.threads} of {cores} cores"
        yield "too-many-threads", f"{want}: run with {setting}."


def _of_steps(facts: StepFacts) -> Iterator[tuple[str, str]]:
    """Yield (rule, what it says): a slow rank, slow batches, figures not to be trusted much."""
    if facts.ranks > 1 and facts.lag >= 0.1:
        said = (
            f"Rank {facts.slowest} takes {facts.lag:.0%} of a step longer than the fastest, and all wait for it: look "
            "for other work on its host, a slower device, or larger samples in its share."
        )
        yield "one-rank-lags", said
    # What workers take off a step, they put on it again where a batch is made in less than a millisecond.
    if facts.data >= 0.1 and facts.data_s >= 1e-3:
        workers = "(DataLoader(num_workers=...))"
        if facts.framework != "torch":
            workers = "(PyDataset(workers=...)) or tf.data's prefetch"
        wait = f"Data wait is {facts.data:.0%} of a step"
        yield "waits-for-data", f"{wait}: more loader workers {workers}, or cheaper preprocessing."
    if facts.noise >= 0.25:
        said = (
            f"The middle half of the steps spreads over {facts.noise:.0%} of the median: other work disturbs them. "
            "Measure on a quiet machine, or more --steps."
        )
        yield "noisy", said


def _of_communication(facts: StepFacts) -> Iterator[tuple[str, str]]:
    """Yield (rule, what it says): a step that waits for the reduction, for its start or for a slow link."""
    if facts.communication >= 0.15:
        said = (
            f"Communication is exposed for {facts.communication:.0%} of a step: compute does not hide it. A larger "
            "batch a rank, or several batches a step (Trainer(accumulate=...), backward_passes_per_step), send "
            "gradients less often for the same work."
        )
        yield "communication-exposed", said
    if facts.communication < 0.1:
        return
    bytes_s = facts.gradient_bytes * facts.beta_s_per_byte
    if facts.alpha_s > bytes_s:
        said = (
            f"An allreduce costs {format_time(facts.alpha_s)} however small it is, and the "
            f"{format_size(facts.gradient_bytes)} of gradients cost {format_time(bytes_s)} on top: latency dominates. "
            "Compression would not help; fewer, larger steps do."
        )
        yield "latency-dominates", said
    if facts.hosts > 1 and 0 < facts.link_bytes_per_s < _FAST_LINK_BYTES_PER_S and facts.wire == "none":
        said = (
            f"float32 gradients cross a link of {facts.link_bytes_per_s * 8 / 1e9:.3g} Gb/s. bf16 sends half the "
            'bytes: Trainer(compression="bf16") or compression=hvd.Compression.bf16.'
        )
        yield "slow-link", said
