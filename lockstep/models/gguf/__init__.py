"""GGUF files: metadata, tensors, and their translation to a checkpoint folder.

file.py       the bytes: metadata and the table of tensors
config.py     metadata -> config.json
tokenizer.py  metadata -> tokenizer.json, tokenizer_config.json, generation_config.json
tensors.py    tensors of the file -> tensors by their names in safetensors
folder.py     the folder of these files, and the weights next to them
"""
