"""The prediction layer as a student: one decoder layer on the target's hidden states.

At a text's place i the layer gets the target's hidden state of token i and the embedding of token
i + 1, and says token i + 2. When it drafts on, its own output stands in for the hidden state that
the target has not computed yet. So it is trained: the second token of a draft begun at i is said
from the output at i and token i + 2, and so on, all behind what the target really said. The drafts
of all places of a text run at once: each sees the keys and values of the target's states up to its
own place, and those of its own earlier steps. Knows nothing of texts' origin and of training.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from core.attention import AttentionOptions
from core.errors import ModelError
from core.loading import ATTENTION
from core.prediction_layer import new_layer, run_layer
from core.shared_weights import head_rows
from drafter_service.distil.batches import Batch
from drafter_service.distil.shapes import draft_columns

#: Size of the hidden state that goes into the layer at first, in the median target's terms: with
#: the last layer's own (tens) its habits change slowly, with 1 they are lost.
_FIRST_SCALE = 15.0
_FIRST_NOISE = 0.02


class DraftsInParallel:
    """One layer's attention over drafts from all places of B texts at once.

    Call n + 1 gives query, key and value `[B, H, L, D]` of step n of each place's draft. Step 0
    attends causally; a later one to step 0 up to its place, and to its own place in steps since.
    """

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """`[B, H * r, L, D]` queries; returns `[B, L, H * r, D]`."""
        if options.softcap is not None or options.sinks is not None:
            raise ModelError("model: attention with caps or sinks cannot be trained here")
        self._keys.append(key)
        self._values.append(value)
        repeats, length, steps = query.shape[1] // key.shape[1], query.shape[2], len(self._keys)
        keys, values = (
            [each.repeat_interleave(repeats, dim=1) for each in cached]
            for cached in (self._keys, self._values)
        )
        scores = (query @ keys[0].transpose(-1, -2)).float() * options.scaling
        scores = scores.masked_fill(_hidden(length, steps - 1, options.window, query), -torch.inf)
        own = [(query * each).sum(-1, keepdim=True).float() * options.scaling for each in keys[1:]]
        weights = torch.cat([scores, *own], dim=-1).softmax(dim=-1).to(query.dtype)
        output = weights[..., :length] @ values[0]
        for step, each in enumerate(values[1:]):
            output = output + weights[..., length + step, None] * each
        return output.transpose(1, 2)


def _hidden(length: int, step: int, window: int | None, like: Tensor) -> Tensor:
    """`[L, L]`: which keys of step 0 a place's draft does not see. In `step` it stands so many
    tokens behind its place."""
    places = torch.arange(length, device=like.device)
    distance = places[:, None] - places[None]
    hidden = distance < 0
    return hidden if window is None else hidden | (distance + step >= window)


class PredictionStudent:
    """The `Student` that trains a prediction layer; `layer` is what goes into the checkpoint.

    main: the target's model in fp32, of which the layer gets the last decoder layer as a start.
    feature_layers: decoder layers whose hidden states it gets beside the last.
    """

    def __init__(
        self, main: Any, feature_layers: Sequence[int], draft_token_ids: Sequence[int], seed: int
    ) -> None:
        self.main = main
        self.layer = new_layer(main, feature_layers)
        self.device: torch.device = main.get_input_embeddings().weight.device
        main.requires_grad_(False)
        network, fusion = self.layer.network, self.layer.fusion
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network.layers.to_empty(device=self.device)
            _begin(network.layers[0], main, network.config.get_text_config())
            if fusion is not None:
                _begin_fusion(fusion.to_empty(device=self.device))
        head = main.get_output_embeddings()
        self._head = head_rows(head.weight, head.bias, torch.tensor(draft_token_ids))
        self.columns = draft_columns(draft_token_ids, head.weight.shape[0])
        network.config._attn_implementation = ATTENTION
        self.trained = {**_named(network.layers, "layers."), **_named(fusion, "fusion.")}

    def logits(self, batch: Batch, num_depths: int) -> Iterator[tuple[Tensor, Tensor]]:
        """See `Student`. Token t of an answer can be the first of a draft if t is at least 1, the
        second if t is at least 2, and so on: the first token of an answer comes with the prompt."""
        context = DraftsInParallel()
        assert batch.features is not None
        length = batch.features.shape[1]
        token_ids = nn.functional.pad(batch.token_ids, (0, num_depths))
        hidden = batch.features
        if self.layer.fusion is not None:
            hidden = self.layer.fusion(hidden)
        for depth in range(1, num_depths + 1):
            ids = token_ids[:, depth : depth + length]
            positions = torch.arange(length, device=self.device)[None] + depth
            hidden = run_layer(self.layer.network, 0, ids, hidden, positions, context)
            which = (batch.ordinals >= depth).nonzero()[:, 0]
            places = batch.places[which] - depth - 1
            yield self._head(hidden[batch.rows[which], places]), which


def _begin(layer: Any, main: Any, text: Any) -> None:
    """First weights: the target's last decoder layer and final norm, fed with the hidden state as
    the final norm left it."""
    decoder = main.get_decoder()
    final = decoder.norm.weight.detach()
    layer.mtp_block.load_state_dict(decoder.layers[-1].state_dict())
    if layer.post_norm is not None:
        layer.post_norm.load_state_dict(decoder.norm.state_dict())
    for norm in (layer.enorm, layer.hnorm):
        norm.weight.data.fill_(1.0)
    size = text.hidden_size
    weight = layer.eh_proj.weight.data.normal_(std=_FIRST_NOISE)
    part = slice(0, size) if getattr(text, "mtp_hidden_states_first", False) else slice(size, None)
    weight[:, part] += torch.diag(_FIRST_SCALE / final.where(final.abs() > 0.1, 1.0))


def _begin_fusion(fusion: Any) -> None:
    """At first the last hidden state passes through."""
    for norm in fusion.norms:
        norm.weight.data.fill_(1.0)
    weight = fusion.proj.weight.data.normal_(std=_FIRST_NOISE / 2)
    weight[:, -weight.shape[0] :] += torch.eye(weight.shape[0], device=weight.device)


def _named(module: nn.Module | None, prefix: str) -> dict[str, nn.Parameter]:
    return {} if module is None else {prefix + n: p for n, p in module.named_parameters()}
