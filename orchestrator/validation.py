"""GenerateRequest to GenerationRequest: everything checked, everything resolved.

With `orchestrator.sampling_options` the one reader of the public request message. What is wrong,
and what cannot be combined, is refused with an error that names the field and what is allowed;
nothing is ignored. Knows the target by its VerifierInfo and Tokenizer only; knows nothing of
servers or engines. Tokenizing a long prompt takes a while: callers with an event loop run this in
a thread (see `is_long`).
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace

from core.errors import InvalidRequestError
from core.params import Rule
from core.tokenizer import Tokenizer
from core.types import VerifierInfo
from orchestrator.requests import GenerationRequest, Output, Speculation, Stopping
from orchestrator.sampling_options import check_ids, resolve_sampling
from protos import generation_pb2 as pb

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 128
MAX_DRAFT_TOKENS = 64
MAX_REQUEST_ID_LENGTH = 128
MAX_SAMPLES = 16
MAX_LOGPROBS = 20
_LONG_BYTES = 4096
# Kinds of drafters whose drafts were sampled from no distribution.
_KINDS_WITHOUT_DISTRIBUTIONS = ("ngram",)


def is_long(message: pb.GenerateRequest) -> bool:
    """True when `build_request` would hold up an event loop."""
    return message.ByteSize() > _LONG_BYTES


def build_request(
    message: pb.GenerateRequest,
    info: VerifierInfo,
    tokenizer: Tokenizer,
    pool_kinds: Mapping[str, str],
) -> GenerationRequest:
    """Check and resolve a request for this target; of several samples, the first.

    pool_kinds: kinds of the drafter pools by name, the default pool first.

    Unset sampling parameters take the model's defaults, an unset seed is drawn, an unset
    max_new_tokens is what the context has room for. Ids to continue from become the end of the
    prompt and count against max_new_tokens. Raises InvalidRequestError naming the field.
    """
    if len(message.request_id) > MAX_REQUEST_ID_LENGTH:
        raise InvalidRequestError("request_id", f"at most {MAX_REQUEST_ID_LENGTH} characters")
    if message.HasField("n") and not 1 <= message.n <= MAX_SAMPLES:
        raise InvalidRequestError("n", f"must be between 1 and {MAX_SAMPLES}, not {message.n}")
    stopping = message.stopping
    sampling = resolve_sampling(message, info)
    stop_token_ids = _stop_token_ids(stopping, info)
    prompt = _prompt(message, info, tokenizer)
    continued = _continued(message, info, stop_token_ids)
    max_new_tokens = _max_new_tokens(message, info, len(prompt), len(continued))
    most = max_new_tokens + len(continued)
    if not 0 <= stopping.min_new_tokens <= most:
        raise InvalidRequestError(
            "stopping.min_new_tokens",
            f"must be between 0 and max_new_tokens, {most}, not {stopping.min_new_tokens}",
        )
    return GenerationRequest(
        request_id=message.request_id or uuid.uuid4().hex,
        prompt_token_ids=(*prompt, *continued),
        sampling=replace(
            sampling,
            min_new_tokens=stopping.min_new_tokens,
            end_token_ids=tuple(sorted(stop_token_ids)),
            num_prompt_tokens=len(prompt),
        ),
        stopping=Stopping(
            max_new_tokens, _stop_strings(stopping), stop_token_ids, stopping.include_stop
        ),
        speculation=_speculation(message.speculation, sampling.rule, pool_kinds),
        output=_output(message.output),
    )


def _prompt(message: pb.GenerateRequest, info: VerifierInfo, tokenizer: Tokenizer) -> Sequence[int]:
    field = message.WhichOneof("input")
    ids: Sequence[int]
    if field == "prompt":
        ids = tokenizer.encode(message.prompt) if message.prompt else ()
    elif field == "prompt_token_ids":
        field = "prompt_token_ids.ids"
        ids = message.prompt_token_ids.ids
        check_ids(field, ids, info)
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


def _continued(
    message: pb.GenerateRequest, info: VerifierInfo, stop_token_ids: frozenset[int]
) -> Sequence[int]:
    field, ids = "continue_from_token_ids", message.continue_from_token_ids
    check_ids(field, ids, info)
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
    check_ids("stopping.stop_token_ids", stopping.stop_token_ids, info)
    own = () if stopping.ignore_eos else info.eos_token_ids
    return frozenset(own) | frozenset(stopping.stop_token_ids)


def _speculation(
    given: pb.SpeculationOptions, rule: Rule, pool_kinds: Mapping[str, str]
) -> Speculation:
    if not 0 <= given.max_draft_tokens <= MAX_DRAFT_TOKENS:
        raise InvalidRequestError(
            "speculation.max_draft_tokens",
            f"must be between 0 (the pool's own) and {MAX_DRAFT_TOKENS}, "
            f"not {given.max_draft_tokens}",
        )
    if given.drafter and given.drafter not in pool_kinds:
        known = ", ".join(pool_kinds) or "none"
        raise InvalidRequestError(
            "speculation.drafter", f"no pool {given.drafter!r}; there are: {known}"
        )
    enabled = given.enabled if given.HasField("enabled") else True
    if rule is Rule.ENSEMBLE:
        _check_ensemble(given.drafter, enabled, pool_kinds)
    return Speculation(enabled, given.max_draft_tokens, given.drafter)


def _check_ensemble(drafter: str, enabled: bool, pool_kinds: Mapping[str, str]) -> None:
    """The rule's law is made of two models: without a drafter's distributions there is one."""
    if not enabled:
        raise InvalidRequestError("speculation.enabled", "the rule ENSEMBLE needs drafts")
    fit = [name for name, kind in pool_kinds.items() if kind not in _KINDS_WITHOUT_DISTRIBUTIONS]
    pool = drafter or next(iter(pool_kinds), "")
    if pool not in fit:
        why = f"pool {pool!r} of kind {pool_kinds[pool]!r} has none" if pool else "there is no pool"
        raise InvalidRequestError(
            "speculation.drafter",
            f"the rule ENSEMBLE needs drafts with distributions and {why}; "
            f"pools that have them: {', '.join(fit) or 'none'}",
        )


def _output(given: pb.OutputOptions) -> Output:
    if given.logprobs > MAX_LOGPROBS:
        raise InvalidRequestError(
            "output.logprobs", f"must be between 0 and {MAX_LOGPROBS}, not {given.logprobs}"
        )
    return Output(given.logprobs if given.HasField("logprobs") else None, given.prompt_logprobs)
