"""Chooses the n-gram drafter's defaults: replays it and its rivals over real greedy text.

    python benchmarks/prompt_lookup.py [--model NAME] [--new-tokens 200] [--draft-tokens 4 8]

The target writes each prompt's answer once; every drafter then drafts along that text, which is
exactly what greedy verification would accept. Printed per drafter: tokens per verify step,
drafted tokens per step, the accepted share, and the speed over plain decoding if a drafted token
costs 0.0325 (batch 1) or 0.19 (batch 8) of a step, as measured for the default target on one CPU
core. The rival is transformers' prompt lookup, called as its `generate` calls it. About 2 minutes.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.prompts import CHAT, GROUNDED
from core.config import DrafterPoolConfig
from core.embedded import resolve_model
from core.types import SamplingParams
from drafter_service.drafters.base import DraftJob
from drafter_service.drafters.ngram import NgramDrafter

#: Cost of one drafted token of one row, in verify steps without drafts.
COSTS = {"b1": 0.0325, "b8": 0.19}

Draft = Callable[[list[int]], Sequence[int]]


@dataclass
class Tally:
    """What a drafter achieved over a set of texts."""

    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, prompt: list[int], answer: list[int], draft: Draft) -> None:
        """Replay one answer; its first token comes with the prompt's own forward."""
        position = 1
        while position < len(answer):
            drafted = draft(prompt + answer[:position])
            accepted = 0
            for token, right in zip(drafted, answer[position:], strict=False):
                if token != right:
                    break
                accepted += 1
            committed = min(accepted + 1, len(answer) - position)
            position += committed
            self.steps += 1
            self.tokens += committed
            self.drafted += len(drafted)
            self.accepted += accepted

    def __str__(self) -> str:
        speeds = "".join(
            f"  {name} {self.tokens / (self.steps + cost * self.drafted):.2f}x"
            for name, cost in COSTS.items()
        )
        return (
            f"{self.tokens / self.steps:.2f} tokens/step  {self.drafted / self.steps:.2f} drafted"
            f"  {self.accepted / max(1, self.drafted):4.0%} accepted{speeds}"
        )


@torch.inference_mode()
def answers(path: str, tasks: Sequence[str], new_tokens: int) -> list[tuple[list[int], list[int]]]:
    """(prompt, greedy answer) of each task, as token ids."""
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": task}], tokenize=False, add_generation_prompt=True
        )
        for task in tasks
    ]
    batch = tokenizer(chats, return_tensors="pt", padding=True, add_special_tokens=False)
    output = model.generate(**batch, max_new_tokens=new_tokens, do_sample=False)
    texts = []
    for mask, row in zip(batch["attention_mask"], output.tolist(), strict=True):
        width = mask.shape[0]
        prompt, answer = row[width - int(mask.sum()) : width], row[width:]
        if tokenizer.eos_token_id in answer:
            answer = answer[: answer.index(tokenizer.eos_token_id) + 1]
        texts.append((prompt, answer))
    return texts


def ours(k: int, **options: int) -> Draft:
    """The drafter of a pool with these options."""
    drafter = NgramDrafter(DrafterPoolConfig(name="bench", kind="ngram", options=options))
    return lambda tokens: drafter.draft([DraftJob(0, tokens, k, SamplingParams())])[0].token_ids


def theirs(k: int, ngram: int) -> Draft:
    """transformers' `prompt_lookup_num_tokens=k, max_matching_ngram_size=ngram`."""
    generator = PromptLookupCandidateGenerator(
        num_output_tokens=k, max_matching_ngram_size=ngram, max_length=1_000_000
    )

    def draft(tokens: list[int]) -> list[int]:
        candidates, _ = generator.get_candidates(torch.tensor([tokens]))
        drafted: list[int] = candidates[0, len(tokens) :].tolist()
        return drafted

    return draft


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="embedded:smollm2-135m-instruct")
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[4, 8])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    path = resolve_model(arguments.model)
    sets = {"grounded": GROUNDED, "chat": CHAT}
    texts = {name: answers(path, tasks, arguments.new_tokens) for name, tasks in sets.items()}
    for k in arguments.draft_tokens:
        drafters: dict[str, Any] = {f"transformers, ngram {n}": theirs(k, n) for n in (2, 3, 4)}
        for options in ({}, {"min_chance": 0.35}, {"min_chance": 0.0}, {"min_ngram": 2}):
            label = ", ".join(f"{key} {value}" for key, value in options.items()) or "defaults"
            drafters[f"ours, {label}"] = ours(k, **options)
        for name, pairs in texts.items():
            for label, draft in drafters.items():
                tally = Tally()
                for prompt, answer in pairs:
                    tally.add(prompt, answer, draft)
                print(f"k {k}  {name:9} {label:26} {tally}", flush=True)


if __name__ == "__main__":
    main()
