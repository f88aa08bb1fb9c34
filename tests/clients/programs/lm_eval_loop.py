"""lm-eval: log-likelihoods and generation of a local task, with the server's own tokenizer."""

import json
import sys
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

URL = sys.argv[1]
ROWS = [
    {"question": "List the first 3 primes.", "choices": ["2, 3, 5", "blue", "Rome"], "answer": 0},
    {"question": "What is 2 + 2?", "choices": ["4", "apple tree", "seventeen"], "answer": 0},
]
CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: choices
metric_list: [{{metric: acc}}]
"""
GENERATE = """
task: local_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 24, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""

with tempfile.TemporaryDirectory() as folder:
    data = Path(folder, "rows.jsonl")
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, text in (("choice", CHOICE), ("generate", GENERATE)):
        Path(folder, f"{name}.yaml").write_text(text.format(data=data))
    arguments = {
        "model": "lockstep",
        "base_url": f"{URL}/v1/completions",
        "tokenizer_backend": "remote",
        "num_concurrent": 2,
        "max_retries": 1,
        "max_length": 1024,
    }
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=["local_choice", "local_generate"],
        task_manager=TaskManager(include_path=folder, include_defaults=False),
        bootstrap_iters=0,
    )
    scores = results["results"]
    assert 0 <= scores["local_choice"]["acc,none"] <= 1, scores
    assert "exact_match,none" in scores["local_generate"], scores
    for sample in results["samples"]["local_choice"]:
        likelihoods = [answer[0][0] for answer in sample["resps"]]
        assert all(value < 0 for value in likelihoods), sample
