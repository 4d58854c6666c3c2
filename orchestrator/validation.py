"""GenerateRequest to GenerationRequest: everything checked, everything resolved.

The one reader of the public request message. What is wrong, and what is not built yet, is refused
with an error that names the field and what is allowed; nothing is ignored. Knows the target by its
VerifierInfo and Tokenizer only; knows nothing of servers or engines. Tokenizing a long prompt
takes a while: callers with an event loop run this in a thread (see `is_long`).
"""

import secrets
import uuid
from collections.abc import Sequence

from core.errors import InvalidRequestError
from core.tokenizer import Tokenizer
from core.types import Rule, SamplingParams, VerifierInfo
from core.wire import rule_from_proto
from orchestrator.requests import GenerationRequest, Speculation, Stopping
from protos import generation_pb2 as pb

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 128
MAX_DRAFT_TOKENS = 64
MAX_REQUEST_ID_LENGTH = 128
_TEMPERATURES = (0.001, 100.0)
_LONG_BYTES = 4096
# Parameters of the API that are not built yet, and the values that ask for nothing.
_UNBUILT_SAMPLING = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
_BUILT_RULES = (Rule.GREEDY, Rule.COUPLED)


def is_long(message: pb.GenerateRequest) -> bool:
    """True when `build_request` would hold up an event loop."""
    return message.ByteSize() > _LONG_BYTES


def build_request(
    message: pb.GenerateRequest,
    info: VerifierInfo,
    tokenizer: Tokenizer,
    pool_names: Sequence[str],
) -> GenerationRequest:
    """Check and resolve a request for this target.

    Unset sampling parameters take the model's defaults, an unset seed is drawn, an unset
    max_new_tokens is what the context has room for. Ids to continue from become the end of the
    prompt and count against max_new_tokens. Raises InvalidRequestError naming the field.
    """
    _refuse_unbuilt(message)
    if len(message.request_id) > MAX_REQUEST_ID_LENGTH:
        raise InvalidRequestError("request_id", f"at most {MAX_REQUEST_ID_LENGTH} characters")
    sampling = _sampling(message, info.default_sampling)
    stop_token_ids = _stop_token_ids(message.stopping, info)
    prompt = _prompt(message, info, tokenizer)
    continued = _continued(message, info, stop_token_ids)
    max_new_tokens = _max_new_tokens(message, info, len(prompt), len(continued))
    return GenerationRequest(
        request_id=message.request_id or uuid.uuid4().hex,
        prompt_token_ids=(*prompt, *continued),
        sampling=sampling,
        stopping=Stopping(max_new_tokens, _stop_strings(message.stopping), stop_token_ids),
        speculation=_speculation(message.speculation, pool_names),
    )


def _refuse_unbuilt(message: pb.GenerateRequest) -> None:
    sampling = message.sampling
    asked = {
        "sampling.logit_bias": bool(sampling.logit_bias),
        "sampling.bad_words_ids": bool(sampling.bad_words_ids),
        "stopping.min_new_tokens": message.stopping.min_new_tokens != 0,
        "speculation.ensemble_weight": message.speculation.HasField("ensemble_weight"),
        "output.logprobs": message.output.HasField("logprobs"),
        "output.prompt_logprobs": message.output.prompt_logprobs,
    }
    for name, off in _UNBUILT_SAMPLING.items():
        asked[f"sampling.{name}"] = sampling.HasField(name) and getattr(sampling, name) != off
    for field, is_asked in asked.items():
        if is_asked:
            raise InvalidRequestError(field, "not supported yet; leave it unset")


def _sampling(message: pb.GenerateRequest, default: SamplingParams) -> SamplingParams:
    given = message.sampling
    temperature = given.temperature if given.HasField("temperature") else default.temperature
    low, high = _TEMPERATURES
    if temperature != 0 and not low <= temperature <= high:  # NaN is in no range
        raise InvalidRequestError(
            "sampling.temperature",
            f"must be 0 (greedy) or between {low:g} and {high:g}, not {temperature:g}",
        )
    top_k = given.top_k if given.HasField("top_k") else default.top_k
    if top_k < 0:
        raise InvalidRequestError("sampling.top_k", f"must be 0 (all) or more, not {top_k}")
    top_p = given.top_p if given.HasField("top_p") else default.top_p
    if not 0 < top_p <= 1:
        raise InvalidRequestError("sampling.top_p", f"must be above 0 and at most 1, not {top_p:g}")
    seed = given.seed if given.HasField("seed") else secrets.randbits(64)
    rule = rule_from_proto(message.speculation.rule, temperature, "speculation.rule")
    _check_rule(rule, temperature)
    return SamplingParams(temperature, top_k, top_p, seed, rule)


