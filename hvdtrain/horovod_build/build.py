"""`hvdtrain build`, step by step: look, fetch, patch, compile, install, prove."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.horovod_build import cache, changes, installed, native, other_hosts, owners, packages
from hvdtrain.horovod_build.errors import BuildError, CompileError
from hvdtrain.horovod_build.find import Found, find_all
from hvdtrain.horovod_build.installed import Plane, command_for_tested
from hvdtrain.horovod_build.native import BuildProgress
from hvdtrain.system import gpus

_STEPS = 4
_PROOF_TIMEOUT_S = 180


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """The user's options; the defaults build for whatever is installed."""

    without: frozenset[str] = frozenset()  # parts to leave out: "torch", "tensorflow", "mpi", "nccl"
    rebuild: bool = False  # compile even where the cache has the wheel
    dry_run: bool = False  # say what would be built, and stop
    force: bool = False  # take versions older than the tests', and leave an untested one installed if its proof failed
    out: Path | None = None  # put a copy of the wheel there, for other hosts
    sdist: Path | None = None  # Horovod's sdist as a file, for machines without a network
    through_host: bool = False  # GPU tensors travel through host memory instead of NCCL
    cuda_arch: str | None = None  # GPU architectures, e.g. "80,90"; by default those of the GPUs that are here
    jobs: int | None = None  # compiler processes at once; by default one per core
    install: bool = True  # install the wheel into this environment, and prove it


def build(options: BuildOptions) -> Path | None:
    """Build, install and prove Horovod; return the wheel, or None after a dry run."""
    progress = BuildProgress(_STEPS)
    progress.step("Looking at what is installed")
    found = find_all(without=options.without, force=options.force, through_host=options.through_host)
    chosen = native.settings(found, cuda_arch=options.cuda_arch)
    parts = cache.key_parts(found, chosen)
    key = cache.key_of(parts)
    home, elsewhere = cache.cache_folder()
    for line in [*describe(found), *filter(None, [elsewhere])]:
        progress.note(line)
    wheels = home / "wheels"
    if options.dry_run:
        hit = cache.load(wheels, key) is not None and not options.rebuild
        progress.note(f"cache: {wheels / key} ({'there: nothing to compile' if hit else 'not there: would compile'})")
        for patch in () if hit else changes.read_patches():
            progress.note(f"patch {patch.name}: {patch.reason.splitlines()[0]}")
        if options.out is not None:
            progress.note(f"a copy of the wheel would be put into {options.out.absolute()}")
        return None
    if options.out is not None:
        with owners.alone():  # an error here, before the minutes of a compile
            options.out.mkdir(parents=True, exist_ok=True)
    with owners.alone(), cache.locked(wheels, key):
        entry = None if options.rebuild else cache.load(wheels, key)
        if entry is None:
            try:
                entry = _compile(found, parts, home=home, options=options, progress=progress)
            except CompileError as problem:
                if not found.untested:
                    raise
                raise _refusal(found, str(problem)) from problem
        else:
            progress.step("Taking the wheel from the cache")
            progress.note(f"compiled before in {entry.seconds:.0f} s: {entry.wheel.parent}")
    if options.install:
        _install_and_prove(entry, found, key=key, home=home, options=options, progress=progress)
    if found.untested:
        proof = ": it was proven here, by the lines above" if options.install else ", and nothing was proven here"
        progress.note(f"No test of hvdtrain has seen {' and '.join(map(str, found.untested))}{proof}")
    if options.out is not None:  # only now: a wheel whose proof failed is for nobody
        needs = other_hosts.requirements(entry.wheel, found, architectures=chosen.get(native.ARCHITECTURES, ""))
        copy = _copy(entry.wheel, options.out.absolute(), progress=progress)
        for line in other_hosts.closing_lines(copy, needs, is_proven=options.install):
            progress.note(line)
    return entry.wheel


def _copy(wheel: Path, folder: Path, *, progress: BuildProgress) -> Path:
    """Put a copy of the wheel into `folder`, whole or not at all: other hosts may read there."""
    copy = folder / wheel.name
    if copy.exists() and packages.sha256_of(copy) != packages.sha256_of(wheel):
        progress.note(f"replaces another wheel of the same name, whatever that was built for: {copy}")
    with owners.alone(), packages.filled(copy) as target:
        shutil.copy(wheel, target)
    return copy


def _install_and_prove(
    entry: cache.Entry, found: Found, *, key: str, home: Path, options: BuildOptions, progress: BuildProgress
) -> None:
    """Install the wheel and prove it; if that fails for an untested version, restore what was installed before."""
    before = str(installed.record().get("key", ""))
    if before == key and not options.rebuild:
        progress.step("Installed already: this very wheel")
    else:
        progress.step("Installing the wheel")
        packages.install(entry.wheel, cache=home)
    progress.step("Proving it: an allreduce and a training step between two processes")
    try:
        prove(found, progress=progress)
    except BuildError as problem:
        if not found.untested or options.force:
            raise
        if earlier := cache.load(home / "wheels", before):
            packages.install(earlier.wheel, cache=home)
        else:
            packages.remove(cache=home)
        now = "What was installed before is installed again." if earlier else "It was uninstalled again."
        raise _refusal(found, f"{problem}\n{now}") from problem
    installed.mark_as_proven()
    prove_gpus(found, progress=progress)


def _refusal(found: Found, problem: str) -> BuildError:
    """Return the error for a version that no test has seen and that does not work here."""
    commands = " && ".join(command_for_tested(framework.name) for framework in found.untested)
    problem += f"\nNo test of hvdtrain has seen {' and '.join(map(str, found.untested))}."
    return BuildError(f"{problem} The last version that works: {commands}, then hvdtrain build")


