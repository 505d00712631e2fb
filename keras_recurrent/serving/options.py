"""Options of the command `python -m keras_recurrent.serving`.

This module does not import Keras, so that an invalid option is an error at once.
"""

import argparse
import importlib.util
import math
import os
import pathlib

from keras_recurrent.chat.tools import FORMATS
from keras_recurrent.import_order import keras_backend

KEY_VARIABLE = "KERAS_RECURRENT_API_KEY"
PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "jinja2")


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


def file_text(path):
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise argparse.ArgumentTypeError(f"cannot be read: {error}") from error


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
    add("--preset", "NAME", str, None, text, required=True)
    add("--slots", "N", number(1), 64, "maximum number of requests decoded at the same time")
    text = "maximum number of tokens of prompt and answer together (default: the preset's sequence "
    add("--max-length", "N", number(3), None, text + "length)")
    add("--dtype", "NAME", str, None, "dtype policy of the model, such as bfloat16")
    add("--chat-template", "FILE", file_text, None, "file with a chat template")
    text = f"format of tool calls, {', '.join(FORMATS)} (default: the one in the chat template)"
    add("--tool-format", "NAME", str, None, text, choices=tuple(FORMATS))
    text = "address to listen on; 0.0.0.0 accepts connections from other machines"
    add("--host", "HOST", str, "127.0.0.1", text)
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
    add("--prefix-cache-dir", "DIR", str, None, text)
    text = "interval, in prompt tokens and rounded up to a multiple of 256, at which prefix states "
    text += "are also saved; 0: off"
    add("--prefix-cache-interval", "TOKENS", number(0), 2048, text)
    return parser


def parse_options():
    """Returns the parser and the options, with the key of the environment as `api_key`."""
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
    return parser, options
