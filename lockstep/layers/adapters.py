"""Adapters that the linear layers of a model make room for."""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class AdapterTable:
    """Adapters of an engine, numbered from 1; number 0 is the base model.

    modules: names of the checkpoint's modules that each adapter changes. rank: the largest rank.
    """

    modules: tuple[frozenset[str], ...] = ()
    rank: int = 0

    def module_name(self, adapter: int, names: Collection[str]) -> str | None:
        """Return which of a module's names the adapter changes; None if it changes none."""
        return next((name for name in names if name in self.modules[adapter - 1]), None)

    def changes_module(self, names: Collection[str]) -> bool:
        """Return whether any adapter changes the module with these names."""
        return any(not modules.isdisjoint(names) for modules in self.modules)


NO_ADAPTERS = AdapterTable()
"""Table of an engine without adapters, and of every draft module."""
