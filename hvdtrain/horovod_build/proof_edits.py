"""What is changed in Horovod's launcher so that a job's key is drawn, and gets to its processes and to nobody else."""

from __future__ import annotations

from hvdtrain.horovod_build.edit import Edit

_LAUNCH = "horovod/runner/launch.py"
_GLOO = "horovod/runner/gloo_run.py"
_ENV = "horovod/runner/common/util/env.py"
_MPI = "horovod/runner/mpi_run.py"
_RENDEZVOUS = "horovod/runner/elastic/rendezvous.py"
_WORKER = "horovod/runner/elastic/worker.py"
_RAY = "horovod/ray/runner.py"
_SPARK = "horovod/spark/gloo_run.py"

_DRAWN = (
    Edit(
        _LAUNCH,
        "def _run(args):\n    # If LSF is used",
        "def _run(args):\n"
        "    # In the environment, which other users cannot read, and not for longer than the job.\n"
        "    before = os.environ.get(proof.VARIABLE)\n"
        "    os.environ[proof.VARIABLE] = proof.new_key()\n"
        "    try:\n"
        "        return _run_with_key(args)\n"
        "    finally:\n"
        "        os.environ.pop(proof.VARIABLE, None)\n"
        "        if before is not None:  # this process is a rank of another job\n"
        "            os.environ[proof.VARIABLE] = before\n\n\n"
        "def _run_with_key(args):\n    # If LSF is used",
        "every process of a job must know the others, and no stranger",
    ),
    Edit(
        _LAUNCH,
        "key=secret.make_secret_key(),\n",
        "key=proof.job_key(),\n",
        "all of a job have one key",
        count=2,
    ),
    Edit(
        _LAUNCH,
        "import config_parser, hosts, safe_shell_exec, secret, timeout\n",
        "import config_parser, hosts, proof, safe_shell_exec, timeout\n",
        "for the edits before",
    ),
    Edit(
        _LAUNCH,
        "        run_func_server = KVStoreServer(verbose=settings.verbose)\n",
        "        run_func_server = KVStoreServer(verbose=settings.verbose, key=settings.key)\n",
        "all of a job have one key",
    ),
    Edit(
        _LAUNCH,
        "                              'runfunc', 'func', args.run_func)\n",
        "                              'runfunc', 'func', args.run_func, settings.key)\n",
        "all of a job have one key",
    ),
    Edit(
        _LAUNCH,
        "                                                    'runfunc_result', str(i))\n",
        "                                                    'runfunc_result', str(i), settings.key)\n",
        "all of a job have one key",
    ),
    Edit(
        _LAUNCH,
        "            print('ssh not successful for host {host}:\\n{msg_output}'\n",
        "            if OTHER_HOST_KEY in output_msg:\n"
        "                print(other_host_key(host_addresses[index]), file=sys.stderr)\n"
        "            print('ssh not successful for host {host}:\\n{msg_output}'\n",
        "a changed host key is said by ssh in a page of text, among which no line tells what to do",
    ),
    Edit(
        _LAUNCH,
        "from horovod.runner.util.remote import get_remote_command\n",
        "from horovod.runner.util.remote import OTHER_HOST_KEY, get_remote_command, other_host_key\n",
        "for the edit before",
    ),
    Edit(
        _ENV,
        "'.*CUDA_VISIBLE_DEVICES', secret.HOROVOD_SECRET_KEY}\n",
        "'.*CUDA_VISIBLE_DEVICES', secret.HOROVOD_SECRET_KEY, proof.VARIABLE}\n",
        "the key would stand on command lines",
    ),
    Edit(
        _ENV,
        "from horovod.runner.common.util import secret\n",
        "from horovod.runner.common.util import proof, secret\n",
        "for the edit before",
    ),
    Edit(
        _MPI,
        "for key in sorted(env.keys()) if env_util.is_exportable(key))\n",
        "for key in sorted(env.keys())\n"
        "                    # By its name alone. mpirun hands it on with what it tells other hosts' daemons.\n"
        "                    if env_util.is_exportable(key) or key == proof.VARIABLE)\n",
        "ranks on other hosts need the key: for horovod.run's function, and for Gloo",
    ),
)

