"""Sampling that can be repeated: three samples in one call, then each again by its seed.

    python examples/seeded_sampling.py "Once upon a time" [--address HOST:PORT]

Sample i of a request is what a request with seed + i gives: the second half of this program asks
for each alone, without drafts, and compares. Both hold under the default rule (COUPLED): the text
depends on the seed and on nothing else. A target in bfloat16 can still differ where two logits
tie. Needs grpcio, protobuf and forerun's `protos` package.
"""

import argparse
import collections

import grpc

from protos import generation_pb2 as pb
from protos.generation_pb2_grpc import GenerationServiceStub


def main() -> None:
    """Print the samples, and whether they came again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt")
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    with grpc.insecure_channel(arguments.address) as channel:
        stub = GenerationServiceStub(channel)
        try:
            samples = generate(stub, arguments.prompt, arguments.seed, n=3)
            for index, text in sorted(samples.items()):
                seed = arguments.seed + index
                again = generate(stub, arguments.prompt, seed, enabled=False)[0]
                verdict = "the same again" if again == text else f"ANOTHER TEXT: {again}"
                print(f"--- seed {seed}: {verdict}\n{text}")
        except grpc.RpcError as error:
            raise SystemExit(f"{error.code().name}: {error.details()}") from None


def generate(
    stub: GenerationServiceStub, prompt: str, seed: int, n: int = 1, enabled: bool = True
) -> dict[int, str]:
    """The texts of `n` samples by their index. enabled: with drafts."""
    request = pb.GenerateRequest(
        prompt=prompt,
        n=n,
        sampling=pb.SamplingOptions(temperature=0.9, min_p=0.05, seed=seed),
        stopping=pb.StoppingOptions(max_new_tokens=48),
        speculation=pb.SpeculationOptions(enabled=enabled),
    )
    texts: dict[int, str] = collections.defaultdict(str)
    for response in stub.Generate(request):  # the samples' blocks come as they are committed
        texts[response.sample] += response.text
    return texts


if __name__ == "__main__":
    main()
