"""A program that imports modules once and forks processes from itself: `-m tests.support.fork_server FD MODULE...`

In: requests over the socket FD, see `forks.py`: a command line, environment, folder and files of a process to start, or
one whose exit code is asked for; or the names of more modules and the socket of a client, for a server that is forked
from this one. Out: a process that runs the command line as Python does: as `__main__`, in a session of its own, with
its own exit handlers, traceback and exit code. A program of this repository that ends well is not taken apart after its
exit handlers: that costs half a second of a core. On SIGUSR1 a fork prints the stacks of its threads.
Must hold: nothing is done but importing before a fork: there is no group, no loader, and no thread but one of the
allocator's, which takes care of forks itself. The program ends with its client, and kills what it has forked.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import signal
import socket
import sys
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 1 << 17
"""A request has no more bytes than this."""
DESCRIPTOR = "{descriptor}"
"""Stands in a command line for the number of the descriptor that came with it."""


def serve(client: socket.socket) -> tuple[ModuleType, CodeType]:
    """Answer requests; returns in each fork: its `__main__`, and the code to run in it."""
    running: set[int] = set()
    while True:
        text, descriptors, _, _ = socket.recv_fds(client, MOST_BYTES, 1)
        if not text:
            break
        request = json.loads(text)
        if "start" in request:
            ready, told = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.setsid()
                os.close(client.detach())
                main, code = become(request["start"], descriptors)
                os.close(ready)
                os.close(told)
                return main, code
            os.close(told)
            for descriptor in descriptors:
                os.close(descriptor)
            os.read(ready, 1)  # until its session and files are there
            os.close(ready)
            running.add(pid)
            answer: int | None = pid
        elif "modules" in request:
            answer = os.fork()
            if answer == 0:
                os.setsid()
                os.close(client.detach())
                get_ready(request["modules"])
                return serve(socket.socket(fileno=descriptors[0]))
            os.close(descriptors[0])  # it is not killed here: it ends by itself, with what it has forked
        else:
            answer = exit_code_of(request["pid"], can_wait=request["can_wait"])
            if answer is not None:
                running.discard(request["pid"])
        client.send(json.dumps(answer).encode())
    for pid in running:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    sys.stdout.flush()
    os._exit(0)


def get_ready(modules: Sequence[str]) -> None:
    """Import what forks need."""
    for name in modules:
        importlib.import_module(name)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # those of torch's libraries free what the end of the process frees
    gc.collect()
    gc.freeze()  # what is imported already is not looked through, and so not copied, again and again in each fork


def exit_code_of(pid: int, *, can_wait: bool) -> int | None:
    """Exit code of a fork, negative for a signal; None while it runs, unless it is waited for."""
    done, status = os.waitpid(pid, 0 if can_wait else os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def become(program: Mapping[str, Any], descriptors: Sequence[int]) -> tuple[ModuleType, CodeType]:
    """Make this fork the process that was asked for."""
    for number, path in enumerate(program["files"], start=1):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    faulthandler.register(signal.SIGUSR1, file=2)
    os.environ.clear()
    os.environ.update(program["environment"])
    os.chdir(program["folder"])
    arguments = [str(descriptors[0]) if word == DESCRIPTOR else word for word in program["arguments"]]
    while arguments[0] == "-W":
        action = arguments[1]
        sys.warnoptions.append(action)  # for processes that this one starts
        warnings.simplefilter(action)  # type: ignore[arg-type]
        del arguments[:2]
    main = ModuleType("__main__")
    if arguments[0] == "-m":
        sys.path[0] = program["folder"]
        spec = importlib.util.find_spec(arguments[1])
        assert spec is not None and spec.origin is not None, f"no module {arguments[1]}"
        main.__spec__, main.__file__, main.__package__ = spec, spec.origin, spec.parent
        code, words = spec.loader.get_code(spec.name), [spec.origin, *arguments[2:]]  # type: ignore[union-attr]
    elif arguments[0] == "-c":
        sys.path[0] = ""
        code, words = compile(arguments[1], "<string>", "exec"), ["-c", *arguments[2:]]
    else:
        path = Path(arguments[0])
        sys.path[0] = str(path.parent)
        main.__file__ = str(path)
        code, words = compile(path.read_bytes(), str(path), "exec"), arguments
    sys.argv = words
    sys.modules["__main__"] = main
    return main, code


def run(main: ModuleType, code: CodeType) -> None:
    """Run the code of a fork; a program of this repository that ends well ends here."""
    if not any(Path(getattr(main, "__file__", "")).is_relative_to(ROOT / folder) for folder in ("tests", "examples")):
        exec(code, main.__dict__)
        return
    exit_code: Any = None
    try:
        exec(code, main.__dict__)
    except SystemExit as error:
        exit_code = error.code
        if not isinstance(exit_code, int | None):
            raise
    threading._shutdown()  # type: ignore[attr-defined]  # threads are waited for before the handlers, as Python does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((exit_code or 0) & 0xFF)


if __name__ == "__main__":
    get_ready(sys.argv[2:])
    run(*serve(socket.socket(fileno=int(sys.argv[1]))))
