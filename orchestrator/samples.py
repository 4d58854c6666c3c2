"""Several samples of one request: each a request of its own, their blocks merged as they come.

Sample i is what a request with seed + i would give. The first one starts alone; the others follow
when its first block has come: by then its prompt is in the target's cache, and they copy it.
Closing the merged iterator ends all samples; an error in one ends the others. Knows nothing of
protobuf, text or what an engine does.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace

from core.params import TokenLogprobs
from orchestrator.requests import Block, GenerationRequest

_SEEDS = 1 << 64


def sample_requests(request: GenerationRequest, num_samples: int) -> list[GenerationRequest]:
    """One request per sample, the given one first.

    The prompt's log-probabilities are the same for all and computed once: a prompt that is
    copied from the cache gives none.
    """
    return [request] + [
        replace(
            request,
            request_id=f"{request.request_id}#{sample}",
            sampling=replace(request.sampling, seed=(request.sampling.seed + sample) % _SEEDS),
            output=replace(request.output, prompt_logprobs=False),
        )
        for sample in range(1, num_samples)
    ]


async def merge(
    starts: Sequence[Callable[[], AsyncGenerator[Block, None]]],
) -> AsyncGenerator[tuple[int, Block], None]:
    """Start and run all samples; yields (sample, block), each sample's blocks in their order.

    The first block of every sample carries the prompt's log-probabilities, if the first's does.
    """
    if len(starts) == 1:  # nearly every request: no task per block
        async with contextlib.aclosing(starts[0]()) as blocks:
            async for block in blocks:
                yield 0, block
        return
    streams = [starts[0]()]
    coming = {_next_block(streams[0]): 0}  # the next block of each sample that has one: whose
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}  # what samples have yet to carry
    try:
        while coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for future in sorted(done, key=lambda future: coming[future]):
                block = future.result()
                sample = coming.pop(future)
                if len(streams) < len(starts):
                    streams += [start() for start in starts[1:]]
                    coming |= {_next_block(s): i for i, s in enumerate(streams) if i > 0}
                    prompt_logprobs = dict.fromkeys(coming.values(), block.prompt_logprobs)
                if block.finished is None:
                    coming[_next_block(streams[sample])] = sample
                if entries := prompt_logprobs.pop(sample, ()):
                    block = replace(block, prompt_logprobs=entries)
                yield sample, block
    finally:
        for future in coming:
            future.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


def _next_block(stream: AsyncGenerator[Block, None]) -> asyncio.Future[Block]:
    return asyncio.ensure_future(anext(stream))
