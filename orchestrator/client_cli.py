"""`forerun generate` and `forerun status`: the command line's client of the public API.

Speaks gRPC to an orchestrator and knows nothing of what is behind it. Text goes to stdout exactly
as it arrives (of several samples: each when it has ended), statistics and errors to stderr. On a
terminal accepted draft tokens are green. Options are named as the fields of the API are.
Errors are one line and exit code 1; Ctrl-C cancels the call. `orchestrator.cli` adds both
functions to the `forerun` command.
"""

import asyncio
import collections
import itertools
import os
import sys
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import grpc
import typer
from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table
from rich.text import Text

from core.errors import ForerunError
from core.params import Rule
from core.rpc import bearer_metadata, create_channel
from orchestrator.server import read_token
from protos import cluster_pb2 as cluster
from protos import common_pb2
from protos import generation_pb2 as pb
from protos.cluster_pb2_grpc import ClusterServiceStub
from protos.generation_pb2_grpc import GenerationServiceStub

_INTERRUPTED = 130  # what shells report for SIGINT
_HEALTH_STYLES = {"READY": "green", "CONNECTING": "yellow", "LOST": "red", "REFUSED": "red"}

Address = Annotated[str, typer.Option(help="host:port of the orchestrator.")]
TokenFile = Annotated[str, typer.Option(help="File with the bearer token, if one is needed.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per message.")]
DEFAULT_ADDRESS = "127.0.0.1:50051"


def generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help='The prompt; "-" reads it from stdin.')],
    chat: Annotated[bool, typer.Option("--chat", help="Answer the prompt as a message.")] = False,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest mass.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Least part of the best's chance.")] = None,
    typical_p: Annotated[float | None, typer.Option(help="Keep the typical mass.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: less of it.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Once per token.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="Per occurrence.")] = None,
    no_repeat_ngram_size: Annotated[int | None, typer.Option(help="Forbid a repetition.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    n: Annotated[int, typer.Option("--n", help="Samples; each is printed when it ends.")] = 1,
    max_new_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.")] = None,
    min_new_tokens: Annotated[int | None, typer.Option(help="Fewest before an end token.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends the text; repeatable.")] = None,
    include_stop: Annotated[bool, typer.Option("--include-stop", help="Keep it.")] = False,
    json_schema: Annotated[Path | None, typer.Option(help="File; the text is of it.")] = None,
    regex: Annotated[str | None, typer.Option(help="The whole text matches it.")] = None,
    logprobs: Annotated[int | None, typer.Option(help="And of so many others; --json.")] = None,
    drafter: Annotated[str, typer.Option(help="Name of a drafter pool.")] = "",
    enabled: Annotated[
        bool, typer.Option("--speculation/--no-speculation", help="Whether drafts are used.")
    ] = True,
    max_draft_tokens: Annotated[int, typer.Option(help="Longest draft; 0: the pool's.")] = 0,
    rule: Annotated[Rule | None, typer.Option(help="How drafts are verified.")] = None,
    ensemble_weight: Annotated[float | None, typer.Option(help="The target's.")] = None,
    address: Address = DEFAULT_ADDRESS,
    token_file: TokenFile = "",
    as_json: Json = False,
) -> None:
    """Generate text and stream it."""
    if logprobs is not None and not as_json:
        _fail("--logprobs: they are printed with --json only")
    text = sys.stdin.read() if prompt == "-" else prompt
    console = Console()
    coloured = console.is_terminal and not console.no_color and not as_json
    options = dict(context.params, return_token_ids=coloured or as_json)
    options["rule"] = rule and f"RULE_{rule.name}"
    try:
        request = pb.GenerateRequest(
            prompt=None if chat else text,
            chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=text)]) if chat else None,
            sampling=_fill(pb.SamplingOptions, options),
            stopping=_fill(pb.StoppingOptions, options),
            speculation=_fill(pb.SpeculationOptions, options),
            output=_fill(pb.OutputOptions, options),
            constraint=_constraint(json_schema, regex),
            n=n,
        )
    except ValueError as error:  # a number that its field cannot hold
        _fail(str(error))
    run_client(_generate(request, address, token_file, as_json, coloured), address)


_Options = TypeVar("_Options", bound=Message)


def _fill(message_class: type[_Options], options: Mapping[str, Any]) -> _Options:
    """A message whose fields have the values of the options of the same names."""
    names = [field.name for field in message_class.DESCRIPTOR.fields]
    return message_class(**{name: options[name] for name in names if name in options})


def _constraint(json_schema: Path | None, regex: str | None) -> common_pb2.Constraint | None:
    if json_schema is not None and regex is not None:
        _fail("--json-schema and --regex: only one of them")
    if regex is not None:
        return common_pb2.Constraint(kind=common_pb2.CONSTRAINT_KIND_REGEX, source=regex)
    if json_schema is None:
        return None
    try:
        source = json_schema.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        _fail(f"--json-schema {json_schema}: {error}")
    return common_pb2.Constraint(kind=common_pb2.CONSTRAINT_KIND_JSON_SCHEMA, source=source)


def status(
    address: Address = DEFAULT_ADDRESS, token_file: TokenFile = "", as_json: Json = False
) -> None:
    """Show verifiers, drafter pools and queue."""
    run_client(_status(address, token_file, as_json), address)


