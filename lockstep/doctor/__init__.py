"""Examination of a machine: its kernels, each in a separate process, and its system."""
