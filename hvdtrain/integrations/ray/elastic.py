"""An elastic job. To Horovod's driver each process is a host of one slot; it drops a host when a process dies."""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.errors import HvdTrainError, RankFailedError
from hvdtrain.horovod_build.shared import proof
from hvdtrain.integrations import rendezvous
from hvdtrain.integrations.ray.cluster import POLL_S, RayCluster, RayOutcome, Request, Worker
from hvdtrain.launch.exchange import Message
from hvdtrain.launch.exit_cause import Cause

log = logging.getLogger("hvdtrain")

# How far the job may shrink and grow, and how often it may reset, with a new set of ranks: options of Horovod's driver.
Limits = Mapping[str, Any]

_TOO_FEW_S = 600  # how long the others wait for enough ranks: Horovod's default
_ENDING_S = 10.0
_MOST_STILLBORN = 5  # processes in a row that could not be started


class ElasticJob:
    """One run: Horovod's driver gets hosts from it, and calls `work` in a thread for each. A dead host is replaced."""

    def __init__(self, cluster: RayCluster, request: Request, limits: Limits) -> None:
        self._cluster, self._request, self._limits = cluster, request, limits
        self._workers: dict[str, Worker] = {}
        self._gone: set[str] = set()  # those that have ended
        self._made = self._stillborn = 0
        self._lock = threading.Lock()
        self._problem: HvdTrainError | None = None  # why no more processes are started
        self._answers: dict[str, Message] = {}
        self._deaths: list[Cause] = []
        self._over = False

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return {name: 1} of all that have started. The driver itself leaves out those that died."""
        with self._lock:
            for name in [name for name, worker in self._workers.items() if not worker.facts]:
                try:
                    if self._cluster.has_started(self._workers[name]):
                        self._stillborn = 0
                except HvdTrainError as problem:
                    del self._workers[name]
                    self._stillborn += 1
                    if self._stillborn >= _MOST_STILLBORN:
                        self._problem = problem
            while self._problem is None and len(self._workers) - len(self._gone) < self._limits["max_num_proc"]:
                name = f"worker-{self._made}"
                self._workers[name] = self._cluster.start(name.replace("-", " "), self._request)
                self._made += 1
            return {name: 1 for name, worker in self._workers.items() if worker.facts}

    def run(self) -> RayOutcome:
        """Run to the end; a RankFailedError if the job was reset too often."""
        until = time.monotonic() + self._request.start_timeout_s
        while len(self.find_available_hosts_and_slots()) < self._request.ranks:
            if self._problem is not None:
                raise self._problem
            if time.monotonic() > until:
                raise self._cluster.no_room(self._request)
            time.sleep(POLL_S)
        self._task = self._cluster.ray.put(self._request.task.pickled)
        self._address, self._key = self._cluster.address(), proof.new_key()
        server = rendezvous.make_server(bytes.fromhex(self._key))
        self._driver = importlib.import_module("horovod.runner.elastic.driver").ElasticDriver(
            rendezvous=server, discovery=self, timeout=_TOO_FEW_S, **self._limits
        )
        handler = importlib.import_module("horovod.runner.elastic.rendezvous").create_rendezvous_handler(self._driver)
        began = time.monotonic()
        with rendezvous.serving(server, self._address, handler) as self._port:
            try:
                self._driver.start(self._request.ranks, self.work)
                self._cluster.follow(self._ended, self._present)
            finally:
                self._end()
            message = self._driver.get_results().error_message
        if message is not None:
            last = f"; the last death: {self._deaths[-1]}" if self._deaths else ""
            raise RankFailedError(f"{message}{last}")
        slots = {name: slots[0].rank for name, slots in self._driver.host_assignments.items() if slots}
        outcome = RayOutcome(len(slots), seconds=time.monotonic() - began)
        for name in filter(self._answers.__contains__, slots):
            outcome.take(slots[name], self._answers[name], self._workers[name])
        if self._deaths and not outcome.is_explained:
            outcome.cause = self._deaths[-1]
        return outcome

    def work(self, slot: Any, events: Sequence[threading.Event]) -> tuple[int, float]:
        """Run the function in the process that is this slot's host; return its exit status, and when it ended."""
        try:
            return self._work(slot, events)
        except Exception:  # the driver would wait for this thread for ever
            log.exception("%s: an error in its thread, so its process is ended", slot.hostname)
            self._cluster.kill([self._workers[slot.hostname]])
            return 1, time.time()

    def _work(self, slot: Any, events: Sequence[threading.Event]) -> tuple[int, float]:
        name, worker = slot.hostname, self._workers[slot.hostname]
        place = rendezvous.variables(slot, self._address, self._port, worker.facts["interface"], elastic=True)
        environment = {**self._request.environment, **place, proof.VARIABLE: self._key}
        ref = worker.handle.run.remote(environment, self._request.task.facts, self._task)
        while not self._cluster.ray.wait([ref], timeout=POLL_S)[0]:
            if any(event.is_set() for event in events):
                self._cluster.kill([worker])
        answer = self._cluster.answer(ref, worker, self._driver.get_slot_info(name, 0).rank)
        with self._lock:
            self._gone.add(name)
        if isinstance(answer, Message):
            self._answers[name] = answer
            if answer.facts["kind"] == "error" and not answer.facts["others"]:  # a restart would only repeat it
                self._over = True
            return int(answer.facts.get("code", answer.facts["kind"] == "error")), time.time()
        if not self._over and not any(event.is_set() for event in events):
            self._deaths.append(answer)
            log.warning("%s; the other ranks continue", answer)
        return 1, time.time()

    def _present(self) -> list[Worker]:
        with self._lock:
            return [worker for name, worker in self._workers.items() if name not in self._gone]

    def _ended(self) -> bool:
        """Wait a moment; return whether the job has ended or must end."""
        time.sleep(POLL_S)
        return self._over or self._problem is not None or self._driver.finished()

    def _end(self) -> None:
        """End all processes, and stop the driver. First give it time to note the end of all of its round."""
        self._over = True
        with self._lock:
            self._problem = self._problem or HvdTrainError("the job is over")
        self._cluster.kill(self._present())
        until = time.monotonic() + _ENDING_S
        while not self._driver.finished() and time.monotonic() < until:
            time.sleep(POLL_S / 4)
        if not self._driver.finished():
            self._driver.stop()


def run(cluster: RayCluster, request: Request, limits: Limits) -> RayOutcome:
    """Run the job to its end."""
    # Keep Horovod's driver from configuring logging for the whole process, as its calls of `logging.info` would.
    root, own = logging.getLogger(), logging.lastResort or logging.NullHandler()  # what a process without handlers uses
    if not root.handlers:
        root.addHandler(own)
    try:
        return ElasticJob(cluster, request, limits).run()
    finally:
        root.removeHandler(own)
