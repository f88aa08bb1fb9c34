"""Metadata of a GGUF file -> the files of its text side, as transformers writes them.

    tokenizer.json          vocabulary, merges, and how text is split
    tokenizer_config.json   special tokens by role, and the chat templates
    generation_config.json  the tokens that end an answer, and defaults of sampling

Two kinds of tokenizer are supported: byte-level BPE ("gpt2"), whose rule for splitting text has a
name, and BPE over scores with bytes for unknown characters ("llama"), as SentencePiece writes it.
"""

import re
from collections.abc import Iterator
from typing import Any

from lockstep.errors import LockstepError
from lockstep.models.config_reader import ConfigReader
from lockstep.models.gguf.file import GGUFModel
from lockstep.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from lockstep.models.ignored_settings import is_off

PREFIX = "tokenizer."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens, as tokenizer.ggml.token_type numbers them."""
PADDING = re.compile(r"\[PAD\d+\]")
"""Names that converters give to rows of the embedding without a token."""
SPACE = "\u2581"
"""Character that SentencePiece writes for a blank."""
END_TEXTS = (
    "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>",
)  # fmt: skip
"""Control tokens that end an answer in llama.cpp whichever the metadata names."""

ROLES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",  # spelled so in the format
    "cls_token": "cls",
    "mask_token": "mask",
}
"""Role of a special token -> its name in the metadata."""
ENDS = ("eos", "eot", "eom")
"""Roles of tokens that end an answer."""
OTHER_ROLES = ("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep", "prefix", "suffix",
               "middle")  # fmt: skip
"""Roles that no API here uses."""
SAMPLING = "general.sampling."
SAMPLING_NAMES = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
"""Defaults of sampling whose names differ from generation_config.json's."""


