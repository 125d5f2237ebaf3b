"""The targets, and whether the measured figures meet them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.stats import ratio
from hvdtrain.telemetry.step_times import Spread

Results = dict[str, dict[str, Any]]
RANKS = 2
_OURS = ("hvdtrain", "trainer")


@dataclass(frozen=True)
class Verdict:
    """One target, what was measured for it, and whether that meets it.

    Attributes:
        text: the target.
        limit: the largest figure that meets it.
        measured: None where nothing was measured.
        note: what else a reader should know.
    """

    text: str
    limit: float
    measured: Spread | None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """None where nothing was measured. The median decides; the quartiles say how sure it is."""
        return None if self.measured is None else self.measured.median <= self.limit

    @property
    def sure(self) -> bool:
        """False where the quartiles lie on both sides of the limit: another run may well say the opposite."""
        return self.measured is None or not self.measured.low <= self.limit < self.measured.high


def check(results: Results) -> list[Verdict]:
    """Return a verdict on every target, measured or not; `results` is by the name of the file."""
    gpu = [result for result in results.values() if result.get("machine", {}).get("gpus")]  # a trial has none
    results = {name: result for name, result in results.items() if result.get("ranks", RANKS) == RANKS}
    return [
        *_on_a_gpu(gpu),
        *_against_ddp(results),
        *_against_tuned(results),
        *_keras(results),
        *_memory(results),
        *_once(results),
        *_slow_links(results),
    ]


def _against_ddp(results: Results) -> Iterator[Verdict]:
    for workload, limit in (("lenet", 0.88), ("mlp", 0.72), ("convnet", 0.90), ("transformer", 0.88)):
        result = results.get(workload)
        note = _floor(result) if result else ""
        for peer in _OURS:
            measured = ratio(result, peer, "ddp") if result else None
            yield Verdict(f"{workload}: {peer} / DDP, step time", limit, measured, note)


def _floor(result: dict[str, Any]) -> str:
    """Return how near to no exchange at all a peer could come, and how far DDP comes with malloc's settings alone."""
    words = {"alone": "without any exchange", "alone-kept": "and freed memory kept", "ddp-kept": "DDP with that"}
    found = {text: ratio(result, peer, "ddp") for peer, text in words.items()}
    return ", ".join(f"{text} {measured.median:.3f}" for text, measured in found.items() if measured)


def _against_tuned(results: Results) -> Iterator[Verdict]:
    for workload in ("lenet", "mlp", "convnet", "transformer"):
        result = results.get(workload)
        for peer in _OURS:
            measured = ratio(result, peer, "horovod-tuned") if result else None
            title = result["peers"].get("horovod-tuned", {}).get("title", "") if result else ""
            note = "no sweep made: against one setting" if "no sweep" in title else ""
            yield Verdict(f"{workload}: {peer} / hand-tuned Horovod, step time", 1.02, measured, note)


def _on_a_gpu(results: Sequence[dict[str, Any]]) -> Iterator[Verdict]:
    for result in results:
        if result["ranks"] > 1:
            for peer in ("hvdtrain", "hvdtrain-async"):
                text = f"{result['workload']}, {result['ranks']} GPUs: {peer} / DDP, step time"
                yield Verdict(text, 1.0, ratio(result, peer, "ddp"), str(result["machine"]["gpus"][0]))
            continue
        for peer in (*_OURS, *(f"{each}-async" for each in _OURS)):
            for base, words, limit in (("single", "plain PyTorch", 1.01), ("ddp", "DDP", 1.0)):
                text = f"{result['workload']}, one rank on a GPU: {peer} / {words}, step time"
                yield Verdict(text, limit, ratio(result, peer, base), str(result["machine"].get("gpus", "")))


def _keras(results: Results) -> Iterator[Verdict]:
    tensorflow = results.get("keras-tensorflow-mlp")
    on_torch = results.get("keras-torch-mlp")
    for peer in _OURS:
        measured = ratio(tensorflow, peer, "single") if tensorflow else None
        yield Verdict(f"keras-tensorflow-mlp: {peer} / one process, step time", 1.35, measured)
    measured = ratio(on_torch, "trainer", "torch-trainer") if on_torch else None
    yield Verdict("keras-torch-mlp: trainer / Trainer on plain PyTorch, step time", 1.10, measured)


def _memory(results: Results) -> Iterator[Verdict]:
    for workload in ("lenet", "mlp", "convnet", "transformer"):
        peers = results.get(workload, {}).get("peers", {})
        theirs = peers.get("ddp", {}).get("peak_mib")
        for peer in _OURS:
            ours = peers.get(peer, {}).get("peak_mib")
            measured = Spread(ours / theirs, ours / theirs, ours / theirs) if ours and theirs else None
            yield Verdict(f"{workload}: {peer} / DDP, peak memory of a rank", 1.0, measured)


def _once(results: Results) -> Iterator[Verdict]:
    start = results.get("startup", {}).get("ratios", {})
    for peer in _OURS:
        measured = Spread(**start[peer]) if peer in start else None
        yield Verdict(f"start to first step: {peer} / torchrun + DDP", 1.2, measured)
    own = results.get("overhead", {}).get("extra_us")
    yield Verdict("Trainer's own cost, us a step of 10 parameters", 100.0, Spread(**own) if own else None)


def _slow_links(results: Results) -> Iterator[Verdict]:
    for name, gain in (("1gbit", 5), ("100mbit", 20)):
        result = results.get(f"link-{name}", {"peers": {}})
        for peer in ("gloo", "gloo-fp16", "mpi", "mpi-fp16"):
            bound = result.get("bounds", {}).get(peer)
            text = f"two hosts, {name}: {peer} / max(T_comp, link), step time"
            yield Verdict(text, 1.10, Spread(bound, bound, bound) if bound else None)
        for peer in ("delayed", "delayed-gloo"):
            overlap = result.get("overlaps", {}).get(peer)
            text = f"two hosts, {name}: {peer} / max(T_comp, T_sync), step time"
            yield Verdict(text, 1.05, Spread(overlap, overlap, overlap) if overlap else None)
        for peer in ("local-sgd", "diloco"):
            text = f"two hosts, {name}: {peer} / DDP, step time (DDP takes {gain} x as long)"
            yield Verdict(text, 1 / gain, ratio(result, peer, "ddp"))
