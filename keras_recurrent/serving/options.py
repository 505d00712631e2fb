"""Options of the command `python -m keras_recurrent.serving`.

This module does not import Keras, so that an invalid option is an error at once.
"""

import argparse
import difflib
import importlib.util
import math
import os
import pathlib
import pkgutil
import re
import socket

from keras_recurrent import presets
from keras_recurrent.atomic_files import find_folder
from keras_recurrent.chat.rendering import TemplateRejection, render
from keras_recurrent.chat.tools import FORMATS
from keras_recurrent.checkpoints.files import CONFIG_FILE, HUB, require
from keras_recurrent.import_order import keras_backend

KEY_VARIABLE = "KERAS_RECURRENT_API_KEY"
PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "jinja2")
DTYPE_POLICY = re.compile(r"(mixed_)?(float16|bfloat16)|float32|float64")


def number(minimum, maximum=math.inf, kind=int):
    """Returns a function for argparse, which converts the text of an option to a number."""

    def convert(text):
        value = kind(text)
        is_finite = math.isfinite(value)
        if not is_finite or not minimum <= value <= maximum:
            finite = "" if is_finite else "a finite number of "
            most = "" if maximum == math.inf else f" and at most {maximum}"
            raise argparse.ArgumentTypeError(
                f"must be {finite}at least {minimum}{most}; got {text}"
            )
        return value

    convert.__name__ = kind.__name__  # argparse names it if the text is not a number
    return convert


def dtype_policy(name):
    if not DTYPE_POLICY.fullmatch(name):
        raise argparse.ArgumentTypeError(
            f"must be a dtype policy such as float32, bfloat16 or mixed_bfloat16; got {name!r}"
        )
    return name


def not_empty(text):
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty; omit the option for its default")
    return text


def preset(name):
    if name.startswith(HUB):
        check_on_hub(name)
    if "://" in name:
        return name
    if os.path.exists(folder := find_folder(name)):
        if not os.path.exists(os.path.join(folder, CONFIG_FILE)):
            raise argparse.ArgumentTypeError(f"{name!r} is no preset: it has no {CONFIG_FILE}")
        return name
    modules = [f"{presets.__name__}.{each.name}" for each in pkgutil.iter_modules(presets.__path__)]
    known = [each for module in modules for each in importlib.import_module(module).SIZES]
    if name not in known:
        near = ", ".join(difflib.get_close_matches(name, known, n=4))
        hint = f"; similar names: {near}" if near else ""
        wanted = "must be the name of a preset, a directory or hf://owner/repository"
        raise argparse.ArgumentTypeError(f"{wanted}; got {name!r}{hint}")
    return name


def check_on_hub(name):
    """Raises an error if the configuration of a repository is neither cached nor on the Hub.

    Without a network, a download is tried for half a minute; this function asks once.
    """
    hub = require("huggingface_hub", repr(name))
    file = name.removeprefix(HUB), CONFIG_FILE
    try:
        if hub.try_to_load_from_cache(*file) is None:
            hub.get_hf_file_metadata(hub.hf_hub_url(*file), timeout=5)
    except Exception as error:  # also of the HTTP library, which differs between versions
        reason = str(error).partition("\n")[0]
        raise argparse.ArgumentTypeError(
            f"{CONFIG_FILE} of {name!r} is not cached, and the Hub does not have it or cannot "
            f"be reached: {reason}"
        ) from error


