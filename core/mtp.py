"""Layers that predict further tokens from a target's hidden states, run on ragged batches.

DeepSeek-V3, GLM-4.5 and others come with layers that predict further tokens from the target's last
hidden state (multi-token prediction). transformers finds and loads them (`MtpModel`); they run
here through our attention, with a slot cache of their own. Depth d of L at cache index i takes

    embedding of token i + 1 + d   and   hidden state of depth d - 1 at i (depth 0: the target's)

and predicts token i + 2 + d. A target whose checkpoint has none may have got one by training, in a
directory of its own (core/prediction_layer.py): it runs the same way, as one depth.

The K/V of depth d stand at index i, its rotary position is i + 1 + d. Beside the
target the embedding, head and rotary code are the target's; alone, the checkpoint's embedding and
head are read, and none of its decoder layers. Knows nothing of drafts.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from core import model_facts
from core.attention import ProbeContext, RaggedContext
from core.batch import Row, lay_out
from core.config import ModelConfig
from core.errors import ModelError
from core.features import HIDDEN_STATES
from core.kv_cache import SlotCache
from core.loading import ATTENTION, load_tokenizer
from core.model import RaggedModel
from core.packing import pack_linears, watch_inputs
from core.prediction_layer import PredictionLayer, read_layer, run_layer
from core.shared_weights import single_device, spread_logits, target_of, target_tensors
from core.types import ModelIdentity


@dataclass(frozen=True, slots=True)
class MtpRow:
    """One sequence's part of a run: the cache is cut to `start`, and indices from there on get
    `hidden` `[n, D]`. `token_ids` are those behind `start`, n for the first depth."""

    sequence: int
    start: int
    token_ids: Sequence[int]
    hidden: Tensor


class MtpLayers:
    """Loaded prediction layers and their cache. Use `beside` or `load`.

    num_layers: depths. needs: what the target tells of each token (core/features.py), in all
    `num_features` values. is_trained: whether the layer comes from a directory of its own.
    identity, vocab_size, tokenizer_size, max_length, max_sequences, max_batch_tokens: as
    RaggedModel's.
    """

    def __init__(
        self, layer: PredictionLayer, main: Any, like: ModelConfig, identity: ModelIdentity
    ) -> None:
        self._network = network = layer.network.eval()
        self._fusion, self._draft_token_ids = layer.fusion, layer.draft_token_ids
        self.needs, self.is_trained = layer.needs, layer.is_trained
        self.num_layers: int = network.num_mtp_layers
        self.identity = identity
        self.max_batch_tokens, self.max_sequences = like.max_batch_tokens, like.max_sequences
        text = main.config.get_text_config()
        self.max_length = min(like.max_length, model_facts.max_length(text))
        self.device = torch.device(next(network.layers.parameters()).device)
        self._vocab_size: int = text.vocab_size
        self._hidden_size: int = text.hidden_size
        self.num_features = self._hidden_size * len(self.needs)
        self.dtype: torch.dtype = network.layers[0].eh_proj.weight.dtype
        probe = ProbeContext()
        try:
            with torch.inference_mode(), watch_inputs(network.layers) as groups:
                hidden = torch.zeros(2, self._hidden_size, dtype=self.dtype, device=self.device)
                for depth in range(self.num_layers):
                    hidden = self._layer(depth, [0, 0], [0, 1], hidden, probe)
                self.vocab_size: int = self._logits(hidden[-1:]).shape[-1]
        except ModelError:
            raise
        except Exception as error:  # the boundary to the library's model code
            name = f"the prediction layers of {text.model_type}"
            raise ModelError(f"model: {name} do not run: {error}") from error
        if probe.num_calls != self.num_layers:
            raise ModelError(f"model: {text.model_type}'s prediction layers keep more than K/V")
        if like.pack_weights:
            pack_linears(network.layers if layer.draft_token_ids is None else network, groups)
            if self._fusion is not None:
                pack_linears(self._fusion)
        self.cache = SlotCache(probe.layers, like.max_sequences, self.max_length)
        self.tokenizer_size = self.vocab_size

    @classmethod
    def beside(cls, target: RaggedModel, checkpoint: str = "") -> Self:
        """Those of a loaded target's checkpoint; with a directory whose layer was trained for it,
        that one. Raises ModelError when there is none, or it is another target's."""
        main = target.network
        like = ModelConfig(
            model=target.identity.model,
            max_length=target.max_length,
            max_sequences=target.max_sequences,
            max_batch_tokens=target.max_batch_tokens,
        )
        is_trained = bool(checkpoint) and target_of(Path(checkpoint).expanduser()) is not None
        layer = _layer_of(checkpoint if is_trained else target.identity.model, main, is_trained)
        layers = cls(layer, main, like, target.identity)
        layers.tokenizer_size = target.tokenizer_size
        return layers

    @classmethod
    def load(cls, config: ModelConfig) -> Self:
        """Those of a checkpoint, without its decoder layers, or that of a directory which was
        trained for a target. Raises ModelError as `beside`."""
        if config.threads:
            torch.set_num_threads(config.threads)
        target = target_of(Path(config.model).expanduser())
        main = _without_layers(config.model_copy(update={"model": str(target or config.model)}))
        tokenizer = load_tokenizer(config)
        vocab_size = main.config.get_text_config().vocab_size
        fingerprint = tokenizer.fingerprint if tokenizer else ""
        identity = ModelIdentity(config.model, vocab_size, fingerprint)
        layer = _layer_of(config.model, main, is_trained=target is not None)
        layers = cls(layer, main, config, identity)
        if config.pack_weights:
            pack_linears(layers._network)  # its head too, which beside a target is the target's
        if tokenizer is not None:
            layers.tokenizer_size = min(layers.vocab_size, tokenizer.size)
        return layers

    @torch.inference_mode()
    def run(self, depth: int, rows: Sequence[MtpRow]) -> list[Tensor]:
        """One depth over all rows at once; hidden states `[n, D]` of each row, for the next depth
        and for `logits`. The first depth cuts and extends the cache, the others fill it."""
        batch = [Row(row.sequence, row.start, row.token_ids[: len(row.hidden)], 0) for row in rows]
        if depth == 0:
            for row in batch:
                self.cache.truncate(row.sequence, row.position)
        slots = self.cache.place([row.sequence for row in batch])
        layout = lay_out(batch, slots)
        order = sorted(rows, key=lambda row: layout.spans[row.sequence].tokens.start)
        hidden = torch.cat([row.hidden.to(self.device, self.dtype) for row in order])
        positions = [index + 1 + depth for index in layout.positions]
        context = RaggedContext(self.cache, layout.segments)
        output = self._layer(depth, layout.token_ids, positions, hidden, context)
        if depth == 0:
            for row in batch:
                self.cache.extend(row.sequence, row.token_ids)
        return [output[layout.spans[row.sequence].tokens] for row in rows]

    @torch.inference_mode()
    def hidden(self, features: Tensor) -> Tensor:
        """What the first depth starts from, `[n, D]`, of features `[n, num_features]`."""
        if self._fusion is None:
            return features
        fused: Tensor = self._fusion(features.to(self.device, self.dtype))
        return fused

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 `[n, vocab_size]` of hidden states `[n, D]`; -inf outside of a draft vocabulary."""
        return self._logits(hidden).float()

    def _layer(
        self,
        depth: int,
        token_ids: Sequence[int],
        positions: Sequence[int],
        hidden: Tensor,
        context: RaggedContext | ProbeContext,
    ) -> Tensor:
        ids = torch.tensor([token_ids], device=self.device)
        position_ids = torch.tensor([positions], device=hidden.device)
        return run_layer(self._network, depth, ids, hidden[None], position_ids, context)[0]

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._network._project_to_logits(hidden[None])[0]
        if (ids := self._draft_token_ids) is None:
            return logits
        return spread_logits(logits, ids, self._vocab_size)


def has_mtp_layers(config: Any) -> bool:
    """Whether a model's config says that its checkpoint has prediction layers."""
    return bool(getattr(config.get_text_config(), "num_mtp_layers", None))


