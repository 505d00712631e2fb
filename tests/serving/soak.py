"""Random clients of a server: cancellations, timeouts, malformed bodies and killed connections.

Run the server in another process and send it 10,000 requests:

    KERAS_BACKEND=torch python -m tests.serving.soak --requests 10000
"""

import argparse
import asyncio
import collections
import contextlib
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

import httpx

from keras_recurrent.models import GriffinCausalLM, SamplingParams
from tests.processes import ROOT

NAME, KEY = "griffin_tiny_text", "secret"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
PROMPTS = ["ROMEO:\n", "The ", "Once upon a time", "KING HENRY: My", "def f(", "All happy families"]
NUM_TOKENS = 16
NO_END = {"2": -100}  # logit bias of the end token
# Rounding, which differs between batches and cached states, must not change the best token.
MARGIN = 1e-3
MAX_LENGTH, MAX_BODY = 6000, 20_000
SERVER = {
    "--preset": NAME,
    "--slots": 16,
    "--port": 0,
    "--max-length": MAX_LENGTH,
    "--max-queued": 18,  # some requests find a full queue
    "--max-body": MAX_BODY,
    "--timeout": 6,
    "--grace-period": 2,
    "--prefix-cache-bytes": 2**24,  # full before memory is measured
}
NUM_CONNECTIONS = 32
# Kinds of requests, and how often they are sent.
KINDS = {"whole": 20, "chat": 15, "stream": 20, "cancel": 10, "impatient": 10, "killed": 10}
KINDS |= {"refused": 12, "late": 1}
WRONG_KEY = b"wrong key"
REFUSED = {
    b"{": 400,
    b"[]": 400,
    b'{"model": "%s", "prompt": 1}' % NAME.encode(): 400,
    b'{"model": "%s", "prompt": "%s"}' % (NAME.encode(), b"a" * MAX_LENGTH): 400,
    b'{"model": "x", "prompt": "a"}': 404,
    b'{"prompt": "%s"}' % (b"a" * MAX_BODY): 413,
    WRONG_KEY: 401,
}
REFUSALS = (429, 503)  # full queue, shutdown


def expected_answers():
    """Returns request bodies with the texts of `generate`: greedy, seeded, and second turns."""
    model = GriffinCausalLM.from_preset(NAME)
    bias = {int(token): value for token, value in NO_END.items()}
    prompts, answers = PROMPTS, []
    for _ in range(2):
        options = [{"temperature": 0}] * len(prompts)
        options += [{"temperature": 0.8, "seed": seed} for seed in range(len(prompts))]
        prompts = prompts * 2
        output = model.generate(
            prompts,
            sampling=[SamplingParams(**each, logit_bias=bias, logprobs=2) for each in options],
            max_new_tokens=NUM_TOKENS,
            strip_prompt=True,
        )
        found = zip(prompts, options, output.texts, output.logprobs, strict=True)
        for prompt, each, text, logprobs in found:
            assert text.isascii(), text  # one character for each token
            if each["temperature"] == 0:
                tops = [sorted(token.top.values()) for token in logprobs]
                assert min(top[-1] - top[-2] for top in tops) > MARGIN, prompt
            answers.append(({**each, "prompt": prompt, "logit_bias": NO_END}, text))
        # The next turns begin with saved states of the first ones.
        prompts = [prompt + text for (prompt, text) in zip(prompts, output.texts, strict=True)][:6]
    return answers


