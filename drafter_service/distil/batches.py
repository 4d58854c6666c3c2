"""Texts as tensors: padded batches, their order, and which logits predict an answer's tokens.

The order of an epoch depends on the seed and the epoch only, so that training can begin anywhere.
Padding stands behind a text, where causal attention cannot see it; texts of like length share a
batch. Knows nothing of networks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter_service.distil.generate import Text

#: Batches among which texts are sorted by length: more pad less, fewer mix better.
_POOL = 8


@dataclass(frozen=True, slots=True)
class Batch:
    """B texts of at most L tokens, with M answer tokens among them.

    token_ids: int64 `[B, L]`. num_logits: so many last logits of each row are of interest.
    predicts: bool `[B, num_logits]`, which of them predict a token of an answer; True M times.
    next_columns: int64 `[M]`, the answers' tokens as columns of the draft vocabulary, -1 for those
    that are not in it. columns: int64 `[M, n]`, the target's likeliest tokens likewise.
    probabilities: fp32 `[M, n]`, what the target gave them.
    """

    token_ids: Tensor
    num_logits: int
    predicts: Tensor
    next_columns: Tensor
    columns: Tensor
    probabilities: Tensor

    def to(self, device: torch.device) -> "Batch":
        """The same on a device."""
        return Batch(
            self.token_ids.to(device),
            self.num_logits,
            self.predicts.to(device),
            self.next_columns.to(device),
            self.columns.to(device),
            self.probabilities.to(device),
        )


def make_batch(texts: Sequence[Text], columns: Tensor) -> Batch:
    """`columns`: for every id of the target its column among the draft vocabulary, or -1."""
    whole = [[*text.prompt_ids, *text.answer_ids] for text in texts]
    longest = max(map(len, whole))
    first = min(len(text.prompt_ids) for text in texts) - 1
    token_ids = torch.zeros(len(texts), longest, dtype=torch.int64)
    predicts = torch.zeros(len(texts), longest, dtype=torch.bool)
    for row, (text, ids) in enumerate(zip(texts, whole, strict=True)):
        token_ids[row, : len(ids)] = torch.tensor(ids)
        predicts[row, len(text.prompt_ids) - 1 : len(ids) - 1] = True
    answers = torch.tensor([token for text in texts for token in text.answer_ids])
    top_ids = torch.cat([text.top_ids for text in texts]).long()
    log_probs = torch.cat([text.top_log_probs for text in texts]).float()
    return Batch(
        token_ids,
        longest - first,
        predicts[:, first:],
        columns[answers],
        columns[top_ids],
        log_probs.exp(),
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
