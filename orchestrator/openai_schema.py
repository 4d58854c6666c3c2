"""The bodies of OpenAI's chat and text completions, checked as to form: JSON to values.

A parameter that forerun does not know, or knows and does not support, is refused by its name,
unless it is null or says what is done anyway. What changes no text (`user`, `store: false`, a
`prediction`) is let through. Ranges are for `orchestrator.validation`. Knows no protobuf.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from core.errors import InvalidRequestError

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]

#: Parameters that change no text.
_WITHOUT_EFFECT: Final = frozenset(
    {"metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_options"}
    | {"prompt_cache_retention", "safety_identifier", "service_tier", "user"}
)
#: Parameters that are not supported, and the values of them that ask for nothing.
_NOTHING: Final[Mapping[str, tuple[Any, ...]]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}


class _Body(BaseModel):
    """An object of a request. Null is the same as absent."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


class ForerunOptions(_Body):
    """`forerun`, our own parameter: how drafts are used. See `SpeculationOptions` in the API."""

    enabled: bool | None = None
    max_draft_tokens: Int32 = 0
    drafter: str = ""
    rule: Literal["greedy", "coupled", "rejection", "token_rejection", "ensemble"] | None = None
    ensemble_weight: float | None = None


class JsonSchema(_Body):
    """What `response_format` holds of type `json_schema`. It is always followed strictly."""

    name: str = ""
    description: str = ""
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool = True


class ResponseFormat(_Body):
    """The language of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("the field json_schema belongs to the type json_schema")
        return self


class StreamOptions(_Body):
    """What a stream carries besides."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Options(_Body):
    """What both kinds of completion have in common. Below the line: not OpenAI's, but usual."""

    model: str
    n: Int32 = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] = {}
    seed: int | None = None
    stop: list[str] = []
    response_format: ResponseFormat = ResponseFormat(type="text")
    # ------------------------------------------------------------
    forerun: ForerunOptions | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: Int32 | None = None
    min_tokens: Int32 = 0
    ignore_eos: bool = False
    stop_token_ids: list[TokenId] = []

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name in _NOTHING.keys() & given.keys():
            if given[name] is not None and given[name] not in _NOTHING[name]:
                raise InvalidRequestError(name, "not supported")
        known = given.keys() - _WITHOUT_EFFECT - _NOTHING.keys()
        return {name: given[name] for name in given if name in known}

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list(cls, given: Any) -> Any:
        return [given] if isinstance(given, str) else given


class TextPart(_Body):
    """A part of a message; others than text are not supported."""

    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    """One turn. The roles `tool` and `function` are not supported."""

    role: Literal["system", "developer", "user", "assistant"]
    content: list[TextPart] = []

    @field_validator("content", mode="before")
    @classmethod
    def _text_is_a_part(cls, given: Any) -> Any:
        return [{"type": "text", "text": given}] if isinstance(given, str) else given


class ChatCompletion(Options):
    """The body of `/v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: Int32 | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, lt=2**31)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs", "needs logprobs to be true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise InvalidRequestError("max_tokens", "not together with max_completion_tokens")
        return self


class Completion(Options):
    """The body of `/v1/completions`. A prompt is text or token ids; there may be many."""

    prompt: list[str | list[TokenId]] = Field(min_length=1, max_length=128)
    max_tokens: Int32 | None = 16
    logprobs: Annotated[int, Field(ge=0, lt=2**31)] | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt_is_a_list(cls, given: Any) -> Any:
        is_one = isinstance(given, str) or (
            isinstance(given, list) and given and all(type(item) is int for item in given)
        )
        return [given] if is_one else given


_Options = TypeVar("_Options", bound=Options)


def parse(kind: type[_Options], body: bytes) -> _Options:
    """A request's body. Raises InvalidRequestError that names the parameter."""
    try:
        given = json.loads(body)
        if b"\\u" in body:  # a half of a surrogate pair is no text
            json.dumps(given, ensure_ascii=False).encode()
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError("body", f"is not JSON: {error}") from None
    if first["type"] == "extra_forbidden":
        raise InvalidRequestError(_path(first["loc"]), "unknown, or not supported")
    raise InvalidRequestError(
        _path(first["loc"]) or "body", first["msg"].removeprefix("Value error, ")
    )


def _path(location: tuple[int | str, ...]) -> str:
    """`messages[0].content` for ("messages", 0, "content"); names of types are left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "bool", "int"):
            path += f".{part}"
    return path.removeprefix(".")
