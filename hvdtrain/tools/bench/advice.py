"""What the measured facts mean, in plain words: one small function a rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hvdtrain.tools.quantities import format_size, format_time

_FAST_LINK_BYTES_PER_S = 100e9 / 8


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


def not_reduced(facts: StepFacts) -> str:
    """Ranks that each train alone."""
    if facts.ranks == 1 or facts.reduced:
        return ""
    return (
        f"The optimizer does not reduce gradients: {facts.ranks} ranks each train alone. Use hvdtrain.Trainer, "
        "hvdtrain.prepare or DistributedOptimizer."
    )


def gloo_on_one_host(facts: StepFacts) -> str:
    """A data plane that copies through sockets where shared memory is at hand."""
    if facts.ranks == 1 or facts.hosts > 1 or facts.data_plane != "gloo" or facts.device != "cpu":
        return ""
    if facts.mpi_built:
        return (
            "Gloo carries the gradients on one host, though Horovod has MPI built in, which uses shared memory: unset "
            "HOROVOD_CPU_OPERATIONS."
        )
    return (
        "Gloo carries the gradients through sockets on one host. Open MPI does it through shared memory: install it "
        "(Debian, Ubuntu: apt-get install openmpi-bin libopenmpi-dev), then run `hvdtrain build`."
    )


def communication_exposed(facts: StepFacts) -> str:
    """A step that spends much of its time waiting for the reduction."""
    if facts.communication < 0.15:
        return ""
    return (
        f"Communication is exposed for {facts.communication:.0%} of a step: compute does not hide it. A larger batch a "
        "rank, or several batches a step (Trainer(accumulate=...), backward_passes_per_step), send gradients less "
        "often for the same work."
    )


def latency_dominates(facts: StepFacts) -> str:
    """Gradients so small that an allreduce's start costs more than their bytes."""
    bytes_s = facts.gradient_bytes * facts.beta_s_per_byte
    if facts.communication < 0.1 or facts.alpha_s <= bytes_s:
        return ""
    return (
        f"An allreduce costs {format_time(facts.alpha_s)} however small it is, and the "
        f"{format_size(facts.gradient_bytes)} of gradients cost {format_time(bytes_s)} on top: latency dominates. "
        "Compression would not help; fewer, larger steps do."
    )


def waits_for_data(facts: StepFacts) -> str:
    """Batches that come too slowly."""
    # What workers take off a step, they put on it again where a batch is made in less than a millisecond.
    if facts.data < 0.1 or facts.data_s < 1e-3:
        return ""
    how = (
        "more loader workers (DataLoader(num_workers=...))"
        if facts.framework == "torch"
        else "more loader workers (PyDataset(workers=...)) or tf.data's prefetch"
    )
    return f"Data wait is {facts.data:.0%} of a step: {how}, or cheaper preprocessing."


def oversubscribed(facts: StepFacts) -> str:
    """More ranks than cores."""
    if facts.local_ranks <= facts.cores or facts.device != "cpu":
        return ""
    return (
        f"{facts.local_ranks} ranks share {facts.cores} cores: oversubscribed, so these times say nothing of a host "
        f"with a core for each rank. Use -np {facts.cores} here."
    )


def too_many_threads(facts: StepFacts) -> str:
    """Ranks whose threads take the cores from each other."""
    wanted = facts.local_ranks * facts.threads
    if facts.threads <= 1 or wanted <= facts.cores or facts.device != "cpu":
        return ""
    best = max(1, facts.cores // facts.local_ranks)
    tensorflow = facts.framework == "keras/tensorflow"
    names = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS") if tensorflow else ("OMP_NUM_THREADS",)
    setting = " ".join(f"{name}={best}" for name in names)
    want = f"{facts.local_ranks} ranks of {facts.threads} threads want {wanted} of {facts.cores} cores"
    return f"{want}: run with {setting}."


def slow_link(facts: StepFacts) -> str:
    """Full-precision gradients over a link that is slower than the wait is worth."""
    slow = 0 < facts.link_bytes_per_s < _FAST_LINK_BYTES_PER_S
    if facts.hosts == 1 or not slow or facts.wire != "none" or facts.communication < 0.1:
        return ""
    return (
        f"float32 gradients cross a link of {facts.link_bytes_per_s * 8 / 1e9:.3g} Gb/s. bf16 sends half the bytes: "
        'Trainer(compression="bf16") or compression=hvd.Compression.bf16.'
    )


def one_rank_lags(facts: StepFacts) -> str:
    """A rank for which all others wait."""
    if facts.ranks == 1 or facts.lag < 0.1:
        return ""
    return (
        f"Rank {facts.slowest} takes {facts.lag:.0%} of a step longer than the fastest, and all wait for it: look for "
        "other work on its host, a slower device, or larger samples in its share."
    )


def noisy(facts: StepFacts) -> str:
    """Figures not to be trusted much."""
    if facts.noise < 0.25:
        return ""
    return (
        f"The middle half of the steps spreads over {facts.noise:.0%} of the median: other work disturbs them. Measure "
        "on a quiet machine, or more --steps."
    )


RULES: tuple[Callable[[StepFacts], str], ...] = (
    not_reduced,
    gloo_on_one_host,
    oversubscribed,
    too_many_threads,
    one_rank_lags,
    waits_for_data,
    communication_exposed,
    latency_dominates,
    slow_link,
    noisy,
)


def advise(facts: StepFacts) -> dict[str, str]:
    """Return {rule: sentence} of the rules that apply, the gravest first."""
    return {rule.__name__.replace("_", "-"): said for rule in RULES if (said := rule(facts))}
