"""Text to token ids and back, with the model's own fast tokenizer and chat template.

Knows nothing of models, requests or services, and never touches torch. transformers finds and
converts the tokenizer; the calls go straight to the `tokenizers` backend behind it, whose
encode and decode change no state, so one Tokenizer may serve many threads at once (the
wrapper's own `__call__` sets padding and truncation on each call and may not).
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Self

from core.errors import InvalidRequestError, ModelError

_is_byte = re.compile(r"<0x[0-9A-F]{2}>").fullmatch


class Tokenizer:
    """A model's tokenizer.

    Attributes:
        size: largest id plus one; a model's head may be padded beyond it.
        fingerprint: SHA-256 over the sorted (token, id) pairs; equal for equal vocabularies.
        text_ids: the ids that `decode` turns into text, i.e. all but the special ones.
        byte_ids: ids of single bytes whose decoding depends on the whole run of them that they
            stand in (sentencepiece's byte fallback); empty for byte-level tokenizers.
        special_ids: the special tokens by their content.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_padding()
        self._backend.no_truncation()
        vocab: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        added = self._backend.get_added_tokens_decoder()
        special = {token_id for token_id, token in added.items() if token.special}
        self.special_ids = {added[token_id].content: token_id for token_id in special}
        decoder = self._backend.decoder
        self._decoder_state = b"" if decoder is None else decoder.__getstate__()
        falls_back = b"ByteFallback" in self._decoder_state
        self.size = max(vocab.values()) + 1
        self.fingerprint = hashlib.sha256(json.dumps(sorted(vocab.items())).encode()).hexdigest()
        self.text_ids = frozenset(vocab.values()) - special
        self.byte_ids = frozenset(
            token_id for token, token_id in vocab.items() if falls_back and _is_byte(token)
        )

    @classmethod
    def load(cls, model_path: str, gguf_file: str = "", trust_remote_code: bool = False) -> Self:
        """Load from a directory (nothing is downloaded then) or a hub name.

        Raises ModelError when there is none, or none with a fast implementation.
        """
        from transformers import AutoTokenizer  # takes seconds; clients never need it

        is_path = model_path.startswith(("/", ".", "~")) or os.path.exists(model_path)
        path = os.path.expanduser(model_path) if is_path else model_path
        if is_path and not os.path.isdir(path):
            raise ModelError(f"{model_path}: no such directory")
        options: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {}
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                path, local_files_only=is_path, trust_remote_code=trust_remote_code, **options
            )
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise ModelError(f"{model_path}: the tokenizer cannot be loaded: {error}") from error
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError(f"{model_path}: {type(tokenizer).__name__} has no fast tokenizer")
        return cls(tokenizer)

    @property
    def has_chat_template(self) -> bool:
        """True when conversations can be turned into prompts."""
        return bool(self._tokenizer.chat_template)

    def to_json(self) -> str:
        """The tokenizer as the `tokenizers` library writes it, for libraries that read that."""
        return str(self._backend.to_str())

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Ids of a text, with the special tokens the model puts around one unless told not to."""
        return list(self._backend.encode(text, add_special_tokens=special_tokens).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids. Special tokens and ids that are in no vocabulary give none."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))

    def token_bytes(self) -> list[bytes]:
        """What each token adds to a text in whose middle it stands, UTF-8, by id.

        Nothing for special tokens and ids that are not used. Takes a fraction of a second.
        """
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        is_byte_level = b"ByteLevel" in self._decoder_state
        added = self._backend.get_added_tokens_decoder()
        found = [b""] * self.size
        others = []
        for token, token_id in self._backend.get_vocab(with_added_tokens=True).items():
            if token_id not in self.text_ids:
                continue
            if token_id in added:
                found[token_id] = token.encode()
            elif token_id in self.byte_ids:
                found[token_id] = bytes([int(token[3:5], 16)])
            elif is_byte_level and all(character in byte_of for character in token):
                found[token_id] = bytes(byte_of[character] for character in token)
            else:
                others.append(token_id)
        # Elsewhere a token's text may depend on whether it stands first: let another stand there.
        first = self.encode("a", special_tokens=False)[-1:]
        texts = self._backend.decode_batch([first, *([*first, token_id] for token_id in others)])
        for token_id, text in zip(others, texts[1:], strict=True):
            found[token_id] = text.removeprefix(texts[0]).encode()
        return found

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation, up to where the assistant's next turn begins.

        Raises InvalidRequestError when there is no template or it refuses the conversation.
        """
        from jinja2 import TemplateError

        if not self.has_chat_template:
            raise InvalidRequestError("chat", "the model has no chat template; send a prompt")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise InvalidRequestError("chat", f"refused by the model's template: {error}") from None
        return list(self._backend.encode(text, add_special_tokens=False).ids)
