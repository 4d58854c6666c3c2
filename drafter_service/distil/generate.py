"""The training text: the target answers prompts, many at once, and its likeliest tokens are kept.

Answers lie on disk in shards of consecutive prompts. A prompt's answer depends on the seed, its
number and its words only, never on what was written beside it, and a shard appears by a rename: so
whoever interrupts and repeats `generate` gets the same files, and pays only for those that are
missing. Knows nothing of drafters and training.
"""

import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from core.errors import InvalidRequestError, ModelError
from core.model import RaggedModel, Row
from core.sampling import NO_TOKEN, draw
from core.types import Rule, SamplingParams

SHARD_PROMPTS = 64


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How the target writes. Lengths in tokens.

    greedy_share: of the answers, the rest are sampled at `temperature`. top_n: likeliest tokens
    kept per position, with their log-probabilities at temperature 1.
    """

    seed: int = 0
    max_new_tokens: int = 160
    greedy_share: float = 0.7
    temperature: float = 0.7
    top_n: int = 12


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, the target's answer, and what the target thought of each of the answer's T tokens:
    its likeliest ids `[T, n]` (int32, likeliest first) and their log-probabilities (fp16).
    `features` `[prompt + T - 1, F]` are the target's of all tokens but the last, where wanted."""

    prompt_ids: list[int]
    answer_ids: list[int]
    top_ids: Tensor
    top_log_probs: Tensor
    features: Tensor | None = None


@dataclass(slots=True)
class _Answer:
    """An answer being written. `number` is its prompt's."""

    number: int
    prompt_ids: list[int]
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    top_ids: list[Tensor] = field(default_factory=list)
    top_log_probs: list[Tensor] = field(default_factory=list)

    def text(self) -> Text:
        top_ids, top_log_probs = torch.stack(self.top_ids), torch.stack(self.top_log_probs)
        return Text(self.prompt_ids, self.token_ids, top_ids, top_log_probs)


