"""The peer: the stock transformers model and its `generate`, alone on the target's core.

Greedy, end tokens ignored (the generation config has none), so that both sides produce equally
many tokens. A list of prompts is one left-padded batch, as `generate` wants it. Knows nothing of
forerun. Run as `python -m benchmarks.peer` by `benchmarks.context`.
"""

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.assisted import Assisted
from benchmarks.worker import serve


class Peer:
    """The functions that can be called; see `benchmarks.worker`."""

    def __init__(self) -> None:
        self._model: PreTrainedModel | None = None
        self._pad_id = 0
        self._path = ""
        self._assisted: Assisted | None = None

    def load(self, path: str, dtype: str) -> None:
        """Load the checkpoint the way its users do."""
        self._model, self._path = load_stock(path, dtype), path
        config = self._model.generation_config
        pad, eos = config.pad_token_id, config.eos_token_id
        self._pad_id = pad if pad is not None else (eos[0] if isinstance(eos, list) else eos or 0)
        config.pad_token_id, config.eos_token_id = self._pad_id, None

    @torch.inference_mode()
    def generate(
        self, prompts: list[list[int]], max_new_tokens: int, prompt_lookup_num_tokens: int = 0
    ) -> dict[str, Any]:
        """Seconds of one `generate` call and the new tokens of each prompt."""
        assert self._model is not None
        width = max(map(len, prompts))
        padded = [[self._pad_id] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        options: dict[str, Any] = {}
        if prompt_lookup_num_tokens:
            options["prompt_lookup_num_tokens"] = prompt_lookup_num_tokens
        begin = time.perf_counter()
        output = self._model.generate(
            torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            **options,
        )
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "token_ids": output[:, width:].tolist()}

    def assist(self, method: str, num_draft_tokens: int, **options: Any) -> None:
        """Set up assisted generation; see `benchmarks.assisted`."""
        assert self._model is not None
        options["target"] = self._path
        self._assisted = Assisted(self._model, method, num_draft_tokens, **options)

    def generate_assisted(self, prompt: list[int], max_new_tokens: int) -> dict[str, Any]:
        """What `Assisted.generate` gives."""
        assert self._assisted is not None
        return self._assisted.generate(prompt, max_new_tokens)

    @torch.inference_mode()
    def margin(self, token_ids: list[int]) -> float:
        """Difference of the two largest logits behind the tokens."""
        assert self._model is not None
        logits = self._model(torch.tensor([token_ids]), logits_to_keep=1).logits
        first, second = logits[0, -1].float().topk(2).values.tolist()
        return float(first - second)


def load_stock(path: str, dtype: str) -> PreTrainedModel:
    """The stock model on the CPU, and one thread for it."""
    torch.set_num_threads(1)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, local_files_only=True
    )
    return model.eval()


if __name__ == "__main__":
    peer = Peer()
    serve(
        {
            "load": peer.load,
            "generate": peer.generate,
            "margin": peer.margin,
            "assist": peer.assist,
            "generate_assisted": peer.generate_assisted,
        }
    )