class Clients:
    """Clients of a server, which check every response.

    url: address of the server. answers: request bodies and texts of `expected_answers`.
    outcomes: a `Counter` of (kind of request, outcome). ids: the ids of whole answers.
    cancelled: ids of requests that the server cancelled at its shutdown.
    """

    def __init__(self, url, answers, seed=0):
        self._url, self._answers, self._rng = f"{url}/v1/", answers, random.Random(seed)
        self.outcomes, self.ids, self.cancelled = collections.Counter(), [], []
        headers = {"authorization": f"Bearer {KEY}"}
        self._client = httpx.AsyncClient(base_url=self._url, headers=headers, timeout=60)

    async def send(self, num_requests, kinds=None, is_ending=lambda: False):
        """Sends requests of random kinds; `is_ending` tells if connections may be refused."""
        kinds, limit = kinds or KINDS, asyncio.Semaphore(NUM_CONNECTIONS)

        async def one(kind):
            async with limit:
                try:
                    outcome = await getattr(self, f"_{kind}")()
                except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError):
                    assert is_ending(), f"{kind}: the server closed a connection"
                    outcome = "connection refused"
                self.outcomes[kind, outcome] += 1

        chosen = self._rng.choices(list(kinds), list(kinds.values()), k=num_requests)
        await asyncio.gather(*map(one, chosen))

    async def close(self):
        await self._client.aclose()

    def _request(self, **options):
        """Returns the body of a request, and the text of its answer."""
        body, text = self._rng.choice(self._answers)
        number = self._rng.randrange(1, NUM_TOKENS + 1)
        return {"model": NAME, **body, "max_tokens": number, **options}, text[:number]

    async def _error(self, response, *statuses):
        """Checks an error response; returns the outcome, after a pause if the queue is full."""
        status, error = response.status_code, response.json()["error"]
        assert status in (*statuses, *REFUSALS), response.text
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["message"]
        if error["code"] == "shutting_down" and "x-request-id" in response.headers:
            self.cancelled.append(response.headers["x-request-id"])
            return "cancelled by the server"
        if status == 429:
            assert response.headers["retry-after"] == "1"
            await asyncio.sleep(self._rng.random())
        return status

    async def _whole(self, path="completions", client_timeout=60):
        body, text = self._request()
        if path == "chat/completions":
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        response = await self._client.post(path, json=body, timeout=client_timeout)
        if response.status_code != 200:
            return await self._error(response, 504)
        found = response.json()
        (choice,) = found["choices"]
        assert (choice["message"]["content"] if "message" in choice else choice["text"]) == text
        assert choice["finish_reason"] == "length"
        assert found["usage"]["completion_tokens"] == len(text)
        self.ids.append(found["id"])
        return "whole answer"

    async def _chat(self):
        return await self._whole("chat/completions")

    async def _impatient(self):
        try:
            return await self._whole(client_timeout=self._rng.random() / 5 + 1e-3)
        except httpx.TimeoutException:
            return "client left"

    async def _stream(self, leaves=False):
        body, text = self._request(stream=True)
        found, is_whole = "", False
        async with self._client.stream("POST", "completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                return await self._error(response)
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    is_whole |= line == "data: [DONE]"
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    assert event["error"]["code"] in ("timeout", "shutting_down"), event
                    assert text.startswith(found)
                    if event["error"]["code"] == "timeout":
                        return 504
                    self.cancelled.append(response.headers["x-request-id"])
                    return "cancelled by the server"
                found += event["choices"][0]["text"]
                assert text.startswith(found)
                if leaves and self._rng.random() < 0.1:
                    return "client left"
        assert is_whole
        assert found == text
        self.ids.append(response.headers["x-request-id"])
        return "whole answer"

    async def _cancel(self):
        return await self._stream(leaves=True)

    async def _killed(self):
        """Sends a part of a request, or a whole one, and resets the connection."""
        url, (body, _) = httpx.URL(self._url), self._request()
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(data)}\r\n"
        head += f"content-type: application/json\r\nauthorization: Bearer {KEY}\r\n\r\n"
        _, writer = await asyncio.open_connection(url.host, url.port)
        data = head.encode() + data
        is_whole = self._rng.random() < 0.5
        writer.write(data if is_whole else data[: self._rng.randrange(1, len(data))])
        await writer.drain()
        await asyncio.sleep(self._rng.random() / 20)
        writer.transport.abort()
        return "client left"

    async def _refused(self):
        content, status = self._rng.choice(list(REFUSED.items()))
        headers = {"content-type": "application/json"}
        if content == WRONG_KEY:
            headers["authorization"] = "Bearer wrong"
        response = await self._client.post("completions", content=content, headers=headers)
        return await self._error(response, status)

    async def _late(self):
        """Requests more tokens than the server generates before the timeout."""
        body, _ = self._request(max_tokens=MAX_LENGTH - 100)
        response = await self._client.post("completions", json=body)
        return await self._error(response, 504)


@contextlib.contextmanager
def server(folder):
    """Starts a server; yields its process and the path of its log."""
    template, log = folder / "template.jinja", folder / "log"
    template.write_text(TEMPLATE)
    options = {**SERVER, "--chat-template": template}
    command = [sys.executable, "-m", "keras_recurrent.serving"]
    command += [str(each) for pair in options.items() for each in pair]
    environment = {**os.environ, "KERAS_RECURRENT_API_KEY": KEY}
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=file)
    try:
        yield process, log
    finally:
        process.kill()
        process.wait()


