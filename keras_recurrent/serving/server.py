"""HTTP server with OpenAI's API: the FastAPI application and its graceful shutdown."""

import asyncio
import contextlib
import dataclasses
import logging
import pathlib
import time
from typing import Any

import fastapi
import uvicorn
from pydantic_core import to_json
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from keras_recurrent.chat.tools import calls_grammar, tool_format
from keras_recurrent.generation.grammar import GrammarError, unsupported_reason
from keras_recurrent.serving.gate import Gate, read_body, shutting_down
from keras_recurrent.serving.metrics import Metrics
from keras_recurrent.serving.protocol import ApiError, ChatBody, CompletionBody, value_error
from keras_recurrent.serving.request import EngineClosed, EngineFull
from keras_recurrent.serving.request_group import RequestGroup
from keras_recurrent.serving.responses import ChatFormat, CompletionFormat, LogprobTexts
from keras_recurrent.tokenizers.detokenizer import text_of

log = logging.getLogger("keras_recurrent.serving")
MAX_BODY = 2**20
SMALL_BODY = 2**14  # bytes; larger bodies are parsed in a thread
MAX_READ = 2**14  # bytes
STALL_SECONDS, STALL_BYTES = 30, 2**14  # a client must read so many bytes in this time
NO_TEMPLATE = "The model has no chat template. Use `/v1/completions`, or start the server with "
NO_TEMPLATE += "`--chat-template`."
INTERNAL_ERROR = "The server had an error; its log has the cause."
PAGE = pathlib.Path(__file__).with_name("chat.html")
PAGE_POLICY = "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; "
PAGE_POLICY += "style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"


class Service:
    """Engine, metrics and responses in progress of a server; arguments as in `create_app`."""

    def __init__(self, engine, model_name, api_key, max_body, timeout):
        self.engine, self.model_name, self.timeout = engine, model_name, timeout
        self.api_key, self.max_body = api_key, max_body
        self.created = int(time.time())
        self.tokens = LogprobTexts(engine.preprocessor)
        self.metrics = Metrics(engine)
        self._grammar_unsupported_reason = unsupported_reason()
        # Grammars are compiled one after another, so that most threads are left for other requests.
        self._compiling = asyncio.Lock()
        self.is_draining = False
        self.connections: Any = ()  # this and the next one are set by `Server`
        self.max_connections = None
        self.body_deadlines = set()  # an `asyncio.Timeout` for each body that arrives
        # {id of a response: its `RequestGroup`, None before it is submitted}
        self.groups = {}

    def check_model(self, name):
        if name != self.model_name:
            message = f"The model '{name}' does not exist; this server has '{self.model_name}'."
            raise ApiError(404, message, "model_not_found", param="model")

    async def start(self, body, form):
        """Submits the prompts of a request and returns their `RequestGroup`."""
        if self.is_draining:  # since the body was read
            raise shutting_down()
        self.engine.deliver_in(asyncio.get_running_loop())
        if body.grammar_field and self._grammar_unsupported_reason:
            reason = self._grammar_unsupported_reason
            message = f"For `response_format` and forced calls, the server {reason}."
            raise ApiError(501, message, "unsupported_parameter", param=body.grammar_field)
        self.groups[form.id] = None
        try:
            async with self._compiling if body.grammar_field else contextlib.nullcontext():
                requests = await run_in_threadpool(self._submit, body, form)
        except BaseException:
            del self.groups[form.id]
            raise
        self.groups[form.id] = RequestGroup(requests, self.metrics, body.stream)
        return self.groups[form.id]

    def _submit(self, body, form):
        preprocessor = self.engine.preprocessor
        if isinstance(body, ChatBody):
            template = getattr(preprocessor, "chat_template", None)
            if template is None:
                raise ApiError(400, NO_TEMPLATE, param="messages")
            for number, message in enumerate(body.messages):
                message.check_keys(number, template)
        limits, num_answers = self.engine.limits, len(body.prompts) * (body.n or 1)
        maximum = limits.num_slots + limits.max_queued
        if num_answers > maximum:
            raise ApiError(
                400,
                f"The number of answers, prompts times `n`, must be at most {maximum}, `--slots` "
                f"plus `--max-queued`; got {num_answers}. Send several smaller requests.",
            )
        requests = []
        try:
            options = {"sampling": body.sampling, "max_new_tokens": body.max_new_tokens}
            options |= {"stop": body.stop or None, "cache_salt": body.cache_salt}
            options |= {"prompt_logprobs": body.prompt_logprobs, "tools": body.shown_tools}
            if body.forced_tools:
                grammar = calls_grammar(preprocessor, body.forced_tools, body.max_calls)
                options["sampling"] = dataclasses.replace(body.sampling, grammar=grammar)
            for prompt in body.prompts:
                found = self.engine.submit(prompt, timeout=self.timeout, **options)
                requests += found if isinstance(found, list) else [found]
            if body.echo and preprocessor is not None:
                texts = [
                    p if isinstance(p, str) else text_of(preprocessor, p) for p in body.prompts
                ]
                form.echoed = dict(enumerate(text for text in texts for _ in range(body.n or 1)))
            if body.shown_tools:
                form.parse_tools(tool_format(preprocessor), body.shown_tools, body.max_calls)
            return requests
        except BaseException as error:
            for request in requests:
                request.cancel()
            if isinstance(error, EngineClosed):
                raise shutting_down() from error
            if isinstance(error, ValueError):
                raise value_error(error, body) from error
            raise

    @contextlib.asynccontextmanager
    async def cancel_at_end(self, form, group, receive):
        """Cancels a group of requests at the end of its response, or if the client disconnects."""
        watch = asyncio.ensure_future(_cancel_on_disconnect(receive, group))
        try:
            yield
        finally:
            watch.cancel()
            group.cancel()
            self.groups.pop(form.id, None)

    def check(self, completion):
        """Raises an `ApiError` if a request ended by its timeout."""
        if completion.finish_reason == "timeout":
            message = f"The request took more than {self.timeout:g} s."
            raise ApiError(504, message, "timeout")

    async def drain(self, seconds, is_forced):
        """Refuses new requests, waits for those in progress, and cancels the rest."""
        self.is_draining = True
        for deadline in self.body_deadlines:
            if not deadline.expired():
                deadline.reschedule(0)
        started, end = set(self.groups), time.monotonic() + seconds
        if started:
            log.warning(
                "Shutting down within %g s; unfinished requests: %d; a second signal cancels them",
                seconds,
                len(started),
            )
        while self.groups and time.monotonic() < end and not is_forced():
            await asyncio.sleep(0.02)
            started |= set(self.groups)
        cancelled = sorted(self.groups)
        for group in filter(None, self.groups.values()):
            group.cancel(shutting_down())
        log.warning(
            "Shutdown: requests finished: %d; cancelled: %d%s",
            len(started) - len(cancelled),
            len(cancelled),
            f" ({', '.join(cancelled)})" if cancelled else "",
        )


