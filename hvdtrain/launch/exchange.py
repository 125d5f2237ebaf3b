"""How a function comes from the process that calls it to the ranks, and what it returned comes back.

Both sides unpickle what they get, which runs code. So nothing is read from disk, and nothing from a socket before the
other side has proved who it is: they meet at a Unix socket in a folder that only this user may enter, and each answers
a challenge with a key that is drawn anew for each call and handed down in the environment alone, which other users
cannot read. Who could write there, or read the key, could write into these processes' memory anyhow. The challenges are
ours, by HMAC-SHA256: before Python 3.12 multiprocessing's are by MD5, which FIPS machines refuse.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import Any

_ADDRESS, _KEY = "HVDTRAIN_CALL_SOCKET", "HVDTRAIN_CALL_KEY"
_BYTES = 32  # of a challenge, and of what SHA-256 makes of one
ANSWER_BYTES = 2 * _BYTES  # a rank's own challenge, and its proof


@dataclass(frozen=True)
class Message:
    """What one side tells the other.

    Attributes:
        facts: plain JSON.
        pickled: an object by cloudpickle; b"" for none.
    """

    facts: dict[str, Any]
    pickled: bytes = b""

    def send(self, connection: Connection) -> None:
        """Write it."""
        connection.send_bytes(json.dumps(self.facts).encode())
        connection.send_bytes(self.pickled)

    @classmethod
    def receive(cls, connection: Connection) -> Message:
        """Read one.

        Raises:
            EOFError, OSError: the other side has ended.
        """
        facts = json.loads(connection.recv_bytes())
        return cls(facts, connection.recv_bytes())


class Exchange:
    """The caller's side: gives each rank that comes the task, and takes what each says of it.

    Args:
        folder: private to this user; the socket is made there.
        task: what every rank gets; let go once all have it, for it may be large.
        size: number of ranks. Once so many have come, nobody is let in any more.
    """

    def __init__(self, folder: Path, task: Message, *, size: int) -> None:
        self.answers: dict[int, Message] = {}
        self._task, self._missing = task, size
        self._key = secrets.token_bytes(32)
        self._address = str(folder / "call")
        self._ranks: dict[Connection, int] = {}
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._door.bind(self._address)
            self._door.listen(128)
        except OSError:
            self._door.close()
            raise

    def environment(self) -> dict[str, str]:
        """Return what ranks need to find and to trust this side, and to be trusted."""
        return {_ADDRESS: self._address, _KEY: self._key.hex()}

    def sources(self) -> list[socket.socket | Connection]:
        """Return what to wait for: `take` it once it is ready."""
        return [*([self._door] if self._door.fileno() >= 0 else []), *self._ranks]

    def take(self, source: object) -> None:
        """Let a rank in, or read what one says."""
        if source is self._door:
            self._let_in()
        elif isinstance(source, Connection):
            try:
                self.answers[self._ranks[source]] = Message.receive(source)
            except (EOFError, OSError):  # it has ended, perhaps in the midst of a word: the launcher says how
                pass
            del self._ranks[source]
            source.close()

    def drain(self) -> None:
        """Read what ranks that have ended had said before."""
        while ready := wait(list(self._ranks), timeout=0):
            for connection in ready:
                self.take(connection)

    def close(self) -> None:
        """Hear nothing more: a rank that wants to say something gets an error."""
        for connection in self._ranks:
            connection.close()
        self._ranks.clear()
        self._door.close()

    def _let_in(self) -> None:
        connection = Connection(self._door.accept()[0].detach())
        try:
            know_rank(connection, self._key)
            rank = int(json.loads(connection.recv_bytes())["rank"])
            self._task.send(connection)
        except (AuthenticationError, EOFError, OSError):  # a stranger, or one that was killed
            connection.close()
        else:
            self._ranks[connection] = rank
            self._missing -= 1
            if not self._missing:
                self._task = Message({})
                self._door.close()


def know_rank(connection: Connection, key: bytes) -> None:
    """Prove who this caller is to a rank that has proved itself.

    Raises:
        AuthenticationError, EOFError, OSError: it has not.
    """
    mine = challenge()
    connection.send_bytes(mine)
    connection.send_bytes(reply(key, mine, connection.recv_bytes(ANSWER_BYTES)))


def challenge() -> bytes:
    """Return what a caller asks a rank to prove itself by."""
    return secrets.token_bytes(_BYTES)


def reply(key: bytes, mine: bytes, answer: bytes) -> bytes:
    """Return the caller's own proof for a rank that has answered the challenge `mine`.

    Raises:
        AuthenticationError: the answer was made with another key.
    """
    theirs = answer[:_BYTES]
    _check(answer[_BYTES:], _proof(key, b"rank", mine, theirs), "a rank")
    return _proof(key, b"caller", mine, theirs)


def know_caller(connection: Connection, key: bytes) -> None:
    """Prove who this rank is, and let the caller do so; the other side of `know_rank`."""
    theirs, mine = connection.recv_bytes(_BYTES), secrets.token_bytes(_BYTES)
    connection.send_bytes(mine + _proof(key, b"rank", theirs, mine))
    _check(connection.recv_bytes(_BYTES), _proof(key, b"caller", theirs, mine), "the caller")


def _proof(key: bytes, who: bytes, *challenges: bytes) -> bytes:
    return hmac.digest(key, who + b"".join(challenges), "sha256")  # what one side says is no proof of the other's


def _check(said: bytes, proof: bytes, who: str) -> None:
    if not hmac.compare_digest(said, proof):
        raise AuthenticationError(f"{who} has another key")


def ask(rank: int) -> tuple[Message, Connection]:
    """Return, on a rank, the task and the connection for the answer.

    Raises:
        EOFError, OSError, AuthenticationError: there is no caller any more, or somebody else.
    """
    # What the function starts is not to inherit the key.
    address, key = os.environ.pop(_ADDRESS), bytes.fromhex(os.environ.pop(_KEY))
    connection = Client(address, family="AF_UNIX")
    know_caller(connection, key)
    connection.send_bytes(json.dumps({"rank": rank}).encode())
    return Message.receive(connection), connection


def each(messages: Mapping[int, Message], kind: str) -> Iterator[tuple[int, Message]]:
    """Return rank and message, for those of a kind."""
    return ((rank, message) for rank, message in sorted(messages.items()) if message.facts["kind"] == kind)
