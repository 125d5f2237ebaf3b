"""Reads a measured step from the JSON that `hvdtrain bench --script train.py --json` writes.

`plan` reads the object under the key "plan_input" and nothing else. All values are numbers in SI units; a value that
was not measured is null or left out:

- step_s: one rank's step without communication, waiting for data included; median.
- gradient_bytes: what a rank hands to allreduce in one step.
- samples_per_step: samples that one rank takes in a step.
- backward_share: backward's share of step_s.
- spread_s: standard deviation of step_s from step to step: the distance of its quartiles / 1.349.
- intra_bytes_per_s: bus bandwidth, 2(N-1)/N * bytes / seconds, of a large allreduce between ranks of one host.
- overhead_s: seconds of an allreduce of a few bytes within a host: nearly all of it is starting it, not the hops.
"""

from __future__ import annotations

import json
from pathlib import Path

# The file's keys, and the fields of Step and Cluster that they fill.
_SAME = ("gradient_bytes", "backward_share", "spread_s", "intra_bytes_per_s", "overhead_s")
_FIELDS = {"step_s": "compute_s", "samples_per_step": "samples", **dict(zip(_SAME, _SAME, strict=True))}


def read_measured(path: Path) -> dict[str, float]:
    """Return what the file says, by the names of the fields of Step and Cluster; what it lacks is left out.

    Raises:
        ValueError: if it is not JSON, has no "plan_input", or has something in it that is not a number.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, or not text
        raise ValueError(f"{path} is not JSON: {error}") from None
    values = document.get("plan_input") if isinstance(document, dict) else None
    if not isinstance(values, dict):
        raise ValueError(f'{path} has no object "plan_input": write it with hvdtrain bench --script train.py --json')
    measured = {}
    for key, field in _FIELDS.items():
        value = values.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{path}: plan_input.{key} must be a number. Received: {value!r}")
        measured[field] = value
    return measured
