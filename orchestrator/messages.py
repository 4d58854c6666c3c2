"""Blocks and statuses as the public API's messages: the way out, for every edge.

`orchestrator.validation` is the way in. Knows protobuf and `orchestrator.requests`; knows nothing
of servers, engines or how a message travels.
"""

from collections.abc import Mapping
from typing import Final

from core import __version__
from core.wire import logprobs_to_proto
from orchestrator.detokenizer import Detokenizer
from orchestrator.requests import (
    Block,
    ClusterStatus,
    Finished,
    FinishReason,
    Health,
    PoolStatus,
    ReplicaStatus,
)
from protos import cluster_pb2, generation_pb2

_REASONS: Final[Mapping[FinishReason, generation_pb2.FinishReason]] = {
    FinishReason.STOP_TOKEN: generation_pb2.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: generation_pb2.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}
_HEALTHS: Final[Mapping[Health, cluster_pb2.ReplicaHealth]] = {
    Health.CONNECTING: cluster_pb2.REPLICA_HEALTH_CONNECTING,
    Health.READY: cluster_pb2.REPLICA_HEALTH_READY,
    Health.LOST: cluster_pb2.REPLICA_HEALTH_LOST,
    Health.REFUSED: cluster_pb2.REPLICA_HEALTH_REFUSED,
}


def response_to_proto(
    block: Block, speller: Detokenizer | None, seed: int
) -> generation_pb2.GenerateResponse:
    """One block; with its ids, their origins and texts if there is a speller for the texts.

    `seed`: the one used, for the block that ends the sample.
    """
    response = generation_pb2.GenerateResponse(
        text=block.text,
        logprobs=logprobs_to_proto(block.logprobs),
        prompt_logprobs=logprobs_to_proto(block.prompt_logprobs),
    )
    if speller is not None:
        accepted, total = block.accepted, len(block.token_ids)
        response.token_ids.extend(block.token_ids)
        response.origins.extend([generation_pb2.TOKEN_ORIGIN_ACCEPTED_DRAFT] * accepted)
        response.origins.extend([generation_pb2.TOKEN_ORIGIN_TARGET] * (total - accepted))
        response.token_texts.extend(speller.push(block.token_ids).token_texts)
        response.drafter = block.drafter if accepted else ""
    if block.finished is not None:
        response.finished.CopyFrom(_finished(block.finished, seed))
    return response


def _finished(finished: Finished, seed: int) -> generation_pb2.Finished:
    stats = finished.stats
    return generation_pb2.Finished(
        reason=_REASONS[finished.reason],
        stop_string=finished.stop_string,
        stop_token_id=finished.stop_token_id,
        usage=generation_pb2.Usage(
            prompt_tokens=finished.prompt_tokens,
            completion_tokens=finished.completion_tokens,
            cached_prompt_tokens=finished.cached_prompt_tokens,
        ),
        seed=seed,
        speculation=generation_pb2.SpeculationStats(
            num_spec_steps=stats.num_spec_steps,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_draft_tokens=stats.num_accepted_draft_tokens,
            mean_acceptance_length=stats.mean_acceptance_length,
            draft_acceptance_rate=stats.draft_acceptance_rate,
            acceptance_histogram=stats.acceptance_histogram,
            num_plan_hits=stats.num_plan_hits,
            plan_misses=stats.plan_misses,
            fallback_steps=stats.fallback_steps,
            num_verify_steps=stats.num_verify_steps,
            drafter=stats.drafter,
            num_tokens_without_distributions=stats.num_tokens_without_distributions,
        ),
        time_to_first_token_ms=finished.time_to_first_token_s * 1000,
        total_ms=finished.total_s * 1000,
    )


def status_to_proto(status: ClusterStatus) -> cluster_pb2.GetStatusResponse:
    """The cluster at one moment."""
    return cluster_pb2.GetStatusResponse(
        model=status.model,
        version=__version__,
        verifiers=map(_replica, status.verifiers),
        drafter_pools=map(_pool, status.drafter_pools),
        num_waiting=status.num_waiting,
        num_running=status.num_running,
        num_finished=status.num_finished,
        num_completion_tokens=status.num_completion_tokens,
        uptime_s=status.uptime_s,
    )


def _pool(pool: PoolStatus) -> cluster_pb2.DrafterPoolStatus:
    return cluster_pb2.DrafterPoolStatus(
        pool=pool.pool,
        kind=pool.kind,
        replicas=map(_replica, pool.replicas),
        num_draft_tokens=pool.num_draft_tokens,
        num_accepted_draft_tokens=pool.num_accepted_draft_tokens,
        num_drafts=pool.num_drafts,
    )


def _replica(replica: ReplicaStatus) -> cluster_pb2.ReplicaStatus:
    return cluster_pb2.ReplicaStatus(
        replica_id=replica.replica_id,
        address=replica.address,
        health=_HEALTHS[replica.health],
        message=replica.message,
        num_sequences=replica.num_sequences,
        max_sequences=replica.max_sequences,
        num_losses=replica.num_losses,
    )
