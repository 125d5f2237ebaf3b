"""Functions that travel between processes."""

import pickle
import traceback

import pytest

from hvdtrain.system import pickling


def test_a_function_brings_the_names_of_its_files_to_another_process() -> None:
    def fails() -> None:
        def inner() -> None:
            raise ZeroDivisionError("in a test")

        inner()

    again = pickle.loads(pickling.dumps(fails))  # noqa: S301 - this test's own
    assert again is not fails
    with pytest.raises(ZeroDivisionError) as info:
        again()
    frames = traceback.extract_tb(info.value.__traceback__)[1:]
    assert [frame.filename for frame in frames] == [__file__] * 2
    assert [frame.line for frame in frames] == ["inner()", 'raise ZeroDivisionError("in a test")']
