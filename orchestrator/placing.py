"""Puts what the services say they did between the moments at which the orchestrator sent and heard.

Clocks of other machines need not agree: a service tells durations, and its work is placed inside
the interval of the message that asked for it. What is left over is the wire, half of it each way.

    orchestrator  sent ───────────────────────────────────────────────────────▶ received
    verifier        wire │ queue │ forward │ rule │ drafting │ rest │ wire
                         arrived  begin                   end    departed

A drafter may push plans that nothing asked for: its wire is the shortest seen, one way. Knows
nothing of clocks, sockets or pictures; all times are nanoseconds of the recorder's clock.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from core.types import DraftCommands, DraftPlans, VerifyBatch, VerifyResult, VerifyRow
from orchestrator.timeline import Drafted, Gap, Timeline, Use, Verify, Wait
from orchestrator.trace import Record

#: (sequence, committed length, last token): the state that a draft continues.
_State = tuple[int, int, int]


def build(records: Sequence[Record]) -> Timeline:
    """Place everything that was answered; what was lost on the way is left out."""
    return _Builder(records).timeline


class _Builder:
    def __init__(self, records: Sequence[Record]) -> None:
        self.timeline = Timeline()
        self._sent: dict[tuple[str, int], tuple[int, VerifyBatch]] = {}
        self._last: dict[str, Verify] = {}
        self._asked: dict[int, int] = {}  # sequence -> when its drafter was last asked
        self._unanswered: dict[int, int] = {}  # the same, until a plan came
        self._ready: dict[int, int] = {}  # sequence -> when its last verdict came
        self._opened: set[int] = set()
        self._drafted: dict[_State, tuple[Drafted | Verify, tuple[int, ...]]] = {}
        self._row_waits: dict[tuple[str, int], list[Wait]] = defaultdict(list)
        self._row_uses: dict[tuple[str, int], list[tuple[int, Drafted | Verify]]] = {}
        self._one_way = _one_ways(records)
        for record in records:
            message, at, replica = record.message, record.at_ns, record.replica
            if isinstance(message, VerifyBatch):
                self._batch(at, replica, message)
            elif isinstance(message, VerifyResult):
                self._result(at, replica, message)
            elif isinstance(message, DraftCommands):
                asks = dict.fromkeys(_asks(message), at)
                self._asked |= asks
                self._unanswered |= asks
            else:
                self._plans(at, replica, message)

    def _batch(self, at: int, replica: str, batch: VerifyBatch) -> None:
        self._sent[replica, batch.batch] = (at, batch)
        uses = self._row_uses[replica, batch.batch] = []
        for row in batch.rows:
            source, draft = self._drafted.get(_state_of(row), (None, ()))
            is_used = len(row.draft_token_ids) > 0
            if source and is_used and draft[: len(row.draft_token_ids)] == row.draft_token_ids:
                uses.append((row.sequence, source))
            self._expect(at, replica, batch.batch, row.sequence, source)

    def _expect(
        self, at: int, replica: str, batch: int, sequence: int, source: Drafted | Verify | None
    ) -> None:
        """Note how long a row that is sent now was without its plan."""
        ready = self._ready.get(sequence)
        if ready is None:
            return
        came = source.received if isinstance(source, Drafted) else None
        if came is None and self._asked.get(sequence, -1) < ready:
            return  # nobody drafts for it, or its plan was not expected this time
        self.timeline.num_expecting += 1
        end = at if came is None else came
        if end > ready:
            wait = Wait(sequence, ready, end)
            self.timeline.waits.append(wait)
            self._row_waits[replica, batch].append(wait)

    def _result(self, at: int, replica: str, result: VerifyResult) -> None:
        key = (replica, result.batch)
        sent, batch = self._sent.pop(key, (at, VerifyBatch(result.batch)))
        uses = self._row_uses.pop(key, [])
        if not batch.rows:
            return
        last = self._last.get(replica)
        verify = _place(replica, batch, result, sent, at, last.end if last else 0)
        self.timeline.verifies.append(verify)
        self.timeline.uses += [Use(sequence, source, verify) for sequence, source in uses]
        if last is not None:
            self.timeline.gaps += self._gaps(last, verify)
        self._last[replica] = verify
        self._opened.update(row.sequence for row in batch.rows)
        for verdict in result.verdicts:
            if verdict.token_ids:
                self._ready[verdict.sequence] = at
                length = verdict.position + len(verdict.token_ids)
                state = (verdict.sequence, length, verdict.token_ids[-1])
                if verdict.next_draft_token_ids:
                    self._drafted.setdefault(state, (verify, verdict.next_draft_token_ids))

    def _plans(self, at: int, replica: str, plans: DraftPlans) -> None:
        if not plans.plans:
            return
        answers = [self._unanswered.pop(plan.sequence, None) for plan in plans.plans]
        asked = [ask for ask in answers if ask is not None]
        drafts = self.timeline.drafts
        earlier = max((d.end for d in drafts if d.replica == replica), default=0)
        end = max(earlier, at - self._one_way.get(replica, 0))
        begin = max(earlier, end - plans.draft_ns)
        drafted = Drafted(replica, plans, max(asked, default=None), begin, end, at)
        drafts.append(drafted)
        for plan in plans.plans:
            for branch in plan.branches:
                length = plan.base_length + branch.accepted + 1
                state = (plan.sequence, length, branch.token)
                self._drafted[state] = (drafted, branch.draft_token_ids)

    def _gaps(self, last: Verify, verify: Verify) -> Iterable[Gap]:
        """The time between two batches by what it was spent on."""
        is_new = all(row.sequence not in self._opened for row in verify.batch.rows)
        waits = self._row_waits.pop((verify.replica, verify.batch.batch), [])
        # With several batches under way the next one may leave before the last one's verdicts come.
        answered = last.received if last.received <= verify.sent else last.end
        steps = (
            (min(last.departed, answered), "verifier"),
            (answered, "wire"),
            (max((wait.end for wait in waits), default=answered), "plans"),
            (verify.sent, "requests" if is_new else "orchestrator"),
            (verify.arrived, "wire"),
            (verify.begin, "verifier"),
        )
        begin = last.end
        for step, cause in steps:
            until = min(max(step, begin), verify.begin)
            if until > begin:
                yield Gap(verify.replica, cause, begin, until)
            begin = until


def _place(
    replica: str, batch: VerifyBatch, result: VerifyResult, sent: int, received: int, free_at: int
) -> Verify:
    """Lay a batch's work between its sending and its verdicts, not before the last one's end."""
    told = result.timings
    work = told.forward_ns + told.sampling_ns + told.draft_ns
    inside = min(max(told.total_ns, told.queue_ns + work), received - sent)
    arrived = sent + (received - sent - inside) // 2
    begin = max(arrived + told.queue_ns, free_at)
    begin = max(sent, min(begin, received - work))
    forward_end = min(begin + told.forward_ns, received)
    rule_end = min(forward_end + told.sampling_ns, received)
    end = min(rule_end + told.draft_ns, received)
    departed = max(end, min(arrived + inside, received))
    return Verify(
        replica,
        batch,
        result,
        sent,
        arrived,
        begin,
        forward_end,
        rule_end,
        end,
        departed,
        received,
    )


def _one_ways(records: Iterable[Record]) -> dict[str, int]:
    """Nanoseconds from each drafter to the orchestrator: half of the quickest answer's wire."""
    asked: dict[int, int] = {}
    shortest: dict[str, int] = {}
    for record in records:
        if isinstance(record.message, DraftCommands):
            asked |= dict.fromkeys(_asks(record.message), record.at_ns)
        elif isinstance(record.message, DraftPlans):
            answers = [asked.pop(plan.sequence, None) for plan in record.message.plans]
            times = [at for at in answers if at is not None]
            if times:
                slack = record.at_ns - max(times) - record.message.draft_ns
                known = shortest.get(record.replica, slack // 2)
                shortest[record.replica] = max(0, min(known, slack // 2))
    return shortest


def _asks(commands: DraftCommands) -> list[int]:
    """The sequences that a frame asks a draft for."""
    asks: list[tuple[int, int]] = [(c.sequence, c.next_draft_tokens) for c in commands.opens]
    asks += [(c.sequence, c.next_draft_tokens) for c in commands.commits]
    asks += [(c.sequence, c.next_draft_tokens) for c in commands.sents]
    return [sequence for sequence, wanted in asks if wanted > 0]


def _state_of(row: VerifyRow) -> _State:
    return (row.sequence, row.position + len(row.new_token_ids), row.new_token_ids[-1])
