from __future__ import annotations

import pytest
from horovod.runner.common.util import proof

KEY, OTHER = bytes(32), bytes(31) + b"1"


def test_a_request_is_proven_by_its_head_and_the_body_by_the_head() -> None:
    headers = proof.request_headers(KEY, "PUT", "/global/0", b"body")
    assert proof.is_request(KEY, "PUT", "/global/0", headers)
    assert proof.is_body(headers, b"body")
    assert not proof.is_body(headers, b"another")


@pytest.mark.parametrize(
    ("key", "method", "path", "changed"),
    [
        (OTHER, "PUT", "/global/0", {}),
        (KEY, "GET", "/global/0", {}),
        (KEY, "PUT", "/global/1", {}),
        (KEY, "PUT", "/global/0", {proof.NONCE: "00" * 16}),
        (KEY, "PUT", "/global/0", {proof.BODY: "00" * 32}),
        (KEY, "PUT", "/global/0", {proof.PROOF: "é\udcff"}),
    ],
)
def test_whatever_is_changed_in_a_request_is_noticed(key: bytes, method: str, path: str, changed: dict) -> None:
    headers = {**proof.request_headers(KEY, "PUT", "/global/0", b"body"), **changed}
    assert not proof.is_request(key, method, path, headers)


def test_an_answer_is_one_to_its_request_alone() -> None:
    sent, other = (proof.request_headers(KEY, "GET", "/a/b") for _ in range(2))
    answer = proof.answer_headers(KEY, sent, 200, b"value")
    assert proof.is_answer(KEY, sent, 200, answer, b"value")
    assert not proof.is_answer(KEY, other, 200, answer, b"value")
    assert not proof.is_answer(KEY, sent, 404, answer, b"value")
    assert not proof.is_answer(KEY, sent, 200, answer, b"another")
    assert not proof.is_answer(OTHER, sent, 200, answer, b"value")
    assert not proof.is_answer(KEY, sent, 200, sent, b"")  # its own proof, sent back


def test_a_key_is_drawn_anew_and_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = proof.new_key()
    assert drawn != proof.new_key()
    monkeypatch.setenv(proof.VARIABLE, drawn)
    assert proof.job_key() == bytes.fromhex(drawn)


@pytest.mark.parametrize(
    "text",
    ["", "5", "xyz", "00" * 31, "00" * 33, " ".join(["00"] * 32), "00" * 32 + "\n", " " + "00" * 32, "\u0660" * 64],
)
def test_what_is_no_key_is_named_without_being_shown(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(proof.VARIABLE, text)
    with pytest.raises(RuntimeError, match="HVDTRAIN_JOB_KEY must be 64 hex digits") as info:
        proof.job_key()
    assert not text or f" {text}" not in str(info.value)


@pytest.mark.parametrize("space", [" ", "\t", " \t "])
def test_space_around_a_header_is_no_part_of_it(space: str) -> None:
    sent = proof.request_headers(KEY, "PUT", "/global/0", b"body")
    answer = proof.answer_headers(KEY, sent, 200, b"value")
    spaced, answer = ({name: f"{space}{text}{space}" for name, text in each.items()} for each in (sent, answer))
    assert proof.is_request(KEY, "PUT", "/global/0", spaced)
    assert proof.is_body(spaced, b"body")
    assert proof.is_answer(KEY, sent, 200, answer, b"value")
