"""The child's side of `Process.call`: functions called by lines of JSON.

One line on stdin is a call, one line on stdout its answer; stdin's end is the end. Anything the
functions print goes to stderr, so a library that prints cannot spoil an answer.

    {"function": "generate", "arguments": {...}}   ->   {"result": ...} or {"error": "..."}
"""

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any


def serve(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Answer calls until stdin ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        call = json.loads(line)
        try:
            answer = {"result": functions[call["function"]](**call["arguments"])}
        except Exception as error:  # the boundary of this process: the caller is told
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def end_with_stdin() -> None:
    """End this process when its stdin ends: whoever started it is gone."""

    def watch() -> None:
        # Below Python's buffered reader, whose lock a daemon thread would hold at exit.
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="stdin", daemon=True).start()


def read_line() -> str:
    """The first line of stdin, nothing behind it (see `end_with_stdin`)."""
    line = bytearray()
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        line += byte
    return line.decode()
