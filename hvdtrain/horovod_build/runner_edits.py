"""What is changed in Horovod's launcher: who listens where, and what ranks get to hear before they are ended."""

from __future__ import annotations

from hvdtrain.horovod_build.edit import Edit
from hvdtrain.horovod_build.mpirun_edits import MPIRUN_LOOPBACK
from hvdtrain.horovod_build.open_mpi_edits import OPEN_MPI

_SHELL = "horovod/runner/common/util/safe_shell_exec.py"
_GLOO = "horovod/runner/gloo_run.py"
_MPI = "horovod/runner/mpi_run.py"
_NETWORK = "horovod/runner/util/network.py"

# A job of one host listens on loopback alone, unless HVDTRAIN_LOOPBACK=0; one of several at its interface's address.
_LOOPBACK = (
    Edit(
        _NETWORK,
        "def find_port(server_factory):\n",
        "def addresses_of(nics):\n"
        '    """Return this host\'s IPv4 addresses on the network interfaces `nics`."""\n'
        "    found = net_if_addrs()\n"
        "    return [each.address for nic in nics or () for each in found.get(nic, ()) if each.family == AF_INET]\n\n\n"
        "def is_loopback(nics):\n"
        '    """Return whether `nics` are loopback alone, and a job of one host may keep to it."""\n'
        "    names = set(nics or ())\n"
        "    return bool(names) and names <= get_local_intfs() and os.environ.get('HVDTRAIN_LOOPBACK') != '0'\n\n\n"
        "def listen_address(nics, address=None):\n"
        '    """Return where to listen for those who come through `nics`; \'\' is every interface.\n\n'
        "    :param address: to which they are told to come, where there are several\n"
        '    """\n'
        "    if is_loopback(nics):\n"
        "        return '127.0.0.1'\n"
        "    if set(nics or ()) <= get_local_intfs():  # HVDTRAIN_LOOPBACK=0, or nobody knows which\n"
        "        return ''\n"
        "    own = addresses_of(nics)\n"
        "    return address or (own[0] if len(own) == 1 else '')\n\n\n"
        "def find_port(server_factory, host=''):\n",
        "for the edits after",
    ),
    Edit(
        _NETWORK,
        "import psutil\nimport random\n",
        "import os\nimport psutil\nimport random\n",
        "for the edit before",
    ),
    Edit(
        _NETWORK,
        "            addr = ('', port)\n",
        "            addr = (host, port)\n",
        "every server of a one-host job listened on every interface, without a password",
    ),
    Edit(
        _GLOO,
        "    global_rendezv_port = rendezvous.start()\n",
        "    global_rendezv_port = rendezvous.start(host=network.listen_address(nics, server_ip))\n",
        "the rendezvous of a one-host job over Gloo took orders from the network",
    ),
    Edit(
        _GLOO,
        "        run_func_server_port = run_func_server.start_server()\n",
        "        run_func_server_port = run_func_server.start_server(host=network.listen_address(nics, server_ip))\n",
        "likewise, for the server that hands out a pickled function",
    ),
    Edit(
        "horovod/runner/launch.py",
        "        run_func_server_port = run_func_server.start_server()\n",
        "        run_func_server_port = run_func_server.start_server(host=network.listen_address(nics, driver_ip))\n",
        "likewise, for a job that is not elastic",
    ),
)

