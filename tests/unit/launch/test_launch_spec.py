from __future__ import annotations

import re
from pathlib import Path

import pytest

from hvdtrain import launch
from hvdtrain.launch.arguments import LaunchSpec


@pytest.mark.parametrize(
    ("spec", "over_gloo"),
    [
        (LaunchSpec(), False),
        (LaunchSpec(options=["--gloo"]), True),
        (LaunchSpec(elastic=True), True),
        (LaunchSpec("mpirun", options=["--gloo"]), False),
    ],
)
def test_the_launch_knows_whether_an_mpirun_takes_part(spec: LaunchSpec, over_gloo: bool) -> None:
    assert spec.over_gloo == over_gloo


def test_a_launch_knows_where_its_ranks_are() -> None:
    assert (LaunchSpec().is_here, LaunchSpec().is_elsewhere) == (True, False)
    both, there = LaunchSpec(hosts={"localhost": 1, "192.0.2.77": 1}), LaunchSpec(hosts={"192.0.2.77": 1})
    assert (both.is_here, both.is_elsewhere) == (False, False)
    assert (there.is_here, there.is_elsewhere) == (False, True)


def test_nobody_recovers_the_launcher_from_the_command_line() -> None:
    for path in Path(launch.__file__).parent.glob("*.py"):
        assert not re.search(r"line\[0\]|command\[0\]|name == MPIRUN", path.read_text(encoding="utf-8")), path
