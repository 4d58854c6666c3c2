"""A prediction layer that was trained for a target which came without one.

It is what `transformers.MtpModel` would have found in the target's checkpoint, of the target's own
kind of decoder layer, and runs as such (see core/mtp.py). Its directory is that of a drafter that
shares weights (see core/shared_weights.py): the layer, and the ids of its draft vocabulary.
`forerun.json` says which hidden states of the target it starts from; when they are those of several
layers, they are fused into one first. Knows nothing of training and of drafts.
"""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights
from transformers.modeling_layers import MtpModel

from core.errors import ModelError
from core.features import HIDDEN_STATES
from core.shared_weights import MANIFEST, SharedCheckpoint, head_rows

#: What `forerun.json` calls a directory of this shape, under "shape".
SHAPE = "prediction_layer"
_FUSION = "fusion."
_COMPARED_ROWS = 64


class Fusion(nn.Module):
    """Hidden states of several layers, side by side `[.., n * D]`, become one `[.., D]`."""

    def __init__(self, num_states: int, hidden_size: int, make_norm: Callable[[], Any]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(make_norm() for _ in range(num_states))
        self.proj = nn.Linear(num_states * hidden_size, hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """See the class."""
        parts = states.chunk(len(self.norms), dim=-1)
        normed = [norm(part) for norm, part in zip(self.norms, parts, strict=True)]
        fused: Tensor = self.proj(torch.cat(normed, dim=-1))
        return fused


@dataclass(frozen=True, slots=True)
class PredictionLayer:
    """network: a `MtpModel` with the target's embedding and rotary code, and the rows of its head
    for `draft_token_ids` (int64 `[Vd]`, None for all). needs: names of the target's hidden states,
    as core/features.py has them. fusion: what makes one of them, None for one. is_trained: whether
    it comes from a directory of its own, not from the target's checkpoint."""

    network: Any
    needs: tuple[str, ...]
    fusion: Fusion | None = None
    draft_token_ids: Tensor | None = None
    is_trained: bool = False


def new_layer(main: Any, layers: Sequence[int] = ()) -> PredictionLayer:
    """A layer without weights (on the meta device) for a target's model, which it borrows from.

    layers: decoder layers whose hidden states it gets beside the last one. Raises ModelError for a
    family that the library cannot make such a layer of.
    """
    shell = copy.copy(main)
    shell.config = copy.deepcopy(main.config)
    text = shell.config.get_text_config()
    text.num_mtp_layers = 1
    if getattr(text, "layer_types", None):
        text.mtp_layer_types = [text.layer_types[-1]]
    if getattr(text, "mlp_layer_types", None):
        text.mtp_mlp_layer_types = [text.mlp_layer_types[-1]]
    try:
        with no_init_weights(), torch.device("meta"):
            network = MtpModel(shell, 1)
            like = type(network.layers[0].hnorm)
            size, eps = text.hidden_size, text.rms_norm_eps
            fusion = Fusion(len(layers) + 1, size, lambda: like(size, eps=eps)) if layers else None
    except (AttributeError, TypeError, ValueError, KeyError, StopIteration) as error:
        raise ModelError(f"model: no prediction layer for {text.model_type}: {error}") from error
    network.tie_with_main_model(main)
    needs = (*(f"{HIDDEN_STATES}:{layer}" for layer in layers), HIDDEN_STATES)
    return PredictionLayer(network, needs, fusion, None, True)


def run_layer(
    network: Any, depth: int, token_ids: Tensor, hidden: Tensor, positions: Tensor, context: Any
) -> Tensor:
    """One layer of a `MtpModel` over `[B, T]` token ids and `[B, T, D]` hidden states, at positions
    `[1 or B, T]`; `context` is what attends. Returns `[B, T, D]`."""
    embeds = network.embed_tokens(token_ids).to(hidden.device)
    rotary: dict[str, Any] = {}
    if network.has_per_layer_rope:
        rotary["layer_type"] = network.config.layer_types[depth]
    embedded = None
    if network.rotary_emb is not None:
        embedded = network.rotary_emb(embeds, position_ids=positions, **rotary)
    output: Tensor = network.layers[depth](
        embeds,
        hidden,
        position_embeddings=embedded,
        attention_mask=None,
        position_ids=positions,
        past_key_values=None,
        forerun_context=context,
    )
    return network.shared_post_norm(output) if network.use_shared_post_norm else output


def layers_of(folder: Path) -> tuple[int, ...] | None:
    """The decoder layers that a directory's prediction layer looks at beside the last hidden state;
    None when it is of another shape. Raises ModelError for a manifest that cannot be read."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        return tuple(manifest["feature_layers"]) if manifest.get("shape") == SHAPE else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"model: {path} cannot be read: {error!r}") from error


def is_prediction_layer(path: str) -> bool:
    """Whether a directory is of this shape. Raises ModelError as `layers_of`."""
    return layers_of(Path(path).expanduser()) is not None


def read_layer(folder: Path, main: Any, device: torch.device) -> PredictionLayer:
    """Load a directory's layer for its target's model, in the type of the target's embedding.

    Raises ModelError for another shape, another target, or weights that do not fit.
    """
    layers, shared = layers_of(folder), SharedCheckpoint.read(folder)
    if layers is None or shared is None:
        raise ModelError(f"model: {folder} holds no prediction layer")
    embedding = main.get_input_embeddings()
    name = _name_of(embedding, main)
    known = shared.tensors.get(f"{name}.weight")
    part = slice(0, _COMPARED_ROWS)
    weight = embedding.weight.detach()[part].cpu()
    if known is None or not torch.equal(known[part].to(weight.dtype), weight):
        raise ModelError(f"model: {folder} was made for another target: the embeddings differ")
    layer = new_layer(main, layers)
    network, dtype = layer.network, main.get_input_embeddings().weight.dtype
    own = {name: each.to(device, dtype) for name, each in shared.tensors.items()}
    try:
        found = network.load_state_dict(
            {name: each for name, each in own.items() if name.startswith("layers.")},
            strict=False,
            assign=True,
        )
        if missing := [name for name in found.missing_keys if name.startswith("layers.")]:
            raise ModelError(f"model: {folder} has no {min(missing)}")
        if layer.fusion is not None:
            fusion = {n.removeprefix(_FUSION): t for n, t in own.items() if n.startswith(_FUSION)}
            layer.fusion.load_state_dict(fusion, assign=True)
    except RuntimeError as error:  # other shapes
        raise ModelError(f"model: {folder} does not fit {shared.target}: {error}") from error
    if shared.draft_token_ids is not None:
        network.shared_head = _head_rows(main, shared, device, dtype)
    return PredictionLayer(network, layer.needs, layer.fusion, shared.draft_token_ids, True)


def _head_rows(main: Any, shared: SharedCheckpoint, device: torch.device, dtype: Any) -> nn.Linear:
    """The target's head, only the rows of the draft vocabulary. Read from its checkpoint: that of
    a loaded target may be packed."""
    name = _name_of(main.get_output_embeddings(), main)
    weight = shared.tensors.get(f"{name}.weight")
    if weight is None:  # tied
        weight = main.get_input_embeddings().weight.detach()
    bias = shared.tensors.get(f"{name}.bias")
    ids = shared.draft_token_ids
    assert ids is not None
    return head_rows(weight, bias, ids).to(device, dtype)


def _name_of(module: nn.Module, main: Any) -> str:
    found: str = next(name for name, each in main.named_modules() if each is module)
    return found
