"""Request bodies of OpenAI's API, and the errors that answer invalid ones."""

import re
from typing import Any, ClassVar, Literal

import pydantic
import pydantic_core

from keras_recurrent.generation.sampling_params import SamplingParams
from keras_recurrent.serving.request import PromptTooLong

Count = pydantic.NonNegativeInt
SEEDS = 2**64  # OpenAI's seeds are signed
# Options that keep their names in `SamplingParams`; the last three are not OpenAI's, but vLLM's.
SAMPLING = [
    *("temperature", "top_p", "presence_penalty", "frequency_penalty"),
    *("top_k", "min_p", "repetition_penalty"),
]


class ApiError(Exception):
    """An error with its HTTP status and the body that OpenAI's API has.

    Args:
        status: integer, the HTTP status.
        message: string.
        kind: string, the `type` of OpenAI's errors.
        param: string, the parameter of the request that is invalid, or None.
        code: string for programs, or None.
        headers: a dictionary of additional HTTP headers.
    """

    def __init__(
        self, status, message, kind="invalid_request_error", param=None, code=None, headers=None
    ):
        super().__init__(message)
        self.status, self.headers = status, headers or {}
        # Names in the request may have surrogates, which UTF-8 cannot represent.
        message, param = (
            text and text.encode(errors="replace").decode() for text in (message, param)
        )
        error = {"message": message, "type": kind, "param": param, "code": code}
        self.body = {"error": error}


