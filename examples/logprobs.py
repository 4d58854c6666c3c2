"""Log-probabilities: how sure the target was of each token, and what it would have said instead.

    python examples/logprobs.py "The capital of France is" [--address HOST:PORT]

They are the target's own, before any sampling parameter, for every token: of the prompt, of
accepted drafts (marked with a star) and of those that the target added. Needs grpcio, protobuf and
forerun's `protos` package.
"""

import argparse
import math

import grpc

from protos import common_pb2
from protos import generation_pb2 as pb
from protos.generation_pb2_grpc import GenerationServiceStub


def main() -> None:
    """Print one line per token, and the perplexities of prompt and answer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt")
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    arguments = parser.parse_args()
    request = pb.GenerateRequest(
        prompt=arguments.prompt,
        sampling=pb.SamplingOptions(temperature=0),
        stopping=pb.StoppingOptions(max_new_tokens=arguments.max_new_tokens),
        output=pb.OutputOptions(return_token_ids=True, logprobs=3, prompt_logprobs=True),
    )
    of_prompt: list[common_pb2.TokenLogprobs] = []
    of_answer: list[common_pb2.TokenLogprobs] = []
    with grpc.insecure_channel(arguments.address) as channel:
        try:
            for response in GenerationServiceStub(channel).Generate(request):
                of_prompt.extend(response.prompt_logprobs)  # they come with the first response
                of_answer.extend(response.logprobs)
                show(response)
        except grpc.RpcError as error:
            raise SystemExit(f"{error.code().name}: {error.details()}") from None
    print(f"perplexity: prompt {perplexity(of_prompt):.2f}, answer {perplexity(of_answer):.2f}")


def show(response: pb.GenerateResponse) -> None:
    """A line per token: its text, its probability, the likeliest ids with theirs."""
    for text, origin, entry in zip(
        response.token_texts, response.origins, response.logprobs, strict=True
    ):
        star = "*" if origin == pb.TOKEN_ORIGIN_ACCEPTED_DRAFT else " "
        best = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        others = ", ".join(f"{token} {math.exp(logprob):.1%}" for token, logprob in best)
        print(f"{star} {text!r:20} {math.exp(entry.logprob):6.1%}   of: {others}")


def perplexity(entries: list[common_pb2.TokenLogprobs]) -> float:
    """exp of the mean negative log-probability; 1 is certainty, NaN without tokens."""
    if not entries:
        return math.nan
    return math.exp(-sum(entry.logprob for entry in entries) / len(entries))


if __name__ == "__main__":
    main()
