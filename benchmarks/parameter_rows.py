"""Rows of parameters: what they cost a verify step, and what they leave of the drafts.

Costs are taken on the verifier's engine alone. Acceptance is that of the whole system with the
draft lengths left alone: the same requests under one rule and under another, or with a constraint
and without. Those rows have one run of several texts and no mark: chance moves them by a tenth.
"""

import asyncio
import json
import statistics
from collections.abc import Sequence

from benchmarks.context import Bench
from benchmarks.processes import BenchError
from benchmarks.prompts import EXTRACTIONS, GROUNDED, MIXED
from benchmarks.registry import Measurement, Row, row
from protos import common_pb2 as common
from protos import generation_pb2 as pb

_CONTEXT = 128
_TEMPERATURES = (0.7, 1.0)
_WEIGHT = 0.7
#: What the texts of EXTRACTIONS say, so that a constrained answer means something.
_SCHEMA = json.dumps(
    {
        "type": "array",
        "minItems": 1,
        "maxItems": 5,
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 40},
                "text": {"type": "string", "maxLength": 80},
                "number": {"type": "integer"},
                "kind": {"enum": ["person", "animal", "place", "thing"]},
            },
            "required": ["name", "text", "number", "kind"],
            "additionalProperties": False,
        },
    }
)


# ---------------------------------------------------------------- cost


async def _cost(
    bench: Bench, parameters: str, tasks: Sequence[str], num_draft_tokens: int
) -> Measurement:
    engine = await bench.verifying()
    length = _CONTEXT + 1 + num_draft_tokens
    runs = await engine.call(
        "compare",
        parameters=parameters,
        texts=[ids[:length] for ids in bench.fresh(tasks)],
        num_draft_tokens=num_draft_tokens,
        num_runs=bench.scale.num_engine_runs,
        num_steps=max(1, bench.scale.num_forwards // 2),
    )
    median = {name: statistics.median(times) for name, times in runs.items()}
    note = (
        f"{len(tasks)} rows of {1 + num_draft_tokens} positions; rule {median['our_rule']:.2f} ms, "
        f"greedy {median['peer_rule']:.2f} ms"
    )
    return Measurement(runs["ours"], runs["peer"], [note])


@row("coupled_cost", unit="ms", at_most=1.10)
async def coupled_cost(bench: Bench) -> Measurement:
    """Noise for every token of the vocabulary against none."""
    return await _cost(bench, "coupled", GROUNDED, num_draft_tokens=4)


@row("mixed_parameters_cost", unit="ms", at_most=1.25)
async def mixed_parameters_cost(bench: Bench) -> Measurement:
    """Every row with parameters of its own against none with any."""
    return await _cost(bench, "mixed", GROUNDED * 4, num_draft_tokens=3)


# ---------------------------------------------------------------- acceptance


async def _stats(bench: Bench, requests: Sequence[pb.GenerateRequest]) -> pb.SpeculationStats:
    """The requests at once, whatever they say; their statistics summed up."""
    stack = await bench.stack(is_adaptive=False)
    total = pb.SpeculationStats()
    for generation in await asyncio.gather(*map(stack.call, requests)):
        stats = generation.finished.speculation
        total.num_spec_steps += stats.num_spec_steps
        total.num_draft_tokens += stats.num_draft_tokens
        total.num_accepted_draft_tokens += stats.num_accepted_draft_tokens
        total.num_tokens_without_distributions += stats.num_tokens_without_distributions
    return total


def _rate(stats: pb.SpeculationStats) -> float:
    return stats.num_accepted_draft_tokens / max(1, stats.num_draft_tokens)


def _length(stats: pb.SpeculationStats) -> float:
    """Tokens per round that drafted."""
    return 1 + stats.num_accepted_draft_tokens / max(1, stats.num_spec_steps)


def _told(name: str, stats: pb.SpeculationStats) -> str:
    return (
        f"{name}: {stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} draft tokens "
        f"accepted ({_rate(stats):.1%}), {_length(stats):.2f} tokens per drafted round"
    )


def _sampled(
    bench: Bench, prompts: list[list[int]], rule: common.Rule, temperature: float
) -> list[pb.GenerateRequest]:
    pool = bench.pool_with_model()
    is_mixture = rule == common.RULE_ENSEMBLE
    return [
        pb.GenerateRequest(
            prompt_token_ids=common.TokenIds(ids=ids),
            sampling=pb.SamplingOptions(temperature=temperature, top_k=0, top_p=1.0, seed=seed),
            stopping=pb.StoppingOptions(max_new_tokens=bench.scale.num_new_tokens, ignore_eos=True),
            speculation=pb.SpeculationOptions(
                drafter=pool, rule=rule, ensemble_weight=_WEIGHT if is_mixture else None
            ),
        )
        for seed, ids in enumerate(prompts)
    ]


def _rule_row(name: str, rule: common.Rule, temperature: float) -> Row:
    """Share of draft tokens that a rule accepts, against TOKEN_REJECTION's."""

    async def measure(bench: Bench) -> Measurement:
        prompts = bench.fresh(MIXED)
        ours = await _stats(bench, _sampled(bench, prompts, rule, temperature))
        peer = await _stats(
            bench, _sampled(bench, prompts, common.RULE_TOKEN_REJECTION, temperature)
        )
        notes = [_told(name, ours), _told("token_rejection", peer)]
        if not peer.num_accepted_draft_tokens:
            raise BenchError("; ".join(notes))
        if ours.num_tokens_without_distributions:
            notes.append(f"{ours.num_tokens_without_distributions} tokens by the target alone")
        return Measurement([_rate(ours)], [_rate(peer)], notes)

    return row(f"acceptance_{name}_t{temperature}", unit="accepted/drafted")(measure)


_ACCEPTANCE = tuple(
    _rule_row(name, rule, temperature)
    for name, rule in (
        ("coupled", common.RULE_COUPLED),
        ("rejection", common.RULE_REJECTION),
        ("ensemble", common.RULE_ENSEMBLE),
    )
    for temperature in _TEMPERATURES
)


async def _structured(bench: Bench, pool: str) -> Measurement:
    """Greedy JSON, constrained and not; not all texts reach their end in so few tokens."""
    constraint = common.Constraint(kind=common.CONSTRAINT_KIND_JSON_SCHEMA, source=_SCHEMA)
    requests = [
        pb.GenerateRequest(
            prompt_token_ids=common.TokenIds(ids=ids),
            sampling=pb.SamplingOptions(temperature=0.0),
            stopping=pb.StoppingOptions(max_new_tokens=bench.scale.num_new_tokens),
            speculation=pb.SpeculationOptions(drafter=pool),
        )
        for ids in bench.fresh(EXTRACTIONS)
    ]
    free = await _stats(bench, requests)
    for request in requests:
        request.constraint.CopyFrom(constraint)
    constrained = await _stats(bench, requests)
    notes = [_told("constrained", constrained), _told("free", free)]
    return Measurement([_length(constrained)], [_length(free)], notes)


@row("structured_acceptance_ngram", unit="tokens/round")
async def structured_ngram(bench: Bench) -> Measurement:
    """Prompt lookup under a JSON schema against the same prompts without."""
    return await _structured(bench, bench.pool("ngram"))


@row("structured_acceptance_draft", unit="tokens/round")
async def structured_draft(bench: Bench) -> Measurement:
    """A network's drafts, which know nothing of the schema."""
    return await _structured(bench, bench.pool_with_model())


ROWS = (coupled_cost, mixed_parameters_cost, *_ACCEPTANCE, structured_ngram, structured_draft)
