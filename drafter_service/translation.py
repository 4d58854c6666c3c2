"""Between the tokens of a target and those of a drafter with another tokenizer.

What two tokenizers share is text. The target's tokens are spelled out as bytes, read as UTF-8, and
encoded anew; so is a draft on its way back. Nothing here can raise for what a text contains, and
every id it returns is one of the tokenizer it is for. Knows nothing of models and drawing.

The drafter's tokens are a function of the target's, whatever the pieces in which those arrived:

    closed segments: encoded, never touched again     | open segment       | pending
    <bos> The quick brown ... over the lazy dogs, who | did not expect the | F0 9F

A segment ends at the first single space between words behind its `_SEGMENT` characters, where no
usual tokenizer has a token across, so that encoding it by itself changes nothing. Only the open one
is encoded again as it grows. `pending` are the bytes of an unfinished character.
"""

import codecs
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from core.tokenizer import Tokenizer

_SEGMENT = 48
_find_space = re.compile(r"(?<=\S) (?=\S)").search
_new_decoder = codecs.getincrementaldecoder("utf-8")


class _Side:
    """One of the two tokenizers. `limit`: ids from here on do not exist for its model.

    adds_space: it puts a space before a text, and takes it away when it decodes.
    """

    def __init__(self, tokenizer: Tokenizer, limit: int) -> None:
        self.tokenizer = tokenizer
        self.limit = min(limit, tokenizer.size)
        self.token_bytes = tokenizer.token_bytes()
        self.prefix = [
            *itertools.takewhile(lambda i: i not in tokenizer.text_ids, tokenizer.encode("a"))
        ]
        self.adds_space = self.spell(tokenizer.encode("a", special_tokens=False)) == b" a"
        ids = sorted(i for i in tokenizer.text_ids if i < self.limit and self.token_bytes[i])
        # Of several spellings of the same bytes the last counts: a token before a fallback byte.
        ids.sort(key=lambda i: i not in tokenizer.byte_ids)
        self.id_of = {self.token_bytes[i]: i for i in ids}

    def spell(self, token_ids: Sequence[int]) -> bytes:
        """The bytes of a text's tokens."""
        return b"".join([self.token_bytes[token_id] for token_id in token_ids])

    def encode(self, text: str, is_first: bool = True) -> list[int]:
        """Ids of a text, without the tokens around it. If it is not the first part of one, the
        space that it begins with is the one that the tokenizer adds."""
        if self.adds_space and not is_first:
            text = text.removeprefix(" ")
        if not text:
            return []
        ids = self.tokenizer.encode(text, special_tokens=False)
        return [token_id for token_id in ids if token_id < self.limit]

    def rank(self) -> list[int]:
        """Its tokens of more than a byte, by id, which is by frequency; all if there are none."""
        long = [i for text, i in self.id_of.items() if len(text) > 1]
        return sorted(long or self.id_of.values())


class Translator:
    """Translates between a target's and a drafter's tokens; holds nothing of any text.

    num_drafter_ids: ids the drafter's model has. `shared`: drafter id to target id, for tokens of
    the same bytes and for special tokens of the same name, one to one.
    overlap: the share of a usual text's tokens, at the target, that are shared; an estimate from
    the vocabularies alone: tokens stand in them in the order of their frequency, which falls with
    the rank (Zipf's law). Single bytes do not count: both sides have them and hardly use them.
    """

    def __init__(self, target: Tokenizer, drafter: Tokenizer, num_drafter_ids: int) -> None:
        self.target = _Side(target, target.size)
        self.drafter = _Side(drafter, num_drafter_ids)
        self.shared = {
            drafter_id: self.target.id_of[spelled]
            for spelled, drafter_id in self.drafter.id_of.items()
            if spelled in self.target.id_of
        }
        names = target.special_ids.keys() & drafter.special_ids.keys()
        specials = {target.special_ids[n]: drafter.special_ids[n] for n in names}
        self.special_of = {t: d for t, d in specials.items() if d < self.drafter.limit}
        self.shared |= {d: t for t, d in self.special_of.items()}
        found = set(self.shared.values())
        weights = [(1 / rank, i in found) for rank, i in enumerate(self.target.rank(), start=1)]
        total = sum(weight for weight, _ in weights)
        self.overlap = sum(weight for weight, is_shared in weights if is_shared) / max(total, 1e-9)

    def begin(self) -> "Context":
        """A sequence without tokens."""
        return Context(self)


