"""The public API as a Python call: what every edge (gRPC, HTTP) does with a request.

Validate, run the samples, translate. A caller that closes the iterator frees everything at once.
Knows messages, not how they travel; knows nothing of verifiers, drafters or Ray.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Protocol

import structlog

from core.errors import InvalidRequestError, UnavailableError
from core.tokenizer import Tokenizer
from core.types import VerifierInfo
from orchestrator.detokenizer import Detokenizer
from orchestrator.messages import response_to_proto
from orchestrator.requests import Block, ClusterStatus, GenerationRequest
from orchestrator.samples import merge, sample_requests
from orchestrator.telemetry import Telemetry
from orchestrator.validation import build_request, is_long
from protos import generation_pb2


class ServingEngine(Protocol):
    """What the edge needs of `orchestrator.engine.Engine`."""

    @property
    def info(self) -> VerifierInfo | None:
        """The target's facts; None until a verifier is there."""

    @property
    def pool_kinds(self) -> Mapping[str, str]:
        """Kinds of the drafter pools by name, the default pool first."""

    def generate(
        self, request: GenerationRequest, detokenizer: Detokenizer
    ) -> AsyncGenerator[Block, None]:
        """Run one request; closing the generator frees everything."""

    def status(self) -> ClusterStatus:
        """The cluster at this moment."""


class GenerationApi:
    """Generates for a target: `engine` runs it, `tokenizer` is its own, `telemetry` watches."""

    def __init__(
        self, engine: ServingEngine, tokenizer: Tokenizer, telemetry: Telemetry | None = None
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._telemetry = telemetry or Telemetry()

    async def generate(
        self, request: generation_pb2.GenerateRequest, traceparent: str = ""
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """The responses of all samples, each sample's in order; its last has `finished` set.

        traceparent: W3C trace context of the caller. What is logged in the caller's task from now
        on carries the request's id. Raises InvalidRequestError naming the field, and what the
        engine raises.
        """
        resolved = replace(await self._resolve(request), traceparent=traceparent)
        structlog.contextvars.bind_contextvars(request_id=resolved.request_id)
        requests = sample_requests(resolved, request.n or 1)
        detokenizers = [self._detokenizer(request, r) for r in requests]
        wants_ids = request.output.return_token_ids
        spellers = [self._speller(request) if wants_ids else None for _ in requests]
        starts = [
            functools.partial(self._telemetry.run, self.engine.generate, *arguments)
            for arguments in zip(requests, detokenizers, strict=True)
        ]
        async with contextlib.aclosing(merge(starts)) as blocks:
            async for sample, block in blocks:
                seed = requests[sample].sampling.seed
                response = response_to_proto(block, spellers[sample], seed)
                response.request_id, response.sample = requests[0].request_id, sample
                yield response

    def _detokenizer(
        self, message: generation_pb2.GenerateRequest, request: GenerationRequest
    ) -> Detokenizer:
        """One that stands behind the tokens to continue from."""
        detokenizer = Detokenizer(self.tokenizer, request.stopping.stop)
        if stop_string := detokenizer.push(message.continue_from_token_ids).stop_string:
            raise InvalidRequestError(
                "continue_from_token_ids", f"the text has ended: {stop_string!r} is a stop string"
            )
        return detokenizer

    def _speller(self, message: generation_pb2.GenerateRequest) -> Detokenizer:
        """One that stops at nothing, for the texts of single tokens."""
        speller = Detokenizer(self.tokenizer)
        speller.push(message.continue_from_token_ids)
        return speller

    async def _resolve(self, request: generation_pb2.GenerateRequest) -> GenerationRequest:
        info = self.engine.info
        if info is None:
            raise UnavailableError("no verifier is there yet; try again later")
        arguments = (request, info, self.tokenizer, self.engine.pool_kinds)
        if is_long(request):
            return await asyncio.to_thread(build_request, *arguments)
        return build_request(*arguments)
