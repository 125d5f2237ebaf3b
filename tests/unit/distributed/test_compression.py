"""Schemes of compression: names, options, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hvdtrain
from hvdtrain.distributed.compression import parse


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("int8", hvdtrain.Int8()),
        ("topk:0.01", hvdtrain.TopK(0.01)),
        ("topk:1.0", hvdtrain.TopK(1)),
        ("powersgd:4", hvdtrain.PowerSGD()),
        ("powersgd:2:10", hvdtrain.PowerSGD(rank=2, after_steps=10)),
    ],
)
def test_a_scheme_has_a_name_that_means_it(name, scheme):
    assert str(scheme) == name
    assert parse(name) == scheme == parse(scheme)


def test_types_have_names_only():
    assert [parse(each) for each in ("none", "fp16", "bf16")] == ["none", "fp16", "bf16"]


@pytest.mark.parametrize(
    "given",
    ["zip", "int8:4", "topk", "topk:", "topk:x", "topk:0", "topk:2", "topk:nan", "powersgd", "powersgd:0", "powersgd:x",
     "powersgd:4:-1", "powersgd:4:1:1", "powersgd:4.5", "", None, 4, hvdtrain.PowerSGD],
)  # fmt: skip
def test_what_is_no_scheme_is_refused_with_those_there_are(given):
    with pytest.raises(ValueError, match=r"powersgd:RANK.*Received: compression=") as error:
        parse(given)
    assert repr(given) in str(error.value)


@pytest.mark.parametrize(
    ("make", "received"),
    [
        (lambda: hvdtrain.PowerSGD(rank=0), "rank=0"),
        (lambda: hvdtrain.PowerSGD(rank=True), "rank=True"),
        (lambda: hvdtrain.PowerSGD(rank=1.5), r"rank=1\.5"),
        (lambda: hvdtrain.PowerSGD(after_steps=-1), "after_steps=-1"),
        (lambda: hvdtrain.TopK(0.0), r"fraction=0\.0"),
        (lambda: hvdtrain.TopK(1.01), r"fraction=1\.01"),
        (lambda: hvdtrain.TopK("0.1"), "fraction='0.1'"),
    ],
)
def test_options_outside_their_range_are_refused(make, received):
    with pytest.raises(ValueError, match=received):
        make()


def test_an_option_of_a_name_outside_its_range_is_named():
    with pytest.raises(ValueError, match=r"rank must be an int >= 1\. Received: rank=0"):
        parse("powersgd:0")


@pytest.mark.slow
def test_schemes_import_no_framework():
    program = "import hvdtrain, sys; hvdtrain.PowerSGD(); hvdtrain.TopK(0.1); hvdtrain.Int8(); "
    program += "print({'torch', 'keras', 'tensorflow', 'jax'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
