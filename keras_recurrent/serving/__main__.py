"""Starts the HTTP server: `python -m keras_recurrent.serving --preset griffin_tiny_text`."""

import argparse
import contextlib
import gc
import importlib.util
import ipaddress
import logging
import math
import os
import pathlib
import sys
import time

import keras

from keras_recurrent import serving
from keras_recurrent.chat.tools import FORMATS, tool_format

log = logging.getLogger("keras_recurrent.serving")
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


def dtype_policy(name):
    keras.dtype_policies.get(name)  # raises a ValueError for another name
    return name


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

    def add(name, metavar, type, default, text):
        text += "" if default is None else " (default: %(default)s)"
        options = {"required": True} if name == "--preset" else {"default": default}
        parser.add_argument(name, metavar=metavar, type=type, help=text, **options)

    add("--preset", "NAME", str, None, "a preset, its directory, or hf://owner/repository")
    add("--slots", "N", number(1), 64, "maximum number of requests decoded at the same time")
    text = "maximum number of tokens of prompt and answer together (default: the preset's sequence "
    add("--max-length", "N", number(1), None, text + "length)")
    add("--dtype", "NAME", dtype_policy, None, "dtype policy of the model, such as bfloat16")
    add("--chat-template", "FILE", file_text, None, "file with a chat template")
    text = f"format of tool calls, {', '.join(FORMATS)} (default: the one in the chat template)"
    add("--tool-format", "NAME", str, None, text)
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


def load_model(arguments):
    import keras_hub

    options = {"dtype": arguments.dtype} if arguments.dtype else {}
    if arguments.chat_template:
        options["chat_template"] = arguments.chat_template
    return keras_hub.models.CausalLM.from_preset(arguments.preset, **options)


def make_engine(arguments):
    model = load_model(arguments)
    if arguments.tool_format:
        model.preprocessor.tool_format = arguments.tool_format
        tool_format(model.preprocessor)  # an error for an unknown name
    names = "max_length max_queued prefix_cache_bytes prefix_cache_dir prefix_cache_interval"
    options = {name: getattr(arguments, name) for name in names.split()}
    return serving.Engine(model, num_slots=arguments.slots, **options)


def log_compilations():
    """Logs the programs that JAX compiles in at least 0.5 s."""
    import jax

    def write(event, duration_secs, **labels):
        if event == "/jax/core/compile/backend_compile_duration" and duration_secs >= 0.5:
            log.info("Compiled the program %s in %.1f s", labels.get("fun_name"), duration_secs)

    jax.monitoring.register_event_duration_secs_listener(write)


def is_loopback(host):
    """Returns True if only this machine reaches the host."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def main():
    parser = make_parser()
    arguments = parser.parse_args()
    missing = [name for name in PACKAGES if not importlib.util.find_spec(name)]
    if missing:
        names = " ".join(missing).replace("_", "-")
        raise SystemExit(f"The server requires the extra `serve`: pip install {names}")
    if arguments.prefix_cache_dir and not arguments.prefix_cache_bytes:
        parser.error("--prefix-cache-bytes must be above 0 with --prefix-cache-dir")
    key = os.environ.get(KEY_VARIABLE)
    if key is not None and not key.strip():
        parser.error(f"{KEY_VARIABLE} must not be empty; unset it for a server without a key")

    if keras.config.backend() == "tensorflow":
        parser.error("the server runs on torch and JAX; set KERAS_BACKEND to one of them")

    from keras_recurrent.serving.processes import HTTPProcess, bind

    logging.basicConfig(level=logging.WARNING)
    log.setLevel(logging.INFO)
    if keras.config.backend() == "jax":
        log_compilations()
    # The generation thread must not wait 5 ms, Python's default, for the thread that receives
    # requests.
    sys.setswitchinterval(5e-4)
    if key is None and not is_loopback(arguments.host):
        logging.warning("Other machines reach the server without a key; set %s.", KEY_VARIABLE)
    with HTTPProcess(bind(arguments.host, arguments.port)) as http_process:
        try:
            engine = make_engine(arguments)
        except (ValueError, NotImplementedError) as error:  # an argument is wrong for the model
            parser.error(str(error))
        start = time.monotonic()
        engine.warm_up()
        log.info("Prepared common options in %.1f s", time.monotonic() - start)
        gc.collect()
        gc.freeze()  # a collection stops all threads; without these objects it is short
        app = {
            "model_name": arguments.preset.rstrip("/").rpartition("/")[2],
            "api_key": key,
            "max_body": arguments.max_body,
            "timeout": arguments.timeout,
        }
        limits = ("max_connections", "grace_period")
        server = {name: getattr(arguments, name) for name in limits}
        sys.exit(http_process.run(engine, arguments.preset, app, server))


if __name__ == "__main__":
    main()
