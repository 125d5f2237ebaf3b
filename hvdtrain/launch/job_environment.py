"""Check that a job may be started here, and make the environment of its launcher and ranks, on all hosts."""

from __future__ import annotations

import datetime
import importlib.util
import itertools
import re
import secrets
import uuid
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.distributed import launch_environment
from hvdtrain.errors import UsageError
from hvdtrain.horovod_build import installed
from hvdtrain.horovod_build.shared import listen_on, loopback, start_checks
from hvdtrain.launch import arguments
from hvdtrain.launch.arguments import LaunchSpec
from hvdtrain.system import open_mpi, start_ranks
from hvdtrain.system.process_tree import RUN_DIR
from hvdtrain.system.settings import RUN_ID, RUN_NAME

# Built with Horovod: mpirun listens on every interface, whatever its settings say. This library prevents it.
PRELOADED = Path("runner", "libhvdtrain_listen.so")
# With these settings mpirun detects a lost host in half a minute: seconds of silence, between two questions, and how
# many go unanswered. Open MPI's own are 300, 20 and 9.
_KEEPALIVE = {
    f"OMPI_MCA_oob_tcp_keepalive_{name}": value for name, value in (("time", "10"), ("intvl", "5"), ("probes", "4"))
}
# A rank whose peer was killed loses its connection to it, and aborts. If it is faster than the news of the killed rank,
# mpirun reports the survivor: 5 names neither the killed rank nor its signal then. So wait for mpirun to kill it.
_ABORT_DELAY = {"OMPI_MCA_opal_abort_delay": "3"}  # seconds
# What belongs to one host, or to one session on it.
_OWN = re.compile(
    r"BASH_FUNC_|SLURM|SBATCH_|PBS_|LSB_|SSH_|XDG_|DBUS_|PMIX_|OMPI_COMM_|PRTE_LAUNCHED|"
    r"(.*CUDA_VISIBLE_DEVICES|HOSTNAME|PWD|OLDPWD|SHLVL|TERM|DISPLAY|TMPDIR|_)$"
)


def as_new_run(environment: Mapping[str, str], name: str) -> dict[str, str]:
    """Return the environment of a run of `name` that begins now, with an id and a name that restarts of it share."""
    named = {RUN_NAME: f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"}
    return {**named, **environment, RUN_ID: uuid.uuid4().hex}


def check_place(who: str = "it") -> None:
    """Raise a UsageError if `who` cannot start ranks: in a rank, or without Horovod."""
    found = launch_environment.detect()
    if found and found.size and found.size > 1 and found.name != "Slurm":
        raise UsageError(f"{who} starts the ranks itself, and {found} has started this one. Run it by itself")
    if importlib.util.find_spec("horovod") is None:
        raise UsageError(f"Horovod is not installed, so no ranks can be started. Run `{installed.how_to_build()}`")


def check_host(spec: LaunchSpec) -> None:
    """Raise a UsageError where too few open files are allowed, or /dev/shm has no room for horovodrun's semaphores."""
    try:
        start_checks.check_open_files(spec.ranks if spec.is_here else 2)
        if not spec.is_mpirun:
            start_checks.check_semaphores()
    except start_checks.CannotStartError as problem:
        raise UsageError(str(problem)) from None


def environment(run_dir: Path, spec: LaunchSpec, *, name: str) -> dict[str, str]:
    """Return the environment of a launcher and its ranks; `name` is the script's, for the run's folder."""
    found = as_new_run(start_ranks.rank_environment({}), name)
    # When a rank has failed, the others cannot continue: kill them at once.
    found.setdefault("OMPI_MCA_odls_base_sigkill_timeout", "0")
    if spec.is_mpirun:  # as horovodrun does it: containers run as root, and `init` shares cores out
        found |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if not spec.hosts:
            found = {**open_mpi.OVERSUBSCRIBE_IN_5, **found}
        if not arguments.places_ranks(spec.options):
            found.setdefault("OMPI_MCA_hwloc_base_binding_policy", "none")
    if not spec.is_here:
        found = {**_KEEPALIVE, **_ABORT_DELAY, **found}
        if spec.is_mpirun:  # it, its daemons and ranks listen only at the interfaces that the options or `found` choose
            options = " ".join(spec.options)
            interfaces = listen_on.interfaces((), options, found)
            found |= listen_on.variables(_library(), interfaces, spec.hosts, options, found)
    elif not spec.elastic:
        found |= on_loopback(run_dir, spec, found)
    return open_mpi.for_both(found)


def on_loopback(run_dir: Path, spec: LaunchSpec, environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables for a job of one host, without those that the user has set in `environment` or as options."""
    given = " ".join(spec.options)
    # A process that is killed leaves its files behind: they belong in a folder that is removed.
    wanted = {"OMPI_MCA_orte_tmpdir_base": str(run_dir), "OMPI_MCA_btl_vader_backing_directory": str(run_dir)}
    chosen, is_wanted = {}, environment.get("HVDTRAIN_LOOPBACK") != "0"
    if is_wanted and spec.is_mpirun:
        # One host needs shared memory only. Open MPI's tcp and libfabric's ofi listen on the network, and so does cm.
        wanted |= {"OMPI_MCA_btl": "^openib,tcp,ofi,usnic,uct", "OMPI_MCA_pml": "ob1"}
        chosen = {"LD_PRELOAD": _preload(environment.get("LD_PRELOAD")), "HVDTRAIN_LISTEN_ON": ""}
    elif (
        is_wanted
        and not spec.over_gloo
        and spec.option("--network-interfaces", "--network-interface") is None
        and "mpi" in str(installed.record().get("data_planes", "")).split(",")
    ):  # horovodrun starts an mpirun, and keeps it on loopback as it keeps itself
        _preload(None)  # fail now, not after three restarts
    is_chosen = {name for name in wanted if name in environment or f"mca {name.partition('_MCA_')[2]} " in given}
    return {**chosen, **{name: text for name, text in wanted.items() if name not in is_chosen}}


def _library() -> str:
    return str((installed.package_folder("horovod") or Path("horovod")) / PRELOADED)


def _preload(before: str | None) -> str:
    try:
        return loopback.preload(_library(), before)
    except loopback.LoopbackError as problem:
        raise UsageError(str(problem)) from None


def exports(spec: LaunchSpec, environment: Mapping[str, str]) -> list[str]:
    """Return the options with which mpirun takes this environment to other hosts, as horovodrun does: ssh does not."""
    if "mca_base_env_list" in spec.option_names():  # the user's own list, beside which mpirun takes no -x
        return []
    given = {text.partition("=")[0] for option, text in itertools.pairwise(spec.options) if option in ("-x", "--x")}
    # What is preloaded for this job alone comes with mpirun's daemons, where it is there.
    if environment.get("LD_PRELOAD", "").endswith(PRELOADED.name):
        given.add("LD_PRELOAD")
    names = sorted(name for name in {*environment, RUN_DIR} if name not in given and not _OWN.match(name))
    return [word for name in names for word in ("-x", name)]
