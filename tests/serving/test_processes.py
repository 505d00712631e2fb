"""The border between the processes of the engine and of HTTP: imports, signals and crashes."""

import contextlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time

import httpx
import keras_hub
import numpy as np
import pytest

pytest.importorskip("fastapi")

from keras_recurrent.chat.preprocessing import plain_preprocessor
from keras_recurrent.models import GriffinCausalLMPreprocessor
from keras_recurrent.serving.processes import load_preprocessor
from keras_recurrent.tokenizers import ByteTokenizer
from keras_recurrent.tokenizers.checkpoint_files import tokenize_parts
from keras_recurrent.tokenizers.detokenizer import text_of
from tests.generation.test_text import TOKENIZERS
from tests.models.tiny import tiny_causal_lm
from tests.processes import ROOT, fresh_process
from tests.serving.soak import child_id, resources
from tests.tokenizers.sentence_piece import train

pytestmark = pytest.mark.once

FOLDER = ROOT / "keras_recurrent" / "serving"
FRAMEWORKS = {"keras", "keras_hub", "torch", "jax", "tensorflow"}
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
BODY = {"model": "letters", "prompt": "a", "max_tokens": 100, "stream": True}


@contextlib.contextmanager
def stub_server(seconds=0.01):
    """Starts a server whose engine generates letters; yields its process, address and HTTP's id."""
    command = [sys.executable, str(ROOT / "tests" / "serving" / "stub_engine.py"), str(seconds)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        lines = iter(process.stderr.readline, "")
        (url,) = next(filter(None, (re.findall(r"Listening on (\S+)", line) for line in lines)))
        yield process, url, child_id(process)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@contextlib.contextmanager
def streamed(url):
    """Yields the events of an answer."""
    with httpx.stream("POST", f"{url}/v1/completions", json=BODY, timeout=20) as response:
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        yield (json.loads(line) for line in lines if line != "[DONE]")


def is_served(url):
    """Returns False if the address refuses connections."""
    try:
        httpx.get(f"{url}/health")
    except httpx.ConnectError:
        return False
    except httpx.TransportError:  # accepted, then closed by the end of the process
        pass
    return True


def test_http_process_imports_no_framework():
    """The HTTP process takes 700 MB and 10 s to start."""
    code = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import http_process\n"
    code += "for name in ('keras_recurrent', 'keras_recurrent.tokenizers'):\n"
    code += "    http_process.import_parts(name)\n"
    code += "sys.path.pop(0)\n"
    code += "from keras_recurrent.serving import processes, server\n"
    code += "from keras_recurrent.tokenizers import bpe_file\n"
    code += "import json; print(json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"
    assert set(fresh_process("-c", code)) & FRAMEWORKS == set()


def test_sigterm_finishes_answers_and_both_processes():
    """An answer is cut, the processes stay, or the server starts with too much memory or time."""
    with stub_server() as (process, url, http_id), streamed(url) as events:
        found = resources(http_id)
        assert found.memory < 200
        with open(f"/proc/{http_id}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        assert sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") < 3
        text = next(events)["choices"][0]["text"]
        process.send_signal(signal.SIGTERM)
        choices = [event["choices"][0] for event in events]
        assert len(text + "".join(choice["text"] for choice in choices)) == 100
        assert choices[-1]["finish_reason"] == "length"
        assert process.wait(20) == 0


def test_second_ctrl_c_ends_both_processes_without_a_traceback():
    """A user who does not wait for running answers sees an error of the server's libraries."""
    # No step ends before the HTTP process does.
    with stub_server(seconds=2) as (process, url, _), streamed(url) as events:
        next(events)
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)  # two signals at once may be delivered as one
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(httpx.TransportError):
            list(events)
        process.wait(20)
        assert "Traceback" not in process.stderr.read()


def test_crash_of_the_http_process_ends_the_engine():
    """The engine's process stays on the device, without clients."""
    with stub_server() as (process, url, http_id), streamed(url) as events:
        next(events)
        os.kill(http_id, signal.SIGKILL)
        with pytest.raises(httpx.RemoteProtocolError):
            list(events)
        assert process.wait(20) == 1


def test_crash_of_the_engine_is_an_error_for_open_requests():
    """Clients wait forever, or the HTTP process stays and keeps the port."""
    with stub_server() as (process, url, _), streamed(url) as events:
        next(events)
        process.kill()
        assert list(events)[-1]["error"]["code"] == "engine_failed"
        end = time.monotonic() + 20
        while is_served(url):
            assert time.monotonic() < end
            time.sleep(0.05)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_plain_preprocessor_reproduces_that_of_the_model(name):
    """The HTTP process tokenizes a prompt, or shows tokens, differently from the model."""
    tokenizer, rng = TOKENIZERS[name](), np.random.default_rng(0)
    preprocessor = GriffinCausalLMPreprocessor(tokenizer, chat_template=TEMPLATE)
    plain = pickle.loads(pickle.dumps(plain_preprocessor(preprocessor)))
    text = "é€😀 all happy  families"
    assert plain.tokenizer([text, ""]) == [list(map(int, ids)) for ids in tokenizer([text, ""])]
    for _ in range(30):
        ids = rng.integers(0, tokenizer.vocabulary_size() + 9, 12)
        assert text_of(plain, ids) == text_of(preprocessor, ids)
    prompts = [
        each.apply_chat_template([{"role": "user", "content": text}])
        for each in (plain, preprocessor)
    ]
    assert prompts[0].parts == prompts[1].parts
    assert tokenize_parts(plain.tokenizer, prompts[0].parts, [3]) == tokenize_parts(
        tokenizer, prompts[1].parts, [3]
    )
    assert plain.stop_token_ids == preprocessor.stop_token_ids


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of KerasHub: an open file
def test_preprocessor_of_a_tokenizer_of_kerashub_is_loaded_from_the_preset(tmp_path):
    """The HTTP process has no tokenizer, or one without the methods of a user's class."""

    class Tokenizer(ByteTokenizer):
        pass

    assert plain_preprocessor(GriffinCausalLMPreprocessor(Tokenizer())) is None
    pieces = {"pad_piece": "<pad>", "eos_piece": "<eos>", "bos_piece": "<bos>"}
    file = train(**pieces, pad_id=0, eos_id=1, bos_id=2, unk_id=3)
    tokenizer = keras_hub.models.GemmaTokenizer(file)
    preprocessor = GriffinCausalLMPreprocessor(tokenizer)
    assert plain_preprocessor(preprocessor) is None
    size = tokenizer.vocabulary_size()
    model = tiny_causal_lm(preprocessor=preprocessor, vocabulary_size=size, num_layers=1)
    model.save_to_preset(tmp_path)
    again = load_preprocessor(str(tmp_path), {"chat_template": TEMPLATE})
    assert again.chat_template == TEMPLATE
    text = "all happy"
    assert list(again.tokenizer(text)) == list(tokenizer(text))
