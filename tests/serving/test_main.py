"""Command line of the server: errors before the model is loaded, and compilation."""

import gc
import logging
import re
import socket
import subprocess
import sys

import pytest

pytest.importorskip("fastapi")

from keras_recurrent.models import GriffinCausalLM
from keras_recurrent.serving import __main__ as command
from keras_recurrent.serving import options as options_module
from keras_recurrent.serving import processes

pytestmark = pytest.mark.once


BROKEN_TEMPLATE = "{% for message in messages %}\n{{ message.content.text.all }}{% endfor %}"


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
        (["--dtype", "float17"], "--dtype: must be a dtype policy such as float32"),
        (["--host", ""], "--host: must not be empty"),
        (["--tool-format", "xml"], "--tool-format: invalid choice: 'xml'"),
        (["--chat-template", "/missing"], "--chat-template: cannot be read: [Errno 2]"),
        (["--chat-template", "{folder}/broken"], "broken: `chat_template` failed with Undefined"),
        (["--chat-template", "{folder}/broken"], "Error in line 2: "),
        (["--preset", "hawk_tinny"], "got 'hawk_tinny'; similar names: hawk_tiny"),
        (["--preset", "{folder}"], "is no preset: it has no config.json"),
        (["--preset", "hf://nope/nope"], "--preset: config.json of 'hf://nope/nope' is not cached"),
        (["--prefix-cache-dir", "{folder}/broken"], "--prefix-cache-dir: cannot be created and"),
        (["--prefix-cache-dir", "a", "--prefix-cache-bytes", "0"], "above 0"),
        (["--model", "a"], "unrecognized arguments: --model a"),
        # A variable that was left empty by mistake must not turn the authentication off.
        ([], "KERAS_RECURRENT_API_KEY must not be empty"),
    ],
)
def test_invalid_option_is_an_error_before_the_model_is_loaded(
    monkeypatch, capsys, tmp_path, options, message
):
    """A user waits for minutes until an error names the wrong option."""
    (tmp_path / "broken").write_text(BROKEN_TEMPLATE)
    options = [option.replace("{folder}", str(tmp_path)) for option in options]
    monkeypatch.setenv("KERAS_RECURRENT_API_KEY", "secret" if options else " ")
    assert run(monkeypatch, *options) == 2
    assert message in capsys.readouterr().err


def test_invalid_option_is_an_error_before_keras_is_imported():
    """A user waits for ten seconds until an error names the wrong option."""
    command = [sys.executable, "-X", "importtime", "-m", "keras_recurrent.serving"]
    command += ["--preset", "hawk_tiny", "--host", "a.invalid"]  # checked after all others
    found = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert found.returncode == 1
    assert "cannot listen on a.invalid" in found.stderr
    assert not re.search(r"\| +keras$", found.stderr, re.MULTILINE)


def test_address_in_use_is_an_error_before_the_model_is_loaded(monkeypatch):
    """A user waits for minutes until an error tells that the server cannot listen."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        assert f"127.0.0.1, port {port}: Address already" in run(monkeypatch, "--port", port)
    assert "cannot listen on a.invalid" in run(monkeypatch, "--host", "a.invalid")
    with options_module.bind("::1", 0) as listener:
        assert listener.getsockname()[0] == "::1"
        assert listener.proto == socket.IPPROTO_TCP  # else tokens wait 40 ms in a socket


def test_missing_package_is_an_error_that_names_the_package(monkeypatch):
    packages = *options_module.PACKAGES, "missing_package"
    monkeypatch.setattr(options_module, "PACKAGES", packages)
    message = "The server requires the extra `serve`: pip install missing-package"
    assert run(monkeypatch) == message


def test_preset_of_an_unknown_model_is_an_error_of_the_command_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["serving", "--preset", str(tmp_path), "--port", "0"])
    with pytest.raises(SystemExit) as caught:
        command.main()
    assert caught.value.code == 2
    assert "config.json" in capsys.readouterr().err


def test_broken_template_of_a_preset_is_an_error_of_the_command_line(monkeypatch, capsys, tmp_path):
    """All requests fail, and the operator learns it from the first client."""
    model = GriffinCausalLM.from_preset("hawk_tiny", num_layers=1, chat_template=BROKEN_TEMPLATE)
    model.save_to_preset(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["serving", "--preset", str(tmp_path), "--port", "0"])
    with pytest.raises(SystemExit) as caught:
        command.main()
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert f"Chat template of {tmp_path} (chat_template.jinja, " in error
    assert "`chat_template` failed with Undefined" in error


def test_server_compiles_common_options_before_it_listens(monkeypatch, caplog):
    """The first clients wait for compilations."""
    model = GriffinCausalLM.from_preset("hawk_tiny", num_layers=1)
    options = ["--preset", "hawk_tiny", "--slots", "1", "--port", "0"]
    monkeypatch.setattr(sys, "argv", ["serving", *options])
    monkeypatch.setattr(command, "load_model", lambda _: model)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    counts = []

    def run(process, engine, *options):
        counts.append(engine.stats()["requests"])
        engine.close()

    monkeypatch.setattr(processes.HTTPProcess, "run", run)
    with caplog.at_level(logging.INFO, "keras_recurrent.serving"), pytest.raises(SystemExit):
        command.main()
    assert counts == [4]
    assert "Prepared common options in" in caplog.text


def test_log_compilations_logs_program_and_seconds(caplog):
    """The log does not explain why requests wait."""
    jax = pytest.importorskip("jax")
    command.log_compilations()
    with caplog.at_level(logging.INFO, "keras_recurrent.serving"):
        event = "/jax/core/compile/backend_compile_duration"
        jax.monitoring.record_event_duration_secs(event, 1.5, fun_name="step")
    assert "Compiled the program step in 1.5 s" in caplog.text
