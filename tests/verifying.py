"""The orchestrator's side of verification, as small as it can be: for the verifier's tests.

`Driver` plays one sequence: it makes rows from its committed tokens and a drafter, checks what
every verdict must satisfy, and commits. Drafters here are functions of the committed tokens.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from core.config import ModelConfig
from core.types import Rule, SamplingParams, Verdict, VerdictStatus, VerifyRow
from tests.tiny_models import VOCAB_SIZE

NUM_NEW = 24
MAX_LENGTH = 128
GREEDY = SamplingParams()
COUPLED = SamplingParams(temperature=0.9, top_k=20, top_p=0.95, seed=11, rule=Rule.COUPLED)

Drafter = Callable[[Sequence[int], int], tuple[int, ...]]


def model_config(path: Path, **options: int) -> ModelConfig:
    limits = {"max_length": MAX_LENGTH, "max_sequences": 4, "max_batch_tokens": 64} | options
    return ModelConfig(model=str(path), device_map="cpu", **limits)


def make_prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(256) for _ in range(length)] for length in (1, 7, 20, 33)]


class Driver:
    """One sequence: its committed tokens, and how many of them the verifier holds."""

    def __init__(self, sequence: int, prompt: Sequence[int], drafter: Drafter, k: int) -> None:
        self.sequence = sequence
        self.tokens = list(prompt)
        self.position = 0
        self.accepted: list[int] = []
        self._num_prompt = len(prompt)
        self._drafter = drafter
        self._k = k

    @property
    def generated(self) -> list[int]:
        return self.tokens[self._num_prompt :]

    def row(self) -> VerifyRow:
        draft = self._drafter(self.tokens, self._k)[: self._k] if self._k else ()
        return VerifyRow(self.sequence, self.position, tuple(self.tokens[self.position :]), draft)

    def apply(self, row: VerifyRow, verdict: Verdict) -> None:
        assert verdict.status is VerdictStatus.OK, verdict.message
        assert verdict.position == len(self.tokens)
        assert len(verdict.token_ids) == verdict.accepted + 1
        assert verdict.token_ids[:-1] == row.draft_token_ids[: verdict.accepted]
        self.position = len(self.tokens) + verdict.accepted
        self.tokens += verdict.token_ids
        self.accepted.append(verdict.accepted)


def oracle(full: Sequence[int], wrong_by: int = 0) -> Drafter:
    """Drafts what will come, each id off by `wrong_by`."""
    return lambda tokens, k: tuple(
        (token + wrong_by) % VOCAB_SIZE for token in full[len(tokens) : len(tokens) + k]
    )


def noise(seed: int, bound: int) -> Drafter:
    rng = random.Random(seed)
    return lambda tokens, k: tuple(rng.randrange(bound) for _ in range(rng.randrange(k + 1)))


def drafters(kind: str, full: Sequence[int], index: int) -> Drafter:
    return {
        "perfect": oracle(full),
        "random": noise(index, 4),
        "never right": oracle(full, wrong_by=1),
        "garbage": noise(index, VOCAB_SIZE),
        "half right": lambda tokens, k: (*oracle(full)(tokens, k // 2), *noise(1, 256)(tokens, k)),
    }[kind]
