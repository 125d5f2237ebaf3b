"""Names, numbers and words that several rooms share; HVDTRAIN_RUN_DIR is `process_tree.RUN_DIR`."""

from __future__ import annotations

from collections.abc import Iterable

RUN_NAME = "HVDTRAIN_RUN_NAME"
RUN_ID = "HVDTRAIN_RUN_ID"
DEBUG = "HVDTRAIN_DEBUG"  # 1: each process prints its whole traceback
RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")  # a launcher sets one of them in each rank
EXIT_STOPPED = 75  # EX_TEMPFAIL: stopped on request; the same command resumes


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the end of a message: the nearest of the known names, or what to type where there is none."""
    import difflib  # not at every program's start

    names = list(known)
    begun = [name for name in names if word.strip("-") and name.startswith(word)]
    found = difflib.get_close_matches(word, names, n=1) or (begun if len(begun) == 1 else [])
    return f". Did you mean {found[0]}?" if found else f". {otherwise}" if otherwise else ""
