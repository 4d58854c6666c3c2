"""A target and drafters with set costs and a set acceptance as services, for benchmarks only.

What the target says is a pure function of seed and position, and so is whether a draft token is
right. A forward, or a step of a drafter, is a sleep of the set length. All around them is real:
the verifier's servicer and its queue, `DrafterEngine` with its batches and branches, gRPC.

    python -m benchmarks.synthetic target | drafters      (a `Setting` as a line of JSON on stdin)

serves them and prints their addresses. `benchmarks.virtual` runs the same without a clock.
"""

import asyncio
import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
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


class SyntheticTarget:
    """Stands in for a `VerifierEngine`: the same checks of positions, verdicts by the text."""

    def __init__(self, setting: Setting, text: Text | None = None) -> None:
        self._cost, self._text = setting.target, text or Text()
        self._streams: dict[int, dict[int, list[int]]] = {}  # sequence -> [seed, length]
        self._free_at = [0.0] * self._cost.num_stages
        self._lock = threading.Lock()
        self.busy_s = 0.0
        self.info = VerifierInfo(
            identity=IDENTITY,
            max_length=1 << 20,
            max_sequences=1 << 16,
            max_batch_tokens=setting.max_batch_tokens,
            eos_token_ids=(),
            default_sampling=SamplingParams(),
            instance_id="synthetic",
            tokenizer_size=VOCAB_SIZE,
        )

    @property
    def num_open(self) -> int:
        """Sequences that are open, over all streams."""
        return sum(map(len, self._streams.values()))

    def close_stream(self, stream: int) -> None:
        """Forget everything of a stream."""
        self._streams.pop(stream, None)

    def verify(self, stream: int, batch: VerifyBatch) -> VerifyResult:
        """One forward for all rows."""
        with self._lock:
            sequences = self._streams.setdefault(stream, {})
            for sequence in batch.closes:
                sequences.pop(sequence, None)
            for each in batch.opens:
                sequences[each.sequence] = [each.sampling.seed, 0]
            verdicts = tuple(self._verdict(sequences.get(row.sequence), row) for row in batch.rows)
            seconds = 0.0
            if batch.rows:
                num_tokens = sum(row.num_tokens for row in batch.rows)
                sizes = [len(row.new_token_ids) for row in batch.rows]
                num_prefill = sum(size for size in sizes if size > 1)
                seconds = self._cost.seconds(len(batch.rows), num_tokens, num_prefill)
            wait_s = self._pass_stages(seconds)
        pause(wait_s)
        timings = VerifyTimings(0, round(seconds * 1e9), 0, int(seconds > 0))
        return VerifyResult(batch.batch, verdicts, (), timings)

    def _pass_stages(self, seconds: float) -> float:
        """Seconds until a batch that begins now leaves the last device."""
        now = done = time.perf_counter()
        for stage, free_at in enumerate(self._free_at):
            done = self._free_at[stage] = max(done, free_at) + seconds / len(self._free_at)
        self.busy_s += seconds / len(self._free_at)
        return done - now

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


@contextlib.contextmanager
def staged(num_stages: int) -> Iterator[None]:
    """Let verifiers run so many batches at once, and have one more wait. (A real one has a thread
    for its first device only; the devices behind it work on their own.)"""

    real: Callable[..., Executor] = vars(verifier_server)["ThreadPoolExecutor"]

    def threads(_: int, **options: str) -> Executor:
        return real(num_stages, **options)

    replace = functools.partial(mock.patch.object, verifier_server)
    with replace("ThreadPoolExecutor", threads), replace("_MAX_UNDER_WAY", num_stages + 1):
        yield


async def serve_target(target: SyntheticTarget) -> RunningServer:
    """Serve a target on a free loopback port."""
    with mock.patch.object(verifier_server, "_load", lambda *_: target):
        config = ModelConfig(model="synthetic")
        return await verifier_server.serve_verifier(config, VerifierConfig())


async def serve_drafter(setting: Setting, drafter: Drafter) -> RunningServer:
    """Serve a drafter of the setting's pool on a free loopback port."""
    return await serve(drafter, setting.pool_config)


async def _serve(role: str, setting: Setting) -> None:
    with staged(setting.target.num_stages):
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
