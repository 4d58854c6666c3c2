"""The endpoints of OpenAI's HTTP API: chat and text completions, and the list of models.

A thin layer over `orchestrator.generation_api`: JSON in (`openai_schema`), the API's requests
(`openai_requests`), its responses, JSON out (`openai_replies`). What is wrong is raised, and told
the client by `orchestrator.http_server`.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from core.errors import InvalidRequestError, UnavailableError
from orchestrator.generation_api import GenerationApi
from orchestrator.http_events import event, open_events, read_body, while_connected
from orchestrator.openai_errors import UnknownModelError
from orchestrator.openai_replies import Reply, Spelling, reply_type
from orchestrator.openai_requests import chat_request, completion_requests, parameter_error
from orchestrator.openai_schema import ChatCompletion, Completion, Options, parse
from protos import generation_pb2 as pb

_Responses = AsyncGenerator[tuple[int, pb.GenerateResponse], None]


class OpenAiApi:
    """The endpoints. `model_name` is what clients call the target; "" is the target's own name."""

    def __init__(self, api: GenerationApi, model_name: str = "") -> None:
        self._api = api
        self._model_name = model_name
        self._started_at = int(time.time())
        self._spelling: asyncio.Task[Spelling] | None = None

    def routes(self) -> list[Route]:
        """Where they are."""
        return [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{model:path}", self._model, methods=["GET"]),
        ]

    @property
    def model_name(self) -> str:
        """What clients call the target. Raises UnavailableError while there is none."""
        if self._model_name:
            return self._model_name
        if self._api.engine.info is None:
            raise UnavailableError("no verifier is there yet; try again later")
        return self._api.engine.info.identity.model

    async def _chat(self, request: Request) -> Response:
        body = parse(ChatCompletion, await read_body(request))
        reply = await self._reply(body)
        return await self._answer(request, body, reply, [chat_request(body, reply.id)])

    async def _complete(self, request: Request) -> Response:
        body = parse(Completion, await read_body(request))
        reply = await self._reply(body)
        return await self._answer(request, body, reply, completion_requests(body, reply.id))

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._description()]})

    async def _model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return JSONResponse(self._description())

    def _description(self) -> dict[str, str | int]:
        names = {"id": self.model_name, "object": "model", "owned_by": "forerun"}
        info = self._api.engine.info
        length = {"max_model_len": info.max_length} if info else {}
        return {**names, "created": self._started_at, **length}

    def _check_model(self, name: str) -> None:
        if name != self.model_name:
            raise UnknownModelError(name, self.model_name)

    async def _reply(self, body: Options) -> Reply:
        self._check_model(body.model)
        spelling = None
        if isinstance(body, ChatCompletion | Completion) and body.logprobs not in (None, False):
            spelling = await self._spell()
        kind = reply_type(body)
        return kind(body, f"{kind.prefix}{uuid.uuid4().hex}", self.model_name, spelling)

    async def _spell(self) -> Spelling:
        if self._spelling is None:
            making = asyncio.to_thread(Spelling, self._api.tokenizer)
            self._spelling = asyncio.create_task(making)
        return await asyncio.shield(self._spelling)

    async def _answer(
        self, request: Request, body: Options, reply: Reply, messages: Sequence[pb.GenerateRequest]
    ) -> Response:
        traceparent = request.headers.get("traceparent", "")
        responses = self._generate(body, messages, traceparent)
        if body.stream:
            return await open_events(
                request, _events(body, reply, responses), **{"X-Request-Id": reply.id}
            )
        await while_connected(request.receive, _collect(reply, responses))
        return JSONResponse(reply.completion(), headers={"X-Request-Id": reply.id})

    async def _generate(
        self, body: Options, messages: Sequence[pb.GenerateRequest], traceparent: str
    ) -> _Responses:
        """The responses to all messages, each with the index of its choice."""
        streams = [self._api.generate(message, traceparent) for message in messages]
        try:
            async with contextlib.aclosing(_interleave(streams)) as responses:
                async for number, response in responses:
                    yield number * body.n + response.sample, response
        except InvalidRequestError as error:
            raise parameter_error(error, body) from None


async def _collect(reply: Reply, responses: _Responses) -> None:
    async with contextlib.aclosing(responses):
        async for index, response in responses:
            reply.take(index, response)


async def _events(
    body: Options, reply: Reply, responses: _Responses
) -> AsyncGenerator[bytes, None]:
    opened: set[int] = set()
    async with contextlib.aclosing(responses):
        async for index, response in responses:
            part = reply.take(index, response)
            if index not in opened:
                opened.add(index)
                if opening := reply.opening(index):
                    yield event(opening)
            if part.text or part.logprobs or part.finish_reason:
                yield event(reply.chunk(index, part))
    if body.stream_options.include_usage:
        yield event(reply.usage_chunk())
    yield event("[DONE]")


async def _interleave(
    streams: Sequence[AsyncGenerator[pb.GenerateResponse, None]],
) -> AsyncGenerator[tuple[int, pb.GenerateResponse], None]:
    """The items of all streams as they come, each with its stream's number.

    An error in one ends the others; closing this closes them all.
    """
    coming = {asyncio.ensure_future(anext(stream)): i for i, stream in enumerate(streams)}
    try:
        while coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for future in sorted(done, key=lambda future: coming[future]):
                number = coming.pop(future)
                if isinstance(future.exception(), StopAsyncIteration):
                    continue
                item = future.result()
                coming[asyncio.ensure_future(anext(streams[number]))] = number
                yield number, item
    finally:
        for future in coming:
            future.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