def describe(found: Found) -> list[str]:
    """Return the plan, one line a thing."""
    lines = [f"{f.name} {f.version} ({'CUDA ' + f.cuda if f.cuda else 'CPU'})" for f in found.frameworks]
    lines.append(f"compiler: {found.compiler}, C++{found.cxx_standard}")
    if found.mpi:
        lines.append(f"Open MPI {found.mpi.version}: {found.mpi.launcher}")
    if found.gpu and found.cuda and found.nccl:
        lines.append(f"CUDA {found.cuda.version}: {found.cuda.home}; NCCL {found.nccl.version}: {found.nccl.library}")
    if found.through_host:
        lines.append("GPU tensors travel through host memory")
    return [*lines, *found.notes, f"data planes: {', '.join(found.planes)}"]


def _compile(
    found: Found, parts: dict[str, str], *, home: Path, options: BuildOptions, progress: BuildProgress
) -> cache.Entry:
    """Make the wheel and put it into the cache; the log stays where a failure names it."""
    key = cache.key_of(parts)
    started = time.monotonic()
    jobs = options.jobs or len(os.sched_getaffinity(0))
    progress.step(f"Compiling Horovod {packages.VERSION} with {jobs} processes (about 2 minutes on 2 cores)")
    tools = packages.fetch_tools(home)
    source = packages.check(options.sdist) if options.sdist else packages.fetch(home, tools=tools)
    log = home / "logs" / f"horovod-build-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hvdtrain-build-") as folder:
        tree = packages.unpack(source, scratch := Path(folder))
        changes.change(tree)
        chosen = native.settings(found, cuda_arch=options.cuda_arch)
        env = native.environment(found, chosen, tools=tools, scratch=scratch, record=record(found, key), jobs=jobs)
        wheel = native.run(tree, env=env, log=log, progress=progress)
        seconds = time.monotonic() - started
        entry = cache.store(home / "wheels", key, wheel, parts=parts, seconds=seconds)
    # The log is needed only after a failure: it is a megabyte.
    log.unlink()
    progress.note(f"done in {progress.elapsed()}")
    return entry


def record(found: Found, key: str) -> str:
    """Return the JSON that the wheel carries in horovod/metadata.json under "hvdtrain"."""
    return json.dumps(
        {
            "key": key,
            "edits": changes.fingerprint(),
            "data_planes": ",".join(found.planes),
            "mpi": found.mpi.version if found.mpi else "",
            "cuda": found.cuda.version if found.gpu and found.cuda else "",
            "nccl": found.nccl.version if found.gpu and found.nccl else "",
            "cpu": " ".join(other_hosts.cpu_extensions()),
            "compiler": found.compiler,
        }
    )


def prove(found: Found, *, progress: BuildProgress) -> None:
    """Try an allreduce for each framework over each data plane that was built, and a training step in host memory."""
    from hvdtrain.horovod_build import probe

    failed: list[str] = []
    jobs = probe.plan({each.name: each.cuda for each in found.frameworks}, found.planes, gpus=len(gpus.visible()))
    tried = [name for name, plane, _ in jobs if plane == "nccl"]
    for framework in found.frameworks if "nccl" in found.planes else ():
        if framework.name not in tried:
            progress.note(f"{framework.name} over nccl: not tried, there is no GPU for it here")

    def allreduce(job: tuple[str, Plane, int]) -> probe.Probe:
        return probe.allreduce(job[0], job[1], ranks=job[2], timeout_s=_PROOF_TIMEOUT_S, step=job[1] != "nccl")

    # Two at a time: importing the frameworks is nearly all of it.
    with ThreadPoolExecutor(2) as pool:
        for result in pool.map(allreduce, jobs):
            what = f"{result.framework} over {result.plane}"
            if result.ok:
                count = f"{result.ranks} process{'es' if result.ranks > 1 else ''}"
                step = "" if result.plane == "nccl" else ", a training step equal to one process's"
                progress.note(f"{what}, {count}: {result.allreduce_ms} ms for 1 MiB{step}")
            else:
                progress.note(f"{what}: FAILED")
                failed.append(f"{what}: {result.error}")
    if failed:
        raise BuildError(
            "Horovod was built and installed, but its proof failed:\n" + "\n".join(failed) + "\n`hvdtrain doctor` says "
            "more. A data plane can be left out with --without mpi or --without nccl."
        )


def prove_gpus(found: Found, *, progress: BuildProgress) -> None:
    """Train on this host's GPUs, and keep the result; an error where ranks train wrong while the host waits."""
    from hvdtrain.horovod_build import gpu_proof, gpu_record

    torch = next((each for each in found.frameworks if each.name == "torch"), None)
    if "nccl" not in found.planes or torch is None or not torch.cuda:
        return
    if (ranks := gpu_proof.ranks_here()) < 2:
        progress.note(f"training on GPUs: not proven, {gpu_proof.too_few(ranks)}")
        return
    proof = gpu_proof.prove(ranks=ranks)
    gpu_record.keep(proof)
    progress.note(f"training on GPUs: {proof}")
    for each in proof.failures:
        progress.note(each.splitlines()[0])
    if wrong := proof.failed("blocking"):
        raise BuildError(
            "Horovod was built and installed, but training on this host's GPUs is wrong:\n" + "\n".join(wrong) + "\n"
            f"`{gpu_record.COMMAND}` proves it again. --without nccl leaves GPUs' own reductions out."
        )
    if proof.failures:
        progress.note("So the host waits for its GPUs in each step (HVDTRAIN_GPU_ASYNC=0), as long as this proof fails")
