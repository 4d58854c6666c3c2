"""Which verifier a sequence goes to: the least loaded, or one that has read its beginning before.

Pure policy: knows nothing of clocks, sockets or models. Verifiers keep what they read until its
slot is needed, and copy it for a sequence that begins alike. What each holds is guessed from what
it was given: the beginnings of as many sequences as it has slots, in blocks of tokens whose
hashes include all blocks before them. A wrong guess costs the time to read a prompt.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from core.types import VerifierInfo
from orchestrator.pool import Pool, Replica

_BLOCK_TOKENS = 32
#: This part of its slots a verifier may be fuller than another and still get what it has read.
_SLACK = 0.125


@dataclass(slots=True)
class _Memory:
    """What one life of a verifier has read: block hash -> number of the sequence that had it."""

    instance_id: str = ""
    blocks: dict[int, int] = field(default_factory=dict)


class PrefixAffinity:
    """Chooses verifiers. Several verifiers, each with room, share the load evenly but for a part of
    their slots, which goes to those that can begin with what they hold."""

    def __init__(self) -> None:
        self._memories: dict[str, _Memory] = {}

    def choose(self, verifiers: Pool, token_ids: Sequence[int]) -> Replica | None:
        """The verifier for a sequence that is about to begin; None when none has room.

        token_ids: what it has to read.
        """
        least = verifiers.choose()
        if least is None or len(verifiers.replicas) == 1:
            return least
        blocks = list(_hashes(token_ids))
        chosen, most_read = least, self._num_read(least, blocks)
        for replica in verifiers.ready():
            slack = max(1, int(_SLACK * replica.max_sequences))
            is_near = len(replica.sequences) <= len(least.sequences) + slack
            if replica.num_free and is_near and self._num_read(replica, blocks) > most_read:
                chosen, most_read = replica, self._num_read(replica, blocks)
        self._remember(chosen, blocks)
        return chosen

    def _memory(self, replica: Replica) -> _Memory:
        assert isinstance(replica.info, VerifierInfo)
        memory = self._memories.setdefault(replica.replica_id, _Memory())
        if memory.instance_id != replica.info.instance_id:  # it was restarted, and holds nothing
            memory.instance_id, memory.blocks = replica.info.instance_id, {}
        return memory

    def _num_read(self, replica: Replica, blocks: Sequence[int]) -> int:
        """Blocks from the beginning that the verifier should still hold."""
        known = self._memory(replica).blocks
        oldest = replica.num_taken - replica.max_sequences
        for index, block in enumerate(blocks):
            if block not in known or known[block] < oldest:
                return index
        return len(blocks)

    def _remember(self, replica: Replica, blocks: Sequence[int]) -> None:
        memory, limit = self._memory(replica), replica.max_sequences
        memory.blocks.update(dict.fromkeys(blocks, replica.num_taken))
        if limit and replica.num_taken % limit == 0:
            oldest = replica.num_taken - limit
            memory.blocks = {b: n for b, n in memory.blocks.items() if n >= oldest}


def _hashes(token_ids: Sequence[int]) -> Iterator[int]:
    """One per whole block; equal for equal beginnings."""
    block = 0
    for end in range(_BLOCK_TOKENS, len(token_ids) + 1, _BLOCK_TOKENS):
        block = hash((block, *token_ids[end - _BLOCK_TOKENS : end]))
        yield block
