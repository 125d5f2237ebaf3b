"""Ranks on a Ray cluster: `run` is `hvdtrain.run` there.

Each rank is a Ray actor. Horovod's own rendezvous, and for elastic jobs its driver, bring them together over Gloo and
NCCL. `horovod.ray`'s executors are not used: they wait without a limit, leave placement groups behind, and when
one process dies they give up its whole node, which ends every elastic job on one node.
"""

from hvdtrain.integrations.ray.job import run

__all__ = ["run"]
