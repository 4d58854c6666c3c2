"""A conversation in the terminal: every turn is one Generate call with all turns before it.

    python examples/chat.py [--address HOST:PORT] [--system TEXT]

The server keeps no conversation. What it keeps is the target's cache: the turns before are found
there, and only the new one is read (`cached` in the line behind an answer). An empty line ends
the conversation; Ctrl-C ends an answer. Needs grpcio, protobuf and forerun's `protos` package.
"""

import argparse

import grpc

from protos import generation_pb2 as pb
from protos.generation_pb2_grpc import GenerationServiceStub


def main() -> None:
    """Read a turn, answer it, and so on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--system", default="You are a helpful assistant.")
    arguments = parser.parse_args()
    chat = pb.Chat(messages=[pb.ChatMessage(role="system", content=arguments.system)])
    with grpc.insecure_channel(arguments.address) as channel:
        stub = GenerationServiceStub(channel)
        while content := _read():
            chat.messages.add(role="user", content=content)
            chat.messages.add(role="assistant", content=answer(stub, chat))


def _read() -> str:
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def answer(stub: GenerationServiceStub, chat: pb.Chat) -> str:
    """Print the answer as it comes; returns what there was of it."""
    text = ""
    call = stub.Generate(pb.GenerateRequest(chat=chat))
    try:
        for response in call:
            print(response.text, end="", flush=True)
            text += response.text
            if response.HasField("finished"):
                finished, usage = response.finished, response.finished.usage
                print(
                    f"\n[{usage.prompt_tokens} tokens read, {usage.cached_prompt_tokens} of them "
                    f"cached; {usage.completion_tokens} written in {finished.total_ms:.0f} ms]"
                )
    except KeyboardInterrupt:
        call.cancel()  # frees what the request held
        print()
    except grpc.RpcError as error:
        raise SystemExit(f"{error.code().name}: {error.details()}") from None
    return text


if __name__ == "__main__":
    main()
