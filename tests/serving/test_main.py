"""The command line of the server: errors before the model is loaded."""

import gc
import logging
import socket
import sys

import pytest

pytest.importorskip("fastapi")

from keras_recurrent.models import GriffinCausalLM
from keras_recurrent.serving import __main__ as command
from keras_recurrent.serving.server import Server, bind

pytestmark = pytest.mark.once


def run(monkeypatch, *options):
    """Runs the command; fails if it loads the model."""
    monkeypatch.setattr(sys, "argv", ["serving", "--preset", "griffin_tiny_text", *options])
    monkeypatch.setattr(command, "load_model", lambda _: pytest.fail("the model was loaded"))
    with pytest.raises(SystemExit) as caught:
        command.main()
    return caught.value.code


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--slots", "0"], "--slots: must be at least 1; got 0"),
        (["--slots", "many"], "--slots: invalid int value: 'many'"),
        (["--port", "99999"], "--port: must be at least 0 and at most 65535; got 99999"),
        (["--timeout", "inf"], "--timeout: must be a finite number of at least 0; got inf"),
        (["--timeout", "nan"], "--timeout: must be a finite number of at least 0; got nan"),
        (["--dtype", "float17"], "--dtype: invalid dtype_policy value: 'float17'"),
        (["--chat-template", "/missing"], "--chat-template: cannot be read: [Errno 2]"),
        (["--prefix-cache-dir", "a", "--prefix-cache-bytes", "0"], "above 0"),
        (["--model", "a"], "unrecognized arguments: --model a"),
    ],
)
def test_wrong_options_are_errors(monkeypatch, capsys, options, message):
    """The server loads a model for minutes before it tells that an option is wrong."""
    assert run(monkeypatch, *options) == 2
    assert message in capsys.readouterr().err


def test_an_address_in_use_is_an_error(monkeypatch):
    """The server loads its model before it finds that it cannot listen."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        assert f"127.0.0.1, port {port}: Address already" in run(monkeypatch, "--port", port)
    assert "cannot listen on a.invalid" in run(monkeypatch, "--host", "a.invalid")
    with bind("::1", 0) as listener:
        assert listener.getsockname()[0] == "::1"


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(command, "PACKAGES", (*command.PACKAGES, "missing_package"))
    message = "The server requires the extra `serve`: pip install missing-package"
    assert run(monkeypatch) == message


def test_a_preset_that_does_not_exist_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["serving", "--preset", "no_preset", "--port", "0"])
    with pytest.raises(SystemExit) as caught:
        command.main()
    assert caught.value.code == 2
    assert "Unknown preset 'no_preset'" in capsys.readouterr().err


def test_an_empty_key_is_an_error(monkeypatch, capsys):
    """A variable that was left empty by mistake turns the authentication off."""
    monkeypatch.setenv(command.KEY_VARIABLE, " ")
    assert run(monkeypatch) == 2
    assert f"{command.KEY_VARIABLE} must not be empty" in capsys.readouterr().err


def test_common_options_are_compiled_before_the_server_listens(monkeypatch, caplog):
    """The first clients wait for compilations, or metrics count the requests of the warm-up."""
    model = GriffinCausalLM.from_preset("hawk_tiny", num_layers=1)
    monkeypatch.setattr(sys, "argv", ["serving", "--preset", "a", "--slots", "1", "--port", "0"])
    monkeypatch.setattr(command, "load_model", lambda _: model)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    found = []

    def run(server):
        service = server.config.app.state.service
        found.append((service.engine.stats()["requests"], service.metrics.text()))
        service.engine.close()

    monkeypatch.setattr(Server, "run", run)
    with caplog.at_level(logging.INFO, "keras_recurrent.serving"):
        command.main()
    ((num_requests, text),) = found
    assert num_requests == 4
    assert b"keras_recurrent_tokens_total 0.0" in text
    assert "Prepared common options in" in caplog.text


def test_log_compilations_names_programs_and_seconds(caplog):
    """A compilation delays requests, and the log does not say so."""
    jax = pytest.importorskip("jax")
    command.log_compilations()
    with caplog.at_level(logging.INFO, "keras_recurrent.serving"):
        event = "/jax/core/compile/backend_compile_duration"
        jax.monitoring.record_event_duration_secs(event, 1.5, fun_name="step")
    assert "Compiled the program step in 1.5 s" in caplog.text
