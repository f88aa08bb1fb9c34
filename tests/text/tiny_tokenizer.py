"""A tiny model folder: a byte-level BPE tokenizer trained at once, and its config files."""

import json
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Fast

TEMPLATE = """{%- if tools %}<|im_start|>system
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
<tool_call>
<function=name>
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'critic' %}{{ raise_exception('no critics') }}{% endif -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function.arguments.items() | list | length }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking %}<think>
{% else %}<think>

</think>

{% endif %}{% endif %}"""

TEXTS = ["the quick brown fox jumps over the lazy dog", "naïve café", "def main():\n    return 0"]


def make_folder(folder: Path) -> Path:
    """Write tokenizer.json and the config files into the folder."""
    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    fast.train_from_iterator(TEXTS * 3, trainer)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    plain = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    fast.add_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    fast.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    fast.save(str(folder / "tokenizer.json"))
    ids = {token: fast.token_to_id(token) for token in special}
    files = {
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "chat_template": TEMPLATE},
        "config.json": {"text_config": {"eos_token_id": ids["<|endoftext|>"]}},
        "generation_config.json": {"eos_token_id": [ids["<|im_end|>"]], "temperature": 0.5},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder
