"""`forerun tune`'s measurement and prediction, on the target's core.

Run as `python -m benchmarks.tune_process` by `benchmarks.tune_rows`. Drafters of pools that are
processes of their own in the stack run here too, one after the other with the target: that is how
the tool measures. Knows nothing of rows and of the stack that the prediction is held against.
"""

from typing import Any

from benchmarks.worker import serve
from core.config import DrafterPoolConfig, ModelConfig
from core.rpc import configure_logging
from orchestrator.tuning.prediction import predict
from orchestrator.tuning.run import TuneOptions, tune


def measure(
    target: dict[str, Any],
    pool: dict[str, Any],
    prompts: list[list[int]],
    max_new_tokens: int,
) -> dict[str, Any]:
    """Of one client with drafts of the pool's length: the predicted speed-up over plain decoding,
    and what it is made of, in milliseconds. End tokens are ignored."""
    settings = DrafterPoolConfig.model_validate(pool)
    k = settings.max_draft_tokens
    options = TuneOptions(
        ModelConfig.model_validate(target), [settings], max_new_tokens, k, 1, ignore_eos=True
    )
    report = tune(options, prompts)
    [costs] = report.pools
    k = min(k, len(costs.steps))
    expected = predict(report.target, costs, 1, k)
    return {
        "speedup": expected.speedup,
        "tokens_per_step": costs.steps[k - 1].tokens_per_step,
        "step_ms": 1000 * expected.step_s,
        "draft_ms": 1000 * costs.draft_s[1, k],
        "plain_ms": 1000 / report.target.plain(1),
        "round_ms": 1000 * report.target.round_s[1],
        "trip_ms": 1000 * report.target.trip_s[1],
    }


if __name__ == "__main__":
    configure_logging("WARNING")
    serve({"measure": measure})
