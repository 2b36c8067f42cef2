"""Run commands of one tree in forked processes that have its modules loaded: the other end of ``trees.Server``.

Started as ``python serve.py MODULE:FUNCTION`` with the tree on PYTHONPATH. It imports nothing of this project but that
console entry point, and public readers that a request names. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# What other ranks have to end by themselves after one has failed: they may wait for it in a collective.
OTHERS_S = 10.0


def _function(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _write_modules(path: str) -> None:
    Path(path).write_text(json.dumps([name for name in sys.modules if "__main__" not in name]), encoding="utf-8")


def _verdict(read: Callable[..., Any], argument: Any) -> dict[str, Any]:
    """Whether a reader accepts an argument: the problems' paths and kinds where it does not."""
    try:
        value = read(argument)
        if hasattr(value, "__next__"):
            for _ in value:
                pass
    except Exception as error:  # noqa: BLE001 - whatever the compared tree raises is its verdict
        if problems := getattr(error, "problems", None):
            return {"refused": sorted([each.path, each.kind] for each in problems)}
        # An error of Python is a defect of the reader, not a verdict.
        kind = type(error)
        return {"fails": kind.__name__} if kind.__module__ == "builtins" else {"refused": []}
    return {"accepted": True}


def _call_reader(request: dict[str, Any]) -> None:
    """Write the verdict of the first of the named readers that this tree has."""
    read = None
    for name in request["readers"]:
        with contextlib.suppress(ImportError, AttributeError):
            read = _function(name)
            break
    argument: Any = request["argument"] if request["as"] == "str" else Path(request["argument"])
    verdict = {"no reader of": request["readers"]} if read is None else _verdict(read, argument)
    sys.stdout.write(json.dumps(verdict))


def _become_child(request: dict[str, Any], rank: int) -> None:
    os.setsid()
    output = f"{request['output']}.{rank}"
    for number, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, f"{output}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, f"{output}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        handle = os.open(name, flags, 0o644)
        os.dup2(handle, number)
        os.close(handle)
    os.chdir(request["folder"])
    os.environ.update(request["ranks"][rank])
    sys.argv = [request["program"], *request.get("words", ())]
    if request.get("modules"):
        atexit.register(_write_modules, request["modules"])


def _wait(pids: list[int], timeout_s: float) -> list[int]:
    """Exit codes in order of rank; -9 for what had to be killed. Processes that they left behind end with them."""
    codes: dict[int, int] = {}
    end = time.monotonic() + timeout_s
    pause_s = 0.001
    while len(codes) < len(pids) and time.monotonic() < end:
        for pid in pids:
            if pid in codes:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid]:
                    end = min(end, time.monotonic() + OTHERS_S)
        time.sleep(pause_s)
        pause_s = min(0.05, pause_s * 1.5)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if pid not in codes:
            os.waitpid(pid, 0)
    return [codes.get(pid, -9) for pid in pids]


def _preload(path: Path) -> None:
    """Import what an earlier child has imported, so that later ones do not."""
    for name in json.loads(path.read_text(encoding="utf-8")) if path.exists() else ():
        with contextlib.suppress(Exception):  # a module that only its importer prepares
            importlib.import_module(name)
    gc.freeze()  # a collection in a child would copy every page


def serve(entry: Callable[[], Any], requests: Any, answers: Any) -> Callable[[], Any] | None:
    """Answer requests; in a child, return what it has to do, and None at the end of the requests."""
    for line in requests:
        request = json.loads(line)
        pids = []
        for rank in range(len(request["ranks"])):
            pid = os.fork()
            if pid == 0:
                _become_child(request, rank)
                return partial(_call_reader, request) if "readers" in request else entry
            pids.append(pid)
        codes = _wait(pids, request["timeout_s"])
        if request.get("modules"):
            _preload(Path(request["modules"]))
        answers.write(json.dumps(codes) + "\n")
        answers.flush()
    return None


def main() -> None:
    """Serve until the requests end."""
    # The folder of this file is not a place of modules of the compared tree.
    sys.path.remove(str(Path(__file__).parent))
    entry = _function(sys.argv[1])
    with open(os.dup(0), encoding="utf-8") as requests, open(os.dup(1), "w", encoding="utf-8") as answers:
        work = serve(entry, requests, answers)
    if work is not None:
        # The child ends as the console script does: through SystemExit and the handlers of the interpreter's end.
        result = work()
        sys.exit(result if isinstance(result, int) else 0)


if __name__ == "__main__":
    main()
