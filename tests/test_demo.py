"""What `make demo` serves, as programs that know nothing of forerun see it.

The demo's own configuration, model and command: minutes on a slow machine, and the model is fetched
at the first start.
"""

from collections.abc import Iterator
from typing import Any

import grpc
import openai
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from rich.console import Console

from examples.demo import CONFIG, served

pytestmark = pytest.mark.slow
QUESTION = "What is gravity?"


@pytest.fixture(scope="module")
def demo() -> Iterator[tuple[str, str]]:
    """The API's address, and the page's URL."""
    with served(str(CONFIG), 0, Console(quiet=True)) as addresses:
        yield addresses


def test_openais_client(demo: tuple[str, str]) -> None:
    """A program with a new base URL and nothing else."""
    with openai.OpenAI(base_url=f"{demo[1]}v1", api_key="-", max_retries=0) as client:
        (model,) = client.models.list()
        messages: Any = [{"role": "user", "content": QUESTION}]
        options: Any = {"model": model.id, "temperature": 0, "max_tokens": 32}
        whole = client.chat.completions.create(messages=messages, **options)
        assert whole.usage is not None and whole.usage.completion_tokens == 32
        assert "gravity" in (whole.choices[0].message.content or "").lower()
        chunks = list(client.chat.completions.create(messages=messages, stream=True, **options))
        assert "gravity" in "".join(c.choices[0].delta.content or "" for c in chunks).lower()
        assert client.completions.create(prompt="Gravity is", **options).choices[0].text


def test_reflection_client(demo: tuple[str, str]) -> None:
    """What grpcurl does: all it knows of the API it has from the server."""
    with grpc.insecure_channel(demo[0]) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        service = pool.FindServiceByName("forerun.v1.GenerationService")
        call = service.methods_by_name["Generate"]
        ask, answer = GetMessageClass(call.input_type), GetMessageClass(call.output_type)
        generate = channel.unary_stream(
            f"/{service.full_name}/{call.name}",
            request_serializer=ask.SerializeToString,
            response_deserializer=answer.FromString,
        )
        turns = {"messages": [{"role": "user", "content": QUESTION}]}
        request = ask(chat=turns, sampling={"temperature": 0}, stopping={"max_new_tokens": 32})
        responses = list(generate(request, timeout=300))
    assert "gravity" in "".join(response.text for response in responses).lower()
    assert responses[-1].finished.speculation.num_accepted_draft_tokens > 0
