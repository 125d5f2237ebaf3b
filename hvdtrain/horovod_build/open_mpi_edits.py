"""What is changed in Horovod's launcher so that it speaks Open MPI 4 and 5, and finds the one it was built with."""

from __future__ import annotations

from hvdtrain.horovod_build.edit import Edit
from hvdtrain.system import open_mpi

_MPI = "horovod/runner/mpi_run.py"

OPEN_MPI: tuple[Edit, ...] = (
    Edit(
        _MPI,
        "_NO_BINDING_ARGS = ['-bind-to none', '-map-by slot']\n",
        "_NO_BINDING_ARGS = ['--bind-to none', '--map-by slot']\n",
        "Open MPI 5 takes no long option with one dash",
    ),
    Edit(
        _MPI,
        "    mpi_impl_flags, impl_binding_args, mpi = _get_mpi_implementation_flags(settings.tcp_flag, env=env)\n",
        "    # The Open MPI of a Python environment, though it is not activated.\n"
        "    env = dict(os.environ if env is None else env)\n"
        "    beside, path = os.path.dirname(sys.executable), env.get('PATH', os.environ.get('PATH', os.defpath))\n"
        "    if beside not in path.split(os.pathsep) and os.path.exists(os.path.join(beside, 'mpirun')):\n"
        "        env['PATH'] = beside + os.pathsep + path\n\n"
        "    mpi_impl_flags, impl_binding_args, mpi = _get_mpi_implementation_flags(settings.tcp_flag, env=env)\n",
        "another mpirun, or none, was on PATH than that which Horovod was built with",
    ),
    Edit(
        _MPI,
        "        joined_ssh_args = ' '.join(ssh_args)\n",
        "        joined_ssh_args = ' '.join(ssh_args)\n"
        "        given = env.get('PRTE_MCA_plm_ssh_args', '')\n"
        "        env['PRTE_MCA_plm_ssh_args'] = f'{given} {joined_ssh_args}'.strip()  # by Open MPI 5's name\n",
        "Open MPI 5 went to ssh's own port, whatever -p said: it does not read plm_rsh_args",
    ),
    Edit(
        _MPI,
        "        mpi_impl_flags.append('-mca plm_rsh_num_concurrent {}'.format(len(host_names)))\n",
        "        mpi_impl_flags.append('-mca plm_rsh_num_concurrent {}'.format(len(host_names)))\n"
        "        env.setdefault('PRTE_MCA_plm_ssh_no_tree_spawn', 'true')  # by Open MPI 5's names\n"
        "        env.setdefault('PRTE_MCA_plm_ssh_num_concurrent', str(len(host_names)))\n",
        "likewise, on 64 hosts and more",
    ),
    Edit(
        _MPI,
        "    basic_args = '-l' if impi_or_mpich else '--allow-run-as-root --tag-output'\n",
        "    basic_args = '-l' if impi_or_mpich else '--allow-run-as-root --tag-output'\n"
        "    chosen = settings.output_filename or '--output' in str(settings.extra_mpi_args)\n"
        "    if mpi == _OMPI_IMPL and not chosen:\n"
        f"        said = tiny_shell_exec.execute({open_mpi.ASK_VERSIONS!r}, env)\n"
        f"        if said and re.search({open_mpi.MIXES_LINES!r}, said[0], re.DOTALL):\n"
        f"            basic_args += ' {' '.join(open_mpi.MARK_PIECES)}'  # with a mark for each piece of a line\n",
        "Open MPI 5's launcher, with OpenPMIx before 5.0.11, made one rank's line part of another's",
    ),
    Edit(
        _MPI,
        "from shlex import quote\n",
        "import re\nfrom shlex import quote\n",
        "for the edit before",
    ),
)