# A request to stop reaches the ranks, which get the time for a step and a checkpoint.
_STOP = (
    Edit(
        _SHELL,
        "def terminate_executor_shell_and_children(pid):\n",
        "# From a request to stop to the end of patience.\n"
        "STOP_GRACE_S = 30\n"
        "# Who signals a whole group or a whole job means it once, though each process hears of it twice.\n"
        "ONE_REQUEST_S = 2\n\n\n"
        "def local_ranks():\n"
        '    """Return this host\'s ranks among the processes below this one, without what the ranks started."""\n'
        "    ranks = {}\n"
        "    for process in psutil.Process().children(recursive=True):\n"
        "        try:\n"
        "            variables = process.environ()\n"
        "            rank = variables.get('HOROVOD_RANK', variables.get('OMPI_COMM_WORLD_RANK'))\n"
        "            if rank is not None and ranks.get(process.ppid(), (None, None))[1] != rank:\n"
        "                ranks[process.pid] = (process, rank)\n"
        "        except psutil.Error:\n"
        "            pass\n"
        "    return [process for process, _ in ranks.values()]\n\n\n"
        "def signal_ranks(number):\n"
        '    """Send a signal to this host\'s ranks; return whether there are any."""\n'
        "    ranks = local_ranks()\n"
        "    for process in ranks:\n"
        "        try:\n"
        "            process.send_signal(number)\n"
        "        except psutil.Error:\n"
        "            pass\n"
        "    return bool(ranks)\n\n\n"
        "def after_grace(function):\n"
        '    """Call a function when the time that ranks get to stop is over."""\n'
        "    timer = threading.Timer(STOP_GRACE_S, function)\n"
        "    timer.daemon = True\n"
        "    timer.start()\n\n\n"
        "def terminate_executor_shell_and_children(pid):\n",
        "for the edits after",
    ),
    Edit(
        _SHELL,
        "    for child in p.children():\n"
        "        try:\n"
        "            child.terminate()\n"
        "        except psutil.NoSuchProcess:\n"
        "            pass\n\n"
        "    # Wait for graceful termination.\n"
        "    gone, alive = psutil.wait_procs(p.children(), timeout=GRACEFUL_TERMINATION_TIME_S)\n",
        "    # Some shells become the command: then it has no children, and is the rank itself.\n"
        "    children = p.children() or [p]\n"
        "    for child in children:\n"
        "        try:\n"
        "            child.terminate()\n"
        "        except psutil.NoSuchProcess:\n"
        "            pass\n\n"
        "    # Wait for graceful termination.\n"
        "    gone, alive = psutil.wait_procs(children, timeout=GRACEFUL_TERMINATION_TIME_S)\n",
        "under a shell that becomes its only command, ranks were frozen and killed without a word",
    ),
    Edit(
        _SHELL,
        "    # Kill shell itself.\n    try:\n        p.terminate()\n",
        "    # Kill shell itself: frozen, it would not hear SIGTERM.\n    try:\n        p.kill()\n",
        "the end of each rank that did not listen took 5 s longer",
    ),
    Edit(
        _GLOO,
        "    def set_event_on_signal(signum, frame):\n"
        "        event.set()\n\n"
        "    signal.signal(signal.SIGINT, set_event_on_signal)\n"
        "    signal.signal(signal.SIGTERM, set_event_on_signal)\n",
        "    asked = []\n\n"
        "    def set_event_on_signal(signum, frame):\n"
        "        event.set()\n\n"
        "    def ask_ranks_to_stop(signum, frame):\n"
        "        if asked and time.monotonic() - asked[0] < safe_shell_exec.ONE_REQUEST_S:\n"
        "            return\n"
        "        if asked or not safe_shell_exec.signal_ranks(signum):\n"
        "            event.set()\n"
        "        else:\n"
        "            asked.append(time.monotonic())\n"
        "            safe_shell_exec.after_grace(event.set)\n\n"
        "    def pass_on(signum, frame):\n"
        "        safe_shell_exec.signal_ranks(signum)\n\n"
        "    signal.signal(signal.SIGINT, set_event_on_signal)\n"
        "    signal.signal(signal.SIGTERM, ask_ranks_to_stop)\n"
        "    signal.signal(signal.SIGUSR1, pass_on)\n",
        "5 s after SIGTERM ranks over Gloo were killed, in the midst of a checkpoint; SIGUSR1 killed horovodrun itself",
    ),
    Edit(
        _MPI,
        "        os.execve('/bin/sh', ['/bin/sh', '-c', mpirun_command], env)\n",
        "        sys.exit(_keep(mpirun_command, env))\n\n\n"
        "def _keep(mpirun_command, env):\n"
        '    """Run mpirun, hand it what it is to hear, and return its exit status.\n\n'
        "    mpirun itself gives ranks one second from SIGTERM to SIGKILL, or makes every failure wait for longer.\n"
        '    """\n'
        "    libc = ctypes.CDLL(None)\n"
        "    printed = mpirun_output.Output()\n"
        "    # The shell becomes mpirun, or signals would end the shell alone. In its own session mpirun hears what a\n"
        "    # terminal sends from here, once. It ends with this process (PR_SET_PDEATHSIG).\n"
        "    process = subprocess.Popen(['/bin/sh', '-c', 'exec ' + mpirun_command], env=env, start_new_session=True,\n"
        "                               stdout=printed.stdout, stderr=printed.stderr,\n"
        "                               preexec_fn=lambda: libc.prctl(1, signal.SIGTERM, 0, 0, 0))\n"
        "    printed.start()\n"
        "    asked = []\n\n"
        "    def pass_on(signum, frame):\n"
        "        process.send_signal(signum)\n\n"
        "    def ask_ranks_to_stop(signum, frame):\n"
        "        if asked and time.monotonic() - asked[0] < safe_shell_exec.ONE_REQUEST_S:\n"
        "            return\n"
        "        if asked or not safe_shell_exec.signal_ranks(signum):\n"
        "            process.terminate()\n"
        "        else:\n"
        "            asked.append(time.monotonic())\n"
        "            safe_shell_exec.after_grace(process.terminate)\n\n"
        "    heard = [each for each in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)\n"
        "             if signal.getsignal(each) is not signal.SIG_IGN]\n"
        "    for each in heard:\n"
        "        signal.signal(each, pass_on)\n"
        "    signal.signal(signal.SIGTERM, ask_ranks_to_stop)\n"
        "    status = process.wait()\n"
        "    status = 128 - status if status < 0 else status\n"
        "    for each in (*heard, signal.SIGTERM):  # its output may be read slowly\n"
        "        signal.signal(each, lambda *_: sys.exit(status))\n"
        "    printed.finish()\n"
        "    return status\n",
        "SIGTERM ended a shell, and left mpirun and its ranks behind; mpirun gave ranks one second, and crashed under "
        "`horovodrun ... | head` (status 139)",
    ),
    Edit(
        _MPI,
        "import copy\nimport os\nimport sys\n",
        "import copy\nimport ctypes\nimport os\nimport signal\nimport subprocess\nimport sys\nimport time\n",
        "for the edit before",
    ),
)

