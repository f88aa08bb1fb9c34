"""Faults put into a copy of Lockstep, one at a time: each must be found by `lockstep check`."""
