"""The messages between a caller and a function's ranks, and the proofs of their identity.

Both sides unpickle what they receive, which runs code: each first answers a challenge with a key, which is new for each
call, and only in the environment, which other users cannot read. The proofs use HMAC-SHA256; multiprocessing before
Python 3.12 uses MD5, which FIPS machines refuse.
"""

from __future__ import annotations

import functools
import hmac
import inspect
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from typing import Any

from hvdtrain.system import pickling

ADDRESS, KEY = "HVDTRAIN_CALL_SOCKET", "HVDTRAIN_CALL_KEY"
_BYTES = 32  # of a challenge, and of a SHA-256 digest


@dataclass(frozen=True)
class Message:
    """Facts in plain JSON, and a pickled object; b"" for none."""

    facts: dict[str, Any]
    pickled: bytes = b""

    def send(self, connection: Connection) -> None:
        """Write it."""
        connection.send_bytes(json.dumps(self.facts).encode())
        connection.send_bytes(self.pickled)

    @classmethod
    def receive(cls, connection: Connection) -> Message:
        """Read one; an EOFError or OSError shows that the other side has ended."""
        return cls(json.loads(connection.recv_bytes()), connection.recv_bytes())


def prove_caller(connection: Connection, key: bytes) -> None:
    """Let a rank prove itself, and prove this caller to it; an AuthenticationError, EOFError or OSError if it fails."""
    connection.send_bytes(mine := secrets.token_bytes(_BYTES))
    answer = connection.recv_bytes(2 * _BYTES)  # the rank's own challenge, and its proof
    theirs = answer[:_BYTES]
    _check(answer[_BYTES:], _proof(key, b"rank", mine, theirs), "a rank")
    connection.send_bytes(_proof(key, b"caller", mine, theirs))


def prove_rank(connection: Connection, key: bytes) -> None:
    """Prove this rank, and let the caller prove itself; the other side of `prove_caller`."""
    theirs, mine = connection.recv_bytes(_BYTES), secrets.token_bytes(_BYTES)
    connection.send_bytes(mine + _proof(key, b"rank", theirs, mine))
    _check(connection.recv_bytes(_BYTES), _proof(key, b"caller", theirs, mine), "the caller")


def _proof(key: bytes, who: bytes, *challenges: bytes) -> bytes:
    return hmac.digest(key, who + b"".join(challenges), "sha256")  # with `who`: the two sides' proofs differ


def _check(received: bytes, proof: bytes, who: str) -> None:
    if not hmac.compare_digest(received, proof):
        raise AuthenticationError(f"{who} has another key")


def request_task(rank: int) -> tuple[Message, Connection]:
    """Return, on a rank, the task and the connection for the answer; for errors see `prove_caller`."""
    # What the function starts must not inherit the key.
    address, key = os.environ.pop(ADDRESS), bytes.fromhex(os.environ.pop(KEY))
    connection = Client(address, family="AF_UNIX")
    prove_rank(connection, key)
    connection.send_bytes(json.dumps({"rank": rank}).encode())
    return Message.receive(connection), connection


def pack(parts: dict[str, Any], *, where: str) -> bytes:
    """Return the values of `parts` pickled as one tuple; a TypeError, which ends in `where`, names what cannot be."""
    try:
        return pickling.dumps(tuple(parts.values()))
    except Exception as problem:  # noqa: BLE001, an object's own methods may raise anything
        name, value = next(_culprits(parts.items()), ("it", parts))
        kind = type(value)
        raise TypeError(f"{name}, a {kind.__module__}.{kind.__qualname__}, cannot {where}: {problem}") from None


def _culprits(named: Any, depth: int = 6) -> Iterator[tuple[str, Any]]:
    """Yield the innermost objects that cannot be pickled, with their names."""
    for name, value in named:
        try:
            pickling.dumps(value)
        except Exception:  # noqa: BLE001, see above
            yield from _culprits(_inside(name, value), depth - 1) if depth else ()
            yield name, value


def _inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"{name}[{i}]", item) for i, item in enumerate(value))
    elif inspect.isfunction(value):
        found = inspect.getclosurevars(value)
        for variable, item in {**found.globals, **found.nonlocals}.items():
            yield f"{variable}, which {name} uses", item
    elif inspect.ismethod(value):
        yield f"{name}.__self__", value.__self__
    elif isinstance(value, functools.partial):
        yield from ((f"{name}.{part}", getattr(value, part)) for part in ("func", "args", "keywords"))
    elif hasattr(value, "__dict__") and not inspect.ismodule(value) and not inspect.isclass(value):
        yield from ((f"{name}.{attribute}", item) for attribute, item in vars(value).items())
