"""What the text so far does to the next token's logits: biases, penalties and bans.

`History` holds the committed tokens of one open sequence and what is known of them, kept up to
date token by token; draft tokens are pushed on it and popped again, so each draft position sees
its own prefix and none of them leaves a trace. `apply_history` then edits the logits of a whole
ragged batch at once: it lists (row, token, value) on the host, and gathers, computes and scatters
once. A sequence whose parameters ignore the past has no history and costs nothing.

The meaning of each parameter is that of transformers' processor of its name; presence and
frequency penalties, which it lacks, are vLLM's. core/params.py gives their order. Knows nothing of
temperature and truncation (`core.sampling`), constraints, rules or models.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.errors import InvalidRequestError
from core.params import SamplingParams

_Ints = NDArray[np.int64]


class History:
    """The committed tokens of one sequence, prompt included, and what its parameters make of them.

    Raises InvalidRequestError, naming the parameter, for token ids outside the vocabulary.
    """

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        _check_ids(params, vocab_size)
        self.params = params
        self._token_ids: list[int] = []
        bias = dict(params.logit_bias)
        self._words: dict[int, list[list[int]]] = {}
        for word in params.bad_words_ids:
            if len(word) > 1:
                self._words.setdefault(word[-2], []).append(list(word))
            elif word[0] not in params.end_token_ids:  # transformers spares these as well
                bias[word[0]] = -np.inf  # which no later processor brings back
        self._bias = np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)
        self._successors: dict[tuple[int, ...], list[int]] = {}
        self._seen: _SeenTokens | None = None
        if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
            self._seen = _SeenTokens()
        self._seen_from = params.num_prompt_tokens if params.repetition_penalty == 1 else 0

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Whether the parameters look at the past, or at single tokens; if not, keep no history."""
        return bool(
            params.logit_bias
            or params.bad_words_ids
            or params.repetition_penalty != 1
            or params.presence_penalty
            or params.frequency_penalty
            or params.no_repeat_ngram_size
            or (params.min_new_tokens and params.end_token_ids)
        )

    def __len__(self) -> int:
        return len(self._token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens."""
        tokens, size = self._token_ids, self.params.no_repeat_ngram_size
        for token in token_ids:
            index = len(tokens)
            if size and index >= size - 1:
                self._successors.setdefault(self._suffix(), []).append(token)
            if self._seen and index >= self._seen_from:
                self._seen.push(token, index >= self.params.num_prompt_tokens)
            tokens.append(token)

    def truncate(self, length: int) -> None:
        """Forget all tokens but the first `length`; not more than there are."""
        tokens, size = self._token_ids, self.params.no_repeat_ngram_size
        assert 0 <= length <= len(tokens)
        while len(tokens) > length:
            token, index = tokens.pop(), len(tokens)
            if self._seen and index >= self._seen_from:
                self._seen.pop(token, index >= self.params.num_prompt_tokens)
            if size and index >= size - 1:
                successors = self._successors[self._suffix()]
                successors.pop()
                if not successors:
                    del self._successors[self._suffix()]

    def _suffix(self) -> tuple[int, ...]:
        """The tokens that make an n-gram with the next one; some others while they are too few."""
        start = len(self._token_ids) + 1 - self.params.no_repeat_ngram_size
        return tuple(self._token_ids[start:])

    def _along(self, draft_token_ids: Sequence[int]) -> Iterator[None]:
        """Be at each position of a draft in turn, from before its first token to behind its last,
        and then back again."""
        length = len(self)
        yield
        for token in draft_token_ids:
            self.extend([token])
            yield
        self.truncate(length)

    def _banned(self) -> list[int]:
        """Tokens that cannot be next; some perhaps twice."""
        params, tokens = self.params, self._token_ids
        banned: list[int] = []
        if params.min_new_tokens and len(tokens) < params.num_prompt_tokens + params.min_new_tokens:
            banned += params.end_token_ids
        if params.no_repeat_ngram_size:
            banned += self._successors.get(self._suffix(), ())
        if self._words and tokens:
            words = self._words.get(tokens[-1], ())
            banned += [word[-1] for word in words if tokens[1 - len(word) :] == word[:-1]]
        return banned


class _Entries:
    """Entries of a matrix `[R, V]` with a value each, listed row by row."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.ids: list[_Ints] = []
        self.values: list[NDArray[Any]] = []

    def add(self, row: int, ids: _Ints, values: NDArray[Any]) -> None:
        self.rows.append(row)
        self.ids.append(ids)
        self.values.append(values)

    @property
    def lengths(self) -> list[int]:
        return [len(ids) for ids in self.ids]

    def where(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The index of all entries at once."""
        rows = np.repeat(self.rows, self.lengths)
        index = torch.from_numpy(np.stack([rows, np.concatenate(self.ids)])).to(device)
        return index[0], index[1]


class _SeenTokens:
    """The distinct tokens of a text, by first appearance, and how often each was generated.

    What was pushed last is popped first, so a token that disappears is always the last column.
    """

    def __init__(self) -> None:
        self._columns: dict[int, int] = {}
        self._occurrences: list[int] = []
        self._table: _Ints = np.zeros((2, 64), np.int64)

    def push(self, token: int, generated: bool) -> None:
        column = self._columns.setdefault(token, len(self._columns))
        if column == len(self._occurrences):
            self._occurrences.append(0)
            if column == self._table.shape[1]:
                self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
            self._table[0, column] = token  # the count below is 0, also after pops
        self._occurrences[column] += 1
        if generated:
            self._table[1, column] += 1

    def pop(self, token: int, generated: bool) -> None:
        column = self._columns[token]
        self._occurrences[column] -= 1
        if generated:
            self._table[1, column] -= 1
        if not self._occurrences[column]:
            del self._columns[token], self._occurrences[column]

    def snapshot(self) -> _Ints:
        """Token ids, and under each how often it was generated: `[2, tokens]`."""
        return self._table[:, : len(self._occurrences)].copy()


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """A draft behind a history and `prefix`; its len(draft) + 1 rows of logits begin with row
    `first`."""

    history: History
    first: int
    draft_token_ids: Sequence[int] = ()
    prefix: Sequence[int] = ()


def apply_history(logits: Tensor, rows: Sequence[HistoryRow]) -> None:
    """Apply all parameters that `History.needed` names, in place; other rows stay untouched.

    logits: fp32 `[R, V]`, on any device, which is not waited for. Every (row, token) gets the same
    bits whatever batch or draft it is part of.
    """
    biased, seen = _Entries(), _Entries()
    penalties: list[tuple[float, float, float]] = []
    banned: list[tuple[int, int]] = []
    for row in rows:
        history, params, length = row.history, row.history.params, len(row.history)
        history.extend(row.prefix)
        penalty = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        for index, _ in enumerate(history._along(row.draft_token_ids), row.first):
            if len(history._bias[0]):
                biased.add(index, *history._bias)
            if history._seen:
                seen.add(index, *history._seen.snapshot())
                penalties.append(penalty)
            banned += [(index, token) for token in history._banned()]
        history.truncate(length)
    if biased.rows:
        where = biased.where(logits.device)
        logits[where] += logits.new_tensor(np.concatenate(biased.values))
    if seen.rows:
        where = seen.where(logits.device)
        counts = np.concatenate(seen.values)
        divisor, presence, frequency = np.repeat(penalties, seen.lengths, axis=0).T
        offset = logits.new_tensor(presence * (counts > 0) + frequency * counts)
        scores, divide_by = logits[where], logits.new_tensor(divisor)
        scores = torch.where(scores < 0, scores * divide_by, scores / divide_by)
        logits[where] = scores - offset
    if banned:
        row_indices, token_ids = torch.tensor(banned, device=logits.device).T
        logits[row_indices, token_ids] = -torch.inf


def _check_ids(params: SamplingParams, vocab_size: int) -> None:
    named = {
        "logit_bias": [token for token, _ in params.logit_bias],
        "bad_words_ids": [token for word in params.bad_words_ids for token in word],
        "end_token_ids": params.end_token_ids,
    }
    for name, ids in named.items():
        if not all(0 <= token < vocab_size for token in ids):
            raise InvalidRequestError(f"sampling.{name}", f"ids must be below {vocab_size}")
    if not all(params.bad_words_ids):
        raise InvalidRequestError("sampling.bad_words_ids", "a word must have at least one id")
