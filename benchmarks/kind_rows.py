"""Every kind of drafter against transformers' `generate` with the same method, one client.

Draft lengths are equal and constant on both sides, so acceptance should be too: it stands in the
notes as tokens per verify step. Early exit and the other tokenizer run on the embedded model with
its real weights (which were not trained to exit early); the kinds whose checkpoints cannot be had
here run on tiny random ones in the real format. There acceptance says nothing and a whole step is
all code around the model, so those rows compare the milliseconds that one draft takes.
"""

import dataclasses
import functools
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import cross_tokenizer
from benchmarks.context import Bench
from benchmarks.prompts import CHAT
from benchmarks.registry import Measurement, row
from core.config import Config, DrafterPoolConfig, ModelConfig
from tests.tiny_dflash import save_drafter as save_dflash
from tests.tiny_gemma4 import save_assistant, save_target
from tests.tiny_models import save_tiny
from tests.tiny_mtp import save_tiny_mtp

_NUM_PROMPTS = 4
#: GLM-4.5-Air's: transformers looks for the prediction layers behind so many.
_NUM_GLM_LAYERS = 46


@dataclasses.dataclass(frozen=True, slots=True)
class Pairing:
    """Both sides of a row. `assistant`: the peer's options; see `benchmarks.assisted`."""

    target: ModelConfig
    pool: DrafterPoolConfig
    assistant: dict[str, Any]

    @property
    def num_draft_tokens(self) -> int:
        """Draft length of both."""
        return self.pool.max_draft_tokens


async def _compare(
    bench: Bench, pairing: Pairing, prompts: Sequence[list[int]], is_tiny: bool = False
) -> Measurement:
    """Prompt after prompt, in turns with `generate` on the same one: tokens per second, or with
    `is_tiny` the milliseconds of one attached draft."""
    scale, target = bench.scale, pairing.target
    settings = bench.config.orchestrator.model_copy(
        update={"adaptive_draft_length": False, "default_pool": pairing.pool.name}
    )
    config = Config(target=target, drafter_pools=[pairing.pool], orchestrator=settings)
    ours: list[float] = []
    theirs: list[float] = []
    steps, gained = [0, 0], [0, 0]
    drafting: tuple[list[float], list[float]] = ([], [])
    async with bench.stack_of(config) as stack, bench.peer_of(target.model, target.dtype) as peer:
        await peer.call(
            "assist",
            method=pairing.pool.kind,
            num_draft_tokens=pairing.num_draft_tokens,
            **pairing.assistant,
        )
        for _ in range(max(1, scale.num_runs - 1)):
            seconds, draft_s, before = [0.0, 0.0], 0.0, await stack.verifier_time()
            for prompt in prompts:
                begin = time.perf_counter()
                generation = await stack.generate(prompt, scale.num_new_tokens, pairing.pool.name)
                seconds[0] += time.perf_counter() - begin
                stats = generation.finished.speculation
                steps[0] += stats.num_spec_steps
                gained[0] += stats.num_accepted_draft_tokens
                result = await peer.call(
                    "generate_assisted", prompt=prompt, max_new_tokens=scale.num_new_tokens
                )
                seconds[1] += float(result["seconds"])
                steps[1] += result["num_steps"]
                gained[1] += result["num_accepted"]
                draft_s += result["draft_seconds"]
            tokens = len(prompts) * scale.num_new_tokens
            ours.append(tokens / seconds[0])
            theirs.append(tokens / seconds[1])
            spent = await stack.verifier_time() - before
            drafting[0].append(1000 * spent.drafting_s / spent.batches)
            drafting[1].append(1000 * draft_s * len(drafting[0]) / max(1, steps[1]))
    each = [1 + won / max(1, count) for won, count in zip(gained, steps, strict=True)]
    note = f"tokens per verify step with a draft: ours {each[0]:.2f}, transformers {each[1]:.2f}"
    notes = [note, f"{pairing.num_draft_tokens} draft tokens a step"]
    if is_tiny:
        return Measurement(*drafting, notes)
    return Measurement(ours, theirs, notes)


def _tiny(path: Path, **limits: int) -> ModelConfig:
    return ModelConfig(
        model=str(path),
        dtype="float32",
        device_map="cpu",
        threads=1,
        **{"max_length": 256, "max_sequences": 4, **limits},
    )


def _tiny_prompts(bench: Bench) -> list[list[int]]:
    length = min(24, bench.scale.max_prompt_tokens)
    return [[(37 * i + 11 * n) % 250 for i in range(length)] for n in range(_NUM_PROMPTS)]


def _in_folder(measure: Any) -> Any:
    """Give a row a folder for its checkpoints, which ends with it."""

    @functools.wraps(measure)
    async def wrapped(bench: Bench) -> Measurement:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the library, about tiny models
            return await measure(bench, Path(folder))  # type: ignore[no-any-return]

    return wrapped


@row("early_exit_1_client", unit="tokens/s", at_least=1.2)
async def early_exit_1_client(bench: Bench) -> Measurement:
    """28 of the target's 30 layers draft, beside the target."""
    pool = DrafterPoolConfig(
        name="early",
        kind="early_exit",
        attached=True,
        max_draft_tokens=2,
        options={"num_layers": 28},
    )
    pairing = Pairing(bench.config.target, pool, {"early_exit": 28})
    return await _compare(bench, pairing, bench.fresh(CHAT[:_NUM_PROMPTS]))


@row("cross_tokenizer_1_client", unit="tokens/s", at_least=1.2)
@_in_folder
async def cross_tokenizer_1_client(bench: Bench, folder: Path) -> Measurement:
    """A network with 16,000 of the target's tokens; texts are translated on both sides."""
    target = bench.config.target
    cross_tokenizer.save_drafter("gpt2-16000", Path(target.model), folder)
    model = target.model_copy(update={"model": str(folder)})
    pool = DrafterPoolConfig(
        name="cross",
        kind="cross_tokenizer",
        max_draft_tokens=4,
        model=model,
        options={"target": target.model, "method": "slem"},
    )
    pairing = Pairing(target, pool, {"assistant": str(folder)})
    return await _compare(bench, pairing, bench.fresh(CHAT[:_NUM_PROMPTS]))


@row("mtp_layers_draft_tiny", unit="ms")
@_in_folder
async def mtp_layers_draft_tiny(bench: Bench, folder: Path) -> Measurement:
    """GLM's prediction layer in a tiny random checkpoint of 46 layers, beside the target."""
    save_tiny_mtp("glm4_moe", folder, 1, is_tame=True, num_layers=_NUM_GLM_LAYERS)
    pool = DrafterPoolConfig(name="mtp", kind="mtp_layers", attached=True, max_draft_tokens=1)
    return await _compare(bench, Pairing(_tiny(folder), pool, {}), _tiny_prompts(bench), True)


@row("mtp_assistant_draft_tiny", unit="ms")
@_in_folder
async def mtp_assistant_draft_tiny(bench: Bench, folder: Path) -> Measurement:
    """Gemma 4's assistant, tiny and random, beside its target."""
    target = save_target("text", folder / "target")
    assistant = save_assistant(folder / "assistant", num_assistant_tokens=3)
    pool = DrafterPoolConfig(
        name="assistant",
        kind="mtp_assistant",
        attached=True,
        max_draft_tokens=3,
        model=_tiny(assistant),
    )
    pairing = Pairing(_tiny(target), pool, {"assistant": str(assistant)})
    return await _compare(bench, pairing, _tiny_prompts(bench), True)


@row("dflash_draft_tiny", unit="ms")
@_in_folder
async def dflash_draft_tiny(bench: Bench, folder: Path) -> Measurement:
    """The block-diffusion drafter, tiny and random, beside a Llama."""
    target = save_tiny("llama", folder / "target", num_hidden_layers=4, eos_token_id=None)
    drafter = save_dflash(folder / "drafter")
    pool = DrafterPoolConfig(
        name="dflash", kind="dflash", attached=True, max_draft_tokens=3, model=_tiny(drafter)
    )
    pairing = Pairing(_tiny(target), pool, {"assistant": str(drafter)})
    return await _compare(bench, pairing, _tiny_prompts(bench), True)


ROWS = (
    early_exit_1_client,
    cross_tokenizer_1_client,
    mtp_layers_draft_tiny,
    mtp_assistant_draft_tiny,
    dflash_draft_tiny,
)
