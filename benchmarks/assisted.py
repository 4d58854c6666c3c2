"""transformers' assisted generation, one prompt at a time, and how often its drafts were right.

Every way of drafting that `generate` has goes through one candidate generator; its tally is read
where `generate` itself reports each verdict. Draft lengths are held constant and the confidence
threshold is off, so that both sides draft alike. Knows nothing of forerun.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.candidates import draft_constantly
from tests.tiny_gemma4 import repaired


@dataclass(slots=True)
class Tally:
    """Verdicts on drafts: how many there were, accepted tokens in all, and seconds of drafting."""

    num_steps: int = 0
    num_accepted: int = 0
    draft_seconds: float = 0.0


class Assisted:
    """`generate` of a loaded target with one method.

    method: "early_exit", "mtp_layers", "draft_model", "mtp_assistant", "dflash", "cross_tokenizer".
    assistant: the checkpoint of methods that have one. target: the target's path, for tokenizers.
    early_exit: layers of that method.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: str,
        num_draft_tokens: int,
        assistant: str = "",
        target: str = "",
        early_exit: int = 0,
    ) -> None:
        self._model = model
        self._tally = Tally()
        self._options: dict[str, Any] = {}
        if method == "early_exit":
            self._options["assistant_early_exit"] = early_exit
            draft_constantly(model, num_draft_tokens)
        elif method == "mtp_layers":
            self._options["use_mtp"] = True
        elif method == "mtp_assistant":
            with repaired():  # what 5.23 cannot build
                helper = AutoModelForCausalLM.from_pretrained(assistant, dtype=model.dtype).eval()
            draft_constantly(helper, num_draft_tokens)
            self._options["assistant_model"] = helper
        elif method == "dflash":
            helper = AutoModel.from_pretrained(assistant, dtype=model.dtype).eval()
            self._options |= {"assistant_model": helper, "speculation_type": "dflash"}
        else:
            helper = AutoModelForCausalLM.from_pretrained(assistant, dtype=model.dtype).eval()
            draft_constantly(helper, num_draft_tokens)
            self._options["assistant_model"] = helper
        if method == "cross_tokenizer":
            self._options["tokenizer"] = AutoTokenizer.from_pretrained(target)
            self._options["assistant_tokenizer"] = AutoTokenizer.from_pretrained(assistant)
        self._find_generator = model._get_candidate_generator

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_new_tokens: int) -> dict[str, Any]:
        """Seconds, the new tokens, verify steps with drafts, accepted draft tokens, and the seconds
        that drafting took."""
        self._tally = Tally()
        self._model._get_candidate_generator = self._watched
        ids = torch.tensor([prompt])
        begin = time.perf_counter()
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            **self._options,
        )
        seconds = time.perf_counter() - begin
        return {
            "seconds": seconds,
            "token_ids": output[0, len(prompt) :].tolist(),
            "num_steps": self._tally.num_steps,
            "num_accepted": self._tally.num_accepted,
            "draft_seconds": self._tally.draft_seconds,
        }

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        generator = self._find_generator(*args, **kwargs)
        update, propose = generator.update_candidate_strategy, generator.get_candidates
        tally = self._tally

        def watch(input_ids: Any, scores: Any, num_matches: int) -> None:
            tally.num_steps += 1
            tally.num_accepted += int(num_matches)
            update(input_ids, scores, num_matches)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = propose(*args, **kwargs)
            tally.draft_seconds += time.perf_counter() - begin
            return result

        generator.update_candidate_strategy, generator.get_candidates = watch, timed
        return generator
