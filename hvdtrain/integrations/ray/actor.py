"""What runs on the cluster: one rank in an actor, and a function that sends ranks a signal."""

from __future__ import annotations

import importlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.launch.exchange import Message
from hvdtrain.system import network, process_tree


class Rank:
    """A process that becomes a rank by `run`, which uses the main thread, so that signals reach a Trainer."""

    def __init__(self, name: str) -> None:
        self._name = name  # the prefix of the lines that it prints

    def __repr__(self) -> str:
        return self._name

    def facts(self) -> dict[str, Any]:
        """Return where this process is: pid, host, node, the interface that has the node's address, and its GPUs."""
        ray = importlib.import_module("ray")
        return {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "node": ray.get_runtime_context().get_node_id(),
            "interface": network.interface(ray.util.get_node_ip_address()),
            "gpus": [str(gpu) for gpu in ray.get_gpu_ids()],
        }

    def run(self, environment: Mapping[str, str], facts: Mapping[str, Any], pickled: bytes) -> tuple[Any, bytes]:
        """Call the function of a task, given as facts and pickled; return the answer as (facts, pickled)."""
        os.environ.update(environment)
        # What the caller can import can be imported here; this node's own packages come first.
        sys.path += [path for path in facts["path"] if path not in sys.path]
        from hvdtrain.launch import rank  # with a Horovod of this node

        answer, _ = rank.perform(rank.load(Message(dict(facts), pickled)))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        return answer.facts, answer.pickled


def signal_processes(pids: Sequence[int], number: int) -> None:
    """Send a signal to processes of this node."""
    for pid in pids:
        process_tree.send(pid, number)
