"""No tensor of hvdtrain's own takes the user's default type or default device."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import hvdtrain

PACKAGE = Path(hvdtrain.__file__).parent
# What torch.set_default_device changes, as torch.utils._device lists it.
CREATORS = frozenset({
    "arange", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand",
    "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "zeros",
})  # fmt: skip
# These keep the type of what they are given.
CONVERTERS = frozenset({
    "as_tensor", "asarray", "nested_tensor", "sparse_bsc_tensor", "sparse_bsr_tensor", "sparse_compressed_tensor",
    "sparse_coo_tensor", "sparse_csc_tensor", "sparse_csr_tensor",
})  # fmt: skip


def calls(source: str) -> Iterator[tuple[int, str, set[str | None]]]:
    """Yield line, function and keywords of each call of a function of torch."""
    for node in ast.walk(ast.parse(source)):
        function = node.func if isinstance(node, ast.Call) else None
        if isinstance(function, ast.Attribute) and ast.unparse(function.value) == "torch":
            yield node.lineno, function.attr, {keyword.arg for keyword in node.keywords}


def missing(name: str, keywords: set[str | None]) -> set[str]:
    """Return the keywords that a call must name and does not."""
    wanted = {"dtype", "device"} if name in CREATORS else {"device"} if name in CONVERTERS else set()
    return wanted - keywords


def test_every_new_tensor_names_its_type_and_its_device():
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: torch.{name} without {' and '.join(sorted(lacking))}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, name, keywords in calls(path.read_text())
        if (lacking := missing(name, keywords))
    ]
    assert not found, "\n".join(found)


def test_nothing_of_torch_is_imported_by_name_that_makes_tensors():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "torch":
                assert not {alias.name for alias in node.names} & (CREATORS | CONVERTERS), path


def test_the_list_has_all_that_a_default_device_changes():
    from torch.utils._device import _device_constructors

    others = {function.__name__ for function in _device_constructors()} - CREATORS - CONVERTERS
    windows = {name for name in others if name.endswith("_window")}
    # Nothing here makes them; if something does, this is where it is noticed.
    assert others - windows <= {"empty_quantized", "fft_fftfreq", "fft_rfftfreq", "tril_indices", "triu_indices"}