def chat_template(path):
    """Returns the text of a file, which must render a message."""
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
        check_template(text, path)
    except (OSError, UnicodeError) as error:
        raise argparse.ArgumentTypeError(f"cannot be read: {error}") from error
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def check_template(text, where):
    """Raises a `ValueError` if a chat template neither renders nor rejects a message."""
    message = {"role": "user", "content": "Hello"}
    variables = {"messages": [message], "bos_token": "", "eos_token": "", "pad_token": ""}
    try:
        render(text, {**variables, "tools": None, "documents": None}, [(1, True)])
    except (ImportError, TemplateRejection):  # it may require another role or token
        pass
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def bind(host, port):
    """Returns a socket that is bound to the address, and does not accept connections yet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio only sets TCP_NODELAY if the protocol is given. Without it, the first tokens of a
    # stream wait 40 ms for the client's acknowledgement of the headers.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise SystemExit(
            f"The server cannot listen on {host}, port {port}: {error.strerror}. Select others "
            "with `--host` and `--port`."
        ) from error
    return listener


def make_parser():
    parser = argparse.ArgumentParser(
        prog="python -m keras_recurrent.serving",
        description="Serves a language model with OpenAI's HTTP API.",
        epilog=f"The environment variable {KEY_VARIABLE} sets the key that clients must send; "
        "KERAS_BACKEND selects torch or jax.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
    )

    def add(name, metavar, type, default, text, **options):
        text += "" if default is None else " (default: %(default)s)"
        options |= {"metavar": metavar, "type": type, "default": default, "help": text}
        parser.add_argument(name, **options)

    text = "a preset, its directory, or hf://owner/repository"
    add("--preset", "NAME", preset, None, text, required=True)
    add("--slots", "N", number(1), 64, "maximum number of requests decoded at the same time")
    text = "maximum number of tokens of prompt and answer together (default: the preset's sequence "
    add("--max-length", "N", number(3), None, text + "length)")
    add("--dtype", "NAME", dtype_policy, None, "dtype policy of the model, such as bfloat16")
    add("--chat-template", "FILE", chat_template, None, "file with a chat template")
    text = f"format of tool calls, {', '.join(FORMATS)} (default: the one in the chat template)"
    add("--tool-format", "NAME", str, None, text, choices=tuple(FORMATS))
    text = "address to listen on; 0.0.0.0 accepts connections from other machines"
    add("--host", "HOST", not_empty, "127.0.0.1", text)
    add("--port", "N", number(0, 65535), 8000, "port to listen on; 0: a free one")
    text = "maximum number of queued requests; further ones get status 429"
    add("--max-queued", "N", number(1), 1024, text)
    add("--max-connections", "N", number(1), 2048, "maximum number of client connections")
    add("--max-body", "BYTES", number(1), 2**20, "maximum size of a request body")
    seconds = number(0, kind=float)
    add("--timeout", "SECONDS", seconds, 600.0, "time limit of a request, then status 504")
    text = "time for running requests to finish after SIGTERM"
    add("--grace-period", "SECONDS", seconds, 30.0, text)
    text = "device memory for prefix states, also the size limit of --prefix-cache-dir; 0: off"
    add("--prefix-cache-bytes", "BYTES", number(0), 2**30, text)
    text = "directory that keeps prefix states across restarts"
    add("--prefix-cache-dir", "DIR", not_empty, None, text)
    text = "interval, in prompt tokens and rounded up to a multiple of 256, at which prefix states "
    text += "are also saved; 0: off"
    add("--prefix-cache-interval", "TOKENS", number(0), 2048, text)
    return parser


def parse_options():
    """Returns the parser and the options.

    `api_key` is the key of the environment, `listener` a socket that is bound to host and port.
    """
    parser = make_parser()
    options = parser.parse_args()
    missing = [name for name in PACKAGES if not importlib.util.find_spec(name)]
    if missing:
        names = " ".join(missing).replace("_", "-")
        raise SystemExit(f"The server requires the extra `serve`: pip install {names}")
    if options.prefix_cache_dir and not options.prefix_cache_bytes:
        parser.error("--prefix-cache-bytes must be above 0 with --prefix-cache-dir")
    options.api_key = os.environ.get(KEY_VARIABLE)
    if options.api_key is not None and not options.api_key.strip():
        parser.error(f"{KEY_VARIABLE} must not be empty; unset it for a server without a key")
    if keras_backend() == "tensorflow":
        parser.error("the server runs on torch and JAX; set KERAS_BACKEND to one of them")
    if options.prefix_cache_dir:
        try:
            os.makedirs(options.prefix_cache_dir, mode=0o700, exist_ok=True)
            os.listdir(options.prefix_cache_dir)
        except OSError as error:
            parser.error(f"argument --prefix-cache-dir: cannot be created and read: {error}")
    options.listener = bind(options.host, options.port)
    return parser, options
