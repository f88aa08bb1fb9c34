"""Tokenizer that LLM.get_tokenizer() returns, with the methods of transformers."""

from collections.abc import Sequence
from typing import Any

from lockstep.keywords import TEMPLATE, check_keywords
from lockstep.text.processor import Processor
from lockstep.text.templates.chat_template import Message
from lockstep.text.tokenizers.tokenizer import Tokenizer

APPLY = ("conversation", "tools", "tokenize", "add_generation_prompt", "continue_final_message")
"""Parameters of apply_chat_template(), for the error of an unknown keyword."""


class ModelTokenizer:
    """Tokenizer and chat template of a model.

    Methods have the names and defaults of transformers and return plain Python lists. Raises
    RequestError where skip_tokenizer_init left the tokenizer out.
    """

    def __init__(self, processor: Processor) -> None:
        self._processor = processor
        self._tokenizer: Tokenizer = processor.require_tokenizer("get_tokenizer")

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Return the token ids of a text, and a mask of ones, as a dict."""
        ids = self.encode(text, add_special_tokens)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, special tokens in it included. Raises RequestError."""
        return self._processor.encode(text, add_special_tokens, "text")

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of one token id or several. Raises RequestError."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._processor.decode(ids, skip_special_tokens, "token_ids")

    def apply_chat_template(
        self,
        conversation: list[Message],
        tools: list[dict[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str | list[int]:
        """Return the prompt of a conversation: token ids, or text if tokenize is False.

        In the ids, only the template writes control tokens. That protection is lost if the text is
        sent as a prompt: there, control tokens that a message spells are parsed.
        variables: variables of the template, such as enable_thinking.
        Raises: RequestError.
        """
        foreign = {name: value for name, value in variables.items() if name in TEMPLATE}
        check_keywords(foreign, APPLY, TEMPLATE)
        rendered = self._processor.conversation(
            conversation,
            tools,
            continue_final_message,
            add_generation_prompt=add_generation_prompt,
            **{name: value for name, value in variables.items() if name not in TEMPLATE},
        )
        return rendered.ids if tokenize else rendered.text

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token, or a list of ids; None for an unknown token."""
        if isinstance(tokens, str):
            return self._tokenizer.fast.token_to_id(tokens)
        return [self._tokenizer.fast.token_to_id(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Return the vocabulary's spelling of an id, or a list of them; None for an unknown id."""
        if isinstance(ids, int):
            return self._tokenizer.fast.id_to_token(ids)
        return [self._tokenizer.fast.id_to_token(i) for i in ids]

    def get_vocab(self) -> dict[str, int]:
        """Return all tokens with their ids, added tokens included."""
        return self._tokenizer.fast.get_vocab(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens without added ones, as transformers does."""
        return self._tokenizer.fast.get_vocab_size(with_added_tokens=False)

    @property
    def all_special_ids(self) -> list[int]:
        """Return the ids of all special tokens, ascending."""
        return sorted(self._tokenizer.special_ids)

    @property
    def chat_template(self) -> str | None:
        """Return the text of the chat template in use."""
        return self._processor.tokenizer_info().get("chat_template")

    @property
    def bos_token(self) -> str | None:
        """Return the token that begins a text, as text."""
        return self._tokenizer.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """Return the token that ends a text, as text."""
        return self._tokenizer.special_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        """Return the padding token, as text. Lockstep itself pads nothing."""
        return self._tokenizer.special_tokens.get("pad_token")

    @property
    def bos_token_id(self) -> int | None:
        """Return the id of bos_token."""
        return self._id(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        """Return the id of eos_token. generation_config.json may name more tokens that end an
        answer."""
        return self._id(self.eos_token)

    @property
    def pad_token_id(self) -> int | None:
        """Return the id of pad_token."""
        return self._id(self.pad_token)

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.fast.token_to_id(token)
