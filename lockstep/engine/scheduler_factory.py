"""Scheduler and cache of a plan."""

from typing import Any

from lockstep.cache.cache import Cache, CacheConfig
from lockstep.config import Plan
from lockstep.scheduling.scheduler import Scheduler


def cache_config(plan: Plan, enable_prefix_caching: bool) -> CacheConfig:
    """Return the cache configuration of a plan."""
    return CacheConfig(
        num_pages=plan.num_pages,
        page_size=plan.page_size,
        num_state_slots=plan.num_slots,
        snapshot_every=plan.snapshot_every,
        max_num_seqs=plan.max_num_seqs,
        enable_prefix_caching=enable_prefix_caching,
        host_pages=plan.host_pages,
        slot_host_pages=plan.slot_host_pages,
    )


def make_scheduler(
    plan: Plan, cache: CacheConfig, scheduler: type[Scheduler] = Scheduler, **options: Any
) -> Scheduler:
    """Return a scheduler of a plan with an empty cache.

    options: arguments of the scheduler, in addition to the plan's or instead of them.
    """
    arguments: dict[str, Any] = {
        "max_num_seqs": plan.max_num_seqs,
        "max_num_batched_tokens": plan.max_num_batched_tokens,
        "max_model_len": plan.max_model_len,
        "query_len": plan.query_len,
        "row_buckets": plan.row_buckets,
        "drafts_in_pages": plan.draft_vocab_size > 0,
        "adapters": plan.adapters,
        "forced_budget": plan.max_decided,
    }
    return scheduler(Cache(cache), **{**arguments, **options})
