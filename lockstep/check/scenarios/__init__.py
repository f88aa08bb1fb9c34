"""Random scenarios: generate them, run them, compare their outputs and shrink a failing one."""
