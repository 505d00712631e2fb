"""Random clients: cancellations, timeouts, malformed bodies and killed connections."""

import asyncio
import json
import random
import threading
import time

import httpx
import pytest

from keras_recurrent.models import GriffinCausalLM, SamplingParams
from keras_recurrent.serving import Engine
from tests.serving.test_server import GREEDY, MODEL, running

pytestmark = [pytest.mark.once, pytest.mark.nightly]

NUM_REQUESTS = 300
PROMPTS = [f"Question {n}: {'why? ' * n}" for n in range(6)]
MALFORMED = [b"{", b"[]", b'{"model": "tiny", "prompt": 1}', b'{"model": "x", "prompt": "a"}']


@pytest.fixture(scope="module")
def model():
    return GriffinCausalLM.from_preset("griffin_tiny_text")


async def ask(client, url, rng, expected):
    """Sends one request; returns its kind after checking the answer."""
    kind = rng.choice(["whole", "stream", "cancel", "timeout", "malformed", "killed"])
    number = rng.randrange(len(PROMPTS))
    body = {**MODEL, **GREEDY, "prompt": PROMPTS[number], "max_tokens": rng.randrange(1, 25)}
    text = expected[number][: body["max_tokens"]]
    url += "/v1/completions"
    if kind == "killed":
        host, port = httpx.URL(url).host, httpx.URL(url).port
        _, writer = await asyncio.open_connection(host, port)
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(data)}\r\n"
        head += "content-type: application/json\r\n\r\n"
        writer.write((head.encode() + data)[: rng.randrange(10, len(head) + len(data) + 1)])
        await writer.drain()
        await asyncio.sleep(rng.random() / 20)
        writer.transport.abort()
    elif kind == "malformed":
        headers = {"content-type": "application/json"}
        answer = await client.post(url, content=rng.choice(MALFORMED), headers=headers)
        assert answer.status_code in (400, 404)
        assert answer.json()["error"]["message"]
    elif kind == "timeout":
        try:
            answer = await client.post(url, json=body, timeout=rng.random() / 10 + 1e-3)
            assert answer.json()["choices"][0]["text"] == text
        except httpx.TimeoutException:
            pass
    elif kind == "whole":
        answer = await client.post(url, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == text
    else:
        found = ""
        async with client.stream("POST", url, json={**body, "stream": True}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    found += json.loads(line[6:])["choices"][0]["text"]
                    if kind == "cancel" and rng.random() < 0.2:
                        break
        assert found == text or kind == "cancel"
        assert text.startswith(found)
    return kind


async def ask_all(url, expected, num_requests):
    rng, limit = random.Random(0), asyncio.Semaphore(24)
    async with httpx.AsyncClient(timeout=60) as client:

        async def one():
            async with limit:
                return await ask(client, url, rng, expected)

        return await asyncio.gather(*(one() for _ in range(num_requests)))


def test_random_clients(model):
    """A slot, a thread or a connection is leaked, or a client gets another one's text."""
    engine = Engine(model, num_slots=8, max_length=256)
    sampling = SamplingParams(temperature=0, logit_bias={2: -100})
    answers = [engine.submit(prompt, sampling, max_new_tokens=24) for prompt in PROMPTS]
    expected = [answer.result().text for answer in answers]
    with running(engine) as server:
        num_threads = threading.active_count()
        kinds = asyncio.run(ask_all(server.url, expected, NUM_REQUESTS))
        assert len(set(kinds)) == 6
        service, end = server.config.app.state.service, time.monotonic() + 10
        while engine.stats()["active"] or engine.stats()["queued"] or service.generations:
            assert time.monotonic() < end, engine.stats()
            time.sleep(0.01)
        assert threading.active_count() <= num_threads + 40  # those of the pool
    assert engine.close() == []