async def _generate(
    request: pb.GenerateRequest, address: str, token_file: str, as_json: bool, coloured: bool
) -> None:
    metadata = bearer_metadata(read_token(token_file))
    if traceparent := os.environ.get("TRACEPARENT"):  # the caller's trace, as OpenTelemetry has it
        metadata = (*metadata, ("traceparent", traceparent))
    painters = collections.defaultdict[int, Painter](Painter)
    texts = collections.defaultdict[int, str](str)  # of samples, until it is their turn
    is_line_open = False
    async with create_channel(address) as channel:
        try:
            stub = GenerationServiceStub(channel)
            async for response in stub.Generate(request, metadata=metadata):
                if as_json:
                    print(_json(response), flush=True)
                    continue
                sample, is_last = response.sample, response.HasField("finished")
                texts[sample] += painters[sample].paint(response) if coloured else response.text
                if request.n == 1 or is_last:
                    print(texts.pop(sample), end="\n" if is_last else "", flush=True)
                    is_line_open = not is_last
                if is_last:
                    print(statistics(response.finished), file=sys.stderr)
        finally:  # also before the line that says what went wrong
            if is_line_open:
                print(flush=True)


async def _status(address: str, token_file: str, as_json: bool) -> None:
    metadata = bearer_metadata(read_token(token_file))
    async with create_channel(address) as channel:
        stub = ClusterServiceStub(channel)
        response = await stub.GetStatus(cluster.GetStatusRequest(), metadata=metadata, timeout=10)
    if as_json:
        print(_json(response))
        return
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    console.print(
        f"{response.model}, forerun {response.version}, up {response.uptime_s:.0f} s: "
        f"{response.num_running} running, {response.num_waiting} waiting, "
        f"{response.num_finished} finished, {response.num_completion_tokens} tokens generated",
        markup=False,
    )
    console.print(_table(response))
    pools = [pool.replicas for pool in response.drafter_pools]
    for replica in itertools.chain(response.verifiers, *pools):
        if replica.message:
            console.print(f"{replica.replica_id}: {replica.message}", markup=False)


def run_client(main: Coroutine[Any, Any, None], address: str) -> None:
    """Run to the end; every expected failure becomes one line and an exit code."""
    try:
        asyncio.run(main)
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None
    except ForerunError as error:
        _fail(str(error))
    except grpc.aio.AioRpcError as error:
        details = " ".join((error.details() or "").split())
        if error.code() is grpc.StatusCode.UNAVAILABLE and "connect" in details.lower():
            _fail(f"cannot reach {address}; does an orchestrator run there? ({details})")
        _fail(f"{error.code().name}: {details}")


def _fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(1)


def _json(message: Message) -> str:
    return MessageToJson(
        message,
        indent=None,
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=True,
    )


class Painter:
    """Colours text by the origin of its tokens.

    The text of a response may lag behind its tokens (a stop string may begin), so the origins of
    the characters are kept until the characters come.
    """

    def __init__(self) -> None:
        self._accepted: list[bool] = []

    def paint(self, response: pb.GenerateResponse) -> str:
        """The response's text with accepted draft tokens in green, for a terminal."""
        for text, origin in zip(response.token_texts, response.origins, strict=True):
            is_accepted = origin == pb.TOKEN_ORIGIN_ACCEPTED_DRAFT
            self._accepted.extend([is_accepted] * len(text))
        length = len(response.text)
        origins, self._accepted = self._accepted[:length], self._accepted[length:]
        painted = ""
        pairs = itertools.zip_longest(response.text, origins, fillvalue=False)
        for is_accepted, run in itertools.groupby(pairs, key=lambda pair: pair[1]):
            part = "".join(str(character) for character, _ in run)
            painted += typer.style(part, fg="green") if is_accepted else part
        return painted


def statistics(finished: pb.Finished) -> str:
    """One line about a finished generation."""
    speculation, tokens = finished.speculation, finished.usage.completion_tokens
    rate = 1000 * tokens / finished.total_ms if finished.total_ms else 0.0
    reason = pb.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower()
    parts = [
        f"{tokens} tokens in {finished.total_ms / 1000:.2f} s ({rate:.1f}/s)",
        f"first after {finished.time_to_first_token_ms:.0f} ms",
        f"{speculation.num_verify_steps} verify steps",
    ]
    if speculation.num_draft_tokens:
        parts.append(
            f"{speculation.num_accepted_draft_tokens} of {speculation.num_draft_tokens} draft "
            f"tokens accepted ({speculation.draft_acceptance_rate:.0%}, {speculation.drafter})"
        )
    return ", ".join([*parts, f"seed {finished.seed}", reason])


def _table(response: cluster.GetStatusResponse) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for header in ("replica", "kind", "address", "health", "slots", "losses", "accepted"):
        table.add_column(header, no_wrap=True)
    for verifier in response.verifiers:
        table.add_row(*_row(verifier, "verifier", ""))
    for pool in response.drafter_pools:
        accepted = pool.num_accepted_draft_tokens / max(1, pool.num_draft_tokens)
        share = f"{accepted:.0%} of {pool.num_draft_tokens}"
        for replica in pool.replicas:
            table.add_row(*_row(replica, pool.kind, share))
        if not pool.replicas:
            table.add_row(pool.pool, pool.kind, "", "empty", "", "", share)
    return table


def _row(replica: cluster.ReplicaStatus, kind: str, accepted: str) -> list[Text]:
    health = cluster.ReplicaHealth.Name(replica.health).removeprefix("REPLICA_HEALTH_")
    style = _HEALTH_STYLES.get(health, "default")
    limit = f"/{replica.max_sequences}" if replica.max_sequences else ""
    return [
        Text(replica.replica_id),
        Text(kind),
        Text(replica.address),
        Text(health.lower(), style),
        Text(f"{replica.num_sequences}{limit}"),
        Text(str(replica.num_losses)),
        Text(accepted),
    ]
