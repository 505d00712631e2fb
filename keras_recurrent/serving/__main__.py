"""Starts the HTTP server: `python -m keras_recurrent.serving --preset griffin_tiny_text`."""

import argparse
import contextlib
import importlib.util
import ipaddress
import logging
import os
import pathlib
import sys

from keras_recurrent.serving.engine import Engine

KEY_VARIABLE = "KERAS_RECURRENT_API_KEY"
PACKAGES = {
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "prometheus_client": "prometheus-client",
}


def parse_arguments(arguments=None):
    """Returns the parsed arguments of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m keras_recurrent.serving",
        description="Serves a language model with OpenAI's HTTP API.",
        epilog=f"The environment variable {KEY_VARIABLE} sets the key that clients must send.",
    )
    add = parser.add_argument
    add("--preset", required=True, help="name of a preset, or its directory")
    add("--slots", type=int, default=64, help="requests that are generated at the same time")
    add("--max-length", type=int, help="maximum number of tokens of prompt and answer")
    add("--dtype", help="such as bfloat16")
    add("--chat-template", type=pathlib.Path, help="file with a jinja2 template")
    add("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    add("--port", type=int, default=8000, help="0 selects a free port")
    add("--max-queued", type=int, default=1024, help="requests that wait for a slot")
    add("--max-connections", type=int, default=2048)
    add("--max-body", type=int, default=4 * 2**20, help="bytes in the body of a request")
    add("--timeout", type=float, default=600, help="seconds after which a request ends")
    add("--grace-period", type=float, default=30, help="seconds for requests after SIGTERM")
    add("--prefix-cache-bytes", type=int, default=2**30, help="memory for states of prefixes")
    add("--prefix-cache-dir", help="directory that keeps states of prefixes between runs")
    return parser.parse_args(arguments)


def load_model(arguments):
    """Returns the model of the preset."""
    import keras_hub

    options = {"dtype": arguments.dtype} if arguments.dtype else {}
    if arguments.chat_template:
        options["chat_template"] = arguments.chat_template.read_text(encoding="utf-8")
    return keras_hub.models.CausalLM.from_preset(arguments.preset, **options)


def is_loopback(host):
    """Returns True if only this machine reaches the host."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def main():
    missing = [name for module, name in PACKAGES.items() if not importlib.util.find_spec(module)]
    if missing:
        raise SystemExit(f"The server requires the extra `serve`: pip install {' '.join(missing)}")
    arguments = parse_arguments()

    from keras_recurrent.serving.server import Server, create_app

    logging.basicConfig(level=logging.WARNING)
    # The engine's thread must not wait 5 ms, Python's default, for that of the HTTP server.
    sys.setswitchinterval(5e-4)
    key = os.environ.get(KEY_VARIABLE) or None
    model = load_model(arguments)
    engine = Engine(
        model,
        num_slots=arguments.slots,
        max_length=arguments.max_length,
        max_queued=arguments.max_queued,
        prefix_cache_bytes=arguments.prefix_cache_bytes,
        prefix_cache_dir=arguments.prefix_cache_dir,
    )
    app = create_app(
        engine,
        arguments.preset.rstrip("/").rpartition("/")[2],
        api_key=key,
        max_body=arguments.max_body,
        timeout=arguments.timeout,
    )
    if key is None and not is_loopback(arguments.host):
        logging.warning("Other machines reach the server without a key; set %s.", KEY_VARIABLE)
    server = Server(
        app, arguments.host, arguments.port, arguments.max_connections, arguments.grace_period
    )
    with contextlib.suppress(KeyboardInterrupt):
        server.run()


if __name__ == "__main__":
    main()