class Shards:
    """The files of one folder: of each `SHARD_PROMPTS` consecutive prompts, the answers.

    paths: of all shards. sizes: tokens of the answers, of those shards that are there.
    """

    def __init__(self, folder: Path, num_prompts: int, num_tokens: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.paths = [
            folder / f"shard-{number:05d}.safetensors"
            for number in range(-(-num_prompts // SHARD_PROMPTS))
        ]
        self.sizes = {n: num_answered(path) for n, path in enumerate(self.paths) if path.exists()}
        self._num_tokens = num_tokens

    def missing(self) -> list[int]:
        """Numbers of the shards that are not there, ascending."""
        return [number for number in range(len(self.paths)) if number not in self.sizes]

    def needed(self) -> list[Path] | None:
        """The first shards, as many as hold the tokens wanted, or all; None if one is missing."""
        total = 0
        for number in range(len(self.paths)):
            if number not in self.sizes:
                return None
            total += self.sizes[number]
            if total >= self._num_tokens:
                return self.paths[: number + 1]
        return self.paths


def generate(
    model: RaggedModel,
    prompts: Sequence[str],
    folder: Path,
    options: GenerationOptions,
    num_tokens: int,
    on_tokens: Callable[[int], None] = lambda total: None,
) -> list[Path]:
    """Have the first prompts answered until there are `num_tokens` tokens of answers.

    Returns the shards in order, no more than are needed for that; all there are when the prompts
    run out. Calls `on_tokens` with the tokens there are so far. Raises InvalidRequestError for a
    prompt that leaves no room for its answer, ModelError for a target without a tokenizer.
    """
    shards = Shards(folder, len(prompts), num_tokens)
    if (needed := shards.needed()) is not None:
        return needed
    missing = {number: shards.paths[number] for number in shards.missing()}
    given = dict(enumerate(prompts))
    for unfinished in write_shards(model, given, missing, options, shards.sizes):
        if (needed := shards.needed()) is not None:
            return needed
        on_tokens(min(num_tokens, sum(shards.sizes.values()) + unfinished))
    return shards.paths


def write_shards(
    model: RaggedModel,
    prompts: Mapping[int, str],
    paths: Mapping[int, Path],
    options: GenerationOptions,
    sizes: dict[int, int],
) -> Iterator[int]:
    """Write the shards of these numbers to these paths; `prompts` has theirs, by number.

    Yields after every answer: how many tokens the shards have that are not finished; those that are
    stand in `sizes`. Raises as `generate`.
    """
    members = {
        number: [
            i for i in range(number * SHARD_PROMPTS, (number + 1) * SHARD_PROMPTS) if i in prompts
        ]
        for number in paths
    }
    answers: dict[int, list[_Answer]] = {}
    for answer in _answer(model, prompts, (i for each in members.values() for i in each), options):
        number = answer.number // SHARD_PROMPTS
        shard = answers.setdefault(number, [])
        shard.append(answer)
        if len(shard) == len(members[number]):
            shard.sort(key=lambda each: each.number)
            _save([each.text() for each in answers.pop(number)], paths[number])
            sizes[number] = num_answered(paths[number])
        yield sum(map(_written, answers.values()))


def load_texts(paths: Sequence[Path]) -> Iterator[Text]:
    """The texts of shards, in order. Raises ModelError for a file that is not a shard."""
    for path in paths:
        try:
            shard = load_file(path)
            lengths, ids = shard["lengths"].tolist(), shard["token_ids"].tolist()
            tops, log_probs = shard["top_ids"], shard["top_log_probs"]
        except (OSError, KeyError, SafetensorError) as error:
            raise ModelError(f"{path}: not a shard of training text: {error}") from error
        start = answered = 0
        for num_prompt, num_answer in lengths:
            middle, end = start + num_prompt, start + num_prompt + num_answer
            part = slice(answered, answered + num_answer)
            yield Text(ids[start:middle], ids[middle:end], tops[part], log_probs[part])
            start, answered = end, part.stop


def num_answered(path: Path) -> int:
    """How many tokens of answers a shard holds. Raises as `load_texts`."""
    return sum(len(text.answer_ids) for text in load_texts([path]))


def _save(texts: Sequence[Text], path: Path) -> None:
    token_ids = [token for text in texts for token in (*text.prompt_ids, *text.answer_ids)]
    lengths = [[len(text.prompt_ids), len(text.answer_ids)] for text in texts]
    shard = {
        "lengths": torch.tensor(lengths, dtype=torch.int32),
        "token_ids": torch.tensor(token_ids, dtype=torch.int32),
        "top_ids": torch.cat([text.top_ids for text in texts]),
        "top_log_probs": torch.cat([text.top_log_probs for text in texts]),
    }
    unfinished = path.with_suffix(f".{os.getpid()}")
    save_file(shard, unfinished)
    unfinished.rename(path)


def _written(shard: Sequence[_Answer]) -> int:
    return sum(len(answer.token_ids) for answer in shard)


def _answer(
    model: RaggedModel,
    prompts: Mapping[int, str],
    numbers: Iterable[int],
    options: GenerationOptions,
) -> Iterator[_Answer]:
    """The answers to the prompts of these numbers as they are finished; the batch is kept full."""
    if model.tokenizer is None:
        raise ModelError(f"{model.identity.model} has no tokenizer to read prompts with")
    waiting = iter(numbers)
    free = list(range(model.max_sequences))
    writing: dict[int, _Answer] = {}
    while True:
        room = model.max_batch_tokens - len(writing)
        rows = [
            Row(sequence, model.length(sequence), answer.token_ids[-1:], 1)
            for sequence, answer in writing.items()
        ]
        while free and room >= model.max_length:
            number = next(waiting, None)
            if number is None:
                break
            answer = _begin(model, number, prompts[number], options)
            sequence = free.pop()
            writing[sequence] = answer
            model.open(sequence)
            copied = model.reuse_prefix(sequence, answer.prompt_ids)
            rows.append(Row(sequence, copied, answer.prompt_ids[copied:], 1))
            room -= len(answer.prompt_ids)
        if not rows:
            return
        _step(model, rows, list(writing.values()), options)
        for sequence, answer in list(writing.items()):
            ended = answer.token_ids[-1] in model.eos_token_ids
            if ended or len(answer.token_ids) == options.max_new_tokens:
                model.close(sequence)
                free.append(sequence)
                yield writing.pop(sequence)


def _begin(model: RaggedModel, number: int, prompt: str, options: GenerationOptions) -> _Answer:
    assert model.tokenizer is not None
    if model.tokenizer.has_chat_template:
        ids = model.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    else:
        ids = model.tokenizer.encode(prompt)
    if not 0 < len(ids) <= model.max_length - options.max_new_tokens:
        raise InvalidRequestError(
            f"prompts[{number}]",
            f"{len(ids)} tokens and {options.max_new_tokens} new ones do not fit the context "
            f"of {model.max_length}",
        )
    rng = random.Random(f"{options.seed} {number}")
    if rng.random() < options.greedy_share:
        return _Answer(number, ids, SamplingParams())
    sampling = SamplingParams(
        temperature=options.temperature, seed=rng.getrandbits(63), rule=Rule.COUPLED
    )
    return _Answer(number, ids, sampling)


def _step(
    model: RaggedModel, rows: Sequence[Row], answers: Sequence[_Answer], options: GenerationOptions
) -> None:
    """One forward; every answer gets its next token and what the target thought of it."""
    logits = model.forward(rows)[:, : model.tokenizer_size]
    positions = [len(answer.prompt_ids) + len(answer.token_ids) for answer in answers]
    drawn = draw(logits, [answer.params for answer in answers], positions).tolist()
    best = logits.topk(min(options.top_n, logits.shape[1]))
    log_probs = (best.values - logits.logsumexp(dim=-1, keepdim=True)).half().cpu()
    top_ids = best.indices.int().cpu()
    for i, answer in enumerate(answers):
        if drawn[i] == NO_TOKEN:
            raise ModelError(f"{model.identity.model} computes logits that are not numbers")
        answer.token_ids.append(drawn[i])
        answer.top_ids.append(top_ids[i])
        answer.top_log_probs.append(log_probs[i])
