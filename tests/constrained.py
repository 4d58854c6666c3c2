"""For the tests of constraints: three kinds of tokenizer, and random text under masks.

Byte-level without merges (tests/tiny_models.py), byte-level with tokens that end inside a
character, and sentencepiece-like with byte fallback. Nothing is downloaded.
"""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from core.constraints import ConstraintCompiler, ConstraintState, apply_masks
from core.params import Constraint, ConstraintKind
from core.tokenizer import Tokenizer as CoreTokenizer


class Target:
    """A tokenizer and a compiler of constraints for it, under a head padded by 50 ids."""

    def __init__(self, path: Path, end: int) -> None:
        self.tokenizer = CoreTokenizer.load(str(path))
        self.text = self.tokenizer.to_json()
        self.end, self.vocab_size = end, self.tokenizer.size + 50
        self.compiler = ConstraintCompiler(self.text, [end])

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def compile(self, kind: ConstraintKind, source: str) -> ConstraintState:
        return self.compiler.compile(Constraint(kind, source))

    def allowed(self, mask: NDArray[np.int32]) -> list[set[int]]:
        """The allowed ids of packed masks `[n, words]`, by way of `apply_masks`."""
        logits = torch.zeros(len(mask), self.vocab_size)
        apply_masks(logits, [(0, mask)])
        return [set(row.isfinite().nonzero().flatten().tolist()) for row in logits]


def save_sentencepiece_like(path: Path) -> int:
    """Words behind U+2581 and bytes as <0x..>, as Llama 2 and Gemma have; its end token."""
    words = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "1", '"']
    words += ["20", "-0", '{"', '":', "\u2581[", "\u25811", "ü", "er", "(1", "+("]
    vocab = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token=None))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(path)
    return 1


def save_merged(path: Path) -> int:
    """Byte-level BPE with tokens of several bytes, some of which end inside a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = ['{ "', '" :', '" ,', "1 9", "2 0", "- 0", "( 1", "+ (", "a m", "n am", "nam e"]
    pairs += ["\u0120 \u0120", "n \u00c3", "} }"]
    merges = [(left, right) for left, right in (pair.split(" ") for pair in pairs)]
    vocab = {token: index for index, token in enumerate(alphabet)}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(path)
    return len(vocab)


def generate(target: Target, state: ConstraintState, seed: int) -> tuple[list[int], int]:
    """Greedy tokens of random logits under masks, with drafts that are often right; how many of
    them were accepted. The end token is left out."""
    rng = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    accepted = 0
    while len(tokens) < 600:
        logits = torch.randn(4, target.vocab_size, generator=rng)
        logits[:, target.end] += 2.0
        ids = logits.topk(40).indices[:3]
        draft = [int(row[int(torch.randint(3, (), generator=rng))]) for row in ids]
        first = target.allowed(state.masks(tokens))[0]
        draft[0] = max(first, key=lambda token: float(logits[0, token]))
        masks = state.masks(tokens, draft)
        apply_masks(logits, [(0, masks)])
        for index in range(len(masks)):
            token = int(logits[index].argmax())
            if token == target.end:
                return tokens, accepted
            tokens.append(token)
            if index == len(draft) or token != draft[index]:
                break
            accepted += 1
    raise AssertionError(f"no end: {target.tokenizer.decode(tokens)!r}")
