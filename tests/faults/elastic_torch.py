"""An elastic drop-in script: the weights count how often each sample was learned from.

Each step adds 1 to the weight of each sample of its batch, so what is lost or learned twice shows in the weights. A net
is trained twice, with a whole optimizer state and with one in shards.
"""

from __future__ import annotations

import copy
import hashlib
import time
from typing import Any

import torch
from elastic_job import FOLDER, SCENARIO, changes_hosts, dies, say
from horovod.common.exceptions import HorovodInternalError

import hvdtrain.torch as hvd

SAMPLES, BATCH, EPOCHS, COMMIT_EVERY = 48, 2, 2, 3
FAULT_STEP = 7  # one after a commit

hvd.init()
counts = torch.nn.Embedding(SAMPLES, 1)
torch.nn.init.zeros_(counts.weight)
torch.manual_seed(hvd.rank())  # ranks begin with other weights, and must end with equal ones
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
adding = hvd.DistributedOptimizer(
    torch.optim.SGD(counts.parameters(), lr=1.0), named_parameters=counts.named_parameters(), op=hvd.Sum
)
adam = hvd.DistributedOptimizer(
    torch.optim.Adam(net.parameters(), lr=0.01), named_parameters=[(f"net.{n}", p) for n, p in net.named_parameters()]
)
twin = copy.deepcopy(net)
sharded = hvd.DistributedOptimizer(
    torch.optim.Adam(twin.parameters(), lr=0.01),
    named_parameters=[(f"twin.{n}", p) for n, p in twin.named_parameters()],
    shard_state=True,
)
schedule = torch.optim.lr_scheduler.StepLR(adam, 5, gamma=0.9)
sampler = hvd.elastic.ElasticSampler(range(SAMPLES), seed=1)
state = hvd.elastic.TorchState(
    model=counts, optimizer=adding, net=net, adam=adam, twin=twin, sharded=sharded, schedule=schedule, sampler=sampler,
    epoch=0, steps=0, taken=[],
)  # fmt: skip


def digest() -> str:
    """Return a hash of all weights and moments, and of the schedule."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.update(value.detach().numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                add(value[key])
        else:
            found.update(repr(value).encode())

    for each in (counts, net, adam, schedule):
        add(each.state_dict())
    return found.hexdigest()


def is_twin() -> bool:
    """Return True if weights and moments in shards have the bits of whole ones; a collective."""
    sharded.consolidate_state_dict(None)
    ours, right = sharded.state_dict()["state"], adam.state_dict()["state"]
    pairs = [*zip(twin.parameters(), net.parameters(), strict=True)]
    pairs += [(ours[index][name], each) for index, entries in right.items() for name, each in entries.items()]
    return ours.keys() == right.keys() and all(torch.equal(mine, theirs) for mine, theirs in pairs)


def place() -> dict[str, Any]:
    return {"rank": hvd.rank(), "size": hvd.size(), "step": state.steps, "digest": digest(), "is_twin": is_twin()}


def loses_connection() -> None:
    """In the scenario "error", let rank 1 lose its connection once; every process stays."""
    if SCENARIO == "error" and hvd.rank() == 1 and not (FOLDER / "lost").exists():
        (FOLDER / "lost").touch()
        raise HorovodInternalError("a connection was lost")


def step(index: int, rows: torch.Tensor) -> None:
    if state.steps == FAULT_STEP:
        dies(rank=hvd.rank(), size=hvd.size())
        loses_connection()
        if hvd.broadcast_object(hvd.rank() == 0 and changes_hosts(), root_rank=0):
            while True:  # until the commit ends this, since hosts have changed
                state.commit()
                time.sleep(0.05)
    adding.zero_grad()
    adam.zero_grad()
    sharded.zero_grad()
    sharded.param_groups[0]["lr"] = adam.param_groups[0]["lr"]
    (-counts(rows).sum()).backward()
    samples = torch.rand(BATCH, 4)
    for each in (net, twin):
        each(samples).square().mean().backward()
    adding.step()
    adam.step()
    sharded.step()
    schedule.step()
    sampler.record_batch(index, BATCH)
    state.steps += 1
    state.taken.append(state.steps)  # in place: going back must undo it, too
    if state.steps % COMMIT_EVERY == 0:
        state.commit()


@hvd.elastic.run
def train(state: Any) -> None:
    say("begin", **place(), processed=sampler.processed_num)
    while state.epoch < EPOCHS:
        for index, rows in enumerate(torch.utils.data.DataLoader(range(SAMPLES), sampler=sampler, batch_size=BATCH)):
            step(index, rows)
        state.epoch += 1
        sampler.set_epoch(state.epoch)
        state.commit()


train(state)
say("end", **place(), counts=counts.weight.flatten().tolist(), taken=state.taken)
