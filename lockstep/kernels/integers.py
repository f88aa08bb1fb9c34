"""Integer arithmetic of launchers.

triton.cdiv and triton.next_power_of_2 give the same numbers. Kernels can call those too, so they
take 4 to 8 us of the host each, and a prompt's step has some thousands of calls.
"""


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up. b is positive."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is n or more, from 1 on."""
    return 1 << max(n - 1, 0).bit_length()
