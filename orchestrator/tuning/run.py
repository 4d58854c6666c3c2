"""All of `forerun tune`: loads the target once and each drafter in turn, measures, recommends.

Knows the order of things; how each is measured or predicted stands in the modules beside it.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from core.config import DrafterPoolConfig, ModelConfig
from core.embedded import resolve_model
from core.errors import ConfigError, InvalidRequestError
from core.model import RaggedModel
from core.tokenizer import Tokenizer
from drafter_service.drafters import create_drafter
from orchestrator.attaching import attacher
from orchestrator.pool import explain_mismatch
from orchestrator.tuning.costs import draft_seconds, verify_seconds
from orchestrator.tuning.prediction import (
    PoolCosts,
    Prediction,
    TargetCosts,
    best_of_pool,
    count_steps,
)
from orchestrator.tuning.probe import overheads
from orchestrator.tuning.replay import (
    AttachedSource,
    NoDrafts,
    Options,
    RemoteSource,
    Source,
    replay,
    torch_threads,
)
from verifier_service.attached import AttachedDrafters
from verifier_service.engine import VerifierEngine

_PROBE_TOKENS = 40


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """What to measure.

    max_new_tokens: of each answer. longest: draft length to look at. clients: predictions are for
    one and for so many. ignore_eos: answers go on behind the model's end tokens.
    """

    target: ModelConfig
    pools: Sequence[DrafterPoolConfig]
    max_new_tokens: int = 64
    longest: int = 6
    clients: int = 8
    ignore_eos: bool = False

    @property
    def row_counts(self) -> list[int]:
        """Clients that predictions are for."""
        return sorted({1, self.clients})


@dataclass(frozen=True, slots=True)
class TuneReport:
    """What was measured, and by number of clients the best of each pool, best first."""

    target: TargetCosts
    pools: tuple[PoolCosts, ...]
    best: dict[int, list[Prediction]]


def tune(
    options: TuneOptions,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    say: Callable[[str], None] = lambda line: None,
) -> TuneReport:
    """Measure everything; `say` hears what is being done. Prompts are texts, for the target's chat
    template, or token ids.

    Raises ConfigError, ModelError, InvalidRequestError (a prompt that leaves no room).
    """
    say(f"loading {options.target.model}")
    folder = resolve_model(options.target.model)
    tokenizer = Tokenizer.load(folder, options.target.gguf_file, options.target.trust_remote_code)
    ids = [_ids(tokenizer, prompt) for prompt in prompts]
    needed = max(map(len, ids)) + options.max_new_tokens + 2 * options.longest + 2
    if needed > options.target.max_length:
        raise InvalidRequestError(
            "prompts",
            f"the longest has {max(map(len, ids))} tokens; with its answer and drafts that is "
            f"{needed}, and the target's max_length is {options.target.max_length}",
        )
    limits = {"model": folder, "max_length": needed, "max_sequences": options.clients}
    model = RaggedModel.load(options.target.model_copy(update=limits))
    target = _measure_target(model, tokenizer, options, ids, say)
    pools = tuple([_measure_pool(model, target, pool, options, ids, say) for pool in options.pools])
    best = {
        rows: sorted(
            [best_of_pool(target, pool, rows) for pool in pools],
            key=lambda prediction: -prediction.tokens_per_s,
        )
        for rows in options.row_counts
    }
    return TuneReport(target, pools, best)


def _ids(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> list[int]:
    if not isinstance(prompt, str):
        return list(prompt)
    if tokenizer.has_chat_template:
        return tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    return tokenizer.encode(prompt)


def _replay_options(model: RaggedModel, options: TuneOptions) -> Options:
    stops = () if options.ignore_eos else model.eos_token_ids
    return Options(options.clients, options.longest, options.max_new_tokens, stops)


def _measure_target(
    model: RaggedModel,
    tokenizer: Tokenizer,
    options: TuneOptions,
    prompts: list[list[int]],
    say: Callable[[str], None],
) -> TargetCosts:
    engine = VerifierEngine(model)
    say("target: steps by rows and tokens")
    some = prompts[: options.clients]
    answers = replay(engine, NoDrafts(), some, _replay_options(model, options)).answers
    seconds = verify_seconds(engine, answers, options.row_counts, options.longest + 1)
    say("target: a real stack without drafts, and with a drafter that takes no time")
    num_tokens = min(options.max_new_tokens, _PROBE_TOKENS)
    probing = overheads(
        engine, tokenizer, prompts, options.row_counts, num_tokens, options.target.threads
    )
    return TargetCosts(seconds, *asyncio.run(probing))


def _measure_pool(
    model: RaggedModel,
    target: TargetCosts,
    pool: DrafterPoolConfig,
    options: TuneOptions,
    prompts: list[list[int]],
    say: Callable[[str], None],
) -> PoolCosts:
    say(f"{pool.name}: loading kind {pool.kind}")
    with _drafting(model, _sized(pool, options)) as (engine, source):
        say(f"{pool.name}: drafting behind every token of {len(prompts)} answers")
        answers = replay(engine, source, prompts, _replay_options(model, options)).answers
        made = max((len(draft) for each in answers for draft in each.drafts), default=0)
        longest = max(1, min(options.longest, made))  # a kind may have a limit of its own
        say(f"{pool.name}: its time for 1 to {longest} tokens")
        seconds = draft_seconds(
            engine, source, prompts, target.verify_s, longest, options.max_new_tokens
        )
    steps = [count_steps(answers, k, options.max_new_tokens) for k in range(1, longest + 1)]
    return PoolCosts(pool.name, pool.attached, steps, seconds)


def _sized(pool: DrafterPoolConfig, options: TuneOptions) -> DrafterPoolConfig:
    """The pool with room for the drafts and rows that are measured, and no more."""
    update: dict[str, object] = {"max_draft_tokens": options.longest}
    if pool.model is not None:
        update["model"] = pool.model.model_copy(update={"max_sequences": options.clients})
    return pool.model_copy(update=update)


@contextlib.contextmanager
def _drafting(
    model: RaggedModel, pool: DrafterPoolConfig
) -> Iterator[tuple[VerifierEngine, Source]]:
    """The target with a pool's drafter."""
    if pool.attached:
        attached = AttachedDrafters(model, attacher([pool])(model))
        yield VerifierEngine(model, attached=attached), AttachedSource(pool.name)
        return
    threads = pool.model.threads if pool.model else 0
    with torch_threads(threads):  # and back to the target's: loading sets them
        drafter = create_drafter(pool)
    if mismatch := explain_mismatch(drafter.identity, model.identity):
        raise ConfigError(f"drafter_pools.{pool.name}: {mismatch}")
    source = RemoteSource(drafter, pool.max_draft_tokens, threads)
    yield VerifierEngine(model), source
