"""Small tokenizers of the families there are, built here from a few lines of text.

`byte_level` is GPT-2's kind (bytes as letters, a space belongs to the word behind it), `metaspace`
Llama's (sentencepiece's BPE: characters, unknown ones as bytes, a space before every text), `bytes`
has nothing but the 256 bytes. `save_model` writes a tiny random checkpoint that
speaks one of them. Nothing is downloaded.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from core.config import DrafterPoolConfig, ModelConfig
from tests.tiny_models import load_reference, save_tiny

CORPUS = """\
The harbour was built in 1821, when the old landing place had silted up. Two stone piers protect it.
When the herring stayed away, the town council bought a steam dredger and deepened the basin.
The museum shows the tools of the coopers, a model of the dredger, and the books of the harbour.
def load_orders(path):
    orders = []
    with open(path) as file:
        for line in file:
            customer, product, count = line.strip().split(";")
            orders.append((customer, product, int(count)))
    return orders
Die Köche würzten süße Äpfel. El niño comió una manzana. Ça va très bien, merci.
春眠不觉晓。处处闻啼鸟。吾輩は猫である。名前はまだ無い。Привет, как дела?
"""

TEXT = "The museum shows the tools of the old landing place, and when a herring stayed away from"
#: (target, drafter)
PAIRS = [
    ("byte_level", "metaspace"),
    ("byte_level", "byte_level_bos"),
    ("byte_level", "bytes"),
    ("metaspace", "byte_level"),
    ("metaspace_first", "byte_level_bos"),
    ("bytes", "metaspace_first"),
]


def byte_level(vocab_size: int = 400, bos: bool = False) -> PreTrainedTokenizerFast:
    """GPT-2's kind, with `vocab_size` tokens including "<bos>" and "<eos>"."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS.splitlines(keepends=True), trainer)
    return _fast(backend, "<bos>", "<eos>", bos)


def metaspace(
    vocab_size: int = 480, bos: bool = True, legacy: bool = True
) -> PreTrainedTokenizerFast:
    """Llama's kind: "<unk>", "<s>", "</s>", 256 bytes, then characters and merges.

    `legacy` puts the space before a text by a normalizer, as Llama 2 does, else by Metaspace.
    """
    special = ["<unk>", "<s>", "</s>"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special) - len(fallback), limit_alphabet=90, show_progress=False
    )
    trained.train_from_iterator(CORPUS.replace("\n", " ").split("  "), trainer)
    learned = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    vocab = {token: i for i, token in enumerate([*special, *fallback, *(t for t, _ in learned)])}
    merges = [
        (left, right)
        for left, right in _merges(trained)
        if left in vocab and right in vocab and left + right in vocab
    ]
    backend = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    if legacy:
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(steps)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _fast(backend, "<s>", "</s>", bos)


def pure_bytes(reverse: bool = False) -> PreTrainedTokenizerFast:
    """The 256 bytes and two special tokens; `reverse` gives the bytes other ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=reverse)
    vocab = {token: i for i, token in enumerate(["<pad>", "</s>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _fast(backend, "<pad>", "</s>", False)


BUILDERS = {
    "byte_level": byte_level,
    "byte_level_bos": lambda: byte_level(330, bos=True),
    "metaspace": metaspace,
    "metaspace_first": lambda: metaspace(430, bos=False, legacy=False),
    "bytes": pure_bytes,
}


def save_model(path: Path, tokenizer: str, seed: int = 0) -> Path:
    """A tiny random Llama that speaks the tokenizer of that name.

    Its greedy text is UTF-8 without end: it scores 0 for special tokens and parts of characters.
    """
    fast = BUILDERS[tokenizer]()
    eos = fast.convert_tokens_to_ids(fast.eos_token)
    ids = {"bos_token_id": 0, "eos_token_id": eos, "pad_token_id": eos}
    save_tiny("llama", path, seed, tokenizer=False, vocab_size=len(fast), **ids)
    texts = fast.batch_decode([[i] for i in range(len(fast))], skip_special_tokens=True)
    model = load_reference(path)
    with torch.no_grad():
        model.lm_head.weight[[not text or "\ufffd" in text for text in texts]] = 0
    model.save_pretrained(path)
    fast.save_pretrained(path)
    return path


class Checkpoints:
    """Calling it with a tokenizer's name gives a `save_model`, made once, in a folder of `make`."""

    def __init__(self, make: Callable[[str], Path]) -> None:
        self._make = make
        self._made: dict[str, Path] = {}

    def __call__(self, name: str) -> Path:
        if name not in self._made:
            self._made[name] = save_model(self._make(name), name)
        return self._made[name]


def pool_config(
    drafter: Path, target: Path, method: str = "auto", **options: Any
) -> DrafterPoolConfig:
    """A pool of kind "cross_tokenizer"."""
    limits = {"max_length": 512, "max_sequences": 6, "max_batch_tokens": 64}
    return DrafterPoolConfig(
        name="pool",
        kind="cross_tokenizer",
        model=ModelConfig(model=str(drafter), **limits),
        options={"target": str(target), "method": method, **options},
    )


def encode(path: Path, text: str) -> list[int]:
    """Ids of a text by the library, without special tokens."""
    return list(AutoTokenizer.from_pretrained(path).encode(text, add_special_tokens=False))


def _merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def _fast(backend: Tokenizer, bos: str, eos: str, adds_bos: bool) -> PreTrainedTokenizerFast:
    if adds_bos:
        backend.add_special_tokens([bos])
        token = (bos, backend.token_to_id(bos))
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[token]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=eos,
        clean_up_tokenization_spaces=False,
    )
