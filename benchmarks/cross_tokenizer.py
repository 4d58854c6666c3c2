"""What another tokenizer costs a drafter: acceptance of both ways of translating, for real models.

The target is the embedded SmolLM2, and so is the drafter's network (`--model` names another): the
tokenizer is all that differs. It is SmolLM2's own cut to its first N merges ("gpt2-N"), the same
tokens as sentencepiece would write them ("llama-N"), or single bytes. Each new token's embedding is
the row of the same string. The network was never trained on these spellings, which makes the small
vocabularies look worse than a drafter would that was.

The target's text does not depend on the drafter (greedy, and coupled by its seed), so it is written
once and the drafts are held against it, eight prompts as one batch. Nothing is timed.

    python -m benchmarks.cross_tokenizer [--drafters gpt2-8000,bytes] [--tokens 24] [--draft 5]
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from benchmarks.prompts import CHAT, GROUNDED
from core.config import DrafterPoolConfig, ModelConfig
from core.embedded import resolve_model
from core.model import RaggedModel, Row
from core.tokenizer import Tokenizer
from core.types import Rule, SamplingParams
from drafter_service.drafters import create_drafter
from drafter_service.drafters.base import Drafter, DraftJob
from drafter_service.drafters.draft_model import DraftModelDrafter
from drafter_service.translation import Translator

_TARGET = "embedded:smollm2-135m-instruct"
_DRAFTERS = "gpt2-32000,gpt2-16000,gpt2-8000,gpt2-4000,gpt2-1000,llama-32000,llama-8000,bytes"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_SAMPLINGS = {
    "greedy": SamplingParams(),
    "coupled": SamplingParams(temperature=0.8, top_p=0.95, seed=7, rule=Rule.COUPLED),
}


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Sums over all rounds."""

    num_rounds: int
    num_accepted: int
    num_drafted: int

    def __str__(self) -> str:
        per_verify = 1 + self.num_accepted / self.num_rounds
        share = self.num_accepted / max(1, self.num_drafted)
        return f"{per_verify:5.2f} {share:5.0%}"


class CountingModel(RaggedModel):
    """Counts the tokens it predicts, which is what a draft costs."""

    num_logits = 0

    def forward(self, rows: Sequence[Row], num_layers: int = 0) -> torch.Tensor:
        self.num_logits += sum(row.num_logits for row in rows)
        return super().forward(rows, num_layers)


# ---------------------------------------------------------------- drafters with other tokenizers


