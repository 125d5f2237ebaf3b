r"""What shows that a request comes from the job: a key that only its processes have, and HMAC-SHA256.

The launcher draws the key and hands it down: in the environment on this host, by ssh's standard input elsewhere. It
never stands on a command line, which every user of a host can read. C++ has the same rules in hvdtrain_proof.h.

A request is proven by its head alone, before a byte of its body is read:

    X-Horovod-Nonce: 16 random bytes, in hex
    X-Horovod-Body:  sha256 of the body, in hex
    X-Horovod-Proof: hmac(key, "request\n" METHOD "\n" PATH "\n" NONCE "\n" BODY), in hex

and an answer, so that nobody can take the server's place:

    X-Horovod-Proof: hmac(key, "answer\n" NONCE "\n" STATUS "\n" sha256 of the body), in hex

Hex digits are in lower case. Who can read the network can read what is sent: the proof keeps strangers from taking
part, not from listening.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping

VARIABLE = "HVDTRAIN_JOB_KEY"
NONCE, BODY, PROOF = "X-Horovod-Nonce", "X-Horovod-Body", "X-Horovod-Proof"
_KEY_BYTES = 32


def new_key() -> str:
    """Return a key for a job, as hex."""
    return secrets.token_hex(_KEY_BYTES)


def job_key() -> bytes:
    """Return this job's key, 32 bytes.

    Raises:
        RuntimeError: there is none, or it is not 64 hex digits.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        received = f"{len(text)} characters" if text else "none"  # not the text: it may be most of a key
        raise RuntimeError(
            f"{VARIABLE} must be 64 hex digits, the same for every process of a job. Received: {received}. horovodrun, "
            "hvdtrain run, Ray and Spark set it. Whoever starts ranks otherwise must draw one for all of them."
        )
    return key


def request_headers(key: bytes, method: str, path: str, body: bytes = b"") -> dict[str, str]:
    """Return the headers that prove a request."""
    nonce, digest = secrets.token_hex(16), hashlib.sha256(body).hexdigest()
    return {NONCE: nonce, BODY: digest, PROOF: _proof(key, "request", method, path, nonce, digest)}


def is_request(key: bytes, method: str, path: str, headers: Mapping[str, str]) -> bool:
    """Return whether the head of a request was made with `key`."""
    expected = _proof(key, "request", method, path, headers.get(NONCE, ""), headers.get(BODY, ""))
    return _same(headers.get(PROOF, ""), expected)


def is_body(headers: Mapping[str, str], body: bytes) -> bool:
    """Return whether a body is that of a request whose head was proven."""
    return _same(headers.get(BODY, ""), hashlib.sha256(body).hexdigest())


def answer_headers(key: bytes, headers: Mapping[str, str], status: int, body: bytes = b"") -> dict[str, str]:
    """Return the headers that prove an answer to the request that had `headers`."""
    digest = hashlib.sha256(body).hexdigest()
    return {PROOF: _proof(key, "answer", headers.get(NONCE, ""), str(int(status)), digest)}


def is_answer(key: bytes, sent: Mapping[str, str], status: int, headers: Mapping[str, str], body: bytes) -> bool:
    """Return whether an answer to the request sent with the headers `sent` was made with `key`."""
    return _same(headers.get(PROOF, ""), answer_headers(key, sent, status, body)[PROOF])


def _proof(key: bytes, *parts: str) -> str:
    return hmac.new(key, "\n".join(parts).encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected.encode())