# Who listens, with which key, and where: several hosts' servers at the interface of the job alone.
_SERVERS = (
    Edit(
        _GLOO,
        "def launch_gloo(command, exec_command, settings, nics, env, server_ip):\n",
        "def launch_gloo(command, exec_command, settings, nics, env, server_ip, key=None):\n",
        "for the next edit",
    ),
    Edit(
        _GLOO,
        "    rendezvous = RendezvousServer(settings.verbose)\n\n    # allocate",
        "    rendezvous = RendezvousServer(settings.verbose, key or settings.key)\n\n    # allocate",
        "all of a job have one key",
    ),
    Edit(
        _GLOO,
        "    :param server_ip: ip to use for rendezvous server\n",
        "    :param server_ip: ip to use for rendezvous server\n"
        "    :param key: of the job, which its ranks have; by default that of settings, else of the environment\n",
        "for the edits before",
    ),
    Edit(
        _GLOO,
        "    handler = create_rendezvous_handler(driver)\n"
        "    global_rendezv_port = rendezvous.start(handler)\n"
        "    driver.wait_for_available_slots(settings.num_proc)\n\n"
        "    nics = get_common_interfaces(driver)\n"
        "    server_ip = network.get_driver_ip(nics)\n",
        "    driver.wait_for_available_slots(settings.num_proc)\n\n"
        "    nics = get_common_interfaces(driver)\n"
        "    server_ip = network.get_driver_ip(nics)\n"
        "    handler = create_rendezvous_handler(driver)\n"
        "    global_rendezv_port = rendezvous.start(handler, host=network.listen_address(nics, server_ip))\n",
        "the rendezvous of an elastic job listened on every interface",
    ),
    Edit(
        _GLOO,
        "        run_func_server = KVStoreServer(verbose=settings.verbose)\n",
        "        run_func_server = KVStoreServer(verbose=settings.verbose, key=settings.key)\n",
        "all of a job have one key",
    ),
    Edit(
        _GLOO,
        "'runfunc', 'func', command_or_func)\n",
        "'runfunc', 'func', command_or_func, settings.key)\n",
        "all of a job have one key",
    ),
    Edit(
        _GLOO,
        "run_func_server_port, 'runfunc_result', str(i))\n",
        "run_func_server_port, 'runfunc_result', str(i),\n"
        "                                                    settings.key)\n",
        "all of a job have one key",
    ),
    Edit(
        _RENDEZVOUS,
        "                addresses, secret_key = codec.loads_base64(value)\n"
        "                self._put_worker_addresses(host, int(local_rank), addresses, secret_key)\n",
        "                addresses = json.loads(value)\n"
        "                self._put_worker_addresses(host, int(local_rank), addresses, self.server.key)\n",
        "whoever could connect to an elastic job ran code in its driver: it unpickled what it got",
    ),
    Edit(
        _RENDEZVOUS,
        "import logging\n\nfrom horovod.runner.common.util import codec\n",
        "import json\nimport logging\n\n",
        "for the edit before",
    ),
    Edit(
        _WORKER,
        "            secret_key = secret.make_secret_key()\n"
        "            self._service = WorkerNotificationService(secret_key, nic, self)\n\n"
        "            value = (self._service.addresses(), secret_key)\n"
        "            put_data_into_kvstore(rendezvous_addr,\n"
        "                                  rendezvous_port,\n"
        "                                  PUT_WORKER_ADDRESSES,\n"
        "                                  self._create_id(hostname, local_rank),\n"
        "                                  value)\n",
        "            # By the job's key, which the driver has: none of its own goes over the network.\n"
        "            self._service = WorkerNotificationService(proof.job_key(), nic, self)\n\n"
        "            put_json_into_kvstore(rendezvous_addr,\n"
        "                                  rendezvous_port,\n"
        "                                  PUT_WORKER_ADDRESSES,\n"
        "                                  self._create_id(hostname, local_rank),\n"
        "                                  self._service.addresses())\n",
        "for the edits before",
    ),
    Edit(
        _WORKER,
        "from horovod.runner.common.util import network, secret\n",
        "from horovod.runner.common.util import network, proof\n",
        "for the edit before",
    ),
    Edit(
        _WORKER,
        "from horovod.runner.http.http_client import put_data_into_kvstore\n",
        "from horovod.runner.http.http_client import put_json_into_kvstore\n",
        "for the edit before",
    ),
)

