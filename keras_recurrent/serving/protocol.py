"""Request bodies of OpenAI's API, and the errors that answer invalid ones."""

import functools
import re
import reprlib
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

import pydantic
from starlette.responses import JSONResponse

from keras_recurrent.chat import ROLES
from keras_recurrent.chat.tools import check_tools
from keras_recurrent.generation.sampling_params import SamplingParams
from keras_recurrent.generation.text import MAX_LENGTH, MAX_STRINGS
from keras_recurrent.serving.request import PromptTooLong

MAX_PROMPTS, MAX_MESSAGES, MAX_PARTS, MAX_BIASES = 2048, 4096, 1024, 1024
MAX_ERROR = 1000  # characters of an error, which may quote the request
# Keys of messages in OpenAI's API and its Python client, in addition to the fields of `Message`.
MESSAGE_KEYS = {"name", "tool_calls", "tool_call_id", "refusal", "audio", "function_call"}
MESSAGE_KEYS |= {"annotations", "parsed"}
# Fields of `SamplingParams` that requests have in another form, or not at all.
CONVERTED = {"grammar", "logprobs", "min_new_tokens"}


class ApiError(Exception):
    """An error with its HTTP status and the body that OpenAI's API has.

    Args:
        status: integer, the HTTP status, which also gives the `type` of OpenAI's errors.
        message: string.
        code: string for programs, or None.
        param: string, the parameter of the request that is invalid, or None.
        headers: a dictionary of additional HTTP headers.
    """

    def __init__(self, status, message, code=None, *, param=None, headers=None):
        super().__init__(message)
        self.status, self.headers = status, headers or {}
        kind = "server_error" if status >= 500 else "invalid_request_error"
        kind = "requests" if status == 429 else kind
        error = {"message": message[:MAX_ERROR], "type": kind, "param": param, "code": code}
        self.body = {"error": error}

    def response(self):
        """Returns the response with this error."""
        return JSONResponse(self.body, self.status, self.headers)


Count = pydantic.NonNegativeInt
# Keys of JSON objects are strings; each id has one form.
TokenId = Annotated[
    str, pydantic.Field(pattern=r"^(0|[1-9][0-9]{0,8})$"), pydantic.AfterValidator(int)
]
Seed = Annotated[int, pydantic.AfterValidator(lambda seed: seed % 2**64)]  # OpenAI's are signed
Role = Literal[ROLES]  # type: ignore[valid-type]
StopString = Annotated[str, pydantic.Field(max_length=MAX_LENGTH)]


def limited(max_length=None, min_length=None):
    """Returns pydantic's constraints of a list or dictionary, whose check ends at an error."""
    return pydantic.Field(max_length=max_length, min_length=min_length, fail_fast=True)


class Body(pydantic.BaseModel):
    """Part of a request; unknown fields are errors, and values are not converted."""

    # With `extra="forbid"`, pydantic would make an error for each unknown field.
    model_config = pydantic.ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    # {unsupported option of OpenAI's API: values that equal its absence, as does None}
    neutral: ClassVar[dict[str, list[Any]]] = {}

    @pydantic.model_validator(mode="after")
    def _check_further_fields(self):
        for name, value in (self.model_extra or {}).items():
            if name not in self.neutral:
                name = name[:100]
                message = f"Unrecognized request argument supplied: {name}"
                raise ApiError(400, message, "unknown_parameter", param=name)
            if value is not None and value not in self.neutral[name]:
                message = f"The option '{name}' of OpenAI's API is not supported by this server."
                raise ApiError(400, message, "unsupported_parameter", param=name)
        return self


class StreamOptions(Body):
    neutral = {"include_obfuscation": [False]}

    include_usage: bool | None = None


# {name: (type, default)} of the options of OpenAI's and vLLM's APIs that `SamplingParams` has.
OPTIONS: dict[str, Any] = {
    name: (kind | None, None)
    for name, kind in get_type_hints(SamplingParams).items()
    if name not in CONVERTED
}
OptionsBody: Any = pydantic.create_model("OptionsBody", __base__=Body, **OPTIONS)


