"""What the targets of all streams have committed, and what draft each of them wants next.

Takes in commands; knows nothing of drafters but their limits. Per (stream, sequence) it holds the
committed tokens and the newest wish: a commit that arrives before the last draft was made
replaces that wish. What cannot be gone on with is answered by one NeedOpen and forgotten, and no
other sequence notices. Commands carry their position, so a repeated one changes nothing.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from core.types import (
    DraftClose,
    DraftCommands,
    DraftCommit,
    DraftFeatures,
    DraftOpen,
    DraftSent,
    Features,
    NeedOpen,
    NeedOpenReason,
    SamplingParams,
)

Key = tuple[int, int]  # (stream, sequence)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a drafter can hold; 0 is unlimited, except for `max_draft_tokens`."""

    max_draft_tokens: int
    max_length: int = 0
    max_sequences: int = 0
    vocab_size: int = 0
    can_draft_ahead: bool = False


@dataclass(slots=True)
class HeldSequence:
    """A sequence. `handle` is the drafter's name for it, `seen` how many of its tokens the drafter
    knows, `wanted` the length of the draft that is due, `accepted` belongs to the last outcome.
    `untold` are target features the drafter has not been given, which end at `num_featured`.
    `known` is the draft for the known outcome, once there is one; `sent` what was told of the block
    at the target, until the drafter takes it up; `max_branches` is 0 where it cannot."""

    handle: int
    generation: int
    token_ids: list[int]
    sampling: SamplingParams
    max_draft_tokens: int
    wanted: int = 0
    accepted: int = 0
    seen: int = 0
    untold: list[Features] = field(default_factory=list)
    num_featured: int = 0
    max_branches: int = 0
    known: tuple[int, ...] = ()
    sent: DraftSent | None = None

    @property
    def num_untold(self) -> int:
        """Positions whose features wait."""
        return sum(features.num_tokens for features in self.untold)

    @property
    def has_every_feature(self) -> bool:
        """Whether the target has told of all committed tokens but the last, which it runs next."""
        return self.num_featured >= len(self.token_ids) - 1

    @property
    def lag(self) -> int:
        """Tokens the drafter has not seen."""
        return len(self.token_ids) - self.seen

    @property
    def base_length(self) -> int:
        """Committed tokens when the block was sent whose outcome came last."""
        return len(self.token_ids) - self.accepted - 1


