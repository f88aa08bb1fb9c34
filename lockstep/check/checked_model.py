"""Model of a check at the user's settings, with the engines and plain runs that all parts share."""

from functools import cached_property
from typing import Any

import torch

from lockstep.check.collector import Collector
from lockstep.check.companions import Companions
from lockstep.check.drafters import NO_DRAFTER, drafters_of, requested_drafter, settings_with
from lockstep.check.engines import CheckEngine, Processors, build, build_plain
from lockstep.check.judges.plain_runs import SERVED, PlainRuns
from lockstep.check.random_adapters import RandomAdapters
from lockstep.check.report.report import Report
from lockstep.check.scenarios.examiner import Examiner
from lockstep.check.scenarios.scenario import Kind
from lockstep.config import GRAPH_MODES, EngineConfig
from lockstep.doctor.system import GIB, free_memory
from lockstep.engine_args import resolve_auto_drafter
from lockstep.models.checkpoint import Checkpoint
from lockstep.progress import Progress
from lockstep.spec.config import AUTO
from lockstep.worker.build import find_model, pick_device
from lockstep.worker.executor import worker_of
from lockstep.worker.hooks import CheckHooks
from lockstep.worker.rank_pool import RankPool


class CheckedModel:
    """Model with the user's settings. Its engines are built when a part needs them.

    rows: the user's max_num_seqs, None for the engine's own. settings: the others, for all engines.
    config: settings of a server. graphs: graph modes of the device, the default first. rank_pool:
    of processes that are ranks of one engine after the other. collector: frees engines of ended
    parts. Raises ConfigError or CheckpointError.
    """

    def __init__(
        self, name: str | None, settings: dict[str, Any], report: Report, progress: Progress
    ) -> None:
        self.name = name
        self.report = report
        self.progress = progress
        defaults = {"speculative_config": AUTO, "hf_overrides": None}
        served = resolve_auto_drafter({**defaults, **settings, "model": name}, weights=False)
        self.config = EngineConfig.read(**served)
        self.device = pick_device(self.config)
        self.graphs: tuple[str, ...] = GRAPH_MODES if self.device == "cuda" else ("none",)
        self.settings = dict(settings)
        self.rows: int | None = self.settings.pop("max_num_seqs", None)
        if self.settings.get("speculative_config") == AUTO:
            # A check includes every drafter that the checkpoint supports, so auto adds none.
            self.settings["speculative_config"] = None
        self.rank_pool = RankPool()
        self.collector = Collector()
        self.companions = Companions(find_model(None), self.settings, self.rank_pool)
        self.processors: Processors = {}

    @property
    def is_bundled(self) -> bool:
        """Return whether it is the bundled model."""
        return self.name is None

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """Checkpoint of the model."""
        return Checkpoint.read(find_model(self.name), self.config.hf_overrides)

    @cached_property
    def drafting(self) -> dict[str, Any] | None:
        """The user's speculative_config with its method, or None."""
        return requested_drafter(self.settings)

    @cached_property
    def drafters(self) -> tuple[str, ...]:
        """Drafters that the checkpoint supports; the report gets the reasons against the others."""
        drafters, refused = drafters_of(self.checkpoint, self.drafting)
        if self.report.coverage is not None:
            self.report.coverage.refused_drafters = refused
        return drafters

    @cached_property
    def plain(self) -> CheckEngine:
        """Engine of the plain runs."""
        self.progress("building the plain engine", 0, 0)
        plain = build_plain(self.name, self.settings, self.processors)
        self.report.numerics = plain.engine.numerics
        if self.report.coverage is not None:
            self.report.coverage.record_engine(plain.engine, NO_DRAFTER)
        return plain

    @cached_property
    def adapters(self) -> RandomAdapters:
        """Adapters of the scenarios."""
        return RandomAdapters(worker_of(self.plain.engine).model)

    @cached_property
    def runs(self) -> PlainRuns:
        """Plain runs, of an engine with adapters too that is built when needed."""
        return PlainRuns(
            self.plain,
            lambda: build_plain(
                self.name, {**self.settings, **self.adapters.settings()}, self.processors
            ),
            companion=self.companions.plain,
        )

    def examiner(self) -> Examiner:
        """Return an examiner of scenarios, which keeps its last engine."""
        return Examiner(self.runs, self.build, self.collector)

    def build(self, kind: Kind) -> CheckEngine:
        """Build an engine of this model or of a companion. Raises what LLM raises."""
        if kind.model != SERVED:
            named = (kind.model, kind.numerics)
            engine = self.companions.build(*named, kind.settings(), kind.hooks(), kind.adapters)
        else:
            settings = settings_with(kind.settings(), self.settings)
            settings |= self.adapters.settings() if kind.adapters else {}
            engine = self.build_served(settings, kind.hooks())
        if self.report.coverage is not None:
            self.report.coverage.record_engine(engine.engine, kind.drafter)
        return engine

    def build_served(self, settings: dict[str, Any], hooks: CheckHooks) -> CheckEngine:
        """Build an engine of this model with all of its settings. Raises what LLM raises."""
        return build(self.name, settings, hooks, self.processors, self.rank_pool)

    @cached_property
    def _engine_bytes(self) -> int:
        """Memory of the plain engine, which a part measures before others are built next to it."""
        model = worker_of(self.plain.engine).model
        if self.device == "cuda":
            return torch.cuda.memory_allocated()
        return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))

    def _free_bytes(self) -> int | None:
        """Return the memory that another engine can take; None where the system does not say."""
        if self.device != "cuda":
            return free_memory()
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + unused

    def why_no_second_engine(self) -> str | None:
        """Return why an engine does not fit into memory next to the plain one; None if it does.

        Raises CapacityError if not even the plain one fits.
        """
        needed = self._engine_bytes // self.config.tensor_parallel_size
        free = self._free_bytes()
        if free is None or needed <= free:
            return None
        return (
            f"a second engine of the model needs {needed / GIB:.1f} GiB, and {free / GIB:.1f} GiB "
            f"of {'GPU ' if self.device == 'cuda' else ''}memory are free"
        )