def _layer_of(name: str, main: Any, is_trained: bool) -> PredictionLayer:
    """The library's model of the prediction layers. Raises ModelError."""
    if is_trained:
        device = main.get_input_embeddings().weight.device
        return read_layer(Path(name).expanduser(), main, torch.device(device))
    if not has_mtp_layers(main.config):
        model_type = main.config.get_text_config().model_type
        raise ModelError(f"model: {name} ({model_type}) has no prediction layers")
    decoder = main.get_decoder()
    last = [each for each in decoder.layers[-1].parameters() if each.device.type != "meta"]
    device = last[0].device if last else main.get_input_embeddings().weight.device
    try:
        network = MtpModel.from_pretrained(main, device_map={"": device})
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"model: the prediction layers of {name} cannot be loaded: {error}") from (
            error
        )
    return PredictionLayer(network, (HIDDEN_STATES,))


def _without_layers(config: ModelConfig) -> Any:
    """The checkpoint's model with real embedding, head and rotary code, and nothing else."""
    path = os.path.expanduser(config.model)
    try:
        if not os.path.isdir(path):
            path = snapshot_download(path, allow_patterns=["*.json", "*.safetensors"])
        options = {"trust_remote_code": config.trust_remote_code}
        settings = AutoConfig.from_pretrained(path, **options)
        dtype = settings.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        with torch.device("meta"):
            main = AutoModelForCausalLM.from_config(
                settings, dtype=dtype, attn_implementation=ATTENTION, **options
            )
        outside = target_tensors(Path(path))
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ModelError(f"model: {config.model} cannot be loaded: {error}") from error
    device = single_device(config.device_map) if isinstance(config.device_map, str) else "cpu"
    embedding = main.get_input_embeddings()
    head = main.get_output_embeddings()
    for module in (embedding, head):
        names = [name for name, each in main.named_modules() if each is module]
        found = [outside[f"{n}.weight"] for n in names if f"{n}.weight" in outside]
        if found:
            module.weight = nn.Parameter(found[0].to(device, dtype), requires_grad=False)
        elif module is head and settings.get_text_config().tie_word_embeddings:
            module.weight = embedding.weight
        else:
            raise ModelError(f"model: {config.model} has no weights for {names[0]}")
    decoder = main.get_decoder()
    if getattr(decoder, "rotary_emb", None) is not None:
        decoder.rotary_emb = type(decoder.rotary_emb)(config=decoder.config).to(device)
    return main
