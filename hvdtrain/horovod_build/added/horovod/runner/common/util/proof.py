r"""Proof that a request comes from the job: a key that only its processes have, and HMAC-SHA256.

The launcher draws the key and hands it down: in the environment on this host, by ssh's standard input elsewhere. It
never stands on a command line, which every user of a host can read. C++ has the same rules in hvdtrain_proof.h.

A request is proven by its head alone, before a byte of its body is read:

    X-Horovod-Nonce: 16 random bytes, in hex
    X-Horovod-Body:  sha256 of the body, in hex
    X-Horovod-Proof: hmac(key, "request\n" METHOD "\n" PATH "\n" NONCE "\n" BODY), in hex

and an answer, so that nobody can take the server's place:

    X-Horovod-Proof: hmac(key, "answer\n" NONCE "\n" STATUS "\n" sha256 of the body), in hex

Hex digits are in lower case. Who can read the network can read what is sent: the proof keeps strangers from taking
part, not from reading.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Mapping

VARIABLE = "HVDTRAIN_JOB_KEY"
NONCE, BODY, PROOF = "X-Horovod-Nonce", "X-Horovod-Body", "X-Horovod-Proof"
_KEY_BYTES = 32
_KEY = re.compile(f"[0-9a-fA-F]{{{2 * _KEY_BYTES}}}")


def new_key() -> str:
    """Return a key for a job, as hex."""
    return secrets.token_hex(_KEY_BYTES)


def job_key() -> bytes:
    """Return this job's key, 32 bytes.

    Raises:
        RuntimeError: there is none, or it is not 64 hex digits.
    """
    text = os.environ.get(VARIABLE, "")
    if not _KEY.fullmatch(text):  # bytes.fromhex skips spaces, which hvdtrain_proof.h refuses
        received = f"{len(text)} characters" if text else "none"  # not the text: it may be most of a key
        raise RuntimeError(
            f"{VARIABLE} must be 64 hex digits, the same for every process of a job. Received: {received}. horovodrun, "
            "hvdtrain run, Ray and Spark set it. Whoever starts ranks otherwise must draw one for all of them."
        )
    return bytes.fromhex(text)


def request_headers(key: bytes, method: str, path: str, body: bytes = b"") -> dict[str, str]:
    """Return the headers that prove a request."""
    nonce, digest = secrets.token_hex(16), hashlib.sha256(body).hexdigest()
    return {NONCE: nonce, BODY: digest, PROOF: _proof(key, "request", method, path, nonce, digest)}


def is_request(key: bytes, method: str, path: str, headers: Mapping[str, str]) -> bool:
    """Return whether the head of a request was made with `key`."""
    expected = _proof(key, "request", method, path, _value(headers, NONCE), _value(headers, BODY))
    return _same(_value(headers, PROOF), expected)


def is_body(headers: Mapping[str, str], body: bytes) -> bool:
    """Return whether a body is that of a request whose head was proven."""
    return _same(_value(headers, BODY), hashlib.sha256(body).hexdigest())


def answer_headers(key: bytes, headers: Mapping[str, str], status: int, body: bytes = b"") -> dict[str, str]:
    """Return the headers that prove an answer to the request that had `headers`."""
    digest = hashlib.sha256(body).hexdigest()
    return {PROOF: _proof(key, "answer", _value(headers, NONCE), str(int(status)), digest)}


def is_answer(key: bytes, sent: Mapping[str, str], status: int, headers: Mapping[str, str], body: bytes) -> bool:
    """Return whether an answer to the request sent with the headers `sent` was made with `key`."""
    return _same(_value(headers, PROOF), answer_headers(key, sent, status, body)[PROOF])


def _value(headers: Mapping[str, str], name: str) -> str:
    return headers.get(name, "").strip(" \t")  # http.client leaves what follows a value; it is no part of it


def _proof(key: bytes, *parts: str) -> str:
    return hmac.new(key, "\n".join(parts).encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected.encode())
