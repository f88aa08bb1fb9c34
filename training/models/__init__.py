"""Trained model families in plain PyTorch."""