class Body(pydantic.BaseModel):
    """Part of a request; unknown fields are errors, and values are not converted."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool | None = None


class SamplingBody(Body):
    """Fields of both kinds of completions. None: the default of OpenAI's API."""

    # {unsupported option: values that equal its absence}
    neutral: ClassVar[dict[str, list[Any]]] = {}

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    n: Literal[1] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    # Accepted without effect.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _omit_neutral(cls, fields):
        if not isinstance(fields, dict):
            return fields
        return {name: x for name, x in fields.items() if x not in cls.neutral.get(name, ())}

    @pydantic.field_validator("logit_bias")
    @classmethod
    def _check_logit_bias(cls, bias):
        if not all(re.fullmatch(r"[0-9]{1,9}", token) for token in bias or ()):
            raise ValueError("keys must be token ids")
        return bias

    @pydantic.model_validator(mode="after")
    def _check_characters(self):
        try:
            self.model_dump_json()
        except pydantic_core.PydanticSerializationError as error:
            raise ValueError("strings must be valid Unicode") from error
        return self

    @property
    def includes_usage(self):
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling_params(self, logprobs):
        """Returns the `SamplingParams`.

        Args:
            logprobs: integer, as in `SamplingParams`, or None.
        """
        options = {name: getattr(self, name) for name in SAMPLING}
        options = {name: value for name, value in options.items() if value is not None}
        if self.logit_bias:
            options["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        if self.seed is not None:
            options["seed"] = self.seed % SEEDS
        return SamplingParams(logprobs=logprobs, **options)


class CompletionBody(SamplingBody):
    """Body of a request to `/v1/completions`."""

    neutral = {"echo": [None, False], "best_of": [None, 1], "suffix": [None, ""]}
    limit_name: ClassVar[str] = "max_tokens"

    prompt: str | list[str] | list[Count] | list[list[Count]]
    logprobs: int | None = pydantic.Field(default=None, ge=0, le=20)

    @property
    def prompts(self):
        """List of prompts, each a string or a list of token ids."""
        is_single = isinstance(self.prompt, str) or isinstance((self.prompt or [0])[0], int)
        return [self.prompt] if is_single else self.prompt

    @property
    def max_new_tokens(self):
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def sampling(self):
        return self.sampling_params(self.logprobs)


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    """Message of a conversation. Further fields are passed to the chat template."""

    model_config = pydantic.ConfigDict(extra="allow")

    role: str
    content: str | list[TextPart]

    @pydantic.model_validator(mode="before")
    @classmethod
    def _check_parts(cls, message):
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise ValueError(f"only text parts are supported; got {kind!r}")
        return message

    def rendered(self):
        """Returns the message as the chat template takes it."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {**(self.model_extra or {}), "role": self.role, "content": text}


class ChatBody(SamplingBody):
    """Body of a request to `/v1/chat/completions`."""

    neutral = {
        "response_format": [None, {"type": "text"}],
        "tools": [None, []],
        "tool_choice": [None, "none", "auto"],
        "parallel_tool_calls": [None, False, True],
        "functions": [None, []],
        "function_call": [None, "none", "auto"],
        "modalities": [None, ["text"]],
    }

    messages: list[Message]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = pydantic.Field(default=None, ge=0, le=20)

    @pydantic.model_validator(mode="after")
    def _check_logprobs(self):
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("'top_logprobs' requires 'logprobs' to be true")
        return self

    @property
    def prompts(self):
        """List of the one conversation."""
        return [[message.rendered() for message in self.messages]]

    @property
    def limit_name(self):
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def max_new_tokens(self):
        return getattr(self, self.limit_name)

    @property
    def sampling(self):
        return self.sampling_params((self.top_logprobs or 0) if self.logprobs else None)


def validation_error(errors):
    """Returns the `ApiError` of pydantic's errors in a request body."""
    first = errors[0]
    path, kind = first["loc"][1:], first["type"]
    if isinstance(first.get("input"), bytes):  # not parsed
        message = "The header 'Content-Type' of the request must be 'application/json'."
        return ApiError(415, message, code="unsupported_media_type")
    if kind == "json_invalid" or not path:
        reason = first.get("ctx", {}).get("error", first["msg"])
        return ApiError(400, f"The body must be a JSON object that is a valid request: {reason}.")
    param = str(path[0]) + "".join(f"[{part}]" for part in path[1:2] if isinstance(part, int))
    if kind == "extra_forbidden":
        name = path[-1]
        message = f"Unrecognized request argument supplied: {name}"
        return ApiError(400, message, param=param, code="unknown_parameter")
    if kind == "missing":
        message = f"Missing required parameter: '{path[-1]}'."
        return ApiError(400, message, param=param, code="missing_required_parameter")
    reasons = dict.fromkeys(
        error["msg"].removeprefix("Value error, ")
        for error in errors
        if error["loc"][1:2] == path[:1]
    )
    message = f"Invalid value for '{param}': {', or '.join(reasons)}."
    return ApiError(400, message, param=param, code="invalid_value")


def value_error(error, body):
    """Returns the `ApiError` of a `ValueError` about an argument of the engine.

    Args:
        error: the `ValueError`, whose message begins with the name of the argument.
        body: the `SamplingBody`.
    """
    prompt = "messages" if "messages" in type(body).model_fields else "prompt"
    if isinstance(error, PromptTooLong):
        message = _length_message(error, body)
        return ApiError(400, message, param=prompt, code="context_length_exceeded")
    message = str(error).replace("`max_new_tokens`", f"`{body.limit_name}`")
    name = re.match(r"`(\w+)`", message)
    param = name and name[1]
    if param in ("prompt", "messages"):
        param = prompt
    elif param not in type(body).model_fields:
        param = None
    return ApiError(400, message, param=param, code="invalid_value")


def _length_message(error, body):
    """Returns the message of a `PromptTooLong`, in words of the HTTP API."""
    prompt = f"The prompt ({error.num_tokens} tokens)"
    maximum = f"{error.max_length} tokens, the server's `--max-length`"
    limit = body.max_new_tokens
    if limit is None:
        return f"{prompt} leaves no tokens for the answer within {maximum}. Shorten the prompt."
    default = ", the default" if getattr(body, body.limit_name) is None else ""
    return (
        f"{prompt} and `{body.limit_name}` ({limit}{default}) exceed {maximum}. Shorten the prompt "
        f"or reduce `{body.limit_name}`."
    )