class SequenceTable:
    """The sequences of all streams.

    on_forget: gets the handle of each that is dropped.
    on_commit: gets a commit before it is applied; says whether the drafter knows its tokens.
    """

    def __init__(
        self,
        limits: Limits,
        on_forget: Callable[[int], None],
        on_commit: Callable[[HeldSequence, DraftCommit], bool] = lambda held, commit: False,
    ) -> None:
        self.held: dict[Key, HeldSequence] = {}
        self._limits = limits
        self._on_forget = on_forget
        self._on_commit = on_commit
        self._refused: dict[Key, int] = {}  # generation that was answered by a NeedOpen
        self._need_opens: defaultdict[int, list[NeedOpen]] = defaultdict(list)
        self._handles = itertools.count()

    @property
    def has_need_opens(self) -> bool:
        """Whether `take_need_opens` has something to say."""
        return bool(self._need_opens)

    def take_need_opens(self) -> dict[int, list[NeedOpen]]:
        """What has to be told, by stream; it is told once."""
        taken, self._need_opens = self._need_opens, defaultdict(list)
        return taken

    def apply(self, stream: int, commands: DraftCommands) -> None:
        """Take in one frame, in the order of its kinds. Never raises for a bad command."""
        for close in commands.closes:
            self._close((stream, close.sequence), close)
        for open_ in commands.opens:
            self._open((stream, open_.sequence), open_)
        for features in commands.features:
            self._tell((stream, features.sequence), features)
        for commit in commands.commits:
            self._commit((stream, commit.sequence), commit)
        for sent in commands.sents:
            self._sent((stream, sent.sequence), sent)

    def refuse(self, key: Key, generation: int, reason: NeedOpenReason, message: str) -> None:
        """Answer with a NeedOpen and forget the sequence; an older generation is ignored."""
        if generation >= self._generation(key):
            self._forget(key)
            self._refused[key] = generation
            self._need_opens[key[0]].append(NeedOpen(key[1], generation, reason, message))

    def close_stream(self, stream: int) -> None:
        """Forget everything of a stream that ended."""
        for key in [key for key in self.held if key[0] == stream]:
            self._forget(key)
        for key in [key for key in self._refused if key[0] == stream]:
            del self._refused[key]
        self._need_opens.pop(stream, None)

    def _close(self, key: Key, close: DraftClose) -> None:
        if close.generation >= self._generation(key):
            self._forget(key)

    def _open(self, key: Key, open_: DraftOpen) -> None:
        if open_.generation < self._generation(key):
            return
        self._forget(key)
        problem = _sampling_problem(open_.sampling) or self._ids_problem(open_.token_ids)
        if problem:
            self.refuse(key, open_.generation, NeedOpenReason.INVALID, f"open: {problem}")
        elif 0 < self._limits.max_sequences <= len(self.held):
            message = f"holds {len(self.held)} sequences, the most it can"
            self.refuse(key, open_.generation, NeedOpenReason.FULL, message)
        else:
            held = self.held[key] = HeldSequence(
                handle=next(self._handles),
                generation=open_.generation,
                token_ids=list(open_.token_ids),
                sampling=open_.sampling,
                max_draft_tokens=min(open_.max_draft_tokens, self._limits.max_draft_tokens),
                max_branches=self._max_branches(open_),
            )
            self._want(key, held, open_.next_draft_tokens)

    def _tell(self, key: Key, told: DraftFeatures) -> None:
        """Keep features that follow those there are; of a repetition only what is new."""
        held = self.held.get(key)
        if held is None or told.generation != held.generation:
            return
        features = told.features
        num_known = held.num_featured - features.position
        if num_known < 0:
            message = f"features begin at {features.position}, {held.num_featured} are held"
            self.refuse(key, told.generation, NeedOpenReason.GAP, message)
        elif problem := features.problem:
            message = f"features: {problem}"
            self.refuse(key, told.generation, NeedOpenReason.INVALID, message)
        elif num_known < features.num_tokens:
            held.untold.append(
                Features(
                    held.num_featured,
                    features.num_tokens - num_known,
                    features.dtype,
                    features.data[num_known * features.row_bytes :],
                )
            )
            held.num_featured = features.position + features.num_tokens

    def _commit(self, key: Key, commit: DraftCommit) -> None:
        held = self.held.get(key)
        if commit.generation <= self._refused.get(key, -1):
            return  # it was told already
        if held is not None and commit.generation < held.generation:
            return
        problem = self._commit_problem(commit)
        if problem:
            self.refuse(key, commit.generation, NeedOpenReason.INVALID, f"commit: {problem}")
        elif held is None or commit.generation > held.generation:
            message = f"generation {commit.generation} was never opened"
            self.refuse(key, commit.generation, NeedOpenReason.GAP, message)
        elif commit.base_length > len(held.token_ids):
            message = f"base_length is {commit.base_length}, {len(held.token_ids)} tokens are held"
            self.refuse(key, commit.generation, NeedOpenReason.GAP, message)
        else:
            has_followed = self._on_commit(held, commit)
            held.token_ids[commit.base_length :] = commit.token_ids
            held.seen = len(held.token_ids) if has_followed else min(held.seen, commit.base_length)
            held.accepted = commit.accepted
            self._want(key, held, commit.next_draft_tokens)

    def _sent(self, key: Key, sent: DraftSent) -> None:
        """Note which block is at the target: a draft for the outcome before it comes too late. One
        that is not the known draft's beginning has no outcomes that could be foreseen."""
        held = self.held.get(key)
        if held is None or sent.generation != held.generation:
            return
        if sent.base_length > len(held.token_ids):
            message = f"base_length is {sent.base_length}, {len(held.token_ids)} tokens are held"
            self.refuse(key, sent.generation, NeedOpenReason.GAP, message)
        elif sent.base_length == len(held.token_ids):
            held.wanted = 0
            length = min(sent.next_draft_tokens, held.max_draft_tokens)
            if held.max_branches and length and sent.num_draft_tokens <= len(held.known):
                held.sent = replace(sent, next_draft_tokens=length)

    def _max_branches(self, open_: DraftOpen) -> int:
        """Outcomes to draft for: rules that look at distributions are not drafted ahead for."""
        can = self._limits.can_draft_ahead and not open_.sampling.rule.needs_distributions
        return open_.max_branches if can else 0

    def _want(self, key: Key, held: HeldSequence, num_draft_tokens: int) -> None:
        """Note the next wish, as far as the drafter's context has room for it."""
        held.wanted = min(num_draft_tokens, held.max_draft_tokens)
        if self._limits.max_length:
            room = self._limits.max_length - len(held.token_ids)
            held.wanted = min(held.wanted, room)
            if room <= 0:
                message = f"{len(held.token_ids)} tokens; the context is {self._limits.max_length}"
                self.refuse(key, held.generation, NeedOpenReason.TOO_LONG, message)

    def _forget(self, key: Key) -> None:
        self._refused.pop(key, None)
        held = self.held.pop(key, None)
        if held is not None:
            self._on_forget(held.handle)

    def _generation(self, key: Key) -> int:
        """The newest generation known of a sequence; 0 for an unknown one."""
        held = self.held.get(key)
        return held.generation if held else self._refused.get(key, 0)

    def _commit_problem(self, commit: DraftCommit) -> str:
        if commit.base_length < 1:
            return "base_length must be at least 1"
        if len(commit.token_ids) != commit.accepted + 1:
            return f"accepted is {commit.accepted}, but {len(commit.token_ids)} token_ids came"
        return self._ids_problem(commit.token_ids)

    def _ids_problem(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return "token_ids is empty"
        vocab_size = self._limits.vocab_size
        if vocab_size and max(token_ids) >= vocab_size:
            return f"token id {max(token_ids)} is outside the vocabulary of {vocab_size}"
        return ""


def _sampling_problem(sampling: SamplingParams) -> str:
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        return f"temperature {sampling.temperature} is not a number of at least 0"
    if not 0 < sampling.top_p <= 1:
        return f"top_p {sampling.top_p} is not in (0, 1]"
    return ""
