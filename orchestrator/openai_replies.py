"""The API's responses as OpenAI's objects: whole completions, and the chunks of a stream.

A `Reply` takes up the responses to one HTTP request, whatever number of choices they are of, and
gives for each the part that is new. A chunk carries one part, a completion all of a choice's parts
joined, so that both say the same. Knows nothing of HTTP.

    log-probabilities   one entry per token, but for an end token: it is no part of the text
    `forerun`           in the last part of each choice, if the request has a `forerun` of its own
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf.json_format import MessageToDict

from core.tokenizer import Tokenizer
from orchestrator.openai_schema import ChatCompletion, Completion, Options
from protos import common_pb2
from protos import generation_pb2 as pb

_REASONS: Final[Mapping[int, str]] = {
    pb.FINISH_REASON_STOP_TOKEN: "stop",
    pb.FINISH_REASON_STOP_STRING: "stop",
    pb.FINISH_REASON_LENGTH: "length",
}


class Spelling:
    """The text of each token by itself. Takes a fraction of a second to make."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = tokenizer.token_bytes()
        for name, token_id in tokenizer.special_ids.items():
            self._bytes[token_id] = name.encode()

    def bytes_of(self, token_id: int) -> bytes:
        """UTF-8, perhaps only a part of a code point; empty for ids that are in no vocabulary."""
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def text_of(self, token_id: int) -> str:
        """The text; for a part of a code point its bytes, as OpenAI writes them."""
        try:
            return self.bytes_of(token_id).decode()
        except UnicodeDecodeError:
            escaped = "".join(f"\\x{byte:02x}" for byte in self.bytes_of(token_id))
            return f"bytes:{escaped}"


@dataclass(slots=True)
class Part:
    """What one response adds to a choice. `logprobs` in OpenAI's form, None unless asked for."""

    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    forerun: dict[str, Any] | None = None


@dataclass(slots=True)
class _Choice:
    """Where a choice stands. `offset`: characters that its tokens so far spell."""

    parts: list[Part] = field(default_factory=list)
    offset: int = 0
    usage: pb.Usage | None = None


class Reply(ABC):
    """What becomes of one request. `spelling` is needed for log-probabilities only."""

    prefix: str  # of the reply's name
    kind: str  # of a completion
    chunk_kind: str

    def __init__(
        self, body: Options, reply_id: str, model: str, spelling: Spelling | None = None
    ) -> None:
        self.id = reply_id
        self._body = body
        self._head = {"id": reply_id, "created": int(time.time()), "model": model}
        self._spelling = spelling
        self._choices: dict[int, _Choice] = {}

    def take(self, index: int, response: pb.GenerateResponse) -> Part:
        """The part that is new in the choice `index`."""
        choice = self._choices.setdefault(index, _Choice())
        part = Part(response.text)
        if self._spelling is not None:
            part.logprobs = self._logprobs(choice, response)
        if response.HasField("finished"):
            choice.usage = response.finished.usage
            part.finish_reason = _REASONS[response.finished.reason]
            if self._body.forerun is not None:
                part.forerun = _statistics(response.finished)
        choice.parts.append(part)
        return part

    def completion(self) -> dict[str, Any]:
        """The whole, when every choice has ended."""
        choices = []
        for index, choice in sorted(self._choices.items()):
            last = choice.parts[-1]
            text = "".join(part.text for part in choice.parts)
            logprobs = _joined([part.logprobs for part in choice.parts if part.logprobs])
            whole = Part(text, logprobs, last.finish_reason, last.forerun)
            choices.append(self._choice(index, whole, self._whole(text)))
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage()}

    def chunk(self, index: int, part: Part) -> dict[str, Any]:
        """One part of a stream."""
        return self._chunk([self._choice(index, part, self._piece(part.text))])

    def usage_chunk(self) -> dict[str, Any]:
        """The end of a stream that was asked for `include_usage`."""
        return {**self._chunk([]), "usage": self._usage()}

    def opening(self, index: int) -> dict[str, Any] | None:
        """A chunk before the first of a choice, if there is to be one."""
        return None

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self._body.stream_options.include_usage else {}
        return {**self._head, "object": self.chunk_kind, "choices": choices, **usage}

    def _choice(self, index: int, part: Part, content: dict[str, Any]) -> dict[str, Any]:
        rest = {"logprobs": part.logprobs, "finish_reason": part.finish_reason}
        forerun = {"forerun": part.forerun} if part.forerun is not None else {}
        return {"index": index, **content, **rest, **forerun}

    def _usage(self) -> dict[str, Any]:
        """Prompts are counted once, however many choices they have."""
        usages = {index: c.usage for index, c in sorted(self._choices.items()) if c.usage}
        prompts = [usage for index, usage in usages.items() if index % self._body.n == 0]
        num_prompt = sum(usage.prompt_tokens for usage in prompts)
        num_completion = sum(usage.completion_tokens for usage in usages.values())
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(usage.cached_prompt_tokens for usage in prompts)
            },
        }

    def _logprobs(self, choice: _Choice, response: pb.GenerateResponse) -> dict[str, Any]:
        token_ids, end = list(response.token_ids), response.finished
        if end.HasField("stop_token_id") and token_ids[-1:] == [end.stop_token_id]:
            token_ids.pop()
        entries = list(zip(token_ids, response.logprobs, strict=False))
        offsets = []
        for token_id, text in zip(response.token_ids, response.token_texts, strict=True):
            choice.offset += len(text)
            # Bytes before it that spell nothing may have become final with it.
            own = self._spelling.text_of(token_id) if self._spelling else ""
            offsets.append(choice.offset - len(own if text.endswith(own) else text))
        return self._entries(entries, offsets[: len(entries)])

    @abstractmethod
    def _entries(
        self, entries: list[tuple[int, common_pb2.TokenLogprobs]], offsets: list[int]
    ) -> dict[str, Any]:
        """Log-probabilities of tokens that begin at these characters of the text."""

    @abstractmethod
    def _whole(self, text: str) -> dict[str, Any]:
        """What a choice of a completion holds."""

    @abstractmethod
    def _piece(self, text: str) -> dict[str, Any]:
        """What a choice of a chunk holds."""


