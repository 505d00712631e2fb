"""The recipes with Ray Serve and Ray Data, where these are installed: `make test-ray`."""

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time

import httpx
import pytest

from tests.processes import ROOT, printed

openai = pytest.importorskip("openai")

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="ray is not installed"),
]
MODEL = "griffin_tiny_text"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """Address of two replicas."""
    log_path = tmp_path_factory.mktemp("ray") / "log"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "guides/recipes/ray_serve.py", "--port", str(port)]
    command += ["--preset", MODEL, "--replicas", "2", "2", "--slots", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    try:
        end = time.monotonic() + 300
        while "is ready at" not in log_path.read_text():  # all replicas
            assert process.poll() is None, log_path.read_text()
            assert time.monotonic() < end, log_path.read_text()
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60)


def test_ray_serve_sends_each_session_to_one_replica(url, client):
    """Replicas do not answer, one gets all sessions, or the next turn goes to another one."""

    def ask(session, prompt):
        answer = client.completions.create(
            model=MODEL,
            prompt=prompt,
            temperature=0,
            max_tokens=8,
            extra_headers={"X-Session-Id": session},
        )
        return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens

    sessions = [str(number) for number in range(10)]
    prompts = [f"Session {session}: " for session in sessions]
    texts = [ask(*pair)[0] for pair in zip(sessions, prompts, strict=True)]
    for session, prompt, text in zip(sessions, prompts, texts, strict=True):
        _, num_cached = ask(session, prompt + text + " More")
        assert num_cached > len(prompt)
    for session in sessions[:2]:
        headers = {"X-Session-Id": session}
        text = httpx.get(f"{url}/metrics", headers=headers, timeout=60).text
        ended = re.findall(r"^keras_recurrent_requests_total\S+ (\S+)", text, re.MULTILINE)
        assert 0 < sum(map(float, ended)) < 2 * len(sessions)


def test_ray_serve_streams_chunks(client):
    """Ray Serve collects a streamed response before it sends it."""
    stream = client.completions.create(model=MODEL, prompt="a", max_tokens=8, stream=True)
    assert sum(len(chunk.choices) for chunk in stream) > 1


def test_ray_data_generates_missing_parts_with_equal_answers(tmp_path):
    """Ray cannot run the actors, or a run after an interruption gives other answers."""
    lines = [json.dumps({"id": i, "prompt": f"ROMEO: {i}"}) for i in range(6)]
    (tmp_path / "prompts.jsonl").write_text("\n".join([*lines, json.dumps({"id": 6})]))
    command = ["guides/recipes/batch_inference.py", "--input", str(tmp_path / "prompts.jsonl")]
    command += ["--output", str(tmp_path), "--lines", "3", "--actors", "2", "--slots", "2"]
    command += ["--max-tokens", "8", "--temperature", "1"]
    environment = {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}

    def answers():
        return [path.read_text() for path in sorted(tmp_path.glob("prompts-*"))]

    assert "3 parts to generate" in printed(*command, **environment)
    expected = answers()
    objects = [json.loads(line) for line in "".join(expected).splitlines()]
    assert [answer["id"] for answer in objects] == [*range(7)]
    assert all("text" in answer for answer in objects[:6])
    assert "error" in objects[6]
    (tmp_path / "prompts-000000003.jsonl").unlink()
    assert "1 of 1 parts: {'answers': 3, 'errors': 0}" in printed(*command, **environment)
    assert answers() == expected
