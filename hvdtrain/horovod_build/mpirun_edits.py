"""What is changed in Horovod so that MPI, too, listens on loopback alone, and not at all for a lone process."""

from __future__ import annotations

from hvdtrain.horovod_build.edit import Edit

_MPI = "horovod/runner/mpi_run.py"
_BASICS = "horovod/common/basics.py"

# Open MPI's mpirun binds its listening sockets to every interface, whatever oob_tcp_if_include or, in 5,
# prte_if_include says.
LOOPBACK_SOURCE = r"""
#include <dlfcn.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

namespace {
bool in_mpirun = false;

__attribute__((constructor)) void Begin() {
  // Open MPI 4's mpirun, and the program that 5's becomes: those that have its launcher's library.
  in_mpirun = dlsym(RTLD_DEFAULT, "orte_init") != nullptr || dlsym(RTLD_DEFAULT, "prte_init") != nullptr;
  if (in_mpirun) {
    // What 5's ranks ask its launcher by, OpenPMIx, listens on the first other interface before it takes loopback.
    setenv("PMIX_MCA_ptl_base_if_include", "127.0.0.0/8", 0);
    // Not for the ranks: LD_PRELOAD is what it was, without this library, which stands first in it.
    const char* rest = getenv("LD_PRELOAD") ? strchr(getenv("LD_PRELOAD"), ':') : nullptr;
    if (rest != nullptr) {
      char* kept = strdup(rest + 1);
      setenv("LD_PRELOAD", kept, 1);
      free(kept);
    } else {
      unsetenv("LD_PRELOAD");
    }
  }
}
} // namespace

extern "C" int bind(int fd, const struct sockaddr* address, socklen_t length) noexcept {
  using Bind = int (*)(int, const struct sockaddr*, socklen_t);
  static Bind next = reinterpret_cast<Bind>(dlsym(RTLD_NEXT, "bind"));
  if (in_mpirun && address != nullptr && address->sa_family == AF_INET && length >= sizeof(sockaddr_in)) {
    sockaddr_in local;
    memcpy(&local, address, sizeof local);
    if (local.sin_addr.s_addr == htonl(INADDR_ANY)) {
      local.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    }
    return next(fd, reinterpret_cast<sockaddr*>(&local), sizeof local);
  }
  if (in_mpirun && address != nullptr && address->sa_family == AF_INET6 && length >= sizeof(sockaddr_in6)) {
    sockaddr_in6 local;
    memcpy(&local, address, sizeof local);
    if (IN6_IS_ADDR_UNSPECIFIED(&local.sin6_addr)) {
      local.sin6_addr = in6addr_loopback;
    }
    return next(fd, reinterpret_cast<sockaddr*>(&local), sizeof local);
  }
  return next(fd, address, length);
}
"""

MPIRUN_LOOPBACK: tuple[Edit, ...] = (
    Edit(
        _MPI,
        "    impi_or_mpich = mpi in (_IMPI_IMPL, _MPICH_IMPL)\n",
        "    impi_or_mpich = mpi in (_IMPI_IMPL, _MPICH_IMPL)\n\n"
        "    # Ranks of one host talk through shared memory: they need not listen, and mpirun only to itself.\n"
        "    preload = ''\n"
        "    if mpi == _OMPI_IMPL and network.is_loopback(nics):\n"
        "        start_checks.check_shared_memory(env or os.environ)\n"
        "        given = settings.extra_mpi_args or ''\n"
        "        if 'mca btl ' not in given and 'OMPI_MCA_btl' not in (env or os.environ):\n"
        "            mpi_impl_flags = [f.replace('^openib', '^openib,tcp,ofi,usnic,uct') for f in mpi_impl_flags]\n"
        "        library = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'libhvdtrain_loopback.so')\n"
        "        before = (env or os.environ).get('LD_PRELOAD')\n"
        "        preload = 'env LD_PRELOAD={} '.format(quote(loopback.preload(library, before)))\n",
        "each rank of a one-host job over Open MPI listened on every interface, and so did mpirun",
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
        "from horovod.runner.common.util import env as env_util, hosts, loopback, mpirun_output, proof\n"
        "from horovod.runner.common.util import safe_shell_exec, start_checks, tiny_shell_exec\n"
        "from horovod.runner.util import network\n",
        "for the edits before",
    ),
    Edit(
        "CMakeLists.txt",
        "# TF\nadd_subdirectory(horovod/tensorflow)\n",
        "# Preloaded into mpirun by horovod/runner/mpi_run.py where all ranks are on one host.\n"
        'file(WRITE "${CMAKE_BINARY_DIR}/hvdtrain_loopback.cc" [==[' + LOOPBACK_SOURCE + "]==])\n"
        "# A module: the flags of shared libraries hide every name that is not Horovod's.\n"
        'add_library(hvdtrain_loopback MODULE "${CMAKE_BINARY_DIR}/hvdtrain_loopback.cc")\n'
        "target_link_libraries(hvdtrain_loopback ${CMAKE_DL_LIBS})\n"
        "set_target_properties(hvdtrain_loopback PROPERTIES\n"
        '    LIBRARY_OUTPUT_DIRECTORY "${CMAKE_LIBRARY_OUTPUT_DIRECTORY_ROOT}/runner"\n'
        '    LIBRARY_OUTPUT_DIRECTORY_RELEASE "${CMAKE_LIBRARY_OUTPUT_DIRECTORY_ROOT}/runner"\n'
        '    LIBRARY_OUTPUT_DIRECTORY_DEBUG "${CMAKE_LIBRARY_OUTPUT_DIRECTORY_ROOT}/runner")\n'
        "# TF\nadd_subdirectory(horovod/tensorflow)\n",
        "no setting of Open MPI's keeps mpirun's own sockets to loopback",
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