class ChatReply(Reply):
    """`chat.completion` and its chunks."""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any] | None:
        """The role, which OpenAI sends first."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self._chunk([self._choice(index, Part(""), {"delta": delta})])

    def _whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _piece(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _entries(
        self, entries: list[tuple[int, common_pb2.TokenLogprobs]], offsets: list[int]
    ) -> dict[str, Any]:
        content = []
        for token_id, entry in entries:
            top = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
            alternatives = [self._named(each, logprob) for each, logprob in top]
            content.append({**self._named(token_id, entry.logprob), "top_logprobs": alternatives})
        return {"content": content, "refusal": None}

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        assert self._spelling is not None
        text, raw = self._spelling.text_of(token_id), self._spelling.bytes_of(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(raw)}


class CompletionReply(Reply):
    """`text_completion`, whose chunks have the same form."""

    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def _whole(self, text: str) -> dict[str, Any]:
        return {"text": text}

    _piece = _whole

    def _entries(
        self, entries: list[tuple[int, common_pb2.TokenLogprobs]], offsets: list[int]
    ) -> dict[str, Any]:
        assert self._spelling is not None
        text_of = self._spelling.text_of
        tops = []
        for token_id, entry in entries:
            # Tokens of equal text share a key: the likelier one has it, the chosen one before all.
            top = {text_of(token_id): entry.logprob}
            for each, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True):
                top.setdefault(text_of(each), logprob)
            tops.append(top)
        return {
            "tokens": [text_of(token_id) for token_id, _ in entries],
            "token_logprobs": [entry.logprob for _, entry in entries],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def reply_type(body: Options) -> type[Reply]:
    """The kind of reply to a request."""
    assert isinstance(body, ChatCompletion | Completion)
    return ChatReply if isinstance(body, ChatCompletion) else CompletionReply


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Objects of lists, list by list; None where there are none."""
    if not parts:
        return None
    return {
        name: None if value is None else [item for part in parts for item in part[name]]
        for name, value in parts[0].items()
    }


def _statistics(finished: pb.Finished) -> dict[str, Any]:
    """What OpenAI's objects have no place for."""
    fields = MessageToDict(
        finished, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    for name in ("reason", "usage"):
        del fields[name]
    return {**fields, "seed": finished.seed}
