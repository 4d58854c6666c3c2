"""What `make demo` runs: start everything, watch answers being drafted, compare, stop everything.

Starts `forerun serve` as a user would, in a process of its own, and talks to it over gRPC as any
client would. Accepted draft tokens are green. Every prompt is then answered again without drafts,
and with each part of the hybrid alone: prompt lookup, and the distilled layer that comes with
forerun; the table at the end sets them side by side. The page and OpenAI's API are served
meanwhile; at a terminal they stay until Enter is pressed.
"""

import argparse
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
from rich.console import Console
from rich.table import Table

from protos import generation_pb2, generation_pb2_grpc

CONFIG = Path(__file__).parent.parent / "deploy" / "config" / "local.toml"
MAX_NEW_TOKENS = 96
READY = "forerun is ready at "
PAGE = "the page is at "
STOP_TIMEOUT_S = 60
MOON = (
    "The Moon is Earth's only natural satellite. It orbits around Earth at an average distance of "
    "384,400 kilometres, about 30 times Earth's diameter. The Moon always presents the same side "
    "to Earth, because gravitational pull has locked the Moon's rotation to its orbital period."
)
PROMPTS = {
    "chat": "What is gravity?",
    "summarise": f"Summarize the following text: {MOON}",
    "extract": f"Extract all sentences that mention the Moon from this text:\n{MOON}",
}
ACCEPTED = generation_pb2.TOKEN_ORIGIN_ACCEPTED_DRAFT


@dataclass(frozen=True)
class Run:
    """One answer and what it took. `pool` is empty without speculation."""

    prompt: str
    pool: str
    token_ids: tuple[int, ...]
    finished: generation_pb2.Finished

    @property
    def seconds(self) -> float:
        """From the request to its last token."""
        return self.finished.total_ms / 1000

    @property
    def tokens_per_s(self) -> float:
        """Behind the first token: the prompt's own time is the same for all."""
        decode_ms = self.finished.total_ms - self.finished.time_to_first_token_ms
        return (len(self.token_ids) - 1) / max(decode_ms, 1e-3) * 1000


@contextlib.contextmanager
def served(config: str, http_port: int, console: Console) -> Iterator[tuple[str, str]]:
    """`forerun serve`: its API's address and its page's URL; ended by SIGTERM, as an operator
    would."""
    command = [sys.executable, "-m", "orchestrator.cli", "serve", "--config", config]
    # A session of its own: Ctrl-C is for this process, which then ends that one in order.
    command += ["--port", "0", "--http", str(http_port)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert server.stdout is not None
    try:
        page = ""
        for line in server.stdout:
            if line.startswith(PAGE):
                page = line.removeprefix(PAGE).strip()
            if line.startswith(READY):
                break
        else:
            raise SystemExit(f"forerun serve did not start (exit code {server.wait()})")
        yield line.removeprefix(READY).strip(), page
    finally:
        console.rule("stopping")
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        server.stdout.close()


def answer(
    stub: generation_pb2_grpc.GenerationServiceStub,
    prompt: str,
    pool: str,
    console: Console | None = None,
) -> Run:
    """One greedy answer, streamed to the console when there is one."""
    message = generation_pb2.ChatMessage(role="user", content=PROMPTS[prompt])
    request = generation_pb2.GenerateRequest(
        chat=generation_pb2.Chat(messages=[message]),
        sampling=generation_pb2.SamplingOptions(temperature=0),
        stopping=generation_pb2.StoppingOptions(max_new_tokens=MAX_NEW_TOKENS),
        speculation=generation_pb2.SpeculationOptions(enabled=bool(pool), drafter=pool),
        output=generation_pb2.OutputOptions(return_token_ids=True),
    )
    token_ids: list[int] = []
    finished = generation_pb2.Finished()
    for response in stub.Generate(request):
        token_ids.extend(response.token_ids)
        if console is not None:
            for text, origin in zip(response.token_texts, response.origins, strict=True):
                style = "bold green" if origin == ACCEPTED else None
                console.print(text, style=style, end="", markup=False, highlight=False)
        if response.HasField("finished"):
            finished = response.finished
    return Run(prompt, pool, tuple(token_ids), finished)


def show(runs: list[Run], console: Console) -> None:
    """The runs side by side; the plain one of a prompt is what the others are measured by."""
    table = Table(title="Greedy, one request at a time", box=None, padding=(0, 2, 0, 0))
    for column in ("prompt", "drafter", "tokens", "seconds", "tok/s"):
        table.add_column(column, no_wrap=True)
    for column in ("acc.\nlength", "accepted\n/drafted", "speed-up", "same\ntext"):
        table.add_column(column, no_wrap=True)
    plain = {run.prompt: run for run in runs if not run.pool}
    differs = False
    for run in runs:
        base, spec = plain[run.prompt], run.finished.speculation
        is_same = run.token_ids == base.token_ids
        differs = differs or not is_same
        drafts = (
            f"{spec.mean_acceptance_length:.2f}",
            f"{spec.num_accepted_draft_tokens}/{spec.num_draft_tokens}",
            f"{run.tokens_per_s / base.tokens_per_s:.2f}x",
            "yes" if is_same else "no (*)",
        )
        count, rate = str(len(run.token_ids)), f"{run.tokens_per_s:.1f}"
        row = (run.prompt, run.pool or "none", count, f"{run.seconds:.2f}", rate)
        table.add_row(*row, *(drafts if run.pool else ("", "", "", "")))
    console.print(table)
    console.print(
        "tok/s and speed-up count from the first token on; acc. length: mean tokens per step.",
        style="dim",
    )
    if differs:
        console.print(
            "(*) On this CPU the last bit of a bfloat16 logit depends on how many tokens are "
            "computed at once, and two nearly tied (docs/engine.md). In float32 texts are equal.",
            style="dim",
        )


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description="Watch forerun draft and verify.")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--http", type=int, default=8000, help="port of the page; 0: a free one")
    options = parser.parse_args()
    console = Console()
    started = time.monotonic()

    def step(title: str) -> None:
        console.rule(f"{title} [dim]({time.monotonic() - started:.0f} s)[/dim]", align="left")

    step("starting target, drafters, orchestrator")
    runs = []
    with contextlib.ExitStack() as running:
        address, page = running.enter_context(served(options.config, options.http, console))
        channel = running.enter_context(grpc.insecure_channel(address))
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        console.print(f"the page: [bold]{page}[/bold]   OpenAI's API: [bold]{page}v1[/bold]")
        console.print("[bold green]green[/bold green]: drafted and accepted; plain: the target's")
        for prompt, question in PROMPTS.items():
            step(prompt)
            console.print(question, style="dim", markup=False, highlight=False)
            runs.append(answer(stub, prompt, "hybrid", console))
            console.print()
        step("the same prompts without speculation, and with each part of the hybrid alone")
        for prompt in PROMPTS:
            runs += [answer(stub, prompt, pool) for pool in ("", "ngram", "distilled")]
        order = list(PROMPTS)
        show(sorted(runs, key=lambda run: (order.index(run.prompt), run.pool != "")), console)
        if sys.stdin.isatty():
            console.input(f"\nThe page is still at [bold]{page}[/bold]; Enter ends it ... ")
    step("done, nothing is left running")


if __name__ == "__main__":
    main()