def _failure(error, body, form):
    """Returns the `ApiError` of an exception that ended a response; logs an unknown one."""
    if isinstance(error, EngineFull):
        message = "The server has too many requests. Send the request again later."
        error = ApiError(429, message, "rate_limit_exceeded", headers={"retry-after": "1"})
    elif isinstance(error, EngineClosed):
        message = "The engine has failed. Send the request to another replica, or again later."
        error = ApiError(503, message, "engine_failed", headers={"retry-after": "5"})
    elif isinstance(error, GrammarError):
        error = value_error(error, body)
    elif not isinstance(error, ApiError):
        log.exception("Response %s failed", form.id)
        error = ApiError(500, INTERNAL_ERROR)
    error.headers["x-request-id"] = form.id
    return error


class EventStream(StreamingResponse):
    """Server-sent events of one group of requests, which ends with the response."""

    def __init__(self, service, group, form, body):
        self._arguments = service, group, form, body
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", "x-request-id": form.id}
        super().__init__(self._stream_events(), headers=headers, media_type="text/event-stream")

    async def __call__(self, scope, receive, send):
        service, group, form, _ = self._arguments
        if connection := scope.get("state", {}).get("connection"):
            group.is_writable = lambda: connection.takes_chunks
            group.write = lambda *new: connection.write_chunk(self._encode(*new))
        async with service.cancel_at_end(form, group, receive):
            await self.stream_response(send)

    def _encode(self, index, text, logprobs):
        """Returns an event with new text and log probabilities, or b""."""
        _, group, form, _ = self._arguments
        text, logprobs = form.add_prompt(index, text, logprobs, group.prompt_logprobs(index))
        chunk = form.chunk(index, text, logprobs) if text or logprobs else None
        return b"" if chunk is None else _event(chunk)

    async def _stream_events(self):
        service, group, form, body = self._arguments
        if isinstance(form, ChatFormat):
            for index in range(body.n or 1):
                yield _event(form.first_chunk(index))
        try:
            async for index, *new, completion in group.events():
                if data := self._encode(index, *new):
                    yield data
                if completion is not None:
                    service.check(completion)
                    yield _event(form.chunk(index, "", [], completion.finish_reason))
        except Exception as error:
            yield _event(_failure(error, body, form).body)
            return
        if body.includes_usage:
            yield _event(form.usage_chunk(group.completions, body.n))
        yield b"data: [DONE]\n\n"


def _event(body):
    return b"data: %b\n\n" % to_json(body)


async def _parse(service, request, body_type):
    data = await read_body(request, service)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        message = "The header 'Content-Type' of the request must be 'application/json'."
        raise ApiError(415, message, "unsupported_media_type")
    if len(data) <= SMALL_BODY:
        return body_type.parse(data)
    return await run_in_threadpool(body_type.parse, data)


async def _respond(service, request, body_type, form_type):
    body = await _parse(service, request, body_type)
    service.check_model(body.model)
    form = form_type(body.model, service.tokens, bool(body.logprobs))
    try:
        group = await service.start(body, form)
        if body.stream:
            return EventStream(service, group, form, body)
        async with service.cancel_at_end(form, group, request.receive):
            async for *_, completion in group.events():
                service.check(completion)
    except Exception as error:
        raise _failure(error, body, form) from None
    answer = form.completion(group.completions, body.n)
    return JSONResponse(answer, headers={"x-request-id": form.id})


