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
# Changed by hvdtrain: JSON in the place of pickle, and no file where there can be none that is this user's alone.
"""What horovodrun found out about its hosts within the last hour: which it could reach, by which interfaces."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

_FILE = "hosts.json"  # cache.bin was Horovod's own, which is a pickle: it is never read


class Cache:
    """Results of functions, kept in a file of this user's; in memory alone where there can be none.

    Args:
        cache_folder: of the file.
        cache_staleness_threshold_in_minutes: how old a result may be.
        parameters_hash: of the job; the results of another one's do not count.
    """

    def __init__(self, cache_folder: str, cache_staleness_threshold_in_minutes: float, parameters_hash: str) -> None:
        self._file = os.path.join(cache_folder, _FILE)
        self._seconds = 60.0 * cache_staleness_threshold_in_minutes
        self._parameters_hash = parameters_hash
        self._lock = threading.Lock()
        self._is_kept = _make_own(cache_folder)
        self._results: dict[str, tuple[float, Any]] = self._load() if self._is_kept else {}

    def get(self, key: Any) -> Any:
        """Return a result, None if there is none that is new enough."""
        with self._lock:
            found, value = self._results.get(repr(key), (0.0, None))
        return value if 0 <= time.time() - found <= self._seconds else None

    def put(self, key: Any, val: Any) -> None:
        """Keep a result: True, text, a number, or a set of texts."""
        with self._lock:
            self._results[repr(key)] = (time.time(), val)
            if self._is_kept:
                with contextlib.suppress(OSError):  # a full disk: it is in memory
                    self._save()

    def _load(self) -> dict[str, tuple[float, Any]]:
        try:
            with open(self._file, encoding="utf-8") as file:
                if not _is_own(os.fstat(file.fileno())):
                    return {}
                content = json.load(file)
            if content["parameters_hash"] != self._parameters_hash:
                return {}
            return {key: (float(found), _unpacked(value)) for key, (found, value) in content["results"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}  # there is none, or it is damaged: the hosts are looked at anew

    def _save(self) -> None:
        results = {key: (found, _packed(value)) for key, (found, value) in self._results.items()}
        number, path = tempfile.mkstemp(dir=os.path.dirname(self._file))
        try:
            with open(number, "w", encoding="utf-8") as file:
                json.dump({"parameters_hash": self._parameters_hash, "results": results}, file)
            os.replace(path, self._file)
        except BaseException:
            os.unlink(path)
            raise


def _make_own(folder: str) -> bool:
    """Return whether there is a folder of this user's in which files can be made."""
    try:
        home = os.path.dirname(os.path.abspath(folder))
        if os.stat(home).st_uid != os.geteuid():  # sudo's, or a container's: files of root's would be in the way there
            return False
        os.makedirs(folder, mode=0o700, exist_ok=True)
        return os.stat(folder).st_uid == os.geteuid() and os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        return False


def _is_own(found: os.stat_result) -> bool:
    """Return whether a file is this user's, and nobody else may write to it."""
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _packed(value: Any) -> Any:
    return {"set": sorted(value)} if isinstance(value, (set, frozenset)) else value


def _unpacked(value: Any) -> Any:
    return set(value["set"]) if isinstance(value, dict) else value


def use_cache() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that keeps what a function returns, but for None, where it is called with fn_cache=a Cache."""

    def wrap(func: Callable[..., Any]) -> Callable[..., Any]:
        def wrap_f(*args: Any, **kwargs: Any) -> Any:
            fn_cache = kwargs.pop("fn_cache")
            if fn_cache is None:
                return func(*args, **kwargs)
            key = (func.__name__, tuple(args[0]), sorted(kwargs.items()))
            cached_result = fn_cache.get(key)
            if cached_result is not None:
                return cached_result
            results = func(*args, **kwargs)
            if results is not None:
                fn_cache.put(key, results)
            return results

        return wrap_f

    return wrap
