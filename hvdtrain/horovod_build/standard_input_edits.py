"""What is changed in Horovod's launcher so that values of environment variables stand on no command line."""

from __future__ import annotations

from hvdtrain.horovod_build.edit import Edit

_GLOO = "horovod/runner/gloo_run.py"
_DRIVER = "horovod/runner/driver/driver_service.py"
_TASK = "horovod/runner/task_fn.py"
_SHELL = "horovod/runner/common/util/safe_shell_exec.py"
_REMOTE = "horovod/runner/util/remote.py"

# Every user of a host can read command lines. Here a rank's environment is handed down, elsewhere it comes by ssh's
# standard input.
STANDARD_INPUT: tuple[Edit, ...] = (
    Edit(
        _SHELL,
        "def _exec_middleman(command, env, exit_event, stdout, stderr, rw):\n",
        "def _say(pipe, text):\n"
        "    with contextlib.suppress(OSError):  # the command has ended, or does not read\n"
        "        pipe.write(os.fsencode(text))\n"
        "        pipe.close()\n\n\n"
        "def _exec_middleman(command, env, exit_event, stdout, stderr, rw, input=None):\n",
        "for the edits after",
    ),
    Edit(
        _SHELL, "import codecs\nimport multi", "import codecs\nimport contextlib\nimport multi", "for the edit before"
    ),
    Edit(
        _SHELL,
        "                                      stdout=stdout_w, stderr=stderr_w)\n",
        "                                      stdin=None if input is None else subprocess.PIPE,\n"
        "                                      stdout=stdout_w, stderr=stderr_w)\n"
        "    if input is not None:\n"
        "        in_thread(_say, (executor_shell.stdin, input))\n",
        "for the edits after",
    ),
    Edit(
        _SHELL,
        '            prefix_output_with_timestamp=False):\n    """\n    Execute the given',
        '            prefix_output_with_timestamp=False, input=None):\n    """\n    Execute the given',
        "for the edits after",
    ),
    Edit(
        _SHELL,
        "    :return: command's exit code\n",
        "    :param input: text for the command's standard input; it goes there by pipes alone\n"
        "    :return: command's exit code\n",
        "for the edits after",
    ),
    Edit(
        _SHELL,
        "                                                          (r, w)))\n",
        "                                                          (r, w), input))\n",
        "for the edits after",
    ),
    Edit(
        _REMOTE,
        "from horovod.runner.common.util import env as env_util\n",
        "import re\n"
        "from shlex import quote\n\n"
        "from horovod.runner.common.util import env as env_util\n\n"
        "# What a shell sets itself, or lets nobody set.\n"
        "_SHELLS_OWN = {'PWD', 'OLDPWD', '_', 'UID', 'EUID', 'PPID', 'BASHOPTS', 'SHELLOPTS', 'BASH_VERSINFO'}\n"
        "OTHER_HOST_KEY = 'REMOTE HOST IDENTIFICATION HAS CHANGED'  # what ssh says then\n\n\n"
        "def other_host_key(host):\n"
        "    return (f'Host {host} has a changed ssh host key. If the host was reinstalled, type: '\n"
        "            f'ssh-keygen -R {host}')\n",
        "for the edits after",
    ),
    Edit(
        _REMOTE,
        "def get_remote_command(",
        "def get_remote_command_and_input(command, env, host, folder=None, say=True, port=None, identity_file=None):\n"
        '    """Return the command line that runs `command` on a host, and the standard input that it needs.\n\n'
        "    :param command: of a shell, one simple command\n"
        "    :param env: variables; their values are on no command line, here or there\n"
        "    :param folder: where to run it; the home folder if it is not there\n"
        "    :param say: whether to tell if it is not there\n"
        '    """\n'
        "    variables = {name: quote(value) for name, value in env.items()\n"
        "                 if re.fullmatch('[A-Za-z_][A-Za-z0-9_]*', name) and name not in _SHELLS_OWN}\n"
        "    steps = []\n"
        "    if folder is not None:\n"
        "        told = f'horovodrun: host {host} has no folder {folder!r} that can be entered: '\n"
        "        told += 'its ranks are started in the home folder'\n"
        "        steps.append(f'cd -- {quote(folder)} 2> /dev/null || ' +\n"
        "                     (f\"printf '%s\\\\n' {quote(told)} >&2\" if say else ':'))\n"
        "    if env_util.is_kubeflow_mpi():\n"
        "        # kubexec.sh hands no standard input on (kubectl exec without -i): there they are on command lines,\n"
        "        # which the processes of the pods alone can read.\n"
        "        words = ' '.join(f'{name}={value}' for name, value in variables.items())\n"
        "        steps.append(f'env {words} {command}')\n"
        "        return get_remote_command(quote('; '.join(steps)), host), None\n"
        "    steps += ['export PWD', 'eval \"$(cat)\"', f'exec {command}']\n"
        "    text = ''.join(f'export {name}={value}\\n' for name, value in variables.items())\n"
        "    # The user's shell there may be one that knows other words.\n"
        "    script = quote('sh -c ' + quote('; '.join(steps)))\n"
        "    return get_remote_command(script, host, port, identity_file), text\n\n\n"
        "def get_remote_command(",
        "for the edits after",
    ),
    Edit(
        _GLOO,
        "def _exec_command_fn(settings):\n",
        "class _SshErrors(object):\n"
        '    """Standard error of ssh and of what it runs: says in one line if ssh refuses the host."""\n\n'
        "    def __init__(self, stream, host):\n"
        "        self._stream, self._host, self._told = stream, host, False\n"
        "        self.flush = stream.flush\n\n"
        "    def write(self, text):\n"
        "        self._stream.write(text)\n"
        "        if OTHER_HOST_KEY in text and not self._told:\n"
        "            self._told = True\n"
        "            print(other_host_key(self._host), file=sys.stderr)\n\n"
        "    def fileno(self):\n"
        "        return self._stream.fileno()\n\n\n"
        "def _exec_command_fn(settings, env):\n",
        "for the edits after",
    ),
    Edit(
        _GLOO,
        "            stderr = MultiFile([sys.stderr, stderr_file])\n",
        "            stderr = MultiFile([sys.stderr, stderr_file])\n\n"
        "        if text is not None:\n"
        "            stderr = _SshErrors(stderr or sys.stderr, host_name)\n",
        "a changed host key is said by ssh in a page of text, among which no line tells what to do",
    ),
    Edit(
        _GLOO,
        "        host_address = network.resolve_host_address(host_name)\n"
        "        local_addresses = network.get_local_host_addresses()\n"
        "        if host_address not in local_addresses:\n"
        "            local_command = quote('cd {pwd} > /dev/null 2>&1 ; {command}'\n"
        "                                  .format(pwd=os.getcwd(), command=command))\n"
        "            command = get_remote_command(local_command,\n"
        "                                         host=host_name,\n"
        "                                         port=settings.ssh_port,\n"
        "                                         identity_file=settings.ssh_identity_file)\n\n"
        "        if settings.verbose:\n"
        "            print(command)\n",
        "        if settings.verbose:\n"
        "            print('on host {}: {}'.format(host_name, command))\n\n"
        "        own_key = {proof.VARIABLE: (settings.key or proof.job_key()).hex()}\n"
        "        variables, text = {**os.environ, **env, **own_key}, None\n"
        "        host_address = network.resolve_host_address(host_name)\n"
        "        local_addresses = network.get_local_host_addresses()\n"
        "        if host_address not in local_addresses:\n"
        "            exported = {name: value for name, value in env.items() if env_util.is_exportable(name)}\n"
        "            command, text = get_remote_command_and_input(command, {**exported, **own_key},\n"
        "                                                         host=host_name,\n"
        "                                                         folder=os.getcwd(),\n"
        "                                                         say=slot_info.local_rank == 0,\n"
        "                                                         port=settings.ssh_port,\n"
        "                                                         identity_file=settings.ssh_identity_file)\n"
        "            variables = None\n",
        "over Gloo the whole environment, tokens and passwords too, could be read with ps on the hosts of a job; and "
        "the name of a folder with a space or ; was taken for commands",
    ),
    Edit(
        _GLOO,
        "                                                index=index,\n"
        "                                                stdout",
        "                                                env=variables,\n"
        "                                                input=text,\n"
        "                                                index=index,\n"
        "                                                stdout",
        "for the edit before",
    ),
    Edit(
        _GLOO,
        "    exec_command = _exec_command_fn(settings)\n"
        "    launch_gloo(command, exec_command, settings, nics, env, server_ip)\n",
        "    exec_command = _exec_command_fn(settings, env)\n"
        "    launch_gloo(command, exec_command, settings, nics, {}, server_ip)\n",
        "for the edit before",
    ),
    Edit(
        _GLOO,
        "    exec_command = _exec_command_fn(settings)\n"
        "    rendezvous = RendezvousServer(settings.verbose)\n"
        "    return launch_gloo_elastic(command_or_func, exec_command, settings, env, get_common",
        "    exec_command = _exec_command_fn(settings, env)\n"
        "    rendezvous = RendezvousServer(settings.verbose, settings.key)\n"
        "    return launch_gloo_elastic(command_or_func, exec_command, settings, {}, get_common",
        "for the edits before, in an elastic job",
    ),
    Edit(
        _GLOO,
        "from horovod.runner.util.remote import get_remote_command\n",
        "from horovod.runner.util.remote import OTHER_HOST_KEY, get_remote_command_and_input, other_host_key\n",
        "for the edits before",
    ),
    Edit(
        _GLOO,
        "from horovod.runner.common.util import env as env_util, safe_shell_exec\n",
        "from horovod.runner.common.util import env as env_util, proof, safe_shell_exec\n",
        "for the edits before",
    ),
    Edit(
        _DRIVER,
        "    def _exec_command(command):\n",
        "    # On command lines there is no key: every user of a host can read those, and what it signs is unpickled.\n"
        "    key = {proof.VARIABLE: settings.key.hex()}\n"
        "    settings = copy.copy(settings)\n"
        "    settings.key = None\n\n"
        "    def _exec_command(command, env, text):\n",
        "whoever read the key with ps could run code in the processes that look for common interfaces",
    ),
    Edit(
        _DRIVER,
        "            exit_code = safe_shell_exec.execute(command,\n",
        "            exit_code = safe_shell_exec.execute(command,\n"
        "                                                env=env,\n"
        "                                                input=text,\n",
        "for the edit before",
    ),
    Edit(
        _DRIVER,
        "            .format(python=sys.executable,\n",
        "            .format(python=quote(sys.executable),\n",
        "for the edit after",
    ),
    Edit(
        _DRIVER,
        "        if host_name not in local_host_names:\n"
        "            command = get_remote_command(command,\n"
        "                                         host=host_name,\n"
        "                                         port=settings.ssh_port,\n"
        "                                         identity_file=settings.ssh_identity_file)\n\n"
        "        if settings.verbose >= 2:\n"
        "            print('Launching horovod task function: {}'.format(command))\n"
        "        args_list.append([command])\n",
        "        if settings.verbose >= 2:\n"
        "            print('Launching horovod task function on host {}: {}'.format(host_name, command))\n"
        "        if host_name in local_host_names:\n"
        "            args_list.append([command, {**os.environ, **key}, None])\n"
        "        else:\n"
        "            command, text = get_remote_command_and_input(command, key,\n"
        "                                                         host=host_name,\n"
        "                                                         port=settings.ssh_port,\n"
        "                                                         identity_file=settings.ssh_identity_file)\n"
        "            args_list.append([command, None, text])\n",
        "for the edits before",
    ),
    Edit(
        _DRIVER,
        "import io\nimport os\nimport sys\n\nfrom socket import AF_INET\n",
        "import copy\nimport io\nimport os\nimport sys\n\nfrom shlex import quote\nfrom socket import AF_INET\n",
        "for the edits before",
    ),
    Edit(
        _DRIVER,
        "from horovod.runner.common.util import codec, safe_shell_exec\n",
        "from horovod.runner.common.util import codec, proof, safe_shell_exec\n",
        "for the edits before",
    ),
    Edit(
        _DRIVER,
        "from horovod.runner.util.remote import get_remote_command\n",
        "from horovod.runner.util.remote import get_remote_command_and_input\n",
        "for the edits before",
    ),
    Edit(
        _TASK,
        "    settings = codec.loads_base64(sys.argv[4])\n",
        "    settings = codec.loads_base64(sys.argv[4])\n    settings.key = proof.job_key()\n",
        "for the edits before",
    ),
    Edit(
        _TASK,
        "from horovod.runner.common.util import codec, host_hash\n",
        "from horovod.runner.common.util import codec, host_hash, proof\n",
        "for the edit before",
    ),
)
