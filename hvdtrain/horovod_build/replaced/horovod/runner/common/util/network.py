# Copyright 2019 Uber Technologies, Inc. All Rights Reserved.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
# ==============================================================================
# Changed by hvdtrain: a message is proven by its head before its body is read, and an answer is one to its request.
"""Services of a job's processes, which clients send objects to and get objects from."""

from __future__ import annotations

import contextlib
import queue
import shutil
import socket
import socketserver
from codecs import getreader
from typing import Any

import psutil
from horovod.runner.common.util.proven_server import Nonces, ProvenServer
from horovod.runner.common.util.wire import NotProvenError, Wire
from horovod.runner.util.network import addresses_of, find_port, listen_address
from horovod.runner.util.threads import in_thread

_BODY_SILENCE_S = 60.0  # one of the job's own that stops in the middle of a body has died
_CONNECT_S = 20.0


class PingRequest:
    """Asks a service for its name."""


class NoValidAddressesFound(Exception):  # noqa: N818 - Horovod's name
    """A service can be reached at none of its addresses."""


class PingResponse:
    """Answers a PingRequest."""

    def __init__(self, service_name: str, source_address: str) -> None:
        self.service_name = service_name
        """Service name that responded to this ping."""
        self.source_address = source_address
        """Source IP address that was visible to the service."""


class AckResponse:
    """Used for situations when the response does not carry any data."""


class AckStreamResponse:
    """Used to indicate that stream data follow."""


class BasicService:
    """Answers the requests of clients with its key, each in a thread.

    Args:
        service_name: by which clients know it.
        key: theirs and its.
        nics: names of the network interfaces by which they come; None for all.
    """

    def __init__(self, service_name: str, key: bytes, nics: Any) -> None:
        self._service_name = service_name
        self._wire = Wire(key)
        self._nics = {nics} if isinstance(nics, str) else nics
        self._nonces = Nonces()
        # At one address where one interface is named; at all of this host, and in vain at others, where there are more.
        host = listen_address(self._nics)
        only_at = () if host else addresses_of(self._nics)
        self._server, _ = find_port(lambda addr: ProvenServer(addr, self._make_handler(), only_at=only_at), host)
        self._port = self._server.socket.getsockname()[1]
        self._addresses = self._get_local_addresses()
        self._thread = in_thread(target=self._server.serve_forever)

    def _make_handler(self) -> Any:
        service = self

        class _Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                try:
                    nonce, head = service._wire.read_request(self.rfile)
                    if not service._nonces.is_new(nonce):
                        raise NotProvenError("a request was repeated")
                except EOFError:
                    return
                except (NotProvenError, OSError):
                    service._server.refuse(self.client_address)
                    return
                service._server.prove(self.connection)
                self.connection.settimeout(_BODY_SILENCE_S)
                try:
                    req = service._wire.read_body(head, self.rfile)
                except NotProvenError:
                    service._server.refuse(self.client_address)
                    return
                except EOFError:  # one of ours has died
                    return
                self.connection.settimeout(None)
                self._answer(nonce, req)

            def _answer(self, nonce: bytes, req: Any) -> None:
                # Happens when client is abruptly terminated, don't want to pollute the logs.
                with contextlib.suppress(EOFError, ConnectionError):
                    resp = service._handle(req, self.client_address)
                    if not resp:
                        raise Exception("Handler did not return a response.")
                    # A tuple is the usual response object followed by a utf8 text stream
                    if type(resp) is tuple:
                        (resp, stream) = resp
                        service._wire.write_answer(nonce, resp, self.wfile)
                        service._wire.stream(stream, self.wfile)
                    else:
                        service._wire.write_answer(nonce, resp, self.wfile)

        return _Handler

    def _handle(self, req: Any, client_address: Any) -> Any:
        """Return the response to be sent to the client.

        Can be a single pickle-able object, or a tuple of such an object and a utf8 text stream.
        """
        if isinstance(req, PingRequest):
            return PingResponse(self._service_name, client_address[0])

        raise NotImplementedError(req)

    def _get_local_addresses(self) -> dict[str, list[tuple[str, int]]]:
        result: dict[str, list[tuple[str, int]]] = {}
        for intf, intf_addresses in psutil.net_if_addrs().items():
            if self._nics and intf not in self._nics:
                continue
            for addr in intf_addresses:
                if addr.family == socket.AF_INET:
                    if intf not in result:
                        result[intf] = []
                    result[intf].append((addr.address, self._port))
        if not result and self._nics:
            raise NoValidAddressesFound(
                f"No available network interface found matching user provided interface: {self._nics}"
            )
        return result

    def addresses(self) -> dict[str, list[tuple[str, int]]]:
        """Return {interface: [(address, port)]}."""
        return self._addresses.copy()

    def shutdown(self) -> None:
        """Listen no more, and return when all of the job's own have their answers."""
        self._server.shutdown()
        self._server.server_close()
        self._server.wait_for_proven()
        self._thread.join()

    def get_port(self) -> int:
        """Return the port."""
        return int(self._port)


