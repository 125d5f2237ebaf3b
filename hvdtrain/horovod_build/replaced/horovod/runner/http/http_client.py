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
# =============================================================================
# Changed by hvdtrain: requests are proven by the job's key, and so are the answers, before they are unpickled.
"""What ranks and launchers say to a KVStoreServer or RendezvousServer."""

from __future__ import annotations

import http.client
import json
import time
from typing import Any

from horovod.runner.common.util import codec, proof

TIMEOUT_S = 60.0  # of a connection, and of silence on it
_ATTEMPTS = 3  # of many that come at once, or among strangers, one may be turned away
_PAUSE_S = 0.2


def read_data_from_kvstore(addr: str, port: int, scope: str, key: str, job_key: bytes | None = None) -> Any:
    """Return a value that was put there by `put_data_into_kvstore`.

    Raises:
        RuntimeError: there is none, or the server has another key.
    """
    try:
        # TODO: remove base64 encoding because base64 is not efficient
        return codec.loads_base64(_request(addr, port, "GET", f"/{scope}/{key}", b"", job_key))
    except (OSError, http.client.HTTPException) as e:
        raise RuntimeError("Read data from KVStore server failed.", e) from e


def put_data_into_kvstore(addr: str, port: int, scope: str, key: str, value: Any, job_key: bytes | None = None) -> None:
    """Put a value that can be pickled."""
    _put(addr, port, scope, key, codec.dumps_base64(value, to_ascii=False), job_key)


def put_json_into_kvstore(addr: str, port: int, scope: str, key: str, value: Any) -> None:
    """Put a value of JSON, for servers that read it."""
    _put(addr, port, scope, key, json.dumps(value).encode(), None)


def _put(addr: str, port: int, scope: str, key: str, body: bytes, job_key: bytes | None) -> None:
    try:
        _request(addr, port, "PUT", f"/{scope}/{key}", body, job_key)
    except (OSError, http.client.HTTPException) as e:
        raise RuntimeError("Put data input KVStore server failed.", e) from e


def _request(addr: str, port: int, method: str, path: str, body: bytes, job_key: bytes | None) -> bytes:
    """Return the body of an answer that was made with the job's key.

    Raises:
        OSError, http.client.HTTPException: there is none, or its status is not 200.
    """
    key = proof.job_key() if job_key is None else job_key
    for attempt in range(_ATTEMPTS):
        try:
            status, answer = _ask(addr, port, method, path, body, key)
            break
        except (OSError, http.client.HTTPException):
            if attempt == _ATTEMPTS - 1:
                raise
            time.sleep(_PAUSE_S)
    if status != http.client.OK:
        raise OSError(f"{method} {path} at {addr}:{port}: HTTP status {status}")
    return answer


def _ask(addr: str, port: int, method: str, path: str, body: bytes, key: bytes) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(addr, int(port), timeout=TIMEOUT_S)
    try:
        headers = proof.request_headers(key, method, path, body)
        connection.request(method, path, body=body or None, headers={**headers, "Content-Length": str(len(body))})
        response = connection.getresponse()
        answer = response.read()
        if not proof.is_answer(key, headers, response.status, response.headers, answer):
            raise PermissionError(
                f"{method} {path} at {addr}:{port}: the answer (HTTP status {response.status}) was not made with this "
                "job's key"
            )
        return response.status, answer
    finally:
        connection.close()