class ResponseFormat(Body):
    """Form of the text of an answer. Keys of `json_schema` other than `schema` have no effect."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None

    @pydantic.model_validator(mode="after")
    def _check_schema(self):
        if self.type == "json_schema" and not isinstance(self.grammar, dict):
            example = '{"name": "cat", "schema": {"type": "object"}}'
            raise ValueError(f"'json_schema' must have the schema, as in {example}")
        return self

    @property
    def grammar(self):
        """Option `grammar` of `SamplingParams`, or None."""
        if self.type == "json_schema":
            return (self.json_schema or {}).get("schema")
        return {"type": "object"} if self.type == "json_object" else None


class SamplingBody(OptionsBody):
    """Fields of both kinds of completions. None: the default of OpenAI's API."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    stop: StopString | Annotated[list[StopString], limited(MAX_STRINGS)] | None = None
    seed: Seed | None = None
    logit_bias: Annotated[dict[TokenId, float], limited(MAX_BIASES)] | None = None
    # OpenAI's API has it only in `/v1/chat/completions`, vLLM in both.
    response_format: ResponseFormat | None = None
    # As in vLLM: only requests with the same text share prefix states.
    cache_salt: str | None = pydantic.Field(default=None, min_length=1, max_length=1024)
    # Accepted without effect.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @pydantic.model_validator(mode="after")
    def _check_stream_options(self):
        if self.stream_options is not None and not self.stream:
            message = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
            raise ApiError(400, message, param="stream_options")
        return self

    @classmethod
    def parse(cls, data):
        """Returns the body that bytes of JSON contain, or raises an `ApiError`."""
        try:
            return cls.model_validate_json(data)
        except pydantic.ValidationError as error:
            errors = error.errors(include_url=False)
            raise validation_error(errors) from None

    @property
    def grammar_field(self):
        """Name of the field that restricts the text, or None."""
        if self.forced_tools:
            return "tools"
        has_grammar = self.response_format is not None and self.response_format.grammar is not None
        return "response_format" if has_grammar else None

    @property
    def includes_usage(self):
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def sampling(self):
        """The `SamplingParams`."""
        values = {name: getattr(self, name) for name in OPTIONS}
        values["logprobs"] = (self.top_logprobs or 0) if self.logprobs else None
        values["grammar"] = self.response_format and self.response_format.grammar
        return SamplingParams(**{k: value for k, value in values.items() if value is not None})


class CompletionBody(SamplingBody):
    """Body of a request to `/v1/completions`."""

    neutral = {"best_of": [1], "suffix": [""]}
    limit_name: ClassVar[str] = "max_tokens"

    prompt: (
        str
        | Annotated[list[str], limited(MAX_PROMPTS)]
        | Annotated[list[Count], limited()]
        | Annotated[list[Annotated[list[Count], limited()]], limited(MAX_PROMPTS)]
    )
    echo: bool | None = None
    shown_tools: ClassVar[None] = None
    forced_tools: ClassVar[None] = None
    top_logprobs: int | None = pydantic.Field(default=None, ge=0, le=20, alias="logprobs")

    @property
    def prompt_logprobs(self):
        """Argument of `Engine.submit`, which is also set for `echo` without an answer."""
        if not self.echo or (self.top_logprobs is None and self.max_new_tokens):
            return None
        return self.top_logprobs or 0

    @property
    def logprobs(self):
        """True if log probabilities are requested, as in `ChatBody`."""
        return self.top_logprobs is not None

    @property
    def prompts(self):
        """List of prompts, each a string or a list of token ids."""
        is_single = isinstance(self.prompt, str) or isinstance((self.prompt or [0])[0], int)
        return [self.prompt] if is_single else self.prompt

    @property
    def max_new_tokens(self):
        return 16 if self.max_tokens is None else self.max_tokens


class TextPart(Body):
    type: Literal["text"]
    text: str


@functools.lru_cache(maxsize=8)
def words_of(template):
    return frozenset(re.findall(r"\w+", template))


class Message(Body):
    """Message of a conversation. `check_keys` checks further fields, which are for the template."""

    role: Role
    content: str | Annotated[list[TextPart], limited(MAX_PARTS)] | None = None

    @pydantic.model_validator(mode="after")
    def _check_further_fields(self):
        return self

    def check_keys(self, number, template):
        """Raises an `ApiError` for a key that OpenAI's API and the chat template do not have."""
        for key in (self.model_extra or {}).keys() - MESSAGE_KEYS - words_of(template):
            param = f"messages[{number}].{key[:100]}"
            message = f"Unknown parameter: '{param}'."
            raise ApiError(400, message, "unknown_parameter", param=param)

    def rendered(self):
        """Returns the message as the chat template takes it."""
        parts = self.content
        text = "".join(part.text for part in parts) if isinstance(parts, list) else parts
        more = self.model_extra or {}
        if text is None and isinstance(more.get("refusal"), str):
            text = more["refusal"]
        return {**more, "role": self.role, "content": text}


