"""CPU kernels compiled by Numba: a 16-lane vector type, elementwise functions and threads.

Every function has one fixed order of operations and no fast-math, so its bits depend neither on the
number of rows nor on the width of the CPU's registers.
"""
