"""The one command: `python -m benchmarks`, or `make bench`."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import asked, catalog, gpu, growth, overhead, report, scaling, slow_links, startup, steps, sweep
from benchmarks.asked import SECTIONS, BadInputError
from benchmarks.catalog import Peer
from benchmarks.groups import GroupError
from benchmarks.workloads import GPU, GPUS, WORKLOADS, Workload

_RESULTS = Path(__file__).parent / "results"
# A result's name -> what measures it.
Parts = dict[str, Callable[[], dict[str, Any]]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for, write it down, and show all results that there are."""
    options = _parser().parse_args(arguments)
    try:
        asked.check(options)
        options.out = options.out or (Path(tempfile.mkdtemp(prefix="benchmarks-")) if options.quick else _RESULTS)
        failed = [] if options.show else _measure(options)
    except BadInputError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    results, foreign = report.load(options.out)
    for line in foreign:
        print(f"benchmarks: {line}", file=sys.stderr)
    out = report.console()
    if not results:
        print(f"benchmarks: no results in {options.out}", file=sys.stderr)
        return 1
    report.show(results, out)
    all_met = report.show_targets(results, out)
    report.write(results, options.out)
    _draw(results, options.out)
    failed += [f"{name}/{peer}" for name, result in results.items() for peer, entry in result.get("peers", {}).items()
               if entry["status"] == "failed"]  # fmt: skip
    if failed:
        print(f"benchmarks: failed: {', '.join(failed)}", file=sys.stderr)
        return 1
    # What cannot be read may be what was missed.
    return 1 if options.check and (foreign or not all_met) else 0


def _parser() -> argparse.ArgumentParser:
    plan = steps.Plan
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--workload", type=_list, help="names or patterns, by commas: lenet,keras-*; default: all")
    parser.add_argument("--peer", type=_list, help="names or patterns, by commas: ddp,trainer; default: all")
    parser.add_argument("--section", type=_list, help=f"of {', '.join(SECTIONS)}; all, or steps where names are given")
    parser.add_argument("--np", type=int, help=f"ranks of a distributed peer [{plan.ranks}]")
    parser.add_argument("--rounds", type=int, help=f"turns of each peer after each launch [{plan.rounds}]")
    parser.add_argument("--launches", type=int, help=f"how often peers are started anew [{plan.launches}]")
    parser.add_argument("--seconds", type=float, help=f"length of a turn [{plan.seconds}]")
    parser.add_argument("--horovod-python", help="interpreter whose Horovod the plain Horovod peers use")
    parser.add_argument("--out", type=Path, help="folder of the results; benchmarks/results, or a new one for --quick")
    parser.add_argument("--gpu", action="store_true", help="only what needs a GPU: one rank, or with --np one a GPU")
    parser.add_argument(
        "--link",
        type=_list,
        help=f"only two hosts with a slow link between them, as root: of {', '.join(slow_links.LINKS)}",
    )
    parser.add_argument("--quick", action="store_true", help="a trial in under a minute: LeNet, two peers, short turns")
    parser.add_argument("--show", action="store_true", help="measure nothing, show what is there")
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit with 1 where a measured target's median misses it, unsure ones too, or a file cannot be read",
    )
    return parser


