"""The pruned copy: some layers of the target, and the tokens it may propose.

The target's own network is cut down in place (the caller has no more use for the whole): the
embedding, the rotation and the final norm stay, the chosen layers follow each other, and the head
keeps the rows of the draft vocabulary. Embedding and head are never trained: they stay the
target's, so that a checkpoint need not hold them. Knows nothing of texts' origin and of training.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from core.errors import InvalidRequestError, ModelError
from core.model import RaggedModel
from core.shared_weights import keep_head_rows
from drafter_service.distil.batches import Batch


def choose_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` layers in even steps from the first, which reads tokens, to the last, which writes.

    Raises InvalidRequestError for a count that the target does not have.
    """
    if not 1 <= count <= num_layers:
        raise InvalidRequestError("layers", f"{count} of the target's {num_layers} layers")
    return tuple(-(-i * (num_layers - 1) // max(1, count - 1)) for i in range(count))


def check_layers(layers: Sequence[int], num_layers: int, field: str = "layers") -> None:
    """Raise InvalidRequestError unless these are layers of the target, each once, ascending."""
    if not layers or list(layers) != sorted(set(layers)):
        raise InvalidRequestError(field, f"{list(layers)} must ascend, each layer once")
    if layers[0] < 0 or layers[-1] >= num_layers:
        raise InvalidRequestError(
            field, f"{list(layers)}: the target has layers 0 to {num_layers - 1}"
        )


def choose_vocabulary(
    answers: Iterable[Sequence[int]], size: int, vocab_size: int, always: Sequence[int] = ()
) -> list[int]:
    """The `size` most frequent tokens of the answers, ascending; 0 is the whole vocabulary.

    `always` are in whatever their number (the tokens that end a text). When the answers hold fewer
    tokens, the lowest ids fill up: byte-pair tokenizers number frequent tokens first.
    """
    if size == 0:
        return list(range(vocab_size))
    always = [token for token in always if token < vocab_size]
    if not len(always) < size <= vocab_size:
        raise InvalidRequestError("vocabulary", f"{size} tokens of the target's {vocab_size}")
    counts = Counter(token for answer in answers for token in answer)
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    ranked = [*dict.fromkeys([*always, *ranked])]
    return sorted(ranked[:size])


def prune(target: RaggedModel, layers: Sequence[int], draft_token_ids: Sequence[int]) -> nn.Module:
    """The untrained drafter: the target's network in fp32 with these layers and head rows only.

    Runs through the library's own attention, for training. Only the layers and what stands beside
    them are trainable. Raises ModelError for a network whose layers cannot be found.
    """
    network = target.network
    text = network.config.get_text_config()
    decoder = network.get_decoder()
    if len(getattr(decoder, "layers", ())) != text.num_hidden_layers:
        raise ModelError(f"model: {text.model_type} does not hold its layers where others do")
    check_layers(layers, text.num_hidden_layers)
    decoder.layers = nn.ModuleList([decoder.layers[old] for old in layers])
    for new, layer in enumerate(decoder.layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = new
    text.num_hidden_layers = len(layers)
    if getattr(text, "layer_types", None):
        text.layer_types = [text.layer_types[old] for old in layers]
    text._attn_implementation = "sdpa"
    keep_head_rows(network, torch.tensor(draft_token_ids))
    network.float()
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name in trained_names(network))
    return network  # type: ignore[no-any-return]


class PrunedCopy:
    """The `Student` that `prune` makes: wherever in a draft a token stands, it sees it the same."""

    def __init__(self, network: Any, draft_token_ids: Sequence[int]) -> None:
        # Dropout stays off: a step must depend on nothing but its number.
        self.network = network.eval()
        self.trained = {n: p for n, p in network.named_parameters() if p.requires_grad}
        vocab_size = network.get_input_embeddings().weight.shape[0]
        self.columns = draft_columns(draft_token_ids, vocab_size)
        self.device: torch.device = network.device

    def logits(self, batch: Batch, num_depths: int) -> Iterator[tuple[Tensor, Tensor]]:
        """See `Student`: the answers' tokens but the first, which comes with the prompt."""
        which = (batch.ordinals > 0).nonzero()[:, 0]
        rows, places = batch.rows[which], batch.places[which] - 1
        first = int(places.min()) if len(places) else 0
        output = self.network(
            input_ids=batch.token_ids,
            use_cache=False,
            logits_to_keep=batch.token_ids.shape[1] - first,
        )
        yield output.logits[rows, places - first], which


def trained_names(network: Any) -> set[str]:
    """Names of the parameters that a drafter does not share with its target."""
    shared = {
        id(module.weight)
        for module in (network.get_input_embeddings(), network.get_output_embeddings())
    }
    return {name for name, each in network.named_parameters() if id(each) not in shared}


def draft_columns(draft_token_ids: Sequence[int], vocab_size: int) -> Tensor:
    """For every id of the target its column among the draft vocabulary's, or -1: int64 `[V]`."""
    columns = torch.full((vocab_size,), -1)
    columns[torch.tensor(draft_token_ids)] = torch.arange(len(draft_token_ids))
    return columns
