"""Structured output: an answer that is JSON of a given schema, whatever the model would rather say.

    python examples/structured_output.py "Ada Lovelace, 36, wrote programs." [--address HOST:PORT]

The schema travels with the request; tokens that would leave it cannot be drawn, and drafters draft
on. A text that reaches `max_new_tokens` is cut like any other, so the program looks at the reason
before it parses. Needs grpcio, protobuf and forerun's `protos` package.
"""

import argparse
import json

import grpc

from protos import common_pb2
from protos import generation_pb2 as pb
from protos.generation_pb2_grpc import GenerationServiceStub

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "skills": {
            "type": "array",
            "items": {"type": "string", "maxLength": 30},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["name", "age", "skills"],
    "additionalProperties": False,
}


def main() -> None:
    """Print the parsed answer and how its drafts fared."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text")
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    arguments = parser.parse_args()
    content = f"Describe the person in this text as JSON: {arguments.text}"
    request = pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=content)]),
        sampling=pb.SamplingOptions(temperature=0),
        stopping=pb.StoppingOptions(max_new_tokens=arguments.max_new_tokens),
        constraint=common_pb2.Constraint(
            kind=common_pb2.CONSTRAINT_KIND_JSON_SCHEMA, source=json.dumps(SCHEMA)
        ),
    )
    with grpc.insecure_channel(arguments.address) as channel:
        try:
            responses = list(GenerationServiceStub(channel).Generate(request))
        except grpc.RpcError as error:
            raise SystemExit(f"{error.code().name}: {error.details()}") from None
    text, finished = "".join(response.text for response in responses), responses[-1].finished
    if finished.reason == pb.FINISH_REASON_LENGTH:
        raise SystemExit(f"cut at {finished.usage.completion_tokens} tokens: {text}")
    print(json.dumps(json.loads(text), indent=2, ensure_ascii=False))
    speculation = finished.speculation
    print(
        f"[{finished.usage.completion_tokens} tokens, {speculation.num_accepted_draft_tokens} of "
        f"{speculation.num_draft_tokens} drafted ones accepted]"
    )


if __name__ == "__main__":
    main()
