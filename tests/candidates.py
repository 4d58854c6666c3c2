"""What transformers' own candidate generators propose, round after round: the drafters' reference.

`generate` runs with one of its methods; each round's prefix and draft are recorded where `generate`
itself asks for candidates, through all its accepts and rejects.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Round:
    """A committed prefix, and what was proposed behind it."""

    prefix: list[int]
    draft: list[int]


def record_rounds(
    model: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int, **options: Any
) -> list[Round]:
    """The rounds of one greedy generation. Confidence thresholds and length schedules are the
    caller's to switch off (see `draft_constantly`)."""
    rounds: list[Round] = []
    find = model._get_candidate_generator

    def watched(*args: Any, **kwargs: Any) -> Any:
        generator = find(*args, **kwargs)
        propose = generator.get_candidates

        def record(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            prefix = input_ids[0].tolist()  # generators may change the tensor in place
            candidates, logits = propose(input_ids, *args, **kwargs)
            rounds.append(Round(prefix, candidates[0, len(prefix) :].tolist()))
            return candidates, logits

        generator.get_candidates = record
        return generator

    model._get_candidate_generator = watched
    try:
        ids = torch.tensor([list(prompt)])
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            **options,
        )
    finally:
        del model._get_candidate_generator  # the class's own is found again
    return rounds


def draft_constantly(model: PreTrainedModel, num_draft_tokens: int) -> None:
    """Have an assistant draft so many tokens each time, whatever it thinks of them."""
    config = model.generation_config
    config.num_assistant_tokens = num_draft_tokens
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0


def accept_counts(rounds: Sequence[Round]) -> list[int]:
    """How many of each round's draft were accepted, of all rounds but the last."""
    return [
        len(after.prefix) - len(before.prefix) - 1 for before, after in itertools.pairwise(rounds)
    ]