# horovodrun ends with the status of the rank that ended first, as mpirun does.
_STATUS = (
    Edit(
        _GLOO,
        "def _pad_rank(rank, size):\n",
        "class RanksFailedError(RuntimeError):\n"
        '    """Ranks ended with a status that is not 0; the first one\'s is kept."""\n\n'
        "    def __init__(self, exit_code, message):\n"
        "        super().__init__(message)\n"
        "        self.exit_code = 128 - exit_code if exit_code < 0 else exit_code\n\n\n"
        "def _pad_rank(rank, size):\n",
        "for the edits after",
    ),
    Edit(
        _GLOO,
        "raise RuntimeError('Horovod detected that one or more processes exited with non-zero '\n",
        "raise RanksFailedError(exit_code, 'Horovod detected that one or more processes exited with non-zero '\n",
        "whoever started horovodrun over Gloo could not tell why ranks had ended: its status was always 1",
        count=2,
    ),
    Edit(
        "horovod/runner/launch.py",
        "from horovod.runner.gloo_run import gloo_run, gloo_run_elastic\n",
        "from horovod.runner.common.util import start_checks\n"
        "from horovod.runner.common.util.loopback import LoopbackError\n"
        "from horovod.runner.gloo_run import gloo_run, gloo_run_elastic, RanksFailedError\n",
        "for the next edit",
    ),
    Edit(
        "horovod/runner/launch.py",
        "    _run(args)\n\n\nif __name__ == '__main__':\n",
        "    try:\n"
        "        # Several hosts: how many ranks this one has is not known yet.\n"
        "        start_checks.check_open_files(2 if args.hosts or args.hostfile else args.num_proc or 1)\n"
        "        start_checks.check_semaphores()\n"
        "        _run(args)\n"
        "    except RanksFailedError as failure:\n"
        "        print(failure, file=sys.stderr)\n"
        "        sys.exit(failure.exit_code)\n"
        "    except (LoopbackError, start_checks.CannotStartError) as problem:\n"
        "        sys.exit(f'horovodrun: {problem}')\n\n\n"
        "if __name__ == '__main__':\n",
        "the failing rank's traceback was followed by twenty lines of horovodrun's own",
    ),
)

# Ranks go on, whoever reads what they print.
_PIPE = (
    Edit(
        _SHELL,
        "        dst_stream.write(text)\n        dst_stream.flush()\n",
        "        try:\n"
        "            dst_stream.write(text)\n"
        "            dst_stream.flush()\n"
        "        except BrokenPipeError:\n"
        "            os.dup2(os.open(os.devnull, os.O_WRONLY), dst_stream.fileno())\n",
        "over Gloo, `horovodrun ... | head` printed a traceback a rank, and ranks that went on to print hung",
    ),
)

RUNNER: tuple[Edit, ...] = (*_LOOPBACK, *OPEN_MPI, *MPIRUN_LOOPBACK, *_STOP, *_STATUS, *_PIPE)
