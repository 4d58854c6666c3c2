"""A system and its load, in numbers: costs, acceptance, links, clients, and the settings of it all.

A `Setting` is what synthetic services are built from (`benchmarks.synthetic`), really or in a
simulation, and travels as JSON. Knows nothing of either.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict

from benchmarks.links import Link
from core.config import DrafterPoolConfig


class _Cost(BaseModel):
    model_config = ConfigDict(frozen=True)


class TargetCost(_Cost):
    """Seconds of a forward: `base_s` and what each row and each token adds; tokens of prompts,
    which come many at a time, may cost another `prefill_s`. With `num_stages` the target is sharded
    over so many devices, one behind the other, each with its share of the time."""

    base_s: float
    row_s: float = 0.0
    token_s: float = 0.0
    prefill_s: float | None = None
    num_stages: int = 1

    def seconds(self, num_rows: int, num_tokens: int, num_prefill: int = 0) -> float:
        """Of one forward, from its first device to its last; `num_prefill` of the tokens belong to
        prompts."""
        prefill_s = self.token_s if self.prefill_s is None else self.prefill_s
        rest_s = self.token_s * (num_tokens - num_prefill) + prefill_s * num_prefill
        return self.base_s + self.row_s * num_rows + rest_s


class DraftCost(_Cost):
    """Seconds of a drafter: per step, per row of a step, and per token it reads."""

    step_s: float
    row_s: float = 0.0
    token_s: float = 0.0

    def seconds(self, num_rows: int, num_steps: int, num_read: int) -> float:
        """Of one batch."""
        return num_steps * (self.step_s + self.row_s * num_rows) + self.token_s * num_read


class Setting(_Cost):
    """A system and its load.

    acceptance: chance that a draft token is right if all before it are, by its place in the draft;
        the last one also holds for all places behind.
    guess_hits: chance that one of the first 1, 2, ... guesses of a token that was drafted wrong
        (or that follows the draft) is right.
    num_clients: each has `num_requests` requests, one after the other. rule_temperature: above 0
        the rule is COUPLED. num_drafters: 0 turns drafting off.
    link: between orchestrator and drafters; target_link: between it and the target.
    orchestrator, pool: further settings of the two, as in the configuration.
    """

    target: TargetCost
    draft: DraftCost
    acceptance: tuple[float, ...] = (0.8,)
    guess_hits: tuple[float, ...] = (0.3, 0.4, 0.45)
    num_clients: int = 1
    num_requests: int = 1
    num_new_tokens: int = 128
    num_prompt_tokens: int = 16
    temperature: float = 0.0
    num_drafters: int = 1
    link: Link = Link()
    target_link: Link = Link()
    max_batch_tokens: int = 4096
    orchestrator: dict[str, Any] = {}
    pool: dict[str, Any] = {"max_draft_tokens": 4}

    @property
    def pool_config(self) -> DrafterPoolConfig:
        """The drafters' pool."""
        return DrafterPoolConfig(
            name="synthetic", kind="synthetic", replicas=max(1, self.num_drafters), **self.pool
        )
