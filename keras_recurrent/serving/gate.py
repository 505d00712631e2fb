"""Checks of HTTP requests to `/v1`: API key, connections, size and time of the body."""

import asyncio
import hmac

from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from keras_recurrent.serving.protocol import ApiError

BODY_SECONDS = 30


class Gate(APIRoute):
    """Route of `/v1` that refuses requests without the key or on too many connections."""

    def get_route_handler(self):
        handle = super().get_route_handler()

        async def check_and_handle(request):
            service = request.app.state.service
            try:
                check_request(request, service)
                response = await handle(request)
            except ApiError as error:
                response = error.response()
            except ClientDisconnect:
                response = Response(status_code=499)
            service.metrics.responses.labels(response.status_code).inc()
            return response

        return check_and_handle


def check_request(request, service):
    """Raises an `ApiError` for a request that the `Service` refuses without reading its body."""
    limit = service.max_connections
    if limit is not None and len(service.connections) > limit:
        message = f"The server has more than {limit} connections. Try again later."
        headers = {"retry-after": "1", "connection": "close"}
        raise ApiError(503, message, "too_many_connections", headers=headers)
    if service.api_key is not None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        has_key = hmac.compare_digest(key.encode("latin-1"), service.api_key.encode())
        if scheme.lower() != "bearer" or not has_key:
            message = "Missing or incorrect API key. Send the key in the header 'Authorization: "
            message += "Bearer KEY'."
            headers = {"www-authenticate": "Bearer"}
            raise ApiError(401, message, "invalid_api_key", headers=headers)
    if service.is_draining and request.method == "POST":
        raise shutting_down()


async def read_body(request, service):
    """Returns the body of a request.

    The time limit is cut short if the server shuts down. The rest of a body that is too large is
    read and dropped: a client that is still sending would not see the error otherwise.
    """
    chunks, size, deadlines = [], 0, service.body_deadlines
    try:
        async with asyncio.timeout(BODY_SECONDS) as deadline:
            deadlines.add(deadline)
            async for chunk in request.stream():
                size += len(chunk)
                if size <= service.max_body:
                    chunks.append(chunk)
    except TimeoutError:
        if service.is_draining:
            raise shutting_down() from None
        message = f"The body of the request took more than {BODY_SECONDS} s."
        headers = {"connection": "close"}
        raise ApiError(408, message, "timeout", headers=headers) from None
    finally:
        deadlines.discard(deadline)
    if size > service.max_body:
        message = f"The body has {size} bytes; the maximum is {service.max_body}."
        raise ApiError(413, message, "request_too_large")
    return b"".join(chunks)


def shutting_down():
    """Returns the error of a server that takes no more requests."""
    message = "The server is shutting down. Send the request to another replica, or again later."
    headers = {"retry-after": "5", "connection": "close"}
    return ApiError(503, message, "shutting_down", headers=headers)