def _choice(tool):
    """Returns the `tool_choice` of a tool."""
    return {"type": "function", "function": {"name": tool["function"]["name"]}}


class ChatBody(SamplingBody):
    """Body of a request to `/v1/chat/completions`."""

    neutral = {
        "functions": [[]],
        "function_call": ["none", "auto"],
        "modalities": [["text"]],
        **{name: [] for name in ("audio", "prediction", "reasoning_effort", "web_search_options")},
    }

    echo: ClassVar[bool] = False
    prompt_logprobs: ClassVar[None] = None

    messages: Annotated[list[Message], limited(MAX_MESSAGES, min_length=1)]
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = pydantic.Field(default=None, ge=0, le=20)

    @pydantic.model_validator(mode="after")
    def _check_combinations(self):
        if self.top_logprobs is not None and not self.logprobs:
            got = str(self.logprobs).lower()
            raise ValueError(f"`top_logprobs` requires `logprobs` to be true; got {got}.")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise ValueError("`max_tokens` and `max_completion_tokens` differ. Send one of them.")
        if self.tools not in (None, []):
            check_tools(self.tools)
        if self.forced_tools == []:
            names = ", ".join(repr(tool["function"]["name"]) for tool in self.tools or ())
            raise ValueError(
                '`tool_choice` must be "none", "auto", or, with `tools`, "required" or {"type": '
                f'"function", "function": {{"name": one of the tools, here {names or "none"}}}}}; '
                f"got {reprlib.repr(self.tool_choice)}."
            )
        return self

    @property
    def shown_tools(self):
        """The tools that the model may call, or None."""
        return self.tools if self.tools and self.tool_choice != "none" else None

    @property
    def forced_tools(self):
        """The tools of which an answer must call one, or None."""
        choice, tools = self.tool_choice, self.tools or ()
        if choice in (None, "none", "auto"):
            return None
        return [tool for tool in tools if choice in ("required", _choice(tool))]

    @property
    def max_calls(self):
        """Maximum number of calls, or None."""
        is_named = isinstance(self.tool_choice, dict)
        return 1 if is_named or self.parallel_tool_calls is False else None

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


def validation_error(errors):
    """Returns the `ApiError` of pydantic's errors in a request body."""
    # Each type that a field may have is an error, most of them that the value is of another type.
    specific = [error for error in errors if not error["type"].endswith("_type")]
    first = (specific or errors)[0]
    path, kind = first["loc"], first["type"]
    if not path:
        reason = str(first.get("ctx", {}).get("error", first["msg"]))
        if field := re.match(r"`(\w+)`", reason):
            return ApiError(400, reason, "invalid_value", param=field[1])
        return ApiError(400, f"The body must be a JSON object that is a valid request: {reason}.")
    param = str(path[0]) + "".join(f"[{part}]" for part in path[1:2] if isinstance(part, int))
    if kind == "missing":
        message = f"Missing required parameter: '{path[-1]}'."
        return ApiError(400, message, "missing_required_parameter", param=param)
    same = [first] if specific else [error for error in errors if error["loc"][:1] == path[:1]]
    reasons = dict.fromkeys(error["msg"].removeprefix("Value error, ") for error in same)
    got = reprlib.repr(first["input"])
    message = f"Invalid value for '{param}': {', or '.join(reasons)}; got {got}."
    return ApiError(400, message, "invalid_value", param=param)


def value_error(error, body):
    """Returns the `ApiError` of a `ValueError`, whose message begins with the engine's argument."""
    prompt = "messages" if "messages" in type(body).model_fields else "prompt"
    message = str(error).replace("`max_new_tokens`", f"`{body.limit_name}`")
    message = message.replace("`grammar`", f"`{body.grammar_field}`")
    if isinstance(error, PromptTooLong):
        message = message.replace("`max_length` of the engine", "`--max-length` of the server")
        if body.max_new_tokens is not None and getattr(body, body.limit_name) is None:
            message += f" The default of `{body.limit_name}` is {body.max_new_tokens}."
        return ApiError(400, message, "context_length_exceeded", param=prompt)
    name = re.match(r"`(\w+)`", message)
    param = name and name[1]
    if param in ("prompt", "messages"):
        param = prompt
    elif param not in type(body).model_fields:
        param = None
    return ApiError(400, message, "invalid_value", param=param)