def build_tokenizer(name: str, source: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of that name, made from SmolLM2's."""
    state = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    kind, _, size = name.partition("-")
    merges = [tuple(pair) for pair in state["merges"]][: int(size or 0)]
    alphabet = sorted(bytes_to_unicode().values())
    if kind in ("gpt2", "bytes"):
        tokens = [*alphabet, *(left + right for left, right in merges)]
        backend = Backend(BPE(_numbered(tokens), merges))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    elif kind == "llama":
        backend = _metaspace(merges)
    else:
        raise SystemExit(f"no tokenizer {name!r}: gpt2-N, llama-N or bytes")
    backend.add_special_tokens(list(_SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", clean_up_tokenization_spaces=False
    )


def _metaspace(merges: Sequence[tuple[str, str]]) -> Backend:
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}

    def written(token: str) -> str:
        text = bytes(byte_of[c] for c in token).decode(errors="replace")
        return "" if "\ufffd" in text else text.replace(" ", "▁")

    known = {written(character) for character in byte_of} - {""}
    characters = sorted({c for pair in merges for token in pair for c in written(token)} | known)
    known.update(characters)
    pairs = []
    for pair in merges:
        left, right = map(written, pair)
        if {left, right} <= known:  # neither is half a character, nor was made of such
            pairs.append((left, right))
            known.add(left + right)
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", *fallback, *characters, *(left + right for left, right in pairs)]
    backend = Backend(BPE(_numbered(tokens), pairs, unk_token="<unk>", byte_fallback=True))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(steps)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return backend


def _numbered(tokens: Sequence[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(dict.fromkeys(tokens))}


def save_drafter(name: str, source: Path, target: Path) -> None:
    """The model of `source` with another tokenizer: rows of its embedding, by what they spell."""
    build_tokenizer(name, source).save_pretrained(target)
    old, new = Tokenizer.load(str(source)), Tokenizer.load(str(target))
    translator = Translator(old, new, new.size)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    rows = model.get_input_embeddings().weight.detach()
    chosen = torch.zeros(new.size, rows.shape[1], dtype=rows.dtype)
    for drafter_id, old_id in translator.shared.items():
        chosen[drafter_id] = rows[old_id]
    # The same string under a second id (a letter as a byte) is never drawn, but may be read.
    model.resize_token_embeddings(new.size, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(chosen)
    model.save_pretrained(target)


# ---------------------------------------------------------------- measuring


def write(
    model: RaggedModel, prompts: Sequence[list[int]], k: int, sampling: SamplingParams
) -> list[list[int]]:
    """What the target writes behind each prompt, by itself: `k` tokens or up to its end."""
    plain = DraftModelDrafter(model)
    jobs = [DraftJob(s, prompt, k, sampling) for s, prompt in enumerate(prompts)]
    texts = [list(draft.token_ids) for draft in plain.draft(jobs)]
    for job in jobs:
        plain.close(job.sequence)
    ends = model.eos_token_ids
    return [
        text[: next((i for i, token_id in enumerate(text) if token_id in ends), k)]
        for text in texts
    ]


def measure(
    drafter: Drafter,
    prompts: Sequence[list[int]],
    texts: Sequence[list[int]],
    k: int,
    sampling: SamplingParams,
) -> Acceptance:
    """Draft `k` tokens round by round along the texts, all prompts as one batch."""
    total = Acceptance(0, 0, 0)
    at = dict.fromkeys(range(len(prompts)), 1)  # the prompt gave the first token
    while at:
        jobs = [DraftJob(s, prompts[s] + texts[s][:n], k, sampling) for s, n in at.items()]
        for job, draft in zip(jobs, drafter.draft(jobs), strict=True):
            rest = texts[job.sequence][at[job.sequence] :]
            accepted = 0
            for drafted, wanted in zip(draft.token_ids, rest, strict=False):
                if drafted != wanted:
                    break
                accepted += 1
            drafted = min(len(draft.token_ids), len(rest))
            total = Acceptance(
                total.num_rounds + 1, total.num_accepted + accepted, total.num_drafted + drafted
            )
            at[job.sequence] += accepted + 1
        at = {s: n for s, n in at.items() if n < len(texts[s])}
    return total


def load(model: str, path: Path | None = None) -> ModelConfig:
    """A model's config, eight sequences wide."""
    return ModelConfig(model=str(path or resolve_model(model)), max_length=2048, max_sequences=8)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--drafters", default=_DRAFTERS)
    parser.add_argument("--model", default=_TARGET)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--draft", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = RaggedModel.load(load(_TARGET))
    assert target.tokenizer is not None
    prompts = [
        target.tokenizer.apply_chat_template([{"role": "user", "content": text}])
        for text in (*CHAT[:4], *GROUNDED[:4])
    ]
    texts = {
        name: write(target, prompts, options.tokens, sampling)
        for name, sampling in _SAMPLINGS.items()
    }
    print("tokens per verify and share of the draft accepted; steps: drafter tokens per verify")
    print(
        f"{'drafter':12} {'method':7} {'overlap':>7}  "
        + "   ".join(f"{name:>11} {'steps':>5}" for name in _SAMPLINGS)
    )

    def row(name: str, method: str, overlap: str, drafter: Any) -> None:
        cells = []
        for kind, sampling in _SAMPLINGS.items():
            drafter._model.num_logits = 0
            found = measure(drafter, prompts, texts[kind], options.draft, sampling)
            steps = drafter._model.num_logits / found.num_rounds
            for sequence in range(len(prompts)):
                drafter.close(sequence)
            cells.append(f"{found} {steps:5.1f}")
        print(f"{name:12} {method:7} {overlap:>7}  " + "   ".join(cells), flush=True)

    row("its own", "-", "", DraftModelDrafter(CountingModel.load(load(options.model))))
    source = Path(resolve_model(options.model))
    for name in options.drafters.split(","):
        with tempfile.TemporaryDirectory() as folder:
            save_drafter(name, source, Path(folder))
            for method in ("tli", "slem"):
                pool = DrafterPoolConfig(
                    name=name,
                    kind="cross_tokenizer",
                    model=load("", Path(folder)),
                    options={"target": _TARGET, "method": method},
                )
                drafter: Any = create_drafter(pool)
                drafter._model.__class__ = CountingModel
                row(name, method, f"{drafter._translator.overlap:.2f}", drafter)


if __name__ == "__main__":
    main()
