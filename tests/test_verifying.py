"""What a verifier refuses reaches the client as its own fault, or as the target's."""

import pytest

from core.errors import ForerunError, InvalidRequestError, ModelError
from core.params import Constraint, ConstraintKind, SamplingParams
from orchestrator.verifying import explain_refusal
from tests.harness import serving
from tests.policy import make_request
from tests.tiny_models import EOS, TinyFactory


@pytest.mark.parametrize("prefix", ["", "opens."])
@pytest.mark.parametrize(
    ("message", "error", "text"),
    [
        ("sampling.constraint: no regex: x(", InvalidRequestError, "constraint: no regex: x("),
        ("sampling.top_p: must be", InvalidRequestError, "sampling.top_p: must be"),
        ("sampling.rule: GREEDY needs", InvalidRequestError, "speculation.rule: GREEDY needs"),
        ("max_length: 9 is not in [1, 8]", ModelError, "max_length: 9 is not in [1, 8]"),
        ("the target is gone", ModelError, "the target is gone"),
    ],
)
def test_explain_refusal(prefix: str, message: str, error: type[ForerunError], text: str):
    """A client corrects what INVALID_ARGUMENT names, by the name that it knows."""
    explained = explain_refusal(prefix + message)
    assert type(explained) is error
    assert str(explained) == (prefix if error is ModelError else "") + text


async def test_a_constraint_that_does_not_compile(tiny: TinyFactory):
    """Only the verifier can tell; the others in the batch and the next request go on."""
    async with serving(tiny("llama", eos_token_id=EOS)) as stack:
        wrong = SamplingParams(constraint=Constraint(ConstraintKind.REGEX, "a("))
        with pytest.raises(InvalidRequestError) as caught:
            await stack.run(make_request(sampling=wrong))
        assert caught.value.field == "constraint"
        right = SamplingParams(
            constraint=Constraint(ConstraintKind.REGEX, "ab+c"), num_prompt_tokens=3
        )
        request = make_request(sampling=right, stop_token_ids=frozenset({EOS}))
        _, text, _ = await stack.run(request)
        assert text.startswith("ab")
