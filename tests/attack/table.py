"""The table of attacks: each with its result before hvdtrain defended against it, and its result now.

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
        "Send an elastic job's driver and its ranks' notification services code to unpickle",
        "it was run, as the owner",
        "refused before its body is read; counted, and the first one reported",
        _of("test_elastic", "a_stranger_gets_no_code_run"),
    ),
    Row(
        "Read and overwrite the rendezvous of a one-host job, on loopback; read the function of `horovod.run`",
        "addresses and the function were read, and the job ended in an error",
        "refused; the job ends with the right result",
        _of(
            "test_rendezvous",
            "a_stranger_neither_reads_nor_writes_where_ranks_are",
            "a_stranger_does_not_get_the_function_nor_say_what_it_returned",
        ),
    ),
    Row(
        "Connect 300 times to each port of a one-host job, begin a request, and say no more",
        "the job's ranks did not find each other",
        "the oldest silent connections are closed; the job's own get through",
        _of("test_rendezvous", "a_stranger_who_holds_connections_holds_up_nobody"),
    ),
    Row(
        "Look for a job's key, and for values of its environment, on all command lines of its hosts",
        "the services' key and the whole environment were there",
        "neither does, over Gloo and MPI, on one host and on several",
        _of("test_rendezvous", "the_key_is_in_the_environment_of_the_job_and_nowhere_else")
        + _of("test_several_hosts", "no_key_and_no_value_stands_on_a_command_line_of_any_host"),
    ),
    Row(
        "Ask the services of a job of two hosts from a third one",
        "they listened on every interface, and answered",
        "they listen at the job's interface, and refuse",
        _of(
            "test_several_hosts",
            "a_job_listens_at_its_interface_alone_and_answers_no_other_host",
            "an_elastic_job_listens_at_its_interface_alone",
        ),
    ),
    Row(
        "Connect, from a network that was not chosen, to mpirun, its daemons and the ranks of a job over MPI",
        "all of them listened on every interface",
        "their ports are closed there; a connection through it to another network's address is closed unread",
        _of(
            "test_several_networks",
            "over_mpi_no_port_is_open_on_a_network_that_was_not_chosen",
            "over_mpi_hosts_without_an_address_of_ipv6_are_held_as_others_are",
            "over_mpi_on_several_networks_who_comes_by_another_one_is_sent_away",
            "over_mpi_who_sends_to_the_chosen_address_by_another_network_is_sent_away",
        ),
    ),
    Row(
        "Connect, as another user of a job's host, to Open MPI's ports of a job of two hosts",
        "Open MPI took every connection and read what came",
        "connections of other users are closed unread; the first one is reported",
        _of("test_several_networks", "over_mpi_other_users_of_a_jobs_hosts_get_no_connection"),
    ),
    Row(
        "Connect to mpirun of a one-host job over MPI, on loopback; send it something, and leave before it looks",
        "mpirun took every connection and read what came",
        "connections of other users are closed unread; the first one is reported",
        _of("test_open_mpi", "nobody_else_of_this_host_gets_a_connection_to_mpirun"),
    ),
    Row(
        "Have a job of two hosts start in a folder whose name holds a space or a command",
        "ranks elsewhere started in the home folder, and the command was run there",
        "all start in that folder; one line says so where it is missing",
        _of(
            "test_several_hosts",
            "ranks_elsewhere_start_in_the_same_folder_whatever_its_name",
            "a_folder_that_another_host_has_not_is_told_in_one_line",
        ),
    ),
    Row(
        "Take a known host's place on the network",
        "ssh gave it the job's environment",
        "ssh refuses it; one line says what to do",
        _of("test_several_hosts", "a_host_with_another_key_than_before_gets_nothing"),
    ),
    Row(
        "Send each service 10,000 requests: garbage, cut off, changed, with another key",
        "not tried",
        "no crash, no hang; threads and memory stay",
        _of("test_fuzz", "a_service_stands_ten_thousand_strange_requests"),
    ),
    Row(
        "Read and overwrite the rendezvous of a Spark job",
        "the job ended in an error",
        "refused; the job ends with the right result",
        _of("test_spark_rendezvous", "a_stranger_neither_reads_nor_writes_where_a_spark_jobs_ranks_are"),
    ),
    Row(
        "Read and overwrite the rendezvous of a Ray job, send its services code, look for its key in Ray's files",
        "not tried; without the proof the addresses were read, and code was run as the owner",
        "refused; no file of Ray's that others can read holds the key; the job ends with the right result",
        _of("test_ray", "a_stranger_neither_takes_part_in_a_ray_job_nor_finds_its_key"),
    ),
    Row(
        "Name a Ray of his own in the file by which Ray finds one; read and change what a local Ray keeps in /tmp",
        "the job connected to that Ray; ranks' output could be read, and the session's folder be changed",
        "that Ray is not used, and one line names who made the file; no other user may enter the folder",
        _of("test_ray", "a_job_goes_to_no_ray_that_a_stranger_names_and_lets_nobody_into_its_own"),
    ),
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
        "the job is not affected; the first one is reported",
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
        "Connect to torch.distributed of a job whose Grid divides a model",
        "torch's own store listens on every interface, and takes whoever connects",
        "it runs on the job's Horovod, and opens no port",
        _of("test_sockets", "torch_distributed_on_the_jobs_horovod_opens_no_socket_that_others_reach"),
    ),
    Row(
        "Connect to plain `python train.py`",
        "MPI's daemon listened on every interface",
        "no socket is open",
        _of("test_sockets", "a_script_that_no_launcher_started_opens_no_socket"),
    ),
    Row(
        "Create the deleted folder under /tmp in which a built library looks for others, and put a library there",
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
        "Look for the keys, the environment and the function of an `hvdtrain.run`; read and overwrite its rendezvous",
        "not tried; who was refused was not named",
        "nothing is found, over Gloo and MPI; over Gloo the first who is refused is named",
        _of("test_call_socket", "another_user_finds_nothing_of_a_functions_run_nor_takes_part"),
    ),
    Row(
        "Connect 300 times to the port of a Spark job's caller, and say nothing",
        "no rank was started within 60 s",
        "the job is not affected",
        _of("test_spark", "silent_strangers_do_not_keep_a_spark_jobs_ranks_from_starting"),
    ),
)
