"""A target and drafters with set costs and a set acceptance as services, for benchmarks only.

What the target says is a pure function of seed and position, and so is whether a draft token is
right. A forward, or a step of a drafter, is a sleep of the set length. All around them is real:
the verifier's servicer and its queue, `DrafterEngine` with its batches and branches, gRPC.

    python -m benchmarks.synthetic target | drafters      (a `Setting` as a line of JSON on stdin)

serves them and prints their addresses. `benchmarks.virtual` runs the same without a clock.
"""

import asyncio
import sys
import time
from dataclasses import dataclass
from unittest import mock

from benchmarks.setting import Setting
from benchmarks.synthetic_drafter import SyntheticDrafter, pause
from benchmarks.texts import IDENTITY, VOCAB_SIZE, Text
from benchmarks.worker import end_with_stdin, read_line
from core.config import ModelConfig, VerifierConfig
from core.drafter import Drafter
from core.rpc import RunningServer, configure_logging
from core.types import (
    SamplingParams,
    Verdict,
    VerdictStatus,
    VerifierInfo,
    VerifyBatch,
    VerifyResult,
    VerifyRow,
    VerifyTimings,
)
from drafter_service.server import serve
from verifier_service import server as verifier_server


@dataclass(frozen=True, slots=True)
class _Submitted:
    """A batch that leaves the last device at `end_s`."""

    result: VerifyResult
    end_s: float

    def wait(self) -> None:
        """Until then."""
        pause(self.end_s - time.perf_counter())


class SyntheticTarget:
    """Stands in for a `VerifierEngine`: the same checks of positions, verdicts by the text."""

    def __init__(self, setting: Setting, text: Text | None = None) -> None:
        self._cost, self._text = setting.target, text or Text()
        self._streams: dict[int, dict[int, list[int]]] = {}  # sequence -> [seed, length]
        self._free_at = [0.0] * self._cost.num_stages
        self.info = VerifierInfo(
            identity=IDENTITY,
            max_length=1 << 20,
            max_sequences=1 << 16,
            max_batch_tokens=setting.max_batch_tokens,
            eos_token_ids=(),
            default_sampling=SamplingParams(),
            instance_id="synthetic",
            tokenizer_size=VOCAB_SIZE,
            num_stages=self._cost.num_stages,
        )

    @property
    def num_open(self) -> int:
        """Sequences that are open, over all streams."""
        return sum(map(len, self._streams.values()))

    def close_stream(self, stream: int) -> None:
        """Forget everything of a stream."""
        self._streams.pop(stream, None)

    def submit(self, stream: int, batch: VerifyBatch) -> _Submitted:
        """One forward for all rows, behind those that were submitted before."""
        sequences = self._streams.setdefault(stream, {})
        for sequence in batch.closes:
            sequences.pop(sequence, None)
        for each in batch.opens:
            sequences[each.sequence] = [each.sampling.seed, 0]
        verdicts = tuple(self._verdict(sequences.get(row.sequence), row) for row in batch.rows)
        now = end_s = time.perf_counter()
        if batch.rows:
            num_tokens = sum(row.num_tokens for row in batch.rows)
            sizes = [len(row.new_token_ids) for row in batch.rows]
            num_prefill = sum(size for size in sizes if size > 1)
            seconds = self._cost.seconds(len(batch.rows), num_tokens, num_prefill)
            end_s = self._pass_stages(now, seconds)
        timings = VerifyTimings(0, round((end_s - now) * 1e9), 0, int(end_s > now))
        return _Submitted(VerifyResult(batch.batch, verdicts, (), timings), end_s)

    def complete(self, submitted: _Submitted) -> VerifyResult:
        """What came of it, once it is through."""
        submitted.wait()
        return submitted.result

    def _pass_stages(self, now: float, seconds: float) -> float:
        """When a batch that begins now leaves the last device."""
        for stage, free_at in enumerate(self._free_at):
            now = self._free_at[stage] = max(now, free_at) + seconds / len(self._free_at)
        return now

    def _verdict(self, state: list[int] | None, row: VerifyRow) -> Verdict:
        start = row.position + len(row.new_token_ids)
        if state is None or state[1] < row.position:
            return Verdict(row.sequence, start, VerdictStatus.NEED_PREFIX)
        if row.partial:
            state[1] = start
            return Verdict(row.sequence, start)
        seed, accepted = state[0], 0
        while accepted < len(row.draft_token_ids):
            if row.draft_token_ids[accepted] != self._text.token(seed, start + accepted):
                break
            accepted += 1
        state[1] = start + accepted
        token_ids = (*row.draft_token_ids[:accepted], self._text.token(seed, start + accepted))
        return Verdict(row.sequence, start, accepted=accepted, token_ids=token_ids)


# ---------------------------------------------------------------- services


async def serve_target(target: SyntheticTarget) -> RunningServer:
    """Serve a target on a free loopback port."""
    with mock.patch.object(verifier_server, "_load", lambda *_: target):
        config = ModelConfig(model="synthetic")
        return await verifier_server.serve_verifier(config, VerifierConfig())


async def serve_drafter(setting: Setting, drafter: Drafter) -> RunningServer:
    """Serve a drafter of the setting's pool on a free loopback port."""
    return await serve(drafter, setting.pool_config)


async def _serve(role: str, setting: Setting) -> None:
    if role == "target":
        servers = [await serve_target(SyntheticTarget(setting))]
    else:
        drafters = [SyntheticDrafter(setting) for _ in range(setting.num_drafters)]
        servers = [await serve_drafter(setting, drafter) for drafter in drafters]
    print(*(server.address for server in servers), flush=True)
    await servers[0].wait()


def main() -> None:
    """Serve until a signal, or until stdin ends."""
    setting = Setting.model_validate_json(read_line())
    end_with_stdin()
    configure_logging()
    asyncio.run(_serve(sys.argv[1], setting))


if __name__ == "__main__":
    main()
