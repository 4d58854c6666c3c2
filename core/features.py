"""What the target computes of its tokens beside logits, for drafters that need it.

    hidden_states         the last hidden state: what the head gets (final norm applied)
    hidden_states:LAYER   the hidden state behind decoder layer LAYER (0 is the first)
    kv:LAYER              the keys, then the values, of attention layer LAYER, heads side by side

A tap is set up once for a list of names and read after a forward: a row per token, everything side
by side. Hooks on the loaded model take the hidden states; keys and values are read from the cache.
Knows nothing of drafters. Used by the model's own thread only.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from core.errors import InvalidRequestError
from core.model import RaggedModel

HIDDEN_STATES = "hidden_states"
KEY_VALUES = "kv"


class FeatureTap:
    """Reads named features of a model's forwards. Raises InvalidRequestError for a wrong name."""

    def __init__(self, model: RaggedModel, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._model = model
        self._held: dict[str, Tensor] = {}
        self._hooks: list[Any] = []
        self._kv_layers: dict[str, int] = {}
        for name in dict.fromkeys(names):
            self._set_up(name)

    def _set_up(self, name: str) -> None:
        kind, _, number = name.partition(":")
        decoder = self._model.network.get_decoder()
        layers = getattr(decoder, "layers", ())
        if name == HIDDEN_STATES:
            self._watch(name, decoder)
        elif kind == HIDDEN_STATES and number.isdigit() and int(number) < len(layers):
            self._watch(name, layers[int(number)])
        elif kind == KEY_VALUES and number.isdigit() and int(number) < len(self._model.cache.keys):
            self._kv_layers[name] = self._model.cache.layers[int(number)].source
        else:
            model = self._model.identity.model
            raise InvalidRequestError("features", f"the target {model!r} has no {name!r}")

    def _watch(self, name: str, module: nn.Module) -> None:
        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            self._held[name] = output if isinstance(output, Tensor) else output[0]  # [1, T, D]

        self._hooks.append(module.register_forward_hook(keep))

    def read(self, sequences: Sequence[int]) -> list[Tensor]:
        """The features of the forward that just ran, of each of these rows' sequences: `[n, F]`,
        one row per token that the forward ran for it."""
        device = self._model.device
        parts: list[list[Tensor]] = [[] for _ in sequences]
        for name in self.names:
            for part, sequence in zip(parts, sequences, strict=True):
                span = self._model.spans[sequence]
                if name in self._kv_layers:
                    part.append(self._key_values(self._kv_layers[name], span.slot, span.indices))
                else:
                    part.append(self._held[name][0, span.tokens])
        return [torch.cat([each.to(device) for each in part], dim=-1) for part in parts]

    def _key_values(self, layer: int, slot: int, indices: slice) -> Tensor:
        cache = self._model.cache
        parts = (cache.keys[layer][slot, :, indices], cache.values[layer][slot, :, indices])
        return torch.cat([part.transpose(0, 1).flatten(1) for part in parts], dim=-1)

    def close(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._held.clear()
