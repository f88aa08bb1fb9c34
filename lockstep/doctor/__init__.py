"""Examination of a machine: its kernels, each in a process of its own, and its system."""
