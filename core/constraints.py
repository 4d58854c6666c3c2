"""Structured output: which tokens a JSON schema, a regex or a grammar allows next.

A thin layer over llguidance (docs/structured-output.md says why that one). It keeps one parser
per sequence, which follows the *committed* tokens only; for the draft it steps on, one mask per
position, and back again:

    generated (committed) | d0 d1 d2      masks: behind nothing, behind d0, behind d0 d1, ...
                          | the walk ends at the first draft token that is not allowed

Masks are packed, one bit per token id, and tokens that no text can contain (special tokens, ids
beyond the tokenizer's) are never set; end tokens are set where the text may end. Knows nothing of
requests, rules or models. All of it belongs to one thread.
"""

import functools
import json
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import Any, Final

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray
from torch import Tensor

from core.errors import InvalidRequestError
from core.params import Constraint, ConstraintKind

#: The field that errors name.
_FIELD: Final = "sampling.constraint"
#: Longer sources are refused: some take time quadratic in their length to compile.
_MAX_SOURCE_CHARS: Final = 32 * 1024
#: The compiler recurses through rules and would end the process where the stack ends. This is
#: ample for sources of that length; only the pages that are touched cost memory.
_STACK_BYTES: Final = 256 * 1024 * 1024
#: For schemas without options of their own: a model could emit white space for ever.
_JSON_OPTIONS: Final[Any] = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,32}"}
#: Packed byte -> its 8 bits, inverted, as 8 bools in one int64: a table is the fastest unpacker.
_FORBIDDEN: Final = (
    np.unpackbits(~np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    .view(np.int64)
    .ravel()
)
_LIMITS: Final = LLParserLimits(verbose_errors=False)


class ConstraintCompiler:
    """Turns constraints into states, for one tokenizer. Building it takes about a second.

    A tokenizer that cannot be used (see docs/structured-output.md) is no error here: every
    `compile` then refuses and says why.
    """

    def __init__(
        self, tokenizer_json: str, end_token_ids: Sequence[int], max_compiled: int = 64
    ) -> None:
        """`tokenizer_json`: the fast tokenizer, as the `tokenizers` library writes it ("" for
        none). `end_token_ids`: what ends a text. The `max_compiled` last used constraints are
        kept."""
        self._tokenizer: LLTokenizer | None = None
        self._failure = "the target has no tokenizer"
        if tokenizer_json and not end_token_ids:
            self._failure = "the target has no end token"
        elif tokenizer_json:
            try:
                self._tokenizer = LLTokenizer(tokenizer_json, eos_token=list(end_token_ids))
            except ValueError as error:
                self._failure = f"not with the target's tokenizer: {_one_line(str(error))}"
        self._compiled = functools.lru_cache(max_compiled)(self._compile)

    def compile(self, constraint: Constraint) -> "ConstraintState":
        """The state before the first token. Raises InvalidRequestError for a bad source."""
        tokenizer, matcher = self._compiled(constraint)
        return ConstraintState(matcher.deep_copy(), tokenizer)

    def _compile(self, constraint: Constraint) -> tuple[LLTokenizer, LLMatcher]:
        if self._tokenizer is None:
            raise InvalidRequestError(_FIELD, self._failure)
        if len(constraint.source) > _MAX_SOURCE_CHARS:
            raise _error(constraint, f"longer than {_MAX_SOURCE_CHARS} characters")
        try:
            matcher = _build_on_deep_stack(self._tokenizer, constraint)
        except (ValueError, RecursionError) as error:
            raise _error(constraint, str(error)) from None
        # An ignored keyword would let texts through that the schema forbids.
        problems = [matcher.get_error(), *matcher.get_grammar_warnings()]
        if not any(problems):
            matcher.compute_bitmask()  # finds languages without any text, and warms the copies
            problems = [matcher.get_error()]
        if any(problems):
            raise _error(constraint, next(filter(None, problems)))
        return self._tokenizer, matcher


class ConstraintState:
    """Where one sequence stands in its constraint."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
        self._matcher = matcher
        self._vocab_size = tokenizer.vocab_size
        self._end_token_ids = frozenset(tokenizer.eos_tokens)
        self._tokens: list[int] = []
        self._num_consumed = 0  # fewer than tokens: the parser takes no end token it awaits

    def masks(self, generated: Sequence[int], draft: Sequence[int] = ()) -> NDArray[np.int32]:
        """Allowed tokens behind all `generated` (committed) tokens and behind each draft token.

        Returns packed masks `[n, words]`, 1 <= n <= len(draft) + 1. Row j is for the position
        behind draft[:j]; n - 1 is how many of the draft's first tokens the constraint allows. If
        n <= len(draft), row n - 1 forbids draft[n - 1] and nothing behind that can be accepted,
        so its positions get no mask. Each row allows at least one token; a finished text allows
        the end tokens only, again and again.

        The state catches up with `generated`, whatever it was before, and keeps nothing of the
        draft. Raises InvalidRequestError if `generated` breaks the constraint, or the parser
        gives up (a dead end in the grammar, or its limits).
        """
        self._catch_up(generated)
        rows = np.empty((len(draft) + 1, (self._vocab_size + 31) // 32), np.int32)
        num_drafted = 0
        for index in range(len(rows)):
            fill_next_token_bitmask(self._matcher, rows, index)
            self._check()
            if index == len(draft) or not self._allows(rows[index], draft[index]):
                break
            num_drafted += self._matcher.try_consume_tokens([draft[index]])
        self._matcher.rollback(num_drafted)
        return rows[: index + 1]

    def _check(self) -> None:
        """The parser stays in an error state for ever, and so does the sequence."""
        if self._matcher.is_error():
            raise InvalidRequestError(_FIELD, _one_line(self._matcher.get_error()))

    def _allows(self, row: NDArray[np.int32], token: int) -> bool:
        return token < self._vocab_size and bool(int(row[token >> 5]) >> (token & 31) & 1)

    def _catch_up(self, generated: Sequence[int]) -> None:
        """Bring the parser behind `generated`: back to what is still the same, then on."""
        if self._tokens != list(generated[: len(self._tokens)]):
            pairs = zip(self._tokens, generated, strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            self._matcher.rollback(max(self._num_consumed - same, 0))
            self._num_consumed = min(self._num_consumed, same)
            del self._tokens[same:]
        new = list(generated[len(self._tokens) :])
        known = list(takewhile(lambda token: token < self._vocab_size, new))
        taken = self._matcher.try_consume_tokens(known)
        self._check()
        left = new[taken:]
        if left and not (self._matcher.is_stopped() and self._end_token_ids.issuperset(left)):
            self._matcher.rollback(taken)
            number = len(self._tokens) + taken + 1
            raise InvalidRequestError(_FIELD, f"generated token {number} ({left[0]}) breaks it")
        self._num_consumed += taken
        self._tokens += new


def apply_masks(logits: Tensor, masks: Sequence[tuple[int, NDArray[np.int32]]]) -> None:
    """Set what is not allowed to -inf, in place.

    logits `[R, V]`, on any device. masks: pairs of a row of `logits` and the packed masks
    `[n, words]` of the rows from there on, as `ConstraintState.masks` returns them; other rows
    stay as they are. Ids that the masks do not reach (a padded head) are not allowed.
    """
    if not masks:
        return
    packed = torch.from_numpy(np.concatenate([mask for _, mask in masks])).to(logits.device)
    table = torch.from_numpy(_FORBIDDEN).to(logits.device)
    forbidden = table[packed.view(torch.uint8).int()].view(torch.bool)[:, : logits.shape[1]]
    width, done = forbidden.shape[1], 0
    for row, mask in masks:
        rows = logits[row : row + len(mask)]
        rows[:, :width].masked_fill_(forbidden[done : done + len(mask)], -torch.inf)
        rows[:, width:] = -torch.inf
        done += len(mask)


def _build(tokenizer: LLTokenizer, constraint: Constraint) -> LLMatcher:
    """A parser; it may be one in an error state. Raises ValueError or RecursionError."""
    source = constraint.source
    if constraint.kind is ConstraintKind.REGEX:
        grammar = LLMatcher.grammar_from_regex(source)
    elif constraint.kind is ConstraintKind.GRAMMAR:
        grammar = grammar_from("grammar", source)
    else:
        schema = json.loads(source)
        schema = {} if schema is True else schema
        if not isinstance(schema, dict):
            raise ValueError("a schema is an object or true")
        options = _JSON_OPTIONS if "x-guidance" not in schema else None
        grammar = LLMatcher.grammar_from_json_schema(schema, defaults=options)
    return LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)


def _build_on_deep_stack(tokenizer: LLTokenizer, constraint: Constraint) -> LLMatcher:
    before = threading.stack_size(_STACK_BYTES)
    try:
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(_build, tokenizer, constraint).result()
    finally:
        threading.stack_size(before)


def _error(constraint: Constraint, message: str) -> InvalidRequestError:
    kind = constraint.kind.value.replace("_", " ")
    return InvalidRequestError(_FIELD, f"bad {kind}: {_one_line(message)}")


def _one_line(message: str) -> str:
    """An error of the library without its excerpt of the source."""
    message = re.split(r"\n +\d+ \| |\n?<non-verbose/>", message)[0]
    return " ".join(message.replace("NoExtensionBias", "no text fits it").split())[:300]
