"""Small models of several families: a tokenizer trained at once, and a template in its style."""

import json
from dataclasses import dataclass

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Fast

TEXTS = [
    "the quick brown fox jumps over the lazy dog, and the system asks the user for a tool",
    "<|im_end|> [INST] </s> <tool_call> naïve café {'name': 0}\n\n\tif a < b: return c[1]",
]

QWEN3 = """{%- if tools %}<|im_start|>system
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
<tool_call>
{"name": <function-name>}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set ns = namespace(last=messages | length - 1, search=true) %}
{%- for message in messages[::-1] %}
{%- set index = messages | length - 1 - loop.index0 %}
{%- if ns.search and message.role == 'user' and not (message.content.startswith('<tool_response>')
   and message.content.endswith('</tool_response>')) %}
{%- set ns.search = false %}{% set ns.last = index %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content %}{% set reasoning = message.reasoning_content or '' %}
{%- if not reasoning and '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last %}
{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
{{- content.lstrip('\\n') }}
{%- for call in message.tool_calls or [] %}{{- '\\n<tool_call>\\n{"name": "' + call.function.name
   + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content
   + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\nTools:\\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=4, ensure_ascii=true) + '\\n\\n' }}{% endfor %}
{{- '<|eot_id|>' }}{% endif %}
{%- for message in messages %}
{%- set role = 'ipython' if message.role == 'tool' else message.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
{%- if message.reasoning_content %}{{- message.reasoning_content }}{% endif %}
{%- for call in message.tool_calls or [] %}{{- '<|python_tag|>' ~ call.function.name ~ '('
   ~ call.function.arguments ~ ')' }}{% endfor %}
{{- message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

MISTRAL = """{{- bos_token }}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'assistant' %}
{%- for call in message.tool_calls or [] %}{{- '[TOOL_CALLS][' + (call.function | tojson) + ']' }}
{%- endfor %}{{- (message.reasoning_content or '') + ' ' + message.content + eos_token }}
{%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- else %}{{- message.content + '\\n' }}{% endif %}{% endfor %}"""

NEMOTRON = """{%- for message in messages %}
{%- if loop.first and tools %}{{- '<SPECIAL_10>System\\n<AVAILABLE_TOOLS>' }}
{%- for tool in tools %}{{- '<tool>' ~ (tool.function or tool) | tojson ~ '</tool>' }}{% endfor %}
{{- '</AVAILABLE_TOOLS>\\n' }}{% endif %}
{{- '<SPECIAL_11>' ~ message.role | capitalize ~ '\\n' }}
{%- if message.role == 'assistant' %}
{{- '<think>' ~ (message.reasoning_content or '') ~ '</think>' }}
{%- endif %}{{- message.content | trim ~ '\\n' }}
{%- if message.tool_calls %}{{- '<TOOLCALL>' ~ message.tool_calls ~ '</TOOLCALL>\\n' }}{% endif %}
{{- '<SPECIAL_12>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<SPECIAL_11>Assistant\\n<think>\\n' }}{% endif %}"""


@dataclass(frozen=True)
class Family:
    """A template, and properties of its tokenizer. space: the SentencePiece kind, and its prepend
    scheme."""

    template: str
    special: tuple[str, ...]
    plain: tuple[str, ...] = ()
    space: str | None = None
    normalizer: normalizers.Normalizer | None = None
    flags: tuple[str, ...] = ()

    def tokenizer(self) -> Fast:
        """Return a tokenizer with a few hundred tokens; every byte has one."""
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        fast = Fast(models.BPE(byte_fallback=self.space is not None, fuse_unk=True))
        if self.space is None:
            fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            fast.decoder = decoders.ByteLevel()
            first = pre_tokenizers.ByteLevel.alphabet()
        else:
            fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=self.space, split=False)
            steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            fast.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
            first = ["▁"]
        trainer = trainers.BpeTrainer(
            vocab_size=400 + len(first),
            initial_alphabet=first,
            special_tokens=bytes_ if self.space else [],
            show_progress=False,
        )
        fast.train_from_iterator(TEXTS * 3, trainer)
        if self.space:  # bytes are tokens of the vocabulary, and none of them is an added one
            fast = _without_added(fast)
        if self.normalizer is not None:
            fast.normalizer = self.normalizer
        for names, special in ((self.special, True), (self.plain, False)):
            flags = dict.fromkeys(self.flags, True)
            fast.add_tokens(
                [AddedToken(n, special=special, **{"normalized": False} | flags) for n in names]
            )
        return fast


def _without_added(fast: Fast) -> Fast:
    state = json.loads(fast.to_str())
    state["added_tokens"] = []
    return Fast.from_str(json.dumps(state))


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>")
_TAGS += ("</tool_response>",)
_LLAMA = ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
_LLAMA += ("<|python_tag|>",)
_MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]")
_MISTRAL += ("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
_NEMOTRON = ("<unk>", "<s>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<think>", "</think>")

FAMILIES = {
    "qwen3": Family(QWEN3, _CHATML, (*_TAGS, "\n\n"), normalizer=normalizers.NFC()),
    "llama3": Family(LLAMA3, _LLAMA),
    "mistral": Family(MISTRAL, _MISTRAL, space="first"),
    "mistral, always": Family(MISTRAL, _MISTRAL, space="always"),
    "mistral, stripping": Family(MISTRAL, _MISTRAL, flags=("rstrip", "lstrip")),
    "nemotron": Family(NEMOTRON, _NEMOTRON, ("<TOOLCALL>", "</TOOLCALL>")),
    "llama, normalized": Family(
        LLAMA3, _LLAMA, normalizer=normalizers.NFKC(), flags=("normalized",)
    ),
    "one character": Family(LLAMA3.replace("<|eot_id|>", "☺"), (*_LLAMA, "☺", "halt")),
}
