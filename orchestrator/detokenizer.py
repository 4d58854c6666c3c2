"""Token ids to text while they arrive: text that can still change is kept back.

Knows nothing of requests, blocks or the wire. Two things keep text back. A token may end inside a
code point, or inside a run of byte-fallback tokens, whose text depends on the whole run. And the
text's end may be the beginning of a stop string.

    ids    prefix | pending        only these are decoded: the prefix, whose text is out already,
    text   ------ | emitted ? ?    tells the decoder that it is not at the text's beginning

Without a stop, all pieces and the flush joined are exactly `tokenizer.decode(all ids)`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from core.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Piece:
    """What a block of tokens gave.

    `num_tokens` were used: all, or those up to the one that completed `stop_string` (else "").
    `token_texts` says what became final with each of them; joined it is `text`.
    """

    text: str
    num_tokens: int
    stop_string: str
    token_texts: tuple[str, ...]


class Detokenizer:
    """The text of one request. A stop string ends it: push nothing behind a match.

    stop_string: the one that matched, in `push` or in `flush`; "" so far.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids: list[int] = []  # the window: prefix and pending
        self._num_prefix = 0
        self._num_emitted = 0  # characters of the window's text that are out
        self._held = ""  # final, but may begin a stop string
        self.stop_string = ""

    def push(self, token_ids: Iterable[int]) -> Piece:
        """Take up a block; independent of how the tokens are cut into blocks."""
        texts: list[str] = []
        for token_id in token_ids:
            text, stop_string = self._release(self._decode(token_id))
            texts.append(text)
            if stop_string:
                return Piece("".join(texts), len(texts), stop_string, tuple(texts))
        return Piece("".join(texts), len(texts), "", tuple(texts))

    def flush(self) -> str:
        """What was held back, at the end of the tokens. It too is cut before a stop string."""
        if self._ids:
            text = self._tokenizer.decode(self._ids)[self._num_emitted :]
            self._ids, self._num_prefix, self._num_emitted = [], 0, 0
        else:
            text = ""
        released, stop_string = self._release(text)
        held, self._held = self._held, ""
        return released if stop_string else released + held

    def _decode(self, token_id: int) -> str:
        """The text that became final with this token, stop strings aside."""
        if token_id not in self._tokenizer.text_ids:
            return ""
        self._ids.append(token_id)
        if token_id in self._tokenizer.byte_ids:
            return ""
        text = self._tokenizer.decode(self._ids)
        final = text.removesuffix(_REPLACEMENT)  # only the last can still become something else
        new = final[self._num_emitted :]
        self._num_emitted = max(self._num_emitted, len(final))
        self._shrink_window(text)
        return new

    def _shrink_window(self, text: str) -> None:
        """Let go of the prefix once text that nothing can change stands behind it."""
        decode, ids, start = self._tokenizer.decode, self._ids, self._num_prefix
        cut = len(ids)
        if text.endswith(_REPLACEMENT):
            # Broken bytes, or the first ones of a code point. The last token begins a new code
            # point exactly if the two parts decode alone to what they decode to together.
            cut -= 1
            if decode(ids[:cut]) + decode(ids[cut:]) != text:
                return
        if decode(ids[start:cut]):
            self._num_emitted += len(decode(ids[start:])) - len(text)
            self._ids = ids[start:]
            self._num_prefix = cut - start

    def _release(self, new: str) -> tuple[str, str]:
        """Add final text; return what cannot belong to a stop string, and the one that matched.

        Of several matches the one that is complete first counts, of those the longest: what a
        reader who sees one character after the other would stop at.
        """
        text = self._held + new
        ends = [
            (text.find(stop) + len(stop), -len(stop), stop) for stop in self._stop if stop in text
        ]
        if ends:
            end, negative_length, stop = min(ends)
            self._held, self.stop_string = "", stop
            return text[: end + negative_length], stop
        longest = max(map(len, self._stop), default=0)
        for length in range(min(longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                self._held = text[-length:]
                return text[:-length], ""
        self._held = ""
        return text, ""