def wait_for_address(process, log):
    """Returns the address of a server, once it listens."""
    while not (match := re.search(r"Listening on (http://\S+)", log.read_text())):
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    return match[1]


def child_id(process):
    """Returns the id of the HTTP process of a server."""
    ids = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    # Another one renders chat templates.
    (found,) = (
        n for n in ids if b"http_process" in pathlib.Path(f"/proc/{n}/cmdline").read_bytes()
    )
    return int(found)


def resources(*ids):
    """Returns resident memory in MiB, and numbers of threads and open files of processes."""
    memory = threads = files = 0
    for id in ids:
        folder = pathlib.Path(f"/proc/{id}")
        values = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        memory += int(values["VmRSS"].split()[0]) / 1024
        threads += int(values["Threads"])
        files += len(list((folder / "fd").iterdir()))
    return SimpleNamespace(memory=memory, threads=threads, files=files)


def metrics(url):
    """Returns the samples of `/metrics`."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.removeprefix("keras_recurrent_"): float(value) for name, value in pairs}


async def idle_metrics(url, seconds=30):
    """Waits until no slot is in use and all tokens are in the metrics, which it returns."""
    end = time.monotonic() + seconds
    while True:
        found = metrics(url)
        histograms = ("time_to_first_token_seconds_count", "inter_token_seconds_count")
        num_tokens = sum(found[name] for name in histograms)
        is_idle = not (found["slots_active"] or found["requests_queued"])
        if is_idle and num_tokens == found["tokens_total"]:
            return found
        assert time.monotonic() < end, found
        await asyncio.sleep(0.05)


async def run_clients(url, process, answers, num_requests):
    """Sends the requests, and SIGTERM among the last ones; returns figures and clients."""
    clients, used, begin = Clients(url, answers), [], time.monotonic()
    await clients.send(max(num_requests // 10, 100))
    await idle_metrics(url)
    used.append(resources(process.pid, child_id(process)))
    for _ in range(9):
        await clients.send(num_requests // 10)
        found = await idle_metrics(url)
        used.append(resources(process.pid, child_id(process)))
    seconds = time.monotonic() - begin
    # SIGTERM while requests run, some of which cannot finish.
    last = Clients(url, answers, seed=1)
    kinds = {"whole": 4, "chat": 2, "stream": 4, "late": 1}
    is_ending = False

    async def stop():
        nonlocal is_ending
        while not last.ids:
            await asyncio.sleep(0.001)
        is_ending = True
        process.terminate()

    await asyncio.gather(stop(), last.send(max(num_requests // 20, 60), kinds, lambda: is_ending))
    for each in (clients, last):
        await each.close()
    return {"metrics": found, "resources": used, "seconds": seconds}, clients, last


def run(num_requests):
    """Runs server and clients; returns the figures, after checks that hold for any number."""
    with tempfile.TemporaryDirectory() as folder, server(pathlib.Path(folder)) as (process, log):
        answers = expected_answers()  # while the server starts
        url = wait_for_address(process, log)
        figures, clients, last = asyncio.run(run_clients(url, process, answers, num_requests))
        process.wait(30)
        text = log.read_text()
    figures["outcomes"], figures["last outcomes"] = clients.outcomes, last.outcomes
    (line,) = re.findall(r"Shutdown: .*", text)
    figures["shutdown"] = re.sub(r": cmpl.*|: chatcmpl.*", "", line)
    # Clients have the answers, or timeouts, that the server sent, and know all others.
    cancelled = re.findall(r"(?:chat)?cmpl-\w+", line)
    assert sorted(cancelled) == sorted(last.cancelled), (line, last.cancelled)
    num_late = sum(n for (_, outcome), n in last.outcomes.items() if outcome == 504)
    finished = re.match(r"Shutdown: requests finished: (\d+)", line)
    assert int(finished[1]) <= len(last.ids) + num_late, figures
    assert "Traceback" not in text, text
    answered = {kind for kind, outcome in clients.outcomes if outcome == "whole answer"}
    assert {"whole", "chat", "stream"} <= answered
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    figures = run(parser.parse_args().requests)
    for key, value in figures.items():
        print(f"{key}: {value}")


if __name__ == "__main__":
    main()