def _check_rule(rule: Rule, temperature: float) -> None:
    field, name = "speculation.rule", rule.name
    if rule not in _BUILT_RULES:
        built = ", ".join(built.name for built in _BUILT_RULES)
        raise InvalidRequestError(field, f"{name} is not supported yet; there are: {built}")
    if (rule is Rule.GREEDY) != (temperature == 0):
        needed = "0" if rule is Rule.GREEDY else "above 0"
        raise InvalidRequestError(field, f"{name} needs temperature {needed}, not {temperature:g}")


def _prompt(message: pb.GenerateRequest, info: VerifierInfo, tokenizer: Tokenizer) -> Sequence[int]:
    field = message.WhichOneof("input")
    ids: Sequence[int]
    if field == "prompt":
        ids = tokenizer.encode(message.prompt) if message.prompt else ()
    elif field == "prompt_token_ids":
        field = "prompt_token_ids.ids"
        ids = message.prompt_token_ids.ids
        _check_ids(field, ids, info)
    elif field == "chat":
        messages = message.chat.messages
        for index, turn in enumerate(messages):
            if not turn.role:
                raise InvalidRequestError(f"chat.messages[{index}].role", "must not be empty")
        turns = [{"role": turn.role, "content": turn.content} for turn in messages]
        ids = tokenizer.apply_chat_template(turns) if turns else ()
    else:
        raise InvalidRequestError("input", "one of prompt, prompt_token_ids and chat is needed")
    if not ids:
        raise InvalidRequestError(field, "must not be empty")
    if len(ids) >= info.max_length:
        raise InvalidRequestError(
            field,
            f"has {len(ids)} tokens; at most {info.max_length - 1} fit the context of "
            f"{info.max_length} with one token to generate",
        )
    return ids


def _check_ids(field: str, ids: Sequence[int], info: VerifierInfo) -> None:
    largest = max(ids, default=0)
    if largest >= info.tokenizer_size:
        raise InvalidRequestError(
            field, f"must be below {info.tokenizer_size}, the tokenizer's size; {largest} is not"
        )


def _continued(
    message: pb.GenerateRequest, info: VerifierInfo, stop_token_ids: frozenset[int]
) -> Sequence[int]:
    field, ids = "continue_from_token_ids", message.continue_from_token_ids
    _check_ids(field, ids, info)
    ends = stop_token_ids.intersection(ids)
    if ends:
        raise InvalidRequestError(field, f"the text has ended: {min(ends)} is an end token")
    return ids


def _max_new_tokens(
    message: pb.GenerateRequest, info: VerifierInfo, num_prompt: int, num_continued: int
) -> int:
    room = info.max_length - num_prompt
    wanted = room
    if message.stopping.HasField("max_new_tokens"):
        wanted = message.stopping.max_new_tokens
        if not 1 <= wanted <= room:
            raise InvalidRequestError(
                "stopping.max_new_tokens",
                f"must be between 1 and {room}, not {wanted}: the context holds "
                f"{info.max_length} tokens and the prompt has {num_prompt}",
            )
    if num_continued >= wanted:
        raise InvalidRequestError(
            "continue_from_token_ids",
            f"must hold fewer tokens than may be generated in all, {wanted}, not {num_continued}",
        )
    return wanted - num_continued


def _stop_strings(stopping: pb.StoppingOptions) -> tuple[str, ...]:
    field, stop = "stopping.stop", tuple(stopping.stop)
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(field, f"at most {MAX_STOP_STRINGS} strings, not {len(stop)}")
    for index, string in enumerate(stop):
        if not 1 <= len(string) <= MAX_STOP_LENGTH:
            raise InvalidRequestError(
                f"{field}[{index}]",
                f"must have 1 to {MAX_STOP_LENGTH} characters, not {len(string)}",
            )
    return stop


def _stop_token_ids(stopping: pb.StoppingOptions, info: VerifierInfo) -> frozenset[int]:
    _check_ids("stopping.stop_token_ids", stopping.stop_token_ids, info)
    own = () if stopping.ignore_eos else info.eos_token_ids
    return frozenset(own) | frozenset(stopping.stop_token_ids)


def _speculation(given: pb.SpeculationOptions, pool_names: Sequence[str]) -> Speculation:
    if not 0 <= given.max_draft_tokens <= MAX_DRAFT_TOKENS:
        raise InvalidRequestError(
            "speculation.max_draft_tokens",
            f"must be between 0 (the pool's own) and {MAX_DRAFT_TOKENS}, "
            f"not {given.max_draft_tokens}",
        )
    if given.drafter and given.drafter not in pool_names:
        known = ", ".join(pool_names) or "none"
        raise InvalidRequestError(
            "speculation.drafter", f"no pool {given.drafter!r}; there are: {known}"
        )
    enabled = given.enabled if given.HasField("enabled") else True
    return Speculation(enabled, given.max_draft_tokens, given.drafter)