def _measure(options: argparse.Namespace) -> list[str]:
    """Measure and write down what is asked for; return the names of what failed as a whole."""
    plan = asked.plan(options)
    if options.gpu:
        return _run(_gpu_parts(options.workload, replace(plan, ranks=options.np or 1)), options.out)
    if options.link:
        names, workloads, peers = asked.links(options)
        asked.keep_to_cores(plan.ranks)
        return _run(
            {
                slow_links.result_name(link, workload): partial(
                    slow_links.measure, link, workload, peers, plan, say=_say
                )
                for link in (slow_links.LINKS[name] for name in names)
                for workload in workloads
            },
            options.out,
        )
    few = (["lenet"], ["ddp", "trainer"]) if options.quick else (["*"], ["*"])
    workloads = [WORKLOADS[name] for name in asked.choose("workload", options.workload or few[0], tuple(WORKLOADS))]
    peers = asked.choose("peer", options.peer or few[1], catalog.NAMES)
    sections = asked.sections(options)
    asked.check_fixed(options, sections)
    absent = {each.name: each.missing() for workload in workloads for each in catalog.peers_of(workload)}
    if all(absent.get(name, "unknown") for name in peers):
        raise BadInputError(
            "nothing can run: " + "; ".join(f"{name} {absent.get(name, 'is for other workloads')}" for name in peers)
        )
    asked.keep_to_cores(plan.ranks)
    parts: Parts = {}
    for workload in workloads:
        chosen = [peer for peer in catalog.peers_of(workload) if peer.name in peers]
        if "sweep" in sections and sweep.TUNED in chosen and not sweep.TUNED.missing():
            parts[f"sweep-{workload.name}"] = partial(sweep.measure, workload, plan, say=_say)
        if "steps" in sections and chosen:
            parts[workload.name] = partial(_measure_steps, workload, chosen, plan, options.out)
    others: Parts = {
        "startup": lambda: startup.measure(peers, plan, say=_say),
        "overhead": lambda: overhead.measure(plan, say=_say),
        "scaling": lambda: scaling.measure([each.name for each in workloads], peers, plan, say=_say),
        "growth": lambda: growth.measure(plan, say=_say),
    }
    return _run(parts | {name: part for name, part in others.items() if name in sections}, options.out)


def _run(parts: Parts, folder: Path) -> list[str]:
    """Measure one part after another and write each down at once; return the names of those that failed."""
    failed = []
    for name, measure in parts.items():
        print(name, flush=True)
        try:
            report.save(folder, name, measure())
        except GroupError as error:
            _say(f"FAILED: {error}")
            failed.append(name)
    return failed


def _measure_steps(workload: Workload, peers: Sequence[Peer], plan: steps.Plan, folder: Path) -> dict[str, Any]:
    return steps.measure(workload, _with_best_settings(workload, peers, folder), plan, say=_say)


def _with_best_settings(workload: Workload, peers: Sequence[Peer], folder: Path) -> list[Peer]:
    """Give the hand-tuned peer the settings that the last sweep has found; its title says so where none was made."""
    path = folder / f"sweep-{workload.name}.json"
    try:
        tuned = sweep.best(report.read(path) if path.exists() else None)
    except report.ForeignFileError as error:
        _say(str(error))
        tuned = sweep.best(None)
    return [tuned if peer == sweep.TUNED else peer for peer in peers]


def _gpu_parts(patterns: Sequence[str] | None, plan: steps.Plan) -> Parts:
    known, ending = (GPU, "") if plan.ranks == 1 else (GPUS, f"-{plan.ranks}")
    names = asked.choose("GPU workload", patterns or ["*"], [each.name for each in known])
    there = len(gpu.hardware()["gpus"])
    if not gpu.is_trial() and there < plan.ranks:
        found = f"{there} of {plan.ranks} GPUs are here" if there else "no GPU is here (torch sees no CUDA device)"
        raise BadInputError(f"--gpu: {found}, so nothing was measured")
    return {f"{each.name}{ending}": partial(gpu.measure, each, plan, say=_say) for each in known if each.name in names}


def _draw(results: dict[str, dict[str, Any]], folder: Path) -> None:
    try:
        from benchmarks import picture
    except ImportError:
        print("No picture: matplotlib is not installed (pip install 'hvdtrain[bench]').")
        return
    if path := picture.draw(results, folder):
        print(f"Results: {folder}, picture: {path}")


def _terminated(number: int, frame: object) -> None:
    """Turn a signal into an exit that closes what was started."""
    sys.exit(128 + number)


def _list(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise argparse.ArgumentTypeError("names nothing")
    return names


def _say(line: str) -> None:
    print(f"  {line}", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)
    sys.exit(main())
