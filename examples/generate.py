"""A client in Python: stream a text, and go on where it stopped when the server is lost.

    python examples/generate.py "Write a haiku about rivers." [--address HOST:PORT]

The stream is received with token ids. When the connection breaks, the same request is sent again
with the ids received so far in `continue_from_token_ids`, under the seed that was chosen here: the
server then goes on with exactly the text that the first call would have brought. Needs grpcio,
protobuf and forerun's `protos` package, nothing else.
"""

import argparse
import secrets
import time

import grpc

from protos import generation_pb2 as pb
from protos.generation_pb2_grpc import GenerationServiceStub

RETRIES = 30
RETRY_AFTER_S = 1.0


def main() -> None:
    """Parse the arguments, print the text as it comes and a line of statistics."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt")
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    arguments = parser.parse_args()
    request = pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=arguments.prompt)]),
        sampling=pb.SamplingOptions(seed=secrets.randbits(64)),
        stopping=pb.StoppingOptions(max_new_tokens=arguments.max_new_tokens),
        output=pb.OutputOptions(return_token_ids=True),
    )
    finished = generate(arguments.address, request)
    speculation = finished.speculation
    print(
        f"\n[{finished.usage.completion_tokens} tokens in {finished.total_ms:.0f} ms, "
        f"{speculation.num_accepted_draft_tokens} of them drafted by {speculation.drafter!r}]"
    )


def generate(address: str, request: pb.GenerateRequest) -> pb.Finished:
    """Print the text of a request; resume it while the server can be found again."""
    with grpc.insecure_channel(address) as channel:
        stub = GenerationServiceStub(channel)
        for retries_left in reversed(range(RETRIES + 1)):
            try:
                for response in stub.Generate(request):
                    print(response.text, end="", flush=True)
                    request.continue_from_token_ids.extend(response.token_ids)
                    if response.HasField("finished"):
                        return response.finished
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or not retries_left:
                    raise SystemExit(f"{error.code().name}: {error.details()}") from None
            time.sleep(RETRY_AFTER_S)
    raise SystemExit("the stream ended without an end")


if __name__ == "__main__":
    main()
