"""The picture of docs/trace.md: drafting hidden behind verification.

    python -m benchmarks.picture docs/drafting-ahead.svg

One client of the system rows' services (benchmarks/system_rows.py): a target and a drafter that
sleep as long as those of the size they stand for would compute, as processes behind real gRPC.
"""

import asyncio
import sys
from pathlib import Path

from benchmarks.links import Link
from benchmarks.loads import Services, drive
from benchmarks.system_rows import BASE
from orchestrator.placing import build
from orchestrator.trace import Recorder
from orchestrator.trace_picture import draw_timeline

_SETTING = BASE.model_copy(
    update={"acceptance": (0.8,), "link": Link(one_way_s=0.001), "num_new_tokens": 96}
)
_TITLE = "30 ms target, 3.5 ms drafter, 2 ms round trip: drafts are made while the target verifies"


async def draw() -> str:
    """An SVG of ten rounds."""
    recorder = Recorder()
    async with Services.start(_SETTING, 0, 1) as services, services.engine() as engine:
        engine.record(recorder)
        await drive(engine, _SETTING)
        engine.record(None)
    return draw_timeline(build(recorder.records), _TITLE)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(asyncio.run(draw()), encoding="utf-8")
