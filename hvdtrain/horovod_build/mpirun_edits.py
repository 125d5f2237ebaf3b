"""What is changed in Horovod so that MPI, too, listens where it is to alone, and not at all for a lone process."""

from __future__ import annotations

from hvdtrain.horovod_build.edit import Edit

_MPI = "horovod/runner/mpi_run.py"
_BASICS = "horovod/common/basics.py"

MPIRUN_LOOPBACK: tuple[Edit, ...] = (
    Edit(
        _MPI,
        "    impi_or_mpich = mpi in (_IMPI_IMPL, _MPICH_IMPL)\n",
        "    impi_or_mpich = mpi in (_IMPI_IMPL, _MPICH_IMPL)\n\n"
        "    # Ranks of one host talk through shared memory: they need not listen, and mpirun only to itself.\n"
        "    held = {}\n"
        "    library = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'libhvdtrain_listen.so')\n"
        "    given = settings.extra_mpi_args or ''\n"
        "    chosen_btl = 'mca btl ' in given or 'OMPI_MCA_btl' in env\n"
        "    if mpi == _OMPI_IMPL and network.is_loopback(nics):\n"
        "        start_checks.check_shared_memory(env)\n"
        "        if not chosen_btl:\n"
        "            mpi_impl_flags = [f.replace('^openib', '^openib,tcp,ofi,usnic,uct') for f in mpi_impl_flags]\n"
        "        held = {listen_on.VARIABLE: '', 'LD_PRELOAD': loopback.preload(library, env.get('LD_PRELOAD'))}\n"
        "    elif mpi == _OMPI_IMPL:\n"
        "        chosen = listen_on.interfaces(nics or (), given, env)\n"
        "        names = hosts.parse_hosts_and_slots(settings.hosts)[0] if settings.hosts else []\n"
        "        held = listen_on.variables(library, chosen, names, given, env)\n"
        "        if held and not chosen_btl:  # libfabric's, for windows that Horovod has not, listens at any address\n"
        "            mpi_impl_flags = [f.replace('^openib', '^openib,ofi') for f in mpi_impl_flags]\n"
        "    preload = ''.join(f'{name}={quote(text)} ' for name, text in held.items())\n"
        "    preload = f'env {preload}' if held else ''\n",
        "mpirun, its daemons and the ranks of a job over Open MPI listened on every interface",
    ),
    Edit(
        _MPI,
        "        'mpirun {basic_args} '\n",
        "        '{preload}mpirun {basic_args} '\n",
        "for the edit before",
    ),
    Edit(
        _MPI,
        "        .format(basic_args=basic_args,\n",
        "        .format(preload=preload,\n                basic_args=basic_args,\n",
        "for the edits before",
    ),
    Edit(
        _MPI,
        "from horovod.runner.common.util import env as env_util, hosts, safe_shell_exec, tiny_shell_exec\n",
        "from horovod.runner.common.util import env as env_util, hosts, listen_on, loopback, mpirun_output, proof\n"
        "from horovod.runner.common.util import safe_shell_exec, start_checks, tiny_shell_exec\n"
        "from horovod.runner.util import network\n",
        "for the edits before",
    ),
    Edit(
        "CMakeLists.txt",
        "# TF\nadd_subdirectory(horovod/tensorflow)\n",
        "# Preloaded into mpirun by horovod/runner/mpi_run.py. A module: the flags of shared libraries hide every\n"
        "# name that is not Horovod's. Without C++'s library, of which a rank may bring along another one.\n"
        "add_library(hvdtrain_listen MODULE horovod/runner/hvdtrain_listen.cc)\n"
        "target_compile_options(hvdtrain_listen PRIVATE -fno-exceptions -fno-rtti -fno-threadsafe-statics)\n"
        "target_link_libraries(hvdtrain_listen -nodefaultlibs ${CMAKE_DL_LIBS} c)\n"
        "set_target_properties(hvdtrain_listen PROPERTIES\n"
        '    LIBRARY_OUTPUT_DIRECTORY "${CMAKE_LIBRARY_OUTPUT_DIRECTORY_ROOT}/runner"\n'
        '    LIBRARY_OUTPUT_DIRECTORY_RELEASE "${CMAKE_LIBRARY_OUTPUT_DIRECTORY_ROOT}/runner"\n'
        '    LIBRARY_OUTPUT_DIRECTORY_DEBUG "${CMAKE_LIBRARY_OUTPUT_DIRECTORY_ROOT}/runner")\n'
        "# TF\nadd_subdirectory(horovod/tensorflow)\n",
        "no setting of Open MPI's keeps its sockets to some interfaces",
    ),
    Edit(
        _BASICS,
        "            initialization_ok = self.MPI_LIB_CTYPES.horovod_init(\n"
        "                (ctypes.c_int * comm_size)(*comm), ctypes.c_int(comm_size),\n"
        "                *process_set_args_via_ranks)\n",
        "            with alone.without_sockets():\n"
        "                initialization_ok = self.MPI_LIB_CTYPES.horovod_init(\n"
        "                    (ctypes.c_int * comm_size)(*comm), ctypes.c_int(comm_size),\n"
        "                    *process_set_args_via_ranks)\n",
        "a script that no launcher started had a daemon of MPI's beside it, which listened on every interface",
    ),
    Edit(
        _BASICS,
        "from horovod.common import util as util\n",
        "from horovod.common import alone, util as util\n",
        "for the edit before",
    ),
)
