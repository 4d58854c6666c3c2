"""Distillation: a drafter learns to say what the target would have said.

Each token of an answer is taught by the target's likeliest tokens and their probabilities; what
they leave is one more outcome, the tail. Matrices are optimised by Muon, the rest by AdamW, in bf16
over fp32 weights. The learning rate is constant after a short start and falls to zero in the last
part, so a run that was planned too long or too short can be continued with another length. A
student that drafts from its own hidden states is taught so in that last part: each token as the
first of a draft, as the second, and so on, all behind what the target really said.

Everything that a step needs depends on the seed and the step's number. A run that was interrupted
therefore goes on from its last checkpoint to the same drafter, bit for bit, on the same machine.
Several processes (`ranks`) each take a part of every batch; every token counts the same, whoever
has it. Knows nothing of checkpoints of drafters, of the CLI and of where texts come from.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from core.errors import InvalidRequestError
from drafter_service.distil import ranks
from drafter_service.distil.batches import Batch, endless, make_batch
from drafter_service.distil.generate import Text
from drafter_service.distil.measure import Acceptance, Matches, acceptance


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How to train.

    hard_share: part of the loss that looks at the target's first choice only. decay_share: last
    part of the steps, in which the learning rate falls. num_depths: places of a draft that a
    student learns apart, if they differ for it; each counts `depth_weight` times the one before.
    Evaluation and checkpoint come every `evaluate_every` steps; training ends early after
    `patience` evaluations without a better loss.
    """

    epochs: float = 5.0
    batch_size: int = 16
    learning_rate: float = 1e-2
    hard_share: float = 0.3
    decay_share: float = 0.4
    num_depths: int = 3
    depth_weight: float = 0.8
    warmup_steps: int = 20
    evaluate_every: int = 40
    patience: int = 6
    draft_length: int = 5
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Point:
    """One evaluation: losses, and the acceptance on the held-out prompts."""

    step: int
    training_loss: float
    validation_loss: float
    acceptance: Acceptance


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Texts to learn from, texts that say when to stop, and texts that are only measured."""

    training: Sequence[Text]
    validation: Sequence[Text]
    held_out: Sequence[Text]


class Student(Protocol):
    """A drafter in the making, of whatever shape.

    trained: its parameters that are trained, by name. columns: int64 `[V]`, for every id of the
    target its column among the logits, or -1. device: where batches go.
    """

    @property
    def trained(self) -> Mapping[str, nn.Parameter]:
        """See the class."""

    @property
    def columns(self) -> Tensor:
        """See the class."""

    @property
    def device(self) -> torch.device:
        """See the class."""

    def logits(self, batch: Batch, num_depths: int) -> Iterator[tuple[Tensor, Tensor]]:
        """For each place in a draft, from the first on: logits `[M', Vd]`, and which of the
        batch's tokens they predict, int64 `[M']` ascending. Only the first place, if for all others
        the logits would be the same ones."""


class Trainer:
    """Trains a student in place.

    Attributes: step, the next one; num_steps, planned; history; best, the weights with the lowest
    validation loss so far.
    """

    def __init__(self, student: Student, data: TrainingData, options: TrainingOptions) -> None:
        if not data.training:
            raise InvalidRequestError("tokens", "there is no text to train on")
        per_step = min(options.batch_size, len(data.training))
        if per_step < ranks.count():
            raise InvalidRequestError(
                "batch_size", f"{per_step} texts per step for {ranks.count()} processes"
            )
        self._student, self._data, self._options = student, data, options
        self._lengths = [len(t.prompt_ids) + len(t.answer_ids) for t in data.training]
        per_epoch = max(1, len(data.training) // options.batch_size)
        self.num_steps = max(1, round(options.epochs * per_epoch))
        self.step = 0
        self.history: list[Point] = []
        self._trained = student.trained
        self.best = {name: p.detach().clone() for name, p in self._trained.items()}
        self._optimizers = _optimizers(list(self._trained.values()), options.learning_rate)
        self._losses: list[float] = []

    def run(self, checkpoint: Path, on_step: Callable[["Trainer"], None]) -> None:
        """Train until the planned end or an early one; goes on from `checkpoint` if it exists."""
        if checkpoint.exists():
            self._load(checkpoint)
        order = endless(self._lengths, self._options.batch_size, self._options.seed, self.step)
        while self.step < self.num_steps and not self._is_stale():
            self._losses.append(self._train_on([self._data.training[i] for i in next(order)]))
            self.step += 1
            if self.step % self._options.evaluate_every == 0 or self.step == self.num_steps:
                self._evaluate()
                self._save(checkpoint)
            on_step(self)

    def learning_rate(self) -> float:
        """Of the step that comes next."""
        options = self._options
        start = (self.step + 1) / max(1, options.warmup_steps)
        end = (self.num_steps - self.step) / max(1.0, options.decay_share * self.num_steps)
        return options.learning_rate * min(1.0, start, end)

    def num_depths(self) -> int:
        """Places of a draft that the step that comes next teaches."""
        is_last_part = self.step >= self.num_steps * (1 - self._options.decay_share)
        return self._options.num_depths if is_last_part else 1

    def _train_on(self, texts: Sequence[Text]) -> float:
        part = ranks.part(texts)
        batch = make_batch(part, self._student.columns).to(self._student.device)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate()
        losses, counts = [], []
        for logits, which in self._logits(batch, self.num_depths()):
            losses.append(distillation_loss(logits, batch, which, self._options.hard_share))
            counts.append(len(which))
        totals = ranks.total(counts)  # of tokens: this process's mean counts by its share of them
        losses = [
            each * (n / max(1, total))
            for each, n, total in zip(losses, counts, totals, strict=True)
        ]
        weights = [self._options.depth_weight**depth for depth in range(len(losses))]
        loss = sum(w * each for w, each in zip(weights, losses, strict=True)) / sum(weights)
        assert isinstance(loss, Tensor)
        loss.backward()  # type: ignore[no-untyped-call]
        ranks.add_gradients(self._trained.values())
        nn.utils.clip_grad_norm_(self._trained.values(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
        return ranks.total([float(losses[0].detach())])[0]

    def _evaluate(self) -> None:
        losses, _ = self._measure(self._data.validation)
        _, matches = self._measure(self._data.held_out)
        point = Point(
            self.step,
            sum(self._losses) / max(1, len(self._losses)),
            losses,
            acceptance(matches, self._options.draft_length),
        )
        self._losses.clear()
        if point.validation_loss < min(
            (each.validation_loss for each in self.history), default=float("inf")
        ):
            self.best = {name: p.detach().clone() for name, p in self._trained.items()}
        self.history.append(point)

    def _logits(self, batch: Batch, num_depths: int) -> Iterator[tuple[Tensor, Tensor]]:
        with torch.autocast(self._student.device.type, torch.bfloat16):
            depths = list(self._student.logits(batch, num_depths))
        return iter(depths)

    @torch.no_grad()
    def _measure(self, texts: Sequence[Text]) -> tuple[float, list[Matches]]:
        """Mean loss at the first place of a draft, and what `acceptance` asks for, per text."""
        total, count = 0.0, 0.0
        matches: list[Matches] = []
        texts = ranks.part(texts)
        for start in range(0, len(texts), self._options.batch_size):
            part = texts[start : start + self._options.batch_size]
            batch = make_batch(part, self._student.columns).to(self._student.device)
            found: list[Matches] = [[] for _ in part]
            depths = self._logits(batch, self._options.draft_length)
            for depth, (logits, which) in enumerate(depths):
                if depth == 0:
                    loss = distillation_loss(logits, batch, which, self._options.hard_share)
                    total, count = total + float(loss) * len(which), count + len(which)
                right = logits.argmax(dim=-1) == batch.next_columns[which]
                rows = batch.rows[which]
                for row, each in enumerate(found):
                    each.append(right[rows == row].tolist())
            matches += found
        total, count = ranks.total([total, count])
        return total / max(1, count), ranks.gathered(matches)

    def _is_stale(self) -> bool:
        losses = [each.validation_loss for each in self.history]
        return (
            bool(losses) and len(losses) - 1 - losses.index(min(losses)) >= self._options.patience
        )

    def _save(self, path: Path) -> None:
        if not ranks.is_first():
            return
        state = {
            "step": self.step,
            "weights": {name: p.detach() for name, p in self._trained.items()},
            "best": self.best,
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "history": [astuple(point) for point in self.history],
        }
        unfinished = path.with_suffix(f".{os.getpid()}")
        torch.save(state, unfinished)
        unfinished.rename(path)

    def _load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True, map_location="cpu")
        if state["weights"].keys() != self._trained.keys():
            raise InvalidRequestError("resume", f"{path} is of a drafter with other layers")
        self.step, self.best = state["step"], state["best"]
        self.history = [
            Point(step, training, validation, Acceptance(*accepted))
            for step, training, validation, accepted in state["history"]
        ]
        with torch.no_grad():
            for name, parameter in self._trained.items():
                parameter.copy_(state["weights"][name])
        for optimizer, stored in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(stored)


def distillation_loss(logits: Tensor, batch: Batch, which: Tensor, hard_share: float) -> Tensor:
    """Mean over some of the answers' tokens of the divergence from the target, in nats.

    logits: `[M', draft vocabulary]`, for the tokens `which` of the batch. Mass that the target
    gives to known tokens outside of the draft vocabulary cannot be learnt and counts for nothing.
    The loss of no tokens is zero.
    """
    if not len(which):
        return logits.float().sum()
    columns, probabilities = batch.columns[which], batch.probabilities[which]
    logits = logits.float()
    inside = columns >= 0
    p = probabilities.where(inside, 0.0)
    p_tail = (1.0 - probabilities.sum(dim=-1)).clamp(min=0.0)
    log_q = logits.gather(1, columns.clamp(min=0)) - logits.logsumexp(dim=-1, keepdim=True)
    q_tail = 1.0 - log_q.exp().where(inside, 0.0).sum(dim=-1)
    log_q_tail = q_tail.clamp(min=1e-6).log()
    soft = (torch.xlogy(p, p) - p * log_q).sum(dim=-1) + (
        torch.xlogy(p_tail, p_tail) - p_tail * log_q_tail
    )
    hard = -log_q[:, 0].where(inside[:, 0], 0.0)
    return ((1.0 - hard_share) * soft + hard_share * hard).mean()


def _optimizers(parameters: Sequence[nn.Parameter], rate: float) -> list[torch.optim.Optimizer]:
    matrices = [p for p in parameters if p.dim() == 2]
    others = [p for p in parameters if p.dim() != 2]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(
            torch.optim.Muon(matrices, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        )
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=rate, weight_decay=0.0))
    return optimizers
