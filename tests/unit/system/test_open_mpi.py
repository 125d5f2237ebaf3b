from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.launch import arguments
from hvdtrain.system import open_mpi


@pytest.fixture
def mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An mpirun beside this interpreter, which is on no PATH."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    asked = (open_mpi.spaces_marks, open_mpi.mixes_lines)
    for each in asked:
        each.cache_clear()
    yield tmp_path / "mpirun"
    for each in asked:
        each.cache_clear()


def write(path: Path, said: str) -> None:
    path.write_text(f"#!/bin/sh\necho '{said}'\n")
    path.chmod(0o755)


def test_5_gets_the_settings_of_4_under_its_own_names_and_values() -> None:
    given = {
        "OMPI_MCA_orte_tmpdir_base": "/dev/shm/job",
        "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
        "MINE": "1",
    }
    added = {
        "PRTE_MCA_prte_tmpdir_base": "/dev/shm/job",
        "OMPI_MCA_smsc": "^cma,knem,xpmem",
    }
    assert open_mpi.for_both(given) == given | added


def test_what_is_set_under_5s_name_stays_and_what_5_has_no_value_for_is_left_out() -> None:
    given = {"OMPI_MCA_plm_rsh_args": "-p 1", "PRTE_MCA_plm_ssh_args": "-p 2"}
    given |= {"OMPI_MCA_btl_vader_single_copy_mechanism": "knem"}
    assert open_mpi.for_both(given) == given


def test_an_environments_programs_are_found_where_it_is_not_activated(mpirun: Path) -> None:
    assert open_mpi.program("mpirun") is None
    write(mpirun, "mpirun (Open MPI) 5.0.11")
    assert open_mpi.program("mpirun") == str(mpirun)


@pytest.mark.parametrize(
    ("said", "expected"),
    [("mpirun (Open MPI) 5.0.11", True), ("mpirun (Open MPI) 4.1.4", False), ("HYDRA build details:", False)],
)
def test_only_5_puts_a_space_behind_marks(mpirun: Path, said: str, *, expected: bool) -> None:
    write(mpirun, said)
    assert open_mpi.spaces_marks() is expected


@pytest.mark.parametrize(
    ("version", "pmix", "expected"),
    [
        ("5.0.7", "5.0.7a1", True),  # Debian 13's
        ("5.0.10", "5.0.10", True),
        ("5.0.5", "4.2.9", True),
        ("5.0.11", "5.0.11rc1", False),  # the package index's
        ("5.0.12", "6.1.0", False),
        ("4.1.6", "5.0.7", False),  # which knows no such option
        ("5.0.7", "", False),
    ],
)
def test_only_5_with_an_older_pmix_needs_a_mark_for_each_piece_of_a_line(
    mpirun: Path, version: str, pmix: str, *, expected: bool
) -> None:
    write(mpirun, f"mpirun (Open MPI) {version}")
    if pmix:
        write(mpirun.with_name("prte_info"), f"    PRTE: 3.0.8\n    PMIx: OpenPMIx {pmix} (PMIx Standard: 5.1,")
    assert open_mpi.mixes_lines() is expected
    added = ["--output", ":raw"] if expected else []
    assert arguments.marks([], {}) == ["--tag-output", *added]
    assert arguments.marks(["--output", "xml"], {}) == []