class TextFiles:
    """Tokenizer files of a GGUF file. files(): name of each file -> its object."""

    def __init__(self, model: GGUFModel) -> None:
        entries = {
            key.removeprefix(PREFIX): value
            for key, value in model.metadata.items()
            if key.startswith(PREFIX)
        }
        self.metadata = model.metadata
        self.c = ConfigReader(entries, PREFIX, model.path.name)
        self.tokens = self._texts("ggml.tokens")
        self.types = self._types()
        self.ids = {token: number for number, token in enumerate(self.tokens)}
        self.roles = {name: self._role(name) for name in (*ROLES.values(), *ENDS, *OTHER_ROLES)}

    def files(self) -> dict[str, dict[str, Any]]:
        """Return the files. Raises CheckpointError for damaged or unsupported metadata."""
        contents = {
            "tokenizer.json": self._tokenizer(),
            "tokenizer_config.json": self._tokenizer_config(),
            "generation_config.json": self._generation_config(),
        }
        self._refuse_unread()
        return contents

    def error(self, name: str, value: object, allowed: str, remedy: str = "") -> LockstepError:
        """Return the CheckpointError of an entry."""
        return self.c.error(name, value, allowed, remedy or "Serve the model's safetensors.")

    def _texts(self, name: str) -> tuple[str, ...]:
        value = self.c.raw.get(name)
        if not isinstance(value, tuple) or not value or not isinstance(value[0], str):
            raise self.error(name, value, "a list of texts")
        return value

    def _types(self) -> tuple[int, ...]:
        """Return the type of each token; all are normal where the file does not say."""
        value = self.c.raw.get("ggml.token_type")
        if value is None:
            return (NORMAL,) * len(self.tokens)
        sound = isinstance(value, tuple) and all(type(kind) is int for kind in value)
        if not sound or len(value) != len(self.tokens):
            raise self.error("ggml.token_type", value, f"{len(self.tokens)} whole numbers")
        return value

    def _role(self, name: str) -> int | None:
        """Return the token of a role."""
        field = f"ggml.{name}_token_id"
        number = self.c.get(field, int, -1)
        if number < 0:
            return None
        self.c.need(number < len(self.tokens), field, f"0 to {len(self.tokens) - 1}")
        return number

    def _tokenizer(self) -> dict[str, Any]:
        """Return tokenizer.json."""
        builders = {"gpt2": self._byte_level, "llama": self._sentencepiece}
        kind = self.c.raw.get("ggml.model")
        if kind not in builders:
            raise self.error("ggml.model", kind, ", ".join(builders))
        normalizer, splitter, model, decoder, bos = builders[kind]()
        return {
            "version": "1.0",
            "added_tokens": list(self._added()),
            "normalizer": normalizer,
            "pre_tokenizer": splitter,
            "post_processor": self._template(bos),
            "decoder": decoder,
            "model": {"type": "BPE", "dropout": None, "end_of_word_suffix": None, **model},
        }

    def _added(self) -> Iterator[dict[str, Any]]:
        """Yield the tokens that are found in a text before it is split."""
        for number, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if token and kind in (CONTROL, USER_DEFINED):
                flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
                special = kind == CONTROL
                yield {"id": number, "content": token, **flags, "special": special}

    def _byte_level(self) -> tuple[Any, ...]:
        """Return the parts of a byte-level BPE."""
        pre = self.c.raw.get("ggml.pre")
        if pre not in PRE_TOKENIZERS:
            remedy = "Convert the model again, or serve its safetensors."
            raise self.error("ggml.pre", pre, ", ".join(PRE_TOKENIZERS), remedy)
        self.c.one_of("ggml.add_space_prefix", False, default=False)
        pre_tokenizer = PRE_TOKENIZERS[pre]
        splits = [
            {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            }
            for pattern in pre_tokenizer.patterns
        ]
        bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        splitter = {"type": "Sequence", "pretokenizers": [*splits, {**bytes_, "use_regex": False}]}
        model = {
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre_tokenizer.ignore_merges,
            "vocab": self._vocabulary(),
            "merges": self._merges(),
        }
        normalizer = {"type": "NFC"} if pre_tokenizer.nfc else None
        return normalizer, splitter, model, {**bytes_, "use_regex": True}, pre_tokenizer.bos

    def _vocabulary(self) -> dict[str, int]:
        """Return the id of each token, rows without a token left out."""
        vocabulary = {}
        for number, token in enumerate(self.tokens):
            # Converters fill the vocabulary up to the rows of a padded embedding.
            if self.types[number] == UNUSED and PADDING.fullmatch(token):
                continue
            if self.ids[token] != number:
                raise self.error("ggml.tokens", token, "each token once")
            vocabulary[token] = number
        return vocabulary

    def _merges(self) -> list[list[str]]:
        merges = [merge.split(" ") for merge in self._texts("ggml.merges")]
        for pair in merges:
            if len(pair) != 2 or not all(
                self.ids.get(t) is not None for t in (*pair, "".join(pair))
            ):
                raise self.error("ggml.merges", " ".join(pair), "pairs of tokens that make a token")
        return merges

    def _sentencepiece(self) -> tuple[Any, ...]:
        """Return the parts of a BPE over scores."""
        for name in ("ggml.remove_extra_whitespaces", "ggml.escape_whitespaces"):
            self.c.raw.get(name)
        prefix = self.c.get("ggml.add_space_prefix", bool, True)
        unknown = self.roles["unknown"]
        model = {
            "unk_token": None if unknown is None else self.tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": self._vocabulary(),
            "merges": self._merges() if "ggml.merges" in self.c.raw else self._scored_merges(),
        }
        blanks = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        steps = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
        first = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
        decoder = [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *first,
        ]
        return (
            {"type": "Sequence", "normalizers": [*steps, blanks]},
            None,
            model,
            {"type": "Sequence", "decoders": decoder},
            True,
        )

    def _scored_merges(self) -> list[list[str]]:
        """Return all pairs of tokens that make a token, the highest score of that first."""
        scores = self.c.raw.get("ggml.scores")
        sound = isinstance(scores, tuple) and all(type(score) is float for score in scores)
        if not sound or len(scores) != len(self.tokens):
            raise self.error("ggml.scores", scores, f"{len(self.tokens)} numbers")
        # SentencePiece merges the pair whose result has the highest score; equal ones by lower id.
        ranked = sorted(range(len(self.tokens)), key=lambda number: -scores[number])
        return [
            pair
            for number in ranked
            if self.types[number] == NORMAL
            for pair in self._pairs(self.tokens[number])
        ]

    def _pairs(self, token: str) -> list[list[str]]:
        """Return the pairs of tokens that make a token, those of lower ids first."""
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [pair for pair in cuts if pair[0] in self.ids and pair[1] in self.ids]
        return [
            list(pair) for pair in sorted(pairs, key=lambda p: (self.ids[p[0]], self.ids[p[1]]))
        ]

    def _template(self, bos: bool) -> dict[str, Any] | None:
        """Return the special tokens around a text. bos: whether BOS begins one by default."""
        begin = self._edge("bos", self.c.get("ggml.add_bos_token", bool, bos))
        end = self._edge("eos", self.c.get("ggml.add_eos_token", bool, False))
        self.c.one_of("ggml.add_sep_token", False, default=False)
        if not begin and not end:
            return None
        special = {
            token: {"id": token, "ids": [self.ids[token]], "tokens": [token]}
            for token in (*begin, *end)
        }
        marks = [
            [{"SpecialToken": {"id": token, "type_id": 0}} for token in e] for e in (begin, end)
        ]
        texts = [{"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B")]
        single = [*marks[0], texts[0], *marks[1]]
        pair = [*single, *marks[0], texts[1], *marks[1]]
        return {
            "type": "TemplateProcessing",
            "single": single,
            "pair": pair,
            "special_tokens": special,
        }

    def _edge(self, role: str, wanted: bool) -> list[str]:
        """Return the token of a role as a list, empty where it is not wanted or absent."""
        number = self.roles[role]
        return [self.tokens[number]] if wanted and number is not None else []

    def _tokenizer_config(self) -> dict[str, Any]:
        """Return tokenizer_config.json."""
        numbers = {role: self.roles[name] for role, name in ROLES.items()}
        special = {role: self.tokens[n] for role, n in numbers.items() if n is not None}
        templates = self._templates()
        return {**special, **({"chat_template": templates} if templates else {})}

    def _templates(self) -> Any:
        """Return the chat template, or a list of them with their names."""
        default = self.c.raw.get("chat_template")
        names = self._texts("chat_templates") if "chat_templates" in self.c.raw else ()
        named = [{"name": n, "template": self.c.raw.get(f"chat_template.{n}")} for n in names]
        if not named:
            return default
        first = [] if default is None else [{"name": "default", "template": default}]
        return [*first, *named]

    def _generation_config(self) -> dict[str, Any]:
        """Return generation_config.json."""
        metadata = self.metadata
        sampling = {
            SAMPLING_NAMES.get(name, name): metadata[SAMPLING + name]
            for name in (k.removeprefix(SAMPLING) for k in metadata if k.startswith(SAMPLING))
        }
        named = {self.roles[role] for role in ENDS} - {None}
        known = (self.ids[text] for text in END_TEXTS if text in self.ids)
        ends = named | {number for number in known if self.types[number] == CONTROL}
        return {**sampling, **({"eos_token_id": sorted(ends)} if ends else {})}

    def _refuse_unread(self) -> None:
        """Raise CheckpointError for an entry that no code has read and that may change tokens."""
        ignored = ("ggml.token_type_count", "ggml.scores", "huggingface.json", "ggml.pre")
        for name, value in self.c.raw.items():
            if (
                name not in self.c.raw.names_read
                and name not in ignored
                and not is_off(name, value)
            ):
                raise self.error(name[:100], value, "entries that the tokenizer is built for")


def text_files(model: GGUFModel) -> dict[str, dict[str, Any]]:
    """Return the files of the text side, {} where the file has no tokenizer.

    Raises CheckpointError for metadata that is damaged or not supported.
    """
    if not any(key.startswith(PREFIX) for key in model.metadata):
        return {}
    return TextFiles(model).files()
