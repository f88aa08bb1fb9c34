"""Faults put into a copy of Lockstep, one at a time: each must be found, by `lockstep check`
or, where the bundled model does not reach it, by a test."""
