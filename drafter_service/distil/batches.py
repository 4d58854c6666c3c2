"""Texts as tensors: padded batches, their order, and where the answers' tokens stand in them.

The order of an epoch depends on the seed and the epoch only, so that training can begin anywhere.
Padding stands behind a text, where causal attention cannot see it; texts of like length share a
batch. Knows nothing of networks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from drafter_service.distil.generate import Text

#: Batches among which texts are sorted by length: more pad less, fewer mix better.
_POOL = 8


@dataclass(frozen=True, slots=True)
class Batch:
    """B texts of at most L tokens, with M answer tokens among them, text after text.

    token_ids: int64 `[B, L]`. rows, places, ordinals: int64 `[M]`, the answer tokens' text, their
    place in it, and their number in the answer. next_columns: int64 `[M]`, the tokens as columns of
    the draft vocabulary, -1 for those that are not in it. columns: int64 `[M, n]`, the target's
    likeliest tokens likewise. probabilities: fp32 `[M, n]`, what the target gave them. features:
    `[B, L - 1, F]`, what the target computed of the tokens, for drafters that start from it.
    """

    token_ids: Tensor
    rows: Tensor
    places: Tensor
    ordinals: Tensor
    next_columns: Tensor
    columns: Tensor
    probabilities: Tensor
    features: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        """The same on a device."""
        parts = {each.name: getattr(self, each.name) for each in fields(self)}
        there = {name: part.to(device) for name, part in parts.items() if part is not None}
        return Batch(**there)


def make_batch(texts: Sequence[Text], columns: Tensor) -> Batch:
    """`columns`: for every id of the target its column among the draft vocabulary, or -1."""
    whole = [[*text.prompt_ids, *text.answer_ids] for text in texts]
    token_ids = torch.zeros(len(texts), max(map(len, whole)), dtype=torch.int64)
    for row, ids in enumerate(whole):
        token_ids[row, : len(ids)] = torch.tensor(ids)
    counts = torch.tensor([len(text.answer_ids) for text in texts])
    ordinals = torch.cat([torch.arange(int(count)) for count in counts])
    prompts = torch.tensor([len(text.prompt_ids) for text in texts])
    features = None
    if (first := texts[0].features) is not None:
        features = first.new_zeros(len(texts), token_ids.shape[1] - 1, first.shape[1])
        for row, text in enumerate(texts):
            assert text.features is not None
            features[row, : len(text.features)] = text.features
    answers = torch.tensor([token for text in texts for token in text.answer_ids])
    top_ids = torch.cat([text.top_ids for text in texts]).long()
    log_probs = torch.cat([text.top_log_probs for text in texts]).float()
    return Batch(
        token_ids,
        torch.arange(len(texts)).repeat_interleave(counts),
        prompts.repeat_interleave(counts) + ordinals,
        ordinals,
        columns[answers],
        columns[top_ids],
        log_probs.exp(),
        features,
    )


def epoch_order(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """The batches of an epoch as indices of texts; those left over wait for another epoch."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    shuffled = torch.randperm(len(lengths), generator=generator).tolist()
    batches: list[list[int]] = []
    for start in range(0, len(shuffled), batch_size * _POOL):
        pool = sorted(shuffled[start : start + batch_size * _POOL], key=lambda i: lengths[i])
        batches += [pool[i : i + batch_size] for i in range(0, len(pool), batch_size)]
    full = [batch for batch in batches if len(batch) == batch_size] or batches[:1]
    return [full[i] for i in torch.randperm(len(full), generator=generator).tolist()]


def endless(
    lengths: Sequence[int], batch_size: int, seed: int, first_step: int
) -> Iterator[list[int]]:
    """The batches of all epochs one after the other, from step `first_step` on."""
    epoch = 0
    while True:
        order = epoch_order(lengths, batch_size, seed, epoch)
        yield from order[first_step:]
        first_step = max(0, first_step - len(order))
        epoch += 1
