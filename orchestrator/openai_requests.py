"""OpenAI's parameters as requests of the public API, and the API's errors under OpenAI's names.

Every parameter has a field of `protos.generation_pb2.GenerateRequest` that it goes into. Knows
nothing of HTTP, and nothing of what comes back.
"""

import json
from typing import Final

from core.errors import InvalidRequestError
from orchestrator.openai_schema import ChatCompletion, Completion, ForerunOptions, Options
from protos import common_pb2
from protos import generation_pb2 as pb

#: How a field of the API begins -> what the parameter is called, where names differ; "" is cut.
_PARAMETERS: Final = (
    ("stopping.min_new_tokens", "min_tokens"),
    ("stopping.", ""),
    ("constraint", "response_format"),
    ("sampling.constraint", "response_format"),
    ("sampling.", ""),
    ("speculation.", "forerun."),
    ("chat.messages", "messages"),
    ("chat", "messages"),
    ("prompt_token_ids.ids", "prompt"),
)


def chat_request(body: ChatCompletion, request_id: str) -> pb.GenerateRequest:
    """The request of a chat completion."""
    turns = [
        pb.ChatMessage(
            # OpenAI's newer name for the same thing; templates know the older one.
            role="system" if turn.role == "developer" else turn.role,
            content="".join(part.text for part in turn.content),
        )
        for turn in body.messages
    ]
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    is_newer = body.max_tokens is None
    max_new_tokens = body.max_completion_tokens if is_newer else body.max_tokens
    request = _request(body, request_id, max_new_tokens, num_top)
    request.chat.messages.extend(turns)
    return request


def completion_requests(body: Completion, request_id: str) -> list[pb.GenerateRequest]:
    """The requests of a text completion, one per prompt."""
    requests = []
    for index, prompt in enumerate(body.prompt):
        name = request_id if len(body.prompt) == 1 else f"{request_id}-{index}"
        request = _request(body, name, body.max_tokens, body.logprobs)
        if isinstance(prompt, str):
            request.prompt = prompt
        else:
            request.prompt_token_ids.ids.extend(prompt)
        requests.append(request)
    return requests


def parameter_error(error: InvalidRequestError, body: Options) -> InvalidRequestError:
    """The API's error under the name that the caller used."""
    field, message = error.field, str(error).removeprefix(f"{error.field}: ")
    if field == "stopping.max_new_tokens":
        is_newer = isinstance(body, ChatCompletion) and body.max_tokens is None
        return InvalidRequestError("max_completion_tokens" if is_newer else "max_tokens", message)
    if field == "output.logprobs":
        is_chat = isinstance(body, ChatCompletion)
        return InvalidRequestError("top_logprobs" if is_chat else "logprobs", message)
    for prefix, name in _PARAMETERS:
        if field.startswith(prefix):
            return InvalidRequestError(name + field.removeprefix(prefix), message)
    return error


def _request(
    body: Options, request_id: str, max_new_tokens: int | None, num_top: int | None
) -> pb.GenerateRequest:
    """Everything but the prompt."""
    return pb.GenerateRequest(
        request_id=request_id,
        sampling=pb.SamplingOptions(
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            typical_p=body.typical_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            no_repeat_ngram_size=body.no_repeat_ngram_size,
            logit_bias=_logit_bias(body),
            seed=None if body.seed is None else body.seed % 2**64,
        ),
        stopping=pb.StoppingOptions(
            max_new_tokens=max_new_tokens,
            min_new_tokens=body.min_tokens,
            stop=body.stop,
            stop_token_ids=body.stop_token_ids,
            ignore_eos=body.ignore_eos,
        ),
        speculation=_speculation(body.forerun or ForerunOptions()),
        output=pb.OutputOptions(logprobs=num_top, return_token_ids=num_top is not None),
        constraint=_constraint(body),
        n=body.n,
    )


def _logit_bias(body: Options) -> dict[int, float]:
    try:
        bias = {int(token_id): value for token_id, value in body.logit_bias.items()}
        return dict(pb.SamplingOptions(logit_bias=bias).logit_bias)
    except ValueError:
        raise InvalidRequestError("logit_bias", "its keys must be token ids") from None


def _speculation(given: ForerunOptions) -> pb.SpeculationOptions:
    return pb.SpeculationOptions(
        enabled=given.enabled,
        max_draft_tokens=given.max_draft_tokens,
        drafter=given.drafter,
        rule=f"RULE_{given.rule.upper()}" if given.rule else None,
        ensemble_weight=given.ensemble_weight,
    )


def _constraint(body: Options) -> common_pb2.Constraint | None:
    wanted = body.response_format
    if wanted.type == "text":
        return None
    schema = wanted.json_schema.schema_ if wanted.json_schema else {"type": "object"}
    kind = common_pb2.CONSTRAINT_KIND_JSON_SCHEMA
    return common_pb2.Constraint(kind=kind, source=json.dumps(schema))
