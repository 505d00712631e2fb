"""Checks of HTTP requests before FastAPI sees them: API key, size and time of the body."""

import asyncio
import hmac

from starlette.responses import JSONResponse

from keras_recurrent.serving.protocol import ApiError

BODY_SECONDS = 30


class Gate:
    """ASGI middleware for `/v1`: refuses requests without the key, with too large bodies, and those
    of too many connections.

    Args:
        app: the ASGI application.
        service: the `Service`, which has the connections and tells if the server shuts down.
        api_key, max_body: as in `create_app`.
    """

    def __init__(self, app, service, api_key, max_body):
        self._app, self._service = app, service
        self._key = None if api_key is None else api_key.encode()
        self._max_body = max_body

    async def __call__(self, scope, receive, send):
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or not path.startswith("/v1/"):
            await self._app(scope, receive, send)
            return

        async def counted_send(message):
            if message["type"] == "http.response.start":
                self._service.metrics.response(message["status"])
            await send(message)

        try:
            self._check(scope)
            body = await self._read(receive)
        except ApiError as error:
            response = JSONResponse(error.body, error.status, error.headers)
            await response(scope, receive, counted_send)
            return
        if body is None:  # the client has disconnected
            return
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replayed():
            return messages.pop() if messages else await receive()

        await self._app(scope, replayed, counted_send)

    def _check(self, scope):
        limit = self._service.max_connections
        if limit is not None and len(self._service.connections) > limit:
            message = f"The server has more than {limit} connections. Try again later."
            headers = {"retry-after": "1", "connection": "close"}
            raise ApiError(503, message, "too_many_connections", headers=headers)
        if self._key is not None:
            header = dict(scope["headers"]).get(b"authorization", b"")
            scheme, _, key = header.partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(key, self._key):
                message = (
                    "Missing or incorrect API key. Send the key in the header 'Authorization: "
                    "Bearer KEY'."
                )
                headers = {"www-authenticate": "Bearer"}
                raise ApiError(401, message, "invalid_api_key", headers=headers)
        if self._service.is_draining and scope["method"] == "POST":
            raise shutting_down()

    async def _read(self, receive):
        """Returns the body; None if the client disconnects.

        The time limit is cut short if the server shuts down. The rest of a body that is too large
        is read and dropped: a client that is still sending would not see the error otherwise.
        """
        chunks, size, deadlines = [], 0, self._service.body_deadlines
        try:
            async with asyncio.timeout(BODY_SECONDS) as deadline:
                deadlines.add(deadline)
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    size += len(message.get("body", b""))
                    if size <= self._max_body:
                        chunks.append(message.get("body", b""))
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            if self._service.is_draining:
                raise shutting_down() from None
            message = f"The body of the request took more than {BODY_SECONDS} s."
            headers = {"connection": "close"}
            raise ApiError(408, message, "timeout", headers=headers) from None
        finally:
            deadlines.discard(deadline)
        if size > self._max_body:
            message = f"The body has {size} bytes; the maximum is {self._max_body}."
            raise ApiError(413, message, "request_too_large")
        return b"".join(chunks)


def shutting_down():
    """Returns the error of a server that takes no more requests."""
    message = "The server is shutting down. Send the request to another replica, or again later."
    headers = {"retry-after": "5", "connection": "close"}
    return ApiError(503, message, "shutting_down", headers=headers)
