"""The only user of transformers' models: loads one, and runs it on ragged batches.

Any decoder whose state is attention's K/V works: an attention function of ours is registered with
the library, takes each layer's query, key and value, and attends over the slot cache. No model
code is copied. Masks are ours too: the name is unknown to the library's mask interface, which then
builds none. Models whose state cannot be rolled back are refused at load. Knows nothing of drafts,
rules or services. Not thread-safe: one thread calls it.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from transformers import AttentionInterface

from core import model_facts
from core.attention import AttentionOptions, ProbeContext, RaggedContext
from core.batch import BatchLimits, Span, check_rows, lay_out
from core.batch import Row as Row
from core.config import ModelConfig
from core.errors import ModelError
from core.huge_pages import MIN_MAPPING_BYTES, move_to_huge_pages
from core.kv_cache import SlotCache
from core.loading import ATTENTION, load_network, load_tokenizer
from core.packing import pack_linears, watch_inputs
from core.stages import Relay, count_stages, to_device, watch_output
from core.types import ModelIdentity

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


AttentionInterface.register(ATTENTION, _attention)


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
        network: the transformers model. device: where its inputs go. num_layers: its layers.
        spans: where the tokens of the last forward lie, by sequence.
        num_stages: devices that can work on one forward each, side by side.
    """

    def __init__(self, config: ModelConfig, model: Any) -> None:
        """Use `load`. `model` is a transformers model that uses our attention function."""
        self._text = text = model.config.get_text_config()
        self.network = model
        self.device = _input_device(model)
        self.spans: dict[int, Span] = {}
        self._hidden_device = torch.device("cpu")
        self._relay: Relay | None = None
        self.max_length = min(config.max_length, model_facts.max_length(text))
        self.max_sequences = config.max_sequences
        self.num_layers: int = text.num_hidden_layers
        self.max_batch_tokens = config.max_batch_tokens
        probe = ProbeContext()
        try:
            with (
                torch.inference_mode(),
                watch_inputs(model) as groups,
                watch_output(model.get_decoder()) as outputs,
            ):
                logits = self._run([0, 0], [0, 1], [1], probe)
        except ModelError:
            raise
        except Exception as error:  # the boundary to the library's model code
            raise ModelError(f"model: {text.model_type} does not run: {error}") from error
        self.vocab_size = logits.shape[1]
        model_facts.check_layers(model, text, probe.options, probe.num_calls)
        self._spread([layer.device for layer in probe.layers], [*outputs, logits.device])
        packed_bytes = pack_linears(model, groups) if config.pack_weights else 0
        self.cache = SlotCache(probe.layers, config.max_sequences, self.max_length)
        self._limits = BatchLimits(config.max_batch_tokens, self.max_length, self.vocab_size)
        self.tokenizer = tokenizer = load_tokenizer(config)
        self.tokenizer_size = min(self.vocab_size, tokenizer.size if tokenizer else self.vocab_size)
        fingerprint = tokenizer.fingerprint if tokenizer else ""
        self.identity = ModelIdentity(config.model, self.vocab_size, fingerprint)
        self.eos_token_ids = model_facts.eos_token_ids(text, model.generation_config)
        self.default_sampling = model_facts.default_sampling(model.generation_config)
        self._check_attention(text)
        if self.device.type != "cpu":  # so that a forward of any size fits from now on
            self._rehearse()
        if packed_bytes >= MIN_MAPPING_BYTES:  # smaller ones gain nothing
            move_to_huge_pages()

    def _spread(self, layers: list[torch.device], ends: list[torch.device]) -> None:
        """Know the devices that a forward passes: of the embedding, the layers, and the ends."""
        self._hidden_device = ends[0]
        modules = getattr(self.network.get_decoder(), "layers", ())
        can_relay = len(modules) == len(layers)
        self.num_stages = count_stages([self.device, *layers, *ends]) if can_relay else 1
        if self.num_stages > 1:
            self._relay = Relay(modules, layers)

    @classmethod
    def load(cls, config: ModelConfig, num_layers: int = 0) -> Self:
        """Load a checkpoint, or only its first `num_layers` layers.

        Raises ModelError that names what is wrong.
        """
        if config.threads:
            torch.set_num_threads(config.threads)
        return cls(config, load_network(config, num_layers))

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
    def forward(self, rows: Sequence[Row], num_layers: int = 0) -> Tensor:
        """Run all tokens of all rows at once, through the first `num_layers` layers (0: all).

        Returns fp32 logits `[sum of num_logits, vocab_size]`, rows in the given order, on the
        head's device. Raises InvalidRequestError, with nothing changed, for a row that does not
        fit; after any other error the rows are as if cut to their positions. What fewer layers than
        all have computed must be cut off again by the caller: the others lack it.
        """
        check_rows(rows, self.cache, self._limits)
        for row in rows:
            if not row.nodes:
                self.cache.truncate(row.sequence, row.position)
        slots = self.cache.place([row.sequence for row in rows])
        layout = lay_out(rows, slots)
        self.spans = layout.spans
        context = RaggedContext(self.cache, layout.segments)
        self._text.num_hidden_layers = num_layers or self.num_layers  # model code looks it up
        try:
            logits = self._run(layout.token_ids, layout.positions, layout.logit_indices, context)
        finally:
            self._text.num_hidden_layers = self.num_layers
        for row in rows:
            if row.nodes:
                self.cache.add_nodes(row.sequence, row.token_ids)
            else:
                self.cache.extend(row.sequence, row.token_ids)
        return logits

    def can_exit_early(self, num_layers: int) -> bool:
        """Whether the model's code runs only the first layers when `forward` is told to."""
        layers = getattr(self.network.get_decoder(), "layers", ())
        if not 0 < num_layers < len(layers):
            return False
        calls: list[int] = []
        hooks = [
            layers[index].register_forward_hook(lambda *_, index=index: calls.append(index))
            for index in (num_layers - 1, num_layers)
        ]
        self.open(0)
        try:
            self.forward([Row(0, 0, [0], 1)], num_layers)
        finally:
            self.truncate(0, 0)
            self.close(0)
            for hook in hooks:
                hook.remove()
        return calls == [num_layers - 1]

    def _run(
        self,
        token_ids: list[int],
        positions: list[int],
        keep: list[int],
        context: RaggedContext | ProbeContext | None,
    ) -> Tensor:
        inputs = to_device(torch.tensor([token_ids, positions]), self.device)
        index = to_device(torch.tensor(keep or [0]), self._hidden_device)  # heads need one row
        logits = self.network(
            input_ids=inputs[:1],
            position_ids=inputs[1:],
            use_cache=False,
            logits_to_keep=index,
            **({} if context is None else {"forerun_context": context}),
        ).logits
        if self._relay is not None:
            self._relay.forget()
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
            text._attn_implementation = ATTENTION
        theirs = theirs[:, known := theirs[0] != -torch.inf]  # a narrowed head leaves others out
        for ours, reference in ((first, theirs[:half]), (second, theirs[half:])):
            if not (ours[:, known] - reference).abs().mean() <= 0.25 * reference.std():  # or NaN
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


def _input_device(model: Any) -> torch.device:
    """Where the embedding runs: inputs put there keep the outputs on the devices too."""
    embedding = model.get_input_embeddings()
    hook = getattr(embedding, "_hf_hook", None)
    device = embedding.weight.device if hook is None else hook.execution_device
    return torch.device(device if device is not None else embedding.weight.device)
