"""Starts the HTTP server: `python -m keras_recurrent.serving --preset griffin_tiny_text`."""

import contextlib
import gc
import ipaddress
import logging
import sys
import time

import keras

from keras_recurrent import serving
from keras_recurrent.serving.options import KEY_VARIABLE, check_template, parse_options

log = logging.getLogger("keras_recurrent.serving")


def load_model(options):
    import keras_hub

    attributes = {"dtype": options.dtype} if options.dtype else {}
    if options.chat_template:
        attributes["chat_template"] = options.chat_template
    model = keras_hub.models.CausalLM.from_preset(options.preset, **attributes)
    template = getattr(model.preprocessor, "chat_template", None)
    if template and not options.chat_template:
        files = "chat_template.jinja, tokenizer_config.json or preprocessor.json"
        check_template(template, f"Chat template of {options.preset} ({files})")
    if options.tool_format:
        model.preprocessor.tool_format = options.tool_format
    return model


def make_engine(options):
    names = "max_length max_queued prefix_cache_bytes prefix_cache_dir prefix_cache_interval"
    arguments = {name: getattr(options, name) for name in names.split()}
    return serving.Engine(load_model(options), num_slots=options.slots, **arguments)


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
    parser, options = parse_options()

    from keras_recurrent.serving.processes import HTTPProcess

    logging.basicConfig(level=logging.WARNING)
    log.setLevel(logging.INFO)
    if keras.config.backend() == "jax":
        log_compilations()
    # The generation thread must not wait 5 ms, Python's default, for the thread that receives
    # requests.
    sys.setswitchinterval(5e-4)
    if options.api_key is None and not is_loopback(options.host):
        logging.warning("Other machines reach the server without a key; set %s.", KEY_VARIABLE)
    with HTTPProcess(options.listener) as http_process:
        try:
            engine = make_engine(options)
        except (ValueError, NotImplementedError) as error:  # an option is wrong for the model
            parser.error(str(error))
        start = time.monotonic()
        engine.warm_up()
        log.info("Prepared common options in %.1f s", time.monotonic() - start)
        gc.collect()
        gc.freeze()  # a collection stops all threads; without these objects it is short
        app = {name: getattr(options, name) for name in ("api_key", "max_body", "timeout")}
        app["model_name"] = options.preset.rstrip("/").rpartition("/")[2]
        server = {name: getattr(options, name) for name in ("max_connections", "grace_period")}
        sys.exit(http_process.run(engine, options.preset, app, server))


if __name__ == "__main__":
    main()
