"""The only user of transformers' models: loads one, and runs it on ragged batches.

Any decoder whose state is attention's K/V works: an attention function of ours is registered with
the library, takes each layer's query, key and value, and attends over the slot cache. No model
code is copied. Masks are ours too: the name is unknown to the library's mask interface, which then
builds none. Models whose state cannot be rolled back are refused at load. Knows nothing of drafts,
rules or services. Not thread-safe: one thread calls it.
"""

import os
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, GgufConfig

from core import model_facts
from core.attention import AttentionOptions, ProbeContext, RaggedContext
from core.batch import BatchLimits, Span, check_rows, lay_out
from core.batch import Row as Row
from core.config import ModelConfig
from core.errors import ModelError
from core.kv_cache import SlotCache
from core.packing import pack_linears, watch_inputs
from core.tokenizer import Tokenizer
from core.types import ModelIdentity

_ATTENTION = "forerun"
#: Keywords that attention gets and may ignore: dropout is off, the rest does not change scores.
_HARMLESS = {
    *("dropout", "is_causal", "position_ids", "position_embeddings", "use_cache", "return_dict"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep"),
}


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    forerun_context: RaggedContext | ProbeContext | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What the library calls in each layer; the context is the keyword given to the model."""
    if forerun_context is None:
        raise ModelError(f"{type(module).__name__} does not pass keywords on to attention")
    if isinstance(forerun_context, ProbeContext):
        _check_call(module, attention_mask, others)
    options = AttentionOptions(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return forerun_context.attend(module.layer_idx, query, key, value, options), None


AttentionInterface.register(_ATTENTION, _attention)


def _check_call(module: Any, attention_mask: Tensor | None, others: dict[str, Any]) -> None:
    """Refuse by name what would be silently ignored; runs once per layer, at load."""
    name = type(module).__name__
    if attention_mask is not None:
        raise ModelError(f"{name} builds its own attention mask, which is not supported")
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ModelError(f"{name} is not causal; only decoders are supported")
    for key, argument in others.items():
        if key not in _HARMLESS and argument is not None and argument is not False:
            raise ModelError(f"{name} uses attention option {key!r}, which is not supported")


class RaggedModel:
    """A loaded decoder, its slot cache, and ragged forwards over both.

    Attributes:
        identity: name, head size and tokenizer fingerprint ("" without a tokenizer).
        vocab_size: ids the head produces. tokenizer_size: ids from here on are padding.
        max_length: tokens a sequence may have. max_batch_tokens: tokens of one forward.
        tokenizer: the checkpoint's, None without one.
        eos_token_ids, default_sampling: from the model's generation config.
        cache: the slots.
        network: the transformers model. device: where its inputs go.
        spans: where the tokens of the last forward lie, by sequence.
    """

    def __init__(self, config: ModelConfig, model: Any) -> None:
        """Use `load`. `model` is a transformers model that uses our attention function."""
        text = model.config.get_text_config()
        self.network = self._model = model
        self.device = self._device = _input_device(model)
        self.spans: dict[int, Span] = {}
        self.max_length = min(config.max_length, model_facts.max_length(text))
        self.max_sequences = config.max_sequences
        self.max_batch_tokens = config.max_batch_tokens
        probe = ProbeContext()
        try:
            with torch.inference_mode(), watch_inputs(model) as groups:
                self.vocab_size = self._run([0, 0], [0, 1], [1], probe).shape[1]
        except ModelError:
            raise
        except Exception as error:  # the boundary to the library's model code
            raise ModelError(f"model: {text.model_type} does not run: {error}") from error
        model_facts.check_layers(model, text, probe.options, probe.num_calls)
        if config.pack_weights:
            pack_linears(model, groups)
        self.cache = SlotCache(probe.layers, config.max_sequences, self.max_length)
        self._limits = BatchLimits(config.max_batch_tokens, self.max_length, self.vocab_size)
        self.tokenizer = tokenizer = _load_tokenizer(config)
        self.tokenizer_size = min(self.vocab_size, tokenizer.size if tokenizer else self.vocab_size)
        fingerprint = tokenizer.fingerprint if tokenizer else ""
        self.identity = ModelIdentity(config.model, self.vocab_size, fingerprint)
        self.eos_token_ids = model_facts.eos_token_ids(text, model.generation_config)
        self.default_sampling = model_facts.default_sampling(model.generation_config)
        self._check_attention(text)
        if self._device.type != "cpu":  # so that a forward of any size fits from now on
            self._rehearse()

    @classmethod
    def load(cls, config: ModelConfig) -> Self:
        """Load a checkpoint. Raises ModelError that names what is wrong."""
        if config.threads:
            torch.set_num_threads(config.threads)
        path, options = _source(config)
        try:
            model_config = AutoConfig.from_pretrained(path, **options)
            model_facts.check_config(model_config)
            placement: dict[str, Any] = {"device_map": config.device_map}
            if config.max_memory:  # TOML keys are text, accelerate names GPUs by number
                memory = {int(k) if k.isdigit() else k: v for k, v in config.max_memory.items()}
                placement["max_memory"] = memory
            if config.offload_folder:
                placement["offload_folder"] = config.offload_folder
            if config.gguf_file:  # packed GGUF products need kernels from the network
                placement["quantization_config"] = GgufConfig(dequantize=True)
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=config.dtype, attn_implementation=_ATTENTION, **placement, **options
            )
        except KeyError as error:  # old model code picks its attention from a list of its own
            reason = "its attention cannot be replaced" if _ATTENTION in error.args else repr(error)
            raise ModelError(f"model: {config.model} cannot be loaded: {reason}") from error
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            raise ModelError(f"model: {config.model} cannot be loaded: {error}") from error
        model.eval()
        hook = getattr(model, "_hf_hook", None)
        if hook is not None:  # the head may be on another device than the inputs
            hook.skip_keys = [*_as_list(hook.skip_keys), "logits_to_keep"]
        return cls(config, model)

    # ------------------------------------------------------------ sequences

    def open(self, sequence: int) -> None:
        """Admit a sequence. Raises NoSlotError when `max_sequences` are open."""
        self.cache.open(sequence)

    def close(self, sequence: int) -> None:
        """Forget a sequence; unknown ones are ignored."""
        self.cache.close(sequence)

    def length(self, sequence: int) -> int:
        """Tokens of an open sequence whose K/V are cached."""
        return len(self.cache.token_ids(sequence))

    def truncate(self, sequence: int, length: int) -> None:
        """Forget a sequence's tokens from `length` on."""
        self.cache.truncate(sequence, length)

    def reuse_prefix(self, sequence: int, token_ids: Sequence[int]) -> int:
        """Of the tokens that follow the cached ones, get as many as possible (never all) from
        other sequences, live or finished. Returns how many were gained."""
        return self.cache.reuse_prefix(sequence, token_ids)

    # ------------------------------------------------------------ forward

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Run all tokens of all rows at once.

        Returns fp32 logits `[sum of num_logits, vocab_size]`, rows in the given order, on the
        head's device. Raises InvalidRequestError, with nothing changed, for a row that does not
        fit; after any other error the rows are as if cut to their positions.
        """
        check_rows(rows, self.cache, self._limits)
        for row in rows:
            self.cache.truncate(row.sequence, row.position)
        slots = self.cache.place([row.sequence for row in rows])
        layout = lay_out(rows, slots)
        self.spans = layout.spans
        context = RaggedContext(self.cache, layout.segments)
        logits = self._run(layout.token_ids, layout.positions, layout.logit_indices, context)
        for row in rows:
            self.cache.extend(row.sequence, row.token_ids)
        return logits

    def _run(
        self,
        token_ids: list[int],
        positions: list[int],
        keep: list[int],
        context: RaggedContext | ProbeContext | None,
    ) -> Tensor:
        inputs = torch.tensor([token_ids, positions]).to(self._device)
        # The index stays on the CPU, which serves a head on any device. Heads need one row.
        logits = self._model(
            input_ids=inputs[:1],
            position_ids=inputs[1:],
            use_cache=False,
            logits_to_keep=torch.tensor(keep or [0]),
            **({} if context is None else {"forerun_context": context}),
        ).logits
        kept: Tensor = logits[0, : len(keep)].float()
        return kept

    @torch.inference_mode()
    def _check_attention(self, text: Any) -> None:
        """Compare with the library's own attention on a few tokens. Raises ModelError.

        Some model code does more around attention than it tells; nothing else would notice. The
        limit is far above what rounding does, and far below what a wrong attention does.
        """
        half = min(8, self.max_length // 2)
        token_ids = [(7 * i * i + 3 * i) % self.vocab_size for i in range(2 * half)]
        self.open(0)
        first = self.forward([Row(0, 0, token_ids[:half], half)])
        second = self.forward([Row(0, half, token_ids[half:], half)])
        self.truncate(0, 0)
        self.close(0)
        text._attn_implementation = "eager"
        try:
            every = [*range(2 * half)]
            theirs = self._run(token_ids, every, every, None)
        finally:
            text._attn_implementation = _ATTENTION
        for ours, reference in ((first, theirs[:half]), (second, theirs[half:])):
            if not (ours - reference).abs().mean() <= 0.25 * reference.std():  # NaN is wrong too
                raise ModelError(
                    f"model: {text.model_type} does more around attention than forerun can see"
                )

    def _rehearse(self) -> None:
        """Run the largest forwards there can be, one long row and many short ones."""
        long = min(self.max_batch_tokens, self.max_length)
        short = max(1, min(self.max_batch_tokens // self.max_sequences, self.max_length))
        for sequence in range(self.max_sequences):
            self.open(sequence)
        self.forward([Row(0, 0, [0] * long, min(long, 64))])
        self.forward([Row(s, 0, [0] * short, short) for s in range(self.max_sequences)])
        for sequence in range(self.max_sequences):
            self.truncate(sequence, 0)
            self.close(sequence)


def _source(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """Where to load from, and the options that loading the config and the weights share."""
    path = os.path.expanduser(config.model)
    is_path = path.startswith(("/", ".")) or os.path.exists(path)
    if is_path and not os.path.isdir(path):
        raise ModelError(f"model: {config.model}: no such directory")
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if is_path:  # never ask a network about a path; for names, HF_HUB_OFFLINE says
        options["local_files_only"] = True
    if config.gguf_file:
        options["gguf_file"] = config.gguf_file
    return path, options


def _load_tokenizer(config: ModelConfig) -> Tokenizer | None:
    """The checkpoint's tokenizer; None for a directory that has none."""
    path = os.path.expanduser(config.model)
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    has_files = any(os.path.exists(os.path.join(path, name)) for name in names)
    if os.path.isdir(path) and not config.gguf_file and not has_files:
        return None
    return Tokenizer.load(config.model, config.gguf_file, config.trust_remote_code)


def _input_device(model: Any) -> torch.device:
    """Where the embedding runs: inputs put there keep the outputs on the devices too."""
    embedding = model.get_input_embeddings()
    hook = getattr(embedding, "_hf_hook", None)
    device = embedding.weight.device if hook is None else hook.execution_device
    return torch.device(device if device is not None else embedding.weight.device)


def _as_list(keys: str | list[str] | None) -> list[str]:
    return [keys] if isinstance(keys, str) else list(keys or ())