class BasicClient:
    """Asks a service.

    Args:
        service_name: its name.
        addresses: {interface: [(address, port)]} at which it may be reached.
        key: the service's.
        verbose: 2 prints why an interface will not do.
        match_intf: whether this host must reach it by an interface of the same name.
        probe_timeout: seconds.
        attempts: how often a request is made. All must be idempotent.

    Raises:
        NoValidAddressesFound: it can be reached at none.
    """

    def __init__(
        self,
        service_name: str,
        addresses: Any,
        key: bytes,
        verbose: int,
        match_intf: bool = False,
        probe_timeout: float = 20,
        attempts: int = 3,
    ) -> None:
        self._verbose = verbose
        self._service_name = service_name
        self._wire = Wire(key)
        self._match_intf = match_intf
        self._probe_timeout = probe_timeout
        self._attempts = attempts
        self._addresses = self._probe(addresses)
        if not self._addresses:
            raise NoValidAddressesFound(
                f"Horovod was unable to connect to {service_name} on any "
                f"of the following addresses: {addresses}.\n\n"
                "One possible cause of this problem is that "
                "horovod currently requires every host to have at "
                "least one routable network interface with the same "
                "name across all of the hosts. "
                'You can run "ifconfig -a" '
                "on every host and check for the common "
                "routable interface. "
                "To fix the problem, you can rename interfaces on "
                "Linux."
            )

    def _probe(self, addresses: Any) -> dict[str, list[tuple[str, int]]]:
        result_queue: queue.Queue[Any] = queue.Queue()
        threads = []
        for intf, intf_addresses in addresses.items():
            for addr in intf_addresses:
                thread = in_thread(target=self._probe_one, args=(intf, tuple(addr), result_queue))
                threads.append(thread)
        for t in threads:
            t.join()

        result: dict[str, list[tuple[str, int]]] = {}
        while not result_queue.empty():
            intf, addr = result_queue.get()
            if intf not in result:
                result[intf] = []
            result[intf].append(addr)
        return result

    def _probe_one(self, intf: str, addr: tuple[str, int], result_queue: queue.Queue[Any]) -> None:
        for _ in range(self._attempts):
            # Whatever goes wrong with one address: another one may do.
            with contextlib.suppress(Exception), _Connection(addr, self._probe_timeout) as connection:
                nonce = self._wire.write_request(PingRequest(), connection.wfile)
                resp = self._wire.read_answer(nonce, connection.rfile)
                if resp.service_name == self._service_name and self._is_match(intf, addr, resp):
                    result_queue.put((intf, addr))
                return

    def _is_match(self, intf: str, addr: tuple[str, int], resp: Any) -> bool:
        """Return whether the interfaces of destination and source have one name, where that is asked for."""
        if not self._match_intf:
            return True
        here = {
            name: [each.address for each in found if each.family == socket.AF_INET]
            for name, found in psutil.net_if_addrs().items()
        }
        if resp.source_address in here.get(intf, []):
            return True
        if self._verbose >= 2:
            # Need to find the local interface name whose
            # address was visible to the target host's server.
            other = next((name for name, found in here.items() if resp.source_address in found), "")
            print(
                f"WARNING: Expected to connect the host {addr[0]}:{addr[1]} using interface {intf}, but reached it on "
                f"interface {other}."
            )
        return False

    def _send_one(self, addr: tuple[str, int], req: Any, stream: Any = None) -> Any:
        """Send the request to the server and retry on errors.

        Streams data that follow a AckStreamResponse to the given utf8 text stream.
        """
        for attempt in range(self._attempts):
            try:
                with _Connection(addr, _CONNECT_S) as connection:
                    connection.sock.settimeout(None)  # an answer may be that something has ended, days later
                    nonce = self._wire.write_request(req, connection.wfile)
                    resp = self._wire.read_answer(nonce, connection.rfile)
                    if stream and isinstance(resp, AckStreamResponse):
                        # stream and byte content in rfile are expected to be utf8 text
                        shutil.copyfileobj(getreader("utf-8")(connection.rfile), stream)
                    return resp
            except Exception:
                if attempt == self._attempts - 1:
                    # Raise exception on the last retry.
                    raise
        return None

    def _send(self, req: Any, stream: Any = None) -> Any:
        """Send the request and return the response object.

        Streaming data response is transferred to the optional stream parameter.
        """
        # Since all the addresses were vetted, use the first one.
        addr = next(iter(self._addresses.values()))[0]
        return self._send_one(addr, req, stream)

    def addresses(self) -> dict[str, list[tuple[str, int]]]:
        """Return those at which the service was reached."""
        return self._addresses


class _Connection:
    """A connection and the files that read and write it, for the length of a `with`."""

    def __init__(self, addr: tuple[str, int], timeout_s: float) -> None:
        self.sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.sock.settimeout(timeout_s)
        try:
            self.sock.connect(addr)
        except BaseException:
            self.sock.close()
            raise
        self.rfile, self.wfile = self.sock.makefile("rb"), self.sock.makefile("wb")

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # what could not be sent
            self.wfile.close()
        self.rfile.close()
        self.sock.close()
