"""Makes requests and sequences for the tests of the pure policy."""

from core.types import SamplingParams
from orchestrator.pipeline import Sequence
from orchestrator.requests import GenerationRequest, Output, Speculation, Stopping


def make_request(
    prompt: tuple[int, ...] = (1, 2, 3),
    max_new_tokens: int = 50,
    *,
    request_id: str = "r",
    stop: tuple[str, ...] = (),
    stop_token_ids: frozenset[int] = frozenset(),
    sampling: SamplingParams | None = None,
    enabled: bool = True,
    max_draft_tokens: int = 0,
    drafter: str = "",
    output: Output | None = None,
) -> GenerationRequest:
    """A resolved request, greedy unless told otherwise."""
    return GenerationRequest(
        request_id,
        prompt,
        sampling or SamplingParams(),
        Stopping(max_new_tokens, stop, stop_token_ids),
        Speculation(enabled, max_draft_tokens, drafter),
        output or Output(),
    )


def make_sequence(sequence: int = 1, **request: object) -> Sequence:
    """A sequence of such a request."""
    return Sequence(sequence, make_request(**request))  # type: ignore[arg-type]
