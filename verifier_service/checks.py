"""What can be wrong with an open or a row by itself, before any state is looked at.

Each check raises InvalidRequestError that names the field. Knows nothing of models and
caches; what depends on a sequence's state (its length, whether it is known) is the engine's.
"""

from core.errors import InvalidRequestError
from core.types import VerifyOpen, VerifyRow
from verifier_service.rules import check_sampling


def check_open(open_: VerifyOpen, max_length: int) -> None:
    """Raises InvalidRequestError that names the field."""
    if not 1 <= open_.max_length <= max_length:
        raise InvalidRequestError("max_length", f"{open_.max_length} is not in [1, {max_length}]")
    check_sampling(open_.sampling)


def check_row(row: VerifyRow, seen: set[int], vocab_size: int, max_batch_tokens: int) -> None:
    """Raises InvalidRequestError that names the field; adds the row's sequence to `seen`."""
    if row.sequence in seen:
        raise InvalidRequestError("sequence", f"{row.sequence} is twice in the batch")
    seen.add(row.sequence)
    if not row.new_token_ids:
        raise InvalidRequestError("new_token_ids", "at least one is needed")
    if max(row.new_token_ids) >= vocab_size:
        raise InvalidRequestError("new_token_ids", f"ids must be below {vocab_size}")
    if row.draft_token_ids:
        if row.partial:
            raise InvalidRequestError("draft_token_ids", "a partial row cannot carry a draft")
        if max(row.draft_token_ids) >= vocab_size:
            raise InvalidRequestError("draft_token_ids", f"ids must be below {vocab_size}")
        if len(row.draft_token_ids) >= max_batch_tokens:
            raise InvalidRequestError("draft_token_ids", f"more than {max_batch_tokens - 1}")