async def _cancel_on_disconnect(receive, group):
    while (await receive())["type"] != "http.disconnect":
        pass
    error = ApiError(499, "The client closed the connection.", "client_closed_request")
    group.cancel(error)


def create_app(engine, model_name, *, api_key=None, max_body=MAX_BODY, timeout=600):
    """Returns the FastAPI application that serves an engine with OpenAI's API.

    Args:
        engine: the `Engine`.
        model_name: string, the name of the model in the API.
        api_key: string that clients of `/v1` must send. None: no authentication.
        max_body: integer, maximum number of bytes in the body of a request.
        timeout: number of seconds after which a request ends with an error. None: no limit.
    """
    service = Service(engine, model_name, api_key, max_body, timeout)
    app = fastapi.FastAPI(openapi_url=None)
    app.state.service = service
    router = fastapi.APIRouter(prefix="/v1", route_class=Gate)

    @app.exception_handler(HTTPException)
    async def _http(request, error):
        message = f"{error.detail}: {request.method} {request.url.path}"
        return ApiError(error.status_code, message, headers=error.headers).response()

    @app.exception_handler(Exception)
    async def _other(request, error):
        return ApiError(500, INTERNAL_ERROR).response()

    @router.post("/chat/completions")
    async def _chat(request: fastapi.Request):
        return await _respond(service, request, ChatBody, ChatFormat)

    @router.post("/completions")
    async def _completions(request: fastapi.Request):
        return await _respond(service, request, CompletionBody, CompletionFormat)

    def model():
        about = {"id": model_name, "object": "model", "created": service.created}
        return {**about, "owned_by": "keras_recurrent"}

    @router.get("/models")
    async def _models():
        return {"object": "list", "data": [model()]}

    @router.get("/models/{name:path}")
    async def _model(name: str):
        service.check_model(name)
        return model()

    app.include_router(router)

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def _health():
        status = "shutting down" if service.is_draining else "ok"
        status = "the engine failed" if status == "ok" and engine.is_closed else status
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    @app.get("/metrics")
    async def _metrics():
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.api_route("/", methods=["GET", "HEAD"])
    async def _page():
        headers = {"content-security-policy": PAGE_POLICY}
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=headers)

    return app


class Connection(H11Protocol):
    """Connection of uvicorn that is closed if it stalls, and that streams write to directly."""

    _stall: Any = (None, 0)  # its state and when it began

    def connection_made(self, transport):
        # In 256 KiB, asyncio's default, a body may have 40,000 chunks, while others wait.
        if hasattr(transport, "max_size"):
            transport.max_size = MAX_READ
        super().connection_made(transport)
        self.app_state = {**self.app_state, "connection": self}

    @property
    def takes_chunks(self):
        """True if `write_chunk` may be called: over HTTP/1.1, unless the client is slow."""
        is_open = not self.flow.write_paused and not self.transport.is_closing()
        return is_open and self.scope["http_version"] == "1.1"

    def write_chunk(self, data):
        """Sends a part of a response in chunks, without the layers of ASGI and h11."""
        if data:
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def abort_if_stalled(self, now):
        """Closes the connection if the client sends no headers, or reads nothing, for too long."""
        state = None
        if self.cycle is None or self.cycle.response_complete or self.flow.write_paused:
            state = self.cycle, self.transport.get_write_buffer_size() // STALL_BYTES
        if state is None or state != self._stall[0]:
            self._stall = state, now
        elif now - self._stall[1] > STALL_SECONDS:
            self.transport.abort()


class Server(uvicorn.Server):
    """uvicorn's server, which finishes or cancels requests before it ends.

    Args:
        app: an application of `create_app`.
        listener: a socket of `bind`.
        max_connections: integer, maximum number of connections; while there are more, requests get
            status 503.
        grace_period: number of seconds in which requests can finish after SIGTERM.
    """

    def __init__(self, app, listener, max_connections=2048, grace_period=30):
        self._service, self._grace_period = app.state.service, grace_period
        self._listener = listener
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",  # it would log the cancellation of its task after a second Ctrl-C
            timeout_graceful_shutdown=5,
            access_log=False,
            server_header=False,
        )
        super().__init__(config)
        self._service.connections = self.server_state.connections
        self._service.max_connections = max_connections

    async def serve(self, sockets=None):
        await super().serve(sockets or [self._listener])

    async def startup(self, sockets=None):
        await super().startup(sockets)
        host, port = self._listener.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        logging.getLogger("uvicorn.error").info("Listening on http://%s:%d", host, port)

    async def on_tick(self, counter):
        if counter % 10 == 0:  # once per second
            for connection in list(self._service.connections):
                connection.abort_if_stalled(time.monotonic())
        return await super().on_tick(counter)

    async def shutdown(self, sockets=None):
        await self._service.drain(self._grace_period, lambda: self.force_exit)
        for connection in list(self._service.connections):
            if connection.flow.write_paused:  # uvicorn would wait for the client
                connection.transport.abort()
        await super().shutdown(sockets)
        await run_in_threadpool(self._service.engine.close)
