"""Triton's interpreter on machines without a GPU, as in tests/conftest.py."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any test imports Triton, which reads it then
