"""What is changed in Horovod's sdist so that ranks which meet anew survive the death of one they wait for."""

from __future__ import annotations

from hvdtrain.horovod_build.edit import Edit

_OPERATIONS = "horovod/common/operations.cc"
_RENDEZVOUS = "horovod/runner/elastic/rendezvous.py"

ELASTIC: tuple[Edit, ...] = (
    Edit(
        _OPERATIONS,
        "  {\n"
        "    global_gloo_context.Initialize(ParseGlooIface());\n"
        "  }\n"
        "  if (state.control_operation == LibType::GLOO) {\n"
        "    // Initializes global controller\n"
        "    state.process_set_table.Initialize(global_gloo_context);\n"
        "  }\n",
        "  {\n"
        "    try {\n"
        "      global_gloo_context.Initialize(ParseGlooIface());\n"
        "      if (state.control_operation == LibType::GLOO) {\n"
        "        // Initializes global controller\n"
        "        state.process_set_table.Initialize(global_gloo_context);\n"
        "      }\n"
        "    } catch (const std::exception& ex) {\n"
        "      // There is nobody yet to shut down with.\n"
        '      LOG(ERROR) << "Horovod could not be initialized: " << ex.what();\n'
        "      state.initialization_failed = true;\n"
        "      return;\n"
        "    }\n"
        "  }\n",
        "when a rank died while others met it, or a new host's did not come, every process of the job aborted",
    ),
    Edit(
        _OPERATIONS,
        "    horovod_global.shut_down = false;\n    horovod_global.initialization_done = false;\n",
        "    horovod_global.shut_down = false;\n    horovod_global.initialization_done = false;\n"
        "    horovod_global.initialization_failed = false;\n",
        "after the failure of one initialization every later one failed",
    ),
    Edit(
        _OPERATIONS,
        "void BackgroundThreadLoop(HorovodGlobalState& state) {\n",
        "void BackgroundThreadLoop(HorovodGlobalState& state) {\n  bool failed = false;\n",
        "for the edit after next",
    ),
    Edit(
        _OPERATIONS,
        '        << "Horovod background loop uncaught exception: " << ex.what();\n',
        '        << "Horovod background loop uncaught exception: " << ex.what();\n    failed = true;\n',
        "for the next edit",
    ),
    Edit(
        _OPERATIONS,
        "    horovod_global.process_set_table.Finalize(global_gloo_context,\n"
        "                                              SHUT_DOWN_ERROR);\n",
        "    horovod_global.process_set_table.Finalize(global_gloo_context,\n"
        "                                              SHUT_DOWN_ERROR);\n"
        "    if (failed) {\n"
        "      // Its own Finalize leaves these open. In order they stay so: what was sent last may be under way.\n"
        "      auto& connections = horovod_global.process_set_table.Get(0).gloo_context;\n"
        "      connections.ctx.reset();\n"
        "      connections.global_ctx.reset();\n"
        "      connections.local_ctx.reset();\n"
        "      connections.cross_ctx.reset();\n"
        "    }\n",
        "ranks that wait for one which waits for the dead heard of it after Gloo's 30 s: it kept its connections open",
    ),
    Edit(
        "horovod/common/gloo/gloo_context.cc",
        "      // Signals that this host is not part of the job\n",
        '      // Signals that this host is not part of the job\n      SetEnv(HOROVOD_RANK, "-1");\n',
        "a process cannot tell that its host was removed from a failure after which it must try again",
    ),
    Edit(
        "horovod/common/gloo/http_store.cc",
        "  const auto start = std::chrono::steady_clock::now();\n\n  while (!CheckKeys(keys)) {\n",
        "  const auto start = std::chrono::steady_clock::now();\n\n"
        "  // A new host's rank has frameworks to import. If it dies, the driver of an elastic job refuses to answer.\n"
        '  const char* elastic = std::getenv("HOROVOD_ELASTIC");\n'
        '  const bool patient = elastic != nullptr && std::string(elastic) == "1";\n'
        "  const auto timeout = patient ? std::max(given_timeout, std::chrono::milliseconds(600000))"
        " : given_timeout;\n\n"
        "  while (!CheckKeys(keys)) {\n",
        "a new host whose rank took more than 30 s to start ended the job",
    ),
    Edit(
        "horovod/common/gloo/http_store.cc",
        "                     const std::chrono::milliseconds& timeout) {\n",
        "                     const std::chrono::milliseconds& given_timeout) {\n",
        "for the edit before",
    ),
    Edit(
        _RENDEZVOUS,
        "            return super(RendezvousHandler, self)._get_value(scope, key)\n",
        "            value = super(RendezvousHandler, self)._get_value(scope, key)\n"
        "            if value is None and driver.somebody_failed():\n"
        "                raise LookupError('a rank of this round has failed')\n"
        "            return value\n\n"
        "        def do_GET(self):\n"
        "            try:\n"
        "                super().do_GET()\n"
        "            except LookupError:\n"
        "                self.send_status_code(GONE)  # whoever waits for its address waits in vain\n",
        "ranks waited for the address of one that had died for as long as for one that was about to start",
    ),
    Edit(
        _RENDEZVOUS,
        "GET_RANK_AND_SIZE = 'rank_and_size'\n",
        "GET_RANK_AND_SIZE = 'rank_and_size'\n\nGONE = 410\n",
        "for the edit before",
    ),
    Edit(
        "horovod/runner/elastic/driver.py",
        "    def world_size(self):\n        return self._world_size\n",
        "    def world_size(self):\n        return self._world_size\n\n"
        "    def somebody_failed(self):\n"
        '        """Return whether a process of the present round has ended with an error: '
        'its ranks will not meet."""\n'
        "        return self._worker_registry.count(FAILURE) > 0\n",
        "for the edits before",
    ),
    Edit(
        "horovod/runner/elastic/driver.py",
        "from horovod.runner.elastic.registration import WorkerStateRegistry\n",
        "from horovod.runner.elastic.registration import FAILURE, WorkerStateRegistry\n",
        "for the edit before",
    ),
    Edit(
        "horovod/runner/util/remote.py",
        "SSH_COMMAND_PREFIX = 'ssh -o PasswordAuthentication=no -o StrictHostKeyChecking=no'\n",
        "SSH_COMMAND_PREFIX = ('ssh -o PasswordAuthentication=no -o StrictHostKeyChecking=accept-new '\n"
        "                      '-o ServerAliveInterval=10 -o ServerAliveCountMax=3')\n",
        "ssh did not notice that a host had gone, and the ranks that were left waited for its ranks; and whoever took "
        "a known host's place on the network got the job's environment",
    ),
)
