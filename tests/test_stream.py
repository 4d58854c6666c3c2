"""What one client receives: ids, text, log-probabilities and end are cut at the same token.

A sequence and its stream are driven by verdicts made here. The log-probability of a token is its
id, negated: one that stands beside another token shows.
"""

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import ModelError
from core.tokenizer import Tokenizer
from core.types import TokenLogprobs, Verdict
from orchestrator.detokenizer import Detokenizer
from orchestrator.pipeline import Sequence
from orchestrator.requests import Block, FinishReason, GenerationRequest, Output, Stopping
from orchestrator.stream import Stream
from tests.policy import make_request
from tests.tiny_models import EOS, save_tokenizer

PROMPT = (1, 2, 3, 4, 5)
ALL = Output(logprobs=0, prompt_logprobs=True)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tiny checkpoints' tokenizer: one token per byte."""
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    return Tokenizer.load(str(path))


def entries(token_ids: tuple[int, ...]) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities that tell to which tokens they belong."""
    return tuple(TokenLogprobs(float(-token)) for token in token_ids)


def request(stopping: Stopping, output: Output = ALL) -> GenerationRequest:
    """A request for a prompt of five tokens."""
    return GenerationRequest("r", PROMPT, make_request().sampling, stopping, output=output)


def answer(sequence: Sequence, stream: Stream, token_ids: tuple[int, ...], size: int = 9) -> bool:
    """Send the next row, of `size` tokens at most, and take a verdict on it; True at the end."""
    row = sequence.next_row(size, 0)
    behind_first = row.new_token_ids if row.position else row.new_token_ids[1:]
    wants_prompt = sequence.is_prompt_pending and sequence.request.output.prompt_logprobs
    verdict = Verdict(
        sequence.id,
        row.position + len(row.new_token_ids),
        accepted=0 if row.partial else len(token_ids) - 1,
        token_ids=() if row.partial else token_ids,
        logprobs=() if row.partial else entries(token_ids),
        prompt_logprobs=entries(behind_first) if wants_prompt else (),
    )
    assert sequence.accept(verdict)
    stream.read_prompt(row, verdict)
    if row.partial:
        return False
    block = stream.cut(verdict)
    accepted = sequence.commit(block.token_ids, row, verdict.accepted)
    stream.deliver(block, accepted, 3.0)
    return block.finished is not None


async def run(
    tokenizer: Tokenizer, stopping: Stopping, blocks: list[tuple[int, ...]]
) -> list[Block]:
    """The blocks that come of these verdicts, up to the end or the last of them."""
    sequence = Sequence(1, request(stopping))
    stream = Stream(sequence, Detokenizer(tokenizer, stopping.stop), 1.0)
    received = []
    for token_ids in blocks:
        is_end = answer(sequence, stream, token_ids)
        received.append(await stream.next_block())
        if is_end:
            break
    return received


def joined(blocks: list[Block]) -> tuple[tuple[int, ...], str]:
    """All ids and the whole text; every id has its own log-probability."""
    for block in blocks:
        assert block.logprobs == entries(block.token_ids)
    ids = tuple(token for block in blocks for token in block.token_ids)
    return ids, "".join(block.text for block in blocks)


@pytest.mark.parametrize(
    ("stopping", "reason", "num_tokens", "text"),
    [
        (Stopping(50, ("END",), frozenset({EOS})), FinishReason.STOP_STRING, 9, "abcdef"),
        (Stopping(50, ("END",), frozenset({EOS}), True), FinishReason.STOP_STRING, 9, "abcdefEND"),
        (Stopping(50, (), frozenset({EOS})), FinishReason.STOP_TOKEN, 12, "abcdefENDxy"),
        (Stopping(10, (), frozenset({EOS})), FinishReason.LENGTH, 10, "abcdefENDx"),
        (Stopping(9, ("END",)), FinishReason.STOP_STRING, 9, "abcdef"),
        (Stopping(8, ("END",)), FinishReason.LENGTH, 8, "abcdefEN"),
    ],
)
@pytest.mark.parametrize("cuts", [(14,), (5, 14), (8, 14), (7, 8, 9, 14)])
async def test_everything_ends_at_the_same_token(
    tokenizer, stopping, reason, num_tokens, text, cuts
):
    """Log-probabilities missing for some finish reasons (sglang#10660); text behind an end token
    inside a block (transformers#47912); stop strings missed when a block completes or splits them
    (transformers#48039); `length` in place of `stop` (sglang#31599)."""
    ids = (*tokenizer.encode("abcdefENDxy"), EOS, *tokenizer.encode("zz"))
    blocks = [ids[begin:end] for begin, end in pairwise((0, *cuts))]
    received = await run(tokenizer, stopping, blocks)
    assert joined(received) == (ids[:num_tokens], text)
    assert [block.finished is None for block in received[:-1]] == [True] * (len(received) - 1)
    finished = received[-1].finished
    assert (finished.reason, finished.completion_tokens) == (reason, num_tokens)
    assert finished.stop_string == ("END" if reason is FinishReason.STOP_STRING else "")
    assert finished.stop_token_id == (EOS if reason is FinishReason.STOP_TOKEN else None)
    assert (finished.time_to_first_token_s, finished.total_s) == (2.0, 2.0)


@settings(deadline=None)
@given(
    text=st.text(alphabet="abé", min_size=1, max_size=30),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=2),
    limit=st.integers(1, 40),
    sizes=st.lists(st.integers(1, 9), min_size=60, max_size=60),
    include_stop=st.booleans(),
)
async def test_ids_text_and_counts_agree(tokenizer, text, stops, limit, sizes, include_stop):
    """Whatever stops a text, and however it is cut into blocks."""
    ids = (*tokenizer.encode(text), EOS)
    blocks = []
    for size in sizes:
        blocks.append(ids[:size])
        ids = ids[size:] or (EOS,)
    stopping = Stopping(limit, tuple(stops), frozenset({EOS}), include_stop)
    received = await run(tokenizer, stopping, blocks)
    got, got_text = joined(received)
    finished = received[-1].finished
    assert len(got) == finished.completion_tokens <= limit
    is_cut = finished.stop_string and not include_stop
    assert tokenizer.decode(got) == got_text + (finished.stop_string if is_cut else "")


async def test_a_stop_string_that_only_the_end_completes():
    """Bytes that wait for their run's end would be cut off the text under the reason `length`."""

    class Late:
        stop_string = ""

        def push(self, token_ids):
            return SimpleNamespace(text="", num_tokens=len(token_ids))

        def flush(self):
            self.stop_string = "END"
            return "ab"

    for include_stop, text in ((False, "ab"), (True, "abEND")):
        stopping = Stopping(3, ("END",), include_stop=include_stop)
        sequence = Sequence(1, request(stopping))
        stream = Stream(sequence, Late(), 1.0)
        assert answer(sequence, stream, (7, 8, 9))
        block = await stream.next_block()
        assert (block.text, block.finished.reason) == (text, FinishReason.STOP_STRING)


async def test_prompt_logprobs_come_whole_with_the_first_block(tokenizer):
    """Those of a chunk that is sent again after a loss would be there twice."""
    sequence = Sequence(1, request(Stopping(50)))
    stream = Stream(sequence, Detokenizer(tokenizer), 1.0)
    answer(sequence, stream, (), size=2)
    answer(sequence, stream, (), size=2)
    sequence.forget_verifier()  # and all begins again, in other chunks
    answer(sequence, stream, (), size=3)
    answer(sequence, stream, (70,), size=3)
    answer(sequence, stream, (71, 72))
    first, second = await stream.next_block(), await stream.next_block()
    assert first.prompt_logprobs == entries(PROMPT[1:])
    assert second.prompt_logprobs == ()
    joined([first, second])


async def test_a_rebuilt_sequence_does_not_repeat_its_prompt(tokenizer):
    """After a loss the verifier reads prompt and text again: neither is news to the client."""
    sequence = Sequence(1, request(Stopping(50)))
    stream = Stream(sequence, Detokenizer(tokenizer), 1.0)
    assert sequence.open().prompt_logprobs
    answer(sequence, stream, (70,))
    sequence.forget_verifier()
    opened = sequence.open()
    assert (opened.logprobs, opened.prompt_logprobs) == (0, False)
    answer(sequence, stream, (71,), size=20)
    await stream.next_block()
    assert (await stream.next_block()).prompt_logprobs == ()


@pytest.mark.parametrize(
    ("output", "missing"),
    [
        (Output(logprobs=0), "0 log-probabilities for 2 tokens"),
        (Output(prompt_logprobs=True), "0 log-probabilities for 4 tokens of the prompt"),
    ],
)
def test_missing_logprobs_are_an_error(tokenizer, output, missing):
    """Fewer than tokens would be read as those of other tokens."""
    sequence = Sequence(1, request(Stopping(50), output))
    stream = Stream(sequence, Detokenizer(tokenizer), 1.0)
    with pytest.raises(ModelError, match=missing):
        stream.cut(Verdict(1, 5, token_ids=(7, 8), accepted=1))
