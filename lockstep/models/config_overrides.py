"""Replacement of settings of config.json (hf_overrides).

An override reaches a setting wherever the file has it: at the top level or in text_config, and
rotary settings in rope_parameters (the newer style), rope_scaling or next to it (the older one).
"""

from collections.abc import Mapping
from typing import Any

TEXT_CONFIG = "text_config"
NOT_OF_TEXT = ("model_type", "architectures", TEXT_CONFIG)
"""Settings that describe the file at the top level; text_config has its own."""
ROPE_OBJECTS = ("rope_scaling", "rope_parameters")
ROPE_OUTSIDE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
"""Rotary settings that older files have outside rope_scaling."""
UNSCALED = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Rotary settings that remain if an override removes the scaling."""
FULL_ATTENTION = "full_attention"
"""Key of rope_parameters that are given per layer type."""


def overridden(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json's settings with changes; an object changes the keys that it names."""
    result = _level(settings, changes)
    inner = settings.get(TEXT_CONFIG)
    if isinstance(inner, dict):
        reaching = {
            name: value
            for name, value in changes.items()
            if name not in NOT_OF_TEXT and (name in inner or name in ROPE_OBJECTS + ROPE_OUTSIDE)
        }
        named = changes.get(TEXT_CONFIG)
        inner = _level(inner, reaching)
        result[TEXT_CONFIG] = _level(inner, named) if isinstance(named, Mapping) else inner
        if named is not None and not isinstance(named, Mapping):
            result[TEXT_CONFIG] = named
    return result


def _level(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return one object with changes, its rotary settings in rope_parameters where they change."""
    merged = _merged(settings, {n: v for n, v in changes.items() if n not in ROPE_OBJECTS})
    touched = [name for name in ROPE_OBJECTS if name in changes]
    outside = [name for name in ROPE_OUTSIDE if name in changes]
    if not touched and not (outside and isinstance(settings.get("rope_parameters"), dict)):
        return merged
    wrong = [name for name in touched if not isinstance(changes[name], Mapping | None)]
    if wrong:  # read_rope refuses it by its name
        return merged | {name: changes[name] for name in wrong}
    rope: dict[str, Any] = {}
    for name in ROPE_OBJECTS:
        base = settings.get(name)
        rope |= _one_name(base) if isinstance(base, dict) else {}
    nested = isinstance(rope.get(FULL_ATTENTION), dict)
    flat = rope[FULL_ATTENTION] if nested else rope
    if any(changes[name] is None for name in touched):
        flat = {name: value for name, value in flat.items() if name in UNSCALED}
    for name in touched:
        change = _one_name(changes[name] or {})
        flat = _merged(flat, change.get(FULL_ATTENTION, change))
    flat = flat | {name: changes[name] for name in outside}
    for name in ROPE_OUTSIDE:
        if name in flat:
            merged.pop(name, None)
    merged.pop("rope_scaling", None)
    merged["rope_parameters"] = {**rope, FULL_ATTENTION: flat} if nested else flat
    return merged


def _one_name(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary settings with `type`, the older name, as rope_type."""
    renamed = {"rope_type" if name == "type" else name: value for name, value in rope.items()}
    return {**renamed, "rope_type": rope["rope_type"]} if "rope_type" in rope else renamed


def _merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object with changes, nested objects key by key."""
    merged = dict(settings)
    for name, value in changes.items():
        inner = merged.get(name)
        nested = isinstance(inner, dict) and isinstance(value, Mapping)
        merged[name] = _merged(inner, value) if nested else value
    return merged
