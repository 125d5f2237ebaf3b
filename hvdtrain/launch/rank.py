"""One rank of `hvdtrain.run`: gets the function, calls it, sends its answer."""

from __future__ import annotations

import contextlib
import linecache
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import AuthenticationError
from typing import Any

from hvdtrain.distributed import watchdog
from hvdtrain.distributed.watchdog import tracebacks
from hvdtrain.distributed.watchdog.rank_exit import is_consequence
from hvdtrain.launch import exchange
from hvdtrain.launch.exchange import Message, pack
from hvdtrain.system import pickling
from hvdtrain.system.settings import DEBUG, RANK_VARIABLES


def main() -> None:
    """Run one rank."""
    rank = next(int(os.environ[name]) for name in RANK_VARIABLES if os.environ.get(name))
    try:
        task, connection = exchange.request_task(rank)
    except (EOFError, OSError, AuthenticationError) as problem:
        sys.exit(f"rank {rank}: the caller of hvdtrain.run has ended: {problem}")
    sys.path[:] = task.facts["path"]  # what the caller can import can be imported here
    call = load(task)
    del task  # which may hold as much as the arguments
    answer, exit_request = perform(call)
    with contextlib.suppress(OSError):  # the caller has been interrupted, and takes no more answers
        answer.send(connection)
        connection.close()
    if exit_request is not None:
        raise exit_request
    if answer.facts["kind"] == "error":
        watchdog.leave(1)


def load(task: Message) -> Callable[[], Any] | Message:
    """Return the call that is the task, or the answer where it cannot be loaded."""
    # Tracebacks show the lines of the caller's notebook's cells.
    for name, lines in task.facts["cells"].items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    try:
        fn, args, kwargs = pickle.loads(task.pickled)  # noqa: S301 - from the caller, see exchange.py
    except BaseException as error:  # noqa: BLE001 - whatever it is, the caller must know
        return _failure("could not load the function", error)
    return lambda: fn(*args, **kwargs)


def perform(call: Callable[[], Any] | Message) -> tuple[Message, SystemExit | None]:
    """Return the answer: what `call` returned, or why not; and the request to exit, where that is why."""
    if isinstance(call, Message):
        return call, None
    try:
        return Message({"kind": "result"}, pack({"what it returned": call()}, where="be sent back")), None
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else int(request.code is not None)  # as Python has it
        return Message({"kind": "exit", "code": code}), request
    except BaseException as error:  # noqa: BLE001 - see above
        return _failure("raised", error), None


def _failure(what: str, error: BaseException) -> Message:
    tracebacks.explain(error)
    # Without hvdtrain's own frames.
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, pack.__code__.co_filename):
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    others = is_consequence(error)
    if others and os.environ.get(DEBUG) == "1":
        sys.stderr.write(text + "\n")
    facts = {"kind": "error", "what": what, "host": socket.gethostname(), "time": time.time()}
    facts |= {"text": text, "others": others}
    try:
        return Message(facts, pickling.dumps(error.with_traceback(None)))
    except Exception:  # noqa: BLE001 - then its text must do
        return Message(facts)


if __name__ == "__main__":
    main()
