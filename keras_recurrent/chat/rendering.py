"""Rendering of chat templates by a separate process, with limits of time, memory and output.

In one process, a template could not be stopped: Python interrupts neither `10**10**8` nor a thread.
The process is started at the first rendering, serves all later ones, and is replaced after it had
to be ended.
"""

import atexit
import contextlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import threading
from typing import Any

MAX_SECONDS = 2.0


class TemplateRejection(ValueError):
    """Error of a template that calls `raise_exception`."""


_lock = threading.Lock()
_process: Any = None  # a `subprocess.Popen`, or None


def render(source, variables, ends, calls=()):
    """Renders a jinja2 template as transformers renders chat templates, in one exchange.

    Args:
        source: string, the template.
        variables: a dictionary of variables of the template, which JSON can represent.
        ends: a list of `(number of messages, add_generation_prompt)`, one for each text. None:
            all messages.
        calls: a list of `(index of a message, begin, text, end)`. The three strings are appended to
            the content of the message. `begin` and `end` count as text of the template.

    Returns:
        A list of texts, each at most 1 MB in UTF-8, and a copy of the last one that has other
        characters in the place of those that come from the content of messages.

    Raises:
        ValueError: the template is invalid, fails or calls `raise_exception` (`TemplateRejection`);
            it returns more than 1 MB of text, takes more than 2 seconds on average, or more than
            512 MB of memory (on Linux).
        ImportError: jinja2 is not installed.
        RuntimeError: the process that renders cannot be started.
    """
    request = {"source": source, "variables": variables, "ends": ends, "calls": calls}
    with _lock:
        reply = _exchange(_running_process(), json.dumps(request), MAX_SECONDS * len(ends))
    if "error" in reply:
        raise (TemplateRejection if reply.get("is_rejection") else ValueError)(reply["error"])
    return reply["texts"], reply["template_text"]


def _exchange(process, request, seconds):
    """Returns the reply to a request; ends the process if there is none in time."""
    expired = threading.Event()

    def end():
        expired.set()
        process.kill()

    timer = threading.Timer(seconds, end)
    timer.start()
    line = ""
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(request + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
    finally:  # also after Ctrl-C, with the reply yet to come
        timer.cancel()
        timer.join()
        if not line or expired.is_set():
            _end_process()
    if line:
        return json.loads(line)
    if expired.is_set():
        return {"error": f"`chat_template` took more than {seconds:g} seconds."}
    return {"error": "`chat_template` ended the process that renders it, by too deep recursion."}


def _running_process():
    """Returns the process that renders, and starts it if there is none."""
    global _process
    if _process is not None and _process.poll() is None:
        return _process
    _end_process()
    if importlib.util.find_spec("jinja2") is None:
        raise ImportError(
            "Chat templates take the package 'jinja2': the extra `chat` of keras-recurrent, or "
            "pip install jinja2"
        )
    script = str(pathlib.Path(__file__).with_name("worker.py"))
    # Without -S, Python would first run the .pth files of all installed packages.
    command = [sys.executable, "-E", "-S", script, json.dumps(sys.path)]
    _process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="ascii"
    )
    if not _process.stdout.readline():
        _end_process()
        raise RuntimeError(f"The process that renders chat templates did not start: {command[:-1]}")
    return _process


def _end_process():
    global _process
    process, _process = _process, None
    if process is not None:
        process.kill()
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.wait()


def _leave_process_to_parent():
    if _process is not None:
        _process.returncode = 0
    _lock.release()


atexit.register(_end_process)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_lock.acquire,
        after_in_parent=_lock.release,
        after_in_child=_leave_process_to_parent,
    )