@dataclass(frozen=True, slots=True)
class DrafterTokens:
    """The committed text as the drafter reads it. `num_unchanged`: as many first tokens are those
    of the last time. Not `is_whole`: it ends in bytes that the drafter has no tokens for."""

    token_ids: list[int]
    num_unchanged: int
    is_whole: bool


class Context:
    """The committed tokens of one sequence on their way to the drafter, and its drafts back."""

    def __init__(self, translator: Translator) -> None:
        self._translator = translator
        self._target, self._drafter = translator.target, translator.drafter
        self._token_ids: list[int] = []
        self._closed = list(self._drafter.prefix)
        self._num_unchanged = 0
        self._text = ""  # the open segment
        self._is_first = True  # nothing stands before it, or a special token
        self._utf8 = _new_decoder(errors="replace")
        self._drop_space = self._target.adds_space

    def follow(self, token_ids: Sequence[int], num_unchanged: int = 0) -> bool:
        """Take up what is new in all committed tokens, of which `num_unchanged` need not be
        compared. False when they do not begin with those seen so far: begin a new context."""
        seen = self._token_ids
        unchanged = min(num_unchanged, len(seen))
        if seen[unchanged:] != list(token_ids[unchanged : len(seen)]):
            return False
        for token_id in token_ids[len(seen) :]:
            self._read(token_id)
        seen.extend(token_ids[len(seen) :])
        return True

    def tokens(self) -> DrafterTokens:
        """What the drafter is to read."""
        pending = [self._drafter.id_of.get(bytes([byte])) for byte in self._pending]
        tail = self._drafter.encode(self._text, self._is_first)
        tail += [token_id for token_id in pending if token_id is not None]
        num_unchanged, self._num_unchanged = self._num_unchanged, len(self._closed)
        return DrafterTokens([*self._closed, *tail], num_unchanged, None not in pending)

    def to_target(self, drafted: Sequence[int]) -> list[int]:
        """The target's tokens for a text that the drafter wrote behind this one.

        The text is encoded behind the open segment, and by itself if there a token lies across
        the seam. Empty when nothing fits; unfinished characters at the end are left out.
        """
        pending = self._pending
        written = pending + self._drafter.spell(drafted)
        text = _valid_part(written)
        behind = text.encode()[len(pending) :]
        ids = self._target.encode(self._text + text, self._is_first)
        found = self._ending(ids, behind)
        if not found and not pending:
            begin = "\n" if self._target.adds_space else ""  # no token goes on behind a line's end
            found = self._ending(self._target.encode(begin + text), behind)
        return found

    @property
    def _pending(self) -> bytes:
        return self._utf8.getstate()[0]

    def _read(self, token_id: int) -> None:
        target, special_id = self._target, self._translator.special_of.get(token_id)
        if special_id is not None:
            if self._closed == self._drafter.prefix == [special_id] and not self._text:
                return  # a text that begins as every text does
            self._text += self._utf8.decode(b"", final=True)
            self._utf8.reset()
            self._closed += [*self._drafter.encode(self._text, self._is_first), special_id]
            self._text, self._is_first = "", True
            return
        spelled = target.token_bytes[token_id] if token_id < target.limit else b""
        if self._drop_space and spelled:
            self._drop_space, spelled = False, spelled.removeprefix(b" ")
        self._text += self._utf8.decode(spelled)
        while seam := _find_space(self._text, _SEGMENT):
            self._closed += self._drafter.encode(self._text[: seam.start()], self._is_first)
            self._text, self._is_first = self._text[seam.start() :], False

    def _ending(self, token_ids: list[int], text: bytes) -> list[int]:
        """The last tokens, those that spell exactly `text`; empty when one lies across its begin or
        the tokenizer changed it."""
        start, left = len(token_ids), len(text)
        while left > 0 and start > 0:
            start -= 1
            left -= len(self._target.token_bytes[token_ids[start]])
        ending = token_ids[start:]
        return ending if left == 0 and self._target.spell(ending) == text else []


def _valid_part(written: bytes) -> str:
    """Its text, up to the first bytes that are no UTF-8 or not yet."""
    try:
        return written.decode()
    except UnicodeDecodeError as error:
        return written[: error.start].decode()
