"""Objects between a job's services and their clients, of which each side proves that it has the key."""

from __future__ import annotations

import hashlib
import hmac
import pickle
import secrets
import shutil
import struct
from codecs import getwriter
from typing import Any

import cloudpickle
from horovod.runner.common.util import secret

_MOST_BYTES = 8 * 1024**3  # of a body: functions, and what they return
_NONCE_BYTES = 16
_LENGTH = struct.Struct(">Q")
_HEAD_BYTES = _LENGTH.size + 2 * secret.DIGEST_LENGTH  # after the nonce


class NotProvenError(Exception):
    """A message was not made with the job's key, or is no message at all."""


class Wire:
    """Writes and reads objects, of which each side knows by HMAC that the other one has the key.

    A request, and an answer without the nonce, for it is the request's:

        nonce (16 bytes) | length of the body (8) | sha256 of the body (32) |
        hmac(key, "wire request" or "wire answer" | nonce | length | sha256) (32) | body

    The head is checked before the body is read, and the body before it is unpickled, which runs code. What follows an
    AckStreamResponse is text, and is only shown.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def write_request(self, obj: Any, wfile: Any) -> bytes:
        """Send a request; return its nonce, with which to read the answer."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        wfile.write(nonce)
        self._write(b"wire request", nonce, obj, wfile)
        return nonce

    def read_request(self, rfile: Any) -> tuple[bytes, bytes]:
        """Return (nonce, head) of a request of which the head is proven, to be read on by `read_body`.

        Raises:
            NotProvenError: it is not one.
            EOFError: the connection was closed without data.
        """
        nonce = rfile.read(_NONCE_BYTES)
        if not nonce:
            raise EOFError
        return nonce, self._read_head(b"wire request", nonce, rfile)

    def write_answer(self, nonce: bytes, obj: Any, wfile: Any) -> None:
        """Send the answer to a request."""
        self._write(b"wire answer", nonce, obj, wfile)

    def read_answer(self, nonce: bytes, rfile: Any) -> Any:
        """Return the answer to a request.

        Raises:
            NotProvenError: what was received is not the answer.
        """
        return self.read_body(self._read_head(b"wire answer", nonce, rfile), rfile)

    def read_body(self, head: bytes, rfile: Any) -> Any:
        """Return the object of a message of which the head is proven.

        Raises:
            NotProvenError: it is another one.
            EOFError: the other side has ended.
        """
        (length,) = _LENGTH.unpack_from(head)
        if length > _MOST_BYTES:
            raise NotProvenError(f"a message of {length} bytes is too long")
        body = rfile.read(length)
        if len(body) < length:
            raise EOFError("the other side closed the connection in the middle of a message")
        if not hmac.compare_digest(hashlib.sha256(body).digest(), head[_LENGTH.size :][: secret.DIGEST_LENGTH]):
            raise NotProvenError("the body of a message is not that of its head")
        return cloudpickle.loads(body)

    def stream(self, stream: Any, wfile: Any) -> None:
        """Transfers data from the utf8 text stream to the wfile until stream exhausts."""
        # do not handle exceptions or close the stream here
        shutil.copyfileobj(stream, getwriter("utf-8")(wfile))
        wfile.flush()

    def _write(self, kind: bytes, nonce: bytes, obj: Any, wfile: Any) -> None:
        body = cloudpickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
        head = _LENGTH.pack(len(body)) + hashlib.sha256(body).digest()
        wfile.write(head + self._proof(kind, nonce, head))
        wfile.write(body)
        wfile.flush()

    def _read_head(self, kind: bytes, nonce: bytes, rfile: Any) -> bytes:
        said = rfile.read(_HEAD_BYTES)
        if len(said) < _HEAD_BYTES:
            raise NotProvenError("the other side closed the connection: it has another key, or has ended")
        head: bytes = said[: -secret.DIGEST_LENGTH]
        if not hmac.compare_digest(self._proof(kind, nonce, head), said[-secret.DIGEST_LENGTH :]):
            raise NotProvenError("a message was not made with this job's key")
        return head

    def _proof(self, kind: bytes, nonce: bytes, head: bytes) -> bytes:
        digest: bytes = secret.compute_digest(self._key, kind + nonce + head)
        return digest
