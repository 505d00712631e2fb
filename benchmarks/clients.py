"""Clients of a server with OpenAI's API. This script imports no framework.

`benchmarks.serving` starts four processes of it, each with a load as a line of JSON.
"""

import asyncio
import bisect
import itertools
import json
import math
import random
import re
import sys
import time
from typing import Any, NamedTuple

EVENT = re.compile(rb"data: ({.*?})\n\n")


class Answer(NamedTuple):
    """Answer to a request.

    Attributes:
        begin: float, time of `time.perf_counter` at which the request was sent.
        times: a list of floats, the times at which parts of the text arrived.
        num_tokens, num_prompt_tokens: integers.
        num_cached: integer, number of tokens of the prompt that were in the prefix cache.
        text: string.
    """

    begin: float
    times: list[float]
    num_tokens: int
    num_prompt_tokens: int = 0
    num_cached: int = 0
    text: str = ""


class Load(NamedTuple):
    """Requests that arrive in one of three ways.

    Attributes:
        prompt, answer: integers, mean numbers of tokens.
        seconds: float, duration of the arrivals.
        is_equal: boolean. False: lengths are uniform from half to three halves of the mean.
        clients: integer, number of clients; each sends a request after the answer to the last one.
        rate: float, requests/s at random times (a Poisson process), instead of clients.
        requests: integer, number of requests that arrive at once, instead of clients.
        seed: integer.
    """

    prompt: int
    answer: int
    seconds: float = 0
    is_equal: bool = False
    clients: int = 0
    rate: float = 0
    requests: int = 0
    seed: int = 0

    @property
    def name(self):
        return f"{self.clients} clients" if self.clients else f"{self.rate:.1f} requests/s"

    def parts(self, count):
        """Returns the loads of `count` processes."""
        loads = []
        for i in range(count):
            clients = len(range(i, self.clients, count))
            seed = self.seed * count + i
            loads.append(self._replace(clients=clients, rate=self.rate / count, seed=seed))
        return [load for load in loads if load.clients or load.rate]


async def drive(send, load):
    """Returns the `Answer`s to the requests of a `Load`.

    send: a coroutine function of the numbers of tokens of a prompt and its answer.
    """
    rng, answers, begin = random.Random(load.seed), [], time.perf_counter()

    def length(mean):
        return mean if load.is_equal else rng.randint(max(1, mean // 2), 3 * mean // 2)

    async def request():
        answers.append(await send(length(load.prompt), length(load.answer)))

    async def client():
        while time.perf_counter() < begin + load.seconds:
            await request()

    async with asyncio.TaskGroup() as tasks:
        for function, count in ((client, load.clients), (request, load.requests)):
            for _ in range(count):
                tasks.create_task(function())
        arrival = begin + rng.expovariate(load.rate) if load.rate else math.inf
        while arrival < begin + load.seconds:
            await asyncio.sleep(arrival - time.perf_counter())
            tasks.create_task(request())
            arrival += rng.expovariate(load.rate)
    return sorted(answers)


class Clients:
    """Clients of one process, with a connection for each request in progress.

    Args:
        port: integer, port of the server on this machine.
        options: a dictionary, fields of all request bodies, such as the model and `stream`.
        seed: integer.
    """

    def __init__(self, port, options, seed=0):
        self._port, self._options, self._rng = port, options, random.Random(seed)
        self._free: list[Any] = []  # connections

    def prompt(self, num_tokens):
        """Returns random digits, each of which is a token."""
        return "".join(self._rng.choices("0123456789", k=num_tokens))

    async def send(self, num_prompt_tokens, num_new_tokens):
        """Returns the `Answer` to a prompt of random digits."""
        prompt = self.prompt(num_prompt_tokens)
        return await self.post("completions", {"prompt": prompt, "max_tokens": num_new_tokens})

    def close(self):
        for _, writer in self._free:
            writer.close()

    async def post(self, path, body):
        """Returns the `Answer` to the body of a request."""
        body = json.dumps({**self._options, **body}).encode()
        head = f"POST /v1/{path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        begin = time.perf_counter()
        if not self._free:
            self._free.append(await asyncio.open_connection("127.0.0.1", self._port))
        reader, writer = connection = self._free.pop()
        writer.write(head.encode() + body)
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        if length is not None:
            data = await reader.readexactly(int(length[1]))
            if b" 200 " not in head[:16]:
                raise RuntimeError(f"The server answered {data.decode()}")
            answer = whole_answer(begin, time.perf_counter(), data)
        else:
            answer = streamed_answer(begin, await read_chunks(reader))
        self._free.append(connection)
        return answer


async def read_chunks(reader):
    """Returns the `(time, bytes)` of a body in chunks, as they arrive."""
    parts, end = [], b""
    while end != b"0\r\n\r\n":
        data = await reader.read(2**16)
        if not data:
            raise RuntimeError("The server closed the connection.")
        parts.append((time.perf_counter(), data))
        end = (end + data)[-5:]
    return parts


def whole_answer(begin, end, data):
    body = json.loads(data)
    (choice,) = body["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return Answer(begin, [end], text=text, **usage_of(body))


def streamed_answer(begin, parts):
    """Returns the `Answer` of server-sent events, the last of which has the usage."""
    ends = list(itertools.accumulate(len(data) for _, data in parts))
    times, text = [], ""
    for event in EVENT.finditer(b"".join(data for _, data in parts)):
        body = json.loads(event[1])
        if "error" in body:
            raise RuntimeError(f"The server answered {body}")
        for choice in body["choices"]:
            new = choice["text"] if "text" in choice else choice["delta"].get("content")
            if new:
                times.append(parts[bisect.bisect_left(ends, event.end())][0])
                text += new
    times = times or [parts[-1][0]]  # only an end token
    return Answer(begin, times, text=text, **usage_of(body))


def usage_of(body):
    """Returns the numbers of tokens of an `Answer`."""
    usage = body["usage"]
    return {
        "num_tokens": usage["completion_tokens"],
        "num_prompt_tokens": usage["prompt_tokens"],
        "num_cached": usage["prompt_tokens_details"]["cached_tokens"],
    }


def main():
    port, options, load = json.loads(sys.stdin.readline())
    load = Load(**load)
    answers = asyncio.run(drive(Clients(port, options, load.seed).send, load))
    found = [answer._replace(text="") for answer in answers]
    json.dump({"answers": found, "cpu_seconds": time.process_time()}, sys.stdout)


if __name__ == "__main__":
    main()
