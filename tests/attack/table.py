"""What each attack is, what came of it before hvdtrain defended against it, and what comes of it now.

A row for each claim; `make attack` adds whether its tests passed, and how long they took. docs/pages/security.md has a
copy.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One attack.

    Attributes:
        attack: what another user, or another host, does.
        before: what came of it on 2026-11-22, before the defence.
        now: what comes of it now, if the tests pass.
        tests: functions of this folder, as file::function.
    """

    attack: str
    before: str
    now: str
    tests: tuple[str, ...]


def _of(file: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{file}.py::test_{name}" for name in names)


ROWS = (
    Row(
        "Answer a rank in the rendezvous's place, with no key or another one",
        "the rank believed it",
        "the rank ends and names the address",
        _of(
            "test_gloo_rendezvous",
            "every_request_of_a_rank_is_proven",
            "an_answer_that_is_not_the_jobs_is_not_believed",
        ),
    ),
    Row(
        "Ask the rendezvous as a rank without the job's key",
        "it was answered",
        "refused at the first request; the rank says why",
        _of(
            "test_gloo_rendezvous",
            "a_rank_that_is_refused_ends_at_its_first_request",
            "a_rank_without_a_key_asks_as_it_always_did",
            "a_key_that_is_none_is_named",
        ),
    ),
    Row(
        "Take a rank's connection to the rendezvous, and say nothing",
        "the rank waited for ever",
        "it gives up after 30 s, three times",
        _of("test_gloo_rendezvous", "a_rank_does_not_wait_for_ever_for_an_answer"),
    ),
    Row(
        "Connect to a rank before the rank that it waits for: silent, with garbage, with another key, 1,500 times",
        "it was taken for that rank: the job failed or hung",
        "the job runs as if nobody were there; the first one is named",
        _of(
            "test_gloo_connections",
            "a_stranger_who_connects_first_is_not_taken_for_a_rank",
            "a_rank_reports_the_first_stranger_alone",
        ),
    ),
    Row(
        "Connect to a job of one host whose environment's path holds a space",
        "it listened on every interface, without a word",
        "it listens on loopback alone, or does not start",
        _of(
            "test_sockets",
            "a_job_of_one_host_listens_on_loopback_alone_whatever_its_environments_path_holds",
            "a_job_of_one_host_does_not_start_where_loopback_cannot_be_held",
        ),
    ),
    Row(
        "Connect to plain `python train.py`",
        "MPI's daemon listened on every interface",
        "no socket is open",
        _of("test_sockets", "a_script_that_no_launcher_started_opens_no_socket"),
    ),
    Row(
        "Make anew the folder under /tmp in which a built library looks for others, and put a library there",
        "it was loaded, with GPU wheels: code as the owner",
        "such a wheel is neither kept nor installed",
        _of(
            "test_libraries",
            "a_wheel_that_looks_for_libraries_where_another_user_can_put_them_is_neither_kept_nor_installed",
            "a_wheel_in_the_cache_is_looked_into_again",
            "a_wheel_names_its_own_environment_and_the_systems_folders_alone",
            "a_path_of_a_builders_library_is_refused_as_well",
            "what_is_read_of_a_library_is_what_readelf_reads",
        ),
    ),
    Row(
        "Put a wheel into a cache that others can write to, or make the cache's folder first",
        "it was installed",
        "the cache is refused, with the command that helps",
        _of(
            "test_libraries",
            "a_cache_that_others_can_write_to_is_refused",
            "a_cache_that_another_user_made_first_is_refused",
            "what_is_built_under_an_open_umask_is_this_users_alone",
            "a_group_of_this_user_alone_does_no_harm",
        ),
    ),
    Row(
        "Read a run's files, and look for the secrets in its command line, environment and options",
        "every file could be read, and planted secrets stood in 30 places",
        "no file can be read, and none holds a secret or the job's key",
        _of(
            "test_secrets",
            "a_planted_secret_is_in_no_file_of_a_run_and_no_other_user_can_read_one",
            "a_run_that_is_shared_can_be_read_by_others",
        ),
    ),
    Row(
        "Connect to the socket of `hvdtrain.run`, over which pickles go",
        "refused",
        "refused: only its user may enter the folder",
        _of("test_call_socket", "no_other_user_reaches_the_socket_of_a_functions_run"),
    ),
    Row(
        "Connect 300 times to the port of a Spark job's caller, and say nothing",
        "no rank was started within 60 s",
        "the job runs as if nobody were there",
        _of("test_spark", "silent_strangers_do_not_keep_a_spark_jobs_ranks_from_starting"),
    ),
)