# Horovod's own ways to run on Ray and Spark. The key goes to workers' environments by Ray's actor calls, which nobody
# proves unless the cluster has TLS (RAY_USE_TLS); on Spark with the task itself, as Spark's own traffic does.
_ENGINES = (
    Edit(
        _RAY,
        "        self.rendezvous = RendezvousServer(self.settings.verbose)\n",
        "        key = proof.new_key()\n"
        "        self.rendezvous = RendezvousServer(self.settings.verbose, bytes.fromhex(key))\n",
        "all of a job have one key",
    ),
    Edit(
        _RAY,
        "self.rendezvous.start()\n",
        "self.rendezvous.start(host=ray.util.get_node_ip_address())\n",
        "it listened on every interface",
    ),
    Edit(
        _RAY,
        '            "HOROVOD_CPU_OPERATIONS": "gloo",\n        }\n',
        '            "HOROVOD_CPU_OPERATIONS": "gloo",\n            proof.VARIABLE: key,\n        }\n',
        "for the edits before",
    ),
    Edit(
        _RAY,
        "from horovod.runner.common.util import secret, timeout, hosts\n",
        "from horovod.runner.common.util import proof, secret, timeout, hosts\n",
        "for the edits before",
    ),
    *(
        edit
        for path in ("horovod/ray/elastic.py", "horovod/ray/elastic_v2.py")
        for edit in (
            Edit(
                path,
                "        self.rendezvous = RendezvousServer(self.settings.verbose)\n",
                "        key = proof.new_key()\n"
                "        self.rendezvous = RendezvousServer(self.settings.verbose, bytes.fromhex(key))\n",
                "all of a job have one key",
            ),
            Edit(
                path,
                "        global_rendezv_port = self.rendezvous.start(handler)\n",
                "        server_ip = socket.gethostbyname(socket.gethostname())\n"
                "        global_rendezv_port = self.rendezvous.start(handler, host=server_ip)\n",
                "it listened on every interface",
            ),
            Edit(
                path,
                "        server_ip = socket.gethostbyname(socket.gethostname())\n        self.run_env_vars = "
                "create_run_env_vars(\n            server_ip, nics, global_rendezv_port, elastic=True)\n",
                "        self.run_env_vars = create_run_env_vars(\n"
                "            server_ip, nics, global_rendezv_port, elastic=True)\n"
                "        self.run_env_vars[proof.VARIABLE] = key\n",
                "for the edits before",
            ),
            Edit(
                path,
                "from horovod.runner.http.http_server import RendezvousServer\n",
                "from horovod.runner.common.util import proof\n"
                "from horovod.runner.http.http_server import RendezvousServer\n",
                "for the edits before",
            ),
        )
    ),
    Edit(
        _SPARK,
        "    launch_gloo(command, exec_command, settings, nics, {}, server_ip)\n",
        "    launch_gloo(command, exec_command, settings, nics, {}, server_ip, key)\n",
        "all of a job have one key",
    ),
    Edit(
        _SPARK,
        "    rendezvous = SparkRendezvousServer(driver, settings.verbose)\n"
        "    launch_gloo_elastic(command, exec_command, settings, env, lambda",
        "    rendezvous = SparkRendezvousServer(driver, settings.verbose, settings.key)\n"
        "    launch_gloo_elastic(command, exec_command, settings, {}, lambda",  # rsh has the environment
        "all of a job have one key; and the environment stood on command lines",
    ),
    Edit(
        "horovod/spark/driver/rendezvous.py",
        "    def __init__(self, driver, verbose):\n        super(SparkRendezvousServer, self).__init__(verbose)\n",
        "    def __init__(self, driver, verbose, key=None):\n"
        "        super(SparkRendezvousServer, self).__init__(verbose, key)\n",
        "for the edit before",
    ),
    Edit(
        "horovod/spark/task/task_service.py",
        "        env[secret.HOROVOD_SECRET_KEY] = codec.dumps_base64(key)\n",
        "        env[secret.HOROVOD_SECRET_KEY] = codec.dumps_base64(key)\n        env[proof.VARIABLE] = key.hex()\n",
        "for the edits before",
    ),
    Edit(
        "horovod/spark/task/task_service.py",
        "from horovod.runner.common.util import codec, secret, timeout\n",
        "from horovod.runner.common.util import codec, proof, secret, timeout\n",
        "for the edit before",
    ),
)

PROOF: tuple[Edit, ...] = (*_DRAWN, *_SERVERS, *_ENGINES)
