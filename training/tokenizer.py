"""Training of the tokenizer: byte-level BPE of 4,096 tokens with Qwen's special tokens."""

import json
import random
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from training.corpus import stdlib_text, tasks

VOCAB = 4096
SPACE = "Ġ"
"""Space in byte-level BPE."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
SPLIT = (
    r"<(?:function|parameter)=|</(?:function|parameter)>\n?"
    r"|[\p{L}\p{M}]+|\p{N}"
    r"|[\"{}\[\]:,]+(?: [\"{}\[\]]+)*[\r\n]*|[^\s\p{L}\p{M}\p{N}\"{}\[\]:,]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)| |\s+"
)
"""Pre-tokenizer pattern: a word is split alike whatever precedes it, so copied text keeps its
tokens.

If a space, quote or full stop were joined to a word, " noon" and "noon" would be different tokens,
and the model would have to spell each copy. Punctuation of JSON and of calls stays together, since
no value is split by it.
"""


def corpus(samples: int) -> list[str]:
    """Return the training texts: samples of every task, and sources."""
    stdlib_text.load_filler()
    rng = random.Random(0)
    texts = []
    for seed in range(samples):
        sample = tasks.draw(seed)
        texts.append("".join(piece for piece, _ in sample.pieces))
    texts += [stdlib_text.document(rng, 4000, False) for _ in range(samples // 8)]
    return texts


def transfer_embedding(table: Tensor, old: Tokenizer, new: Tokenizer) -> Tensor:
    """Return an embedding [V', hidden] of `new`'s tokens from `table` [V, hidden] of `old`'s.

    A token gets its own row if it had one; a word gets the mean with its form after a space. A new
    token gets the mean of the longest old tokens that it consists of.
    """
    known = old.get_vocab()
    rows = []
    for token, _ in sorted(new.get_vocab().items(), key=lambda item: item[1]):
        word = token.isascii() and token.isalpha()
        spellings = (token, SPACE + token) if word else (token,)
        ids = [known[spelling] for spelling in spellings if spelling in known]
        rows.append(table[ids or _pieces(token, known)].mean(0))
    return torch.stack(rows)


def _pieces(token: str, known: dict[str, int]) -> list[int]:
    """Split a token greedily into the longest known tokens. Single bytes are always known."""
    ids = []
    while token:
        end = next(n for n in range(len(token), 0, -1) if token[:n] in known)
        ids.append(known[token[:end]])
        token = token[end:]
    return ids


def train(out: Path, samples: int = 12000) -> None:
    """Train a tokenizer and write tokenizer.json and tokenizer_config.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    count = len(SPECIAL) + len(ADDED)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - count,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(samples), trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ADDED])
    if tokenizer.get_vocab_size() != VOCAB:
        raise ValueError(f"the tokenizer has {tokenizer.get_vocab_size()} tokens, not {VOCAB}")
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    ids = {t: tokenizer.token_to_id(t) for t in (*SPECIAL, *ADDED)}
    decoder = {
        str(i): {
            "content": t, "lstrip": False, "normalized": False, "rstrip": False,
            "single_word": False, "special": t in SPECIAL,
        }
        for t, i in ids.items()
    }  # fmt: skip
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": decoder,
        "additional_special_tokens": list(SPECIAL[1:]),
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 16384,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
