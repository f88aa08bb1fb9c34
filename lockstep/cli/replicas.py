"""Start of several replicas for lockstep serve."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lockstep.cli.show import note, show_start
from lockstep.errors import ConfigError, install_extra
from lockstep.progress import progress_bar
from lockstep.serve.settings import ServerSettings

if TYPE_CHECKING:
    from lockstep.config import EngineConfig
    from lockstep.engine.kv_publisher import KVEventPublisher
    from lockstep.replicas.ray_fleet import FleetSettings
    from lockstep.replicas.transport import ReplicaTransport
    from lockstep.text.processor import Processor
    from lockstep.worker.executor import Facts


def has_replicas(server: ServerSettings) -> bool:
    """Return whether the server's engines are replicas on Ray. Raises ConfigError."""
    minimum, maximum = replica_range(server)
    if maximum == 1 and server.ray_address is None:
        return False
    if server.disable_frontend_multiprocessing:
        raise ConfigError(
            f"disable_frontend_multiprocessing=True is not allowed with replicas={minimum}, each "
            "of which is a process; allowed: with one replica. Leave one of them out."
        )
    return True


def replica_range(server: ServerSettings) -> tuple[int, int]:
    """Return the minimum and the maximum number of replicas.

    Raises ConfigError where the settings contradict each other.
    """
    minimum = server.min_replicas or min(server.replicas, server.max_replicas or server.replicas)
    maximum = server.max_replicas or max(server.replicas, minimum)
    is_outside = server.replicas != 1 and not minimum <= server.replicas <= maximum
    if is_outside or minimum > maximum:
        raise ConfigError(
            f"min_replicas={minimum} replicas={server.replicas} max_replicas={maximum} is not "
            "allowed; allowed: numbers that do not fall in this order. Correct --min-replicas, "
            "--replicas or --max-replicas."
        )
    return minimum, maximum


def load_replicas(
    settings: dict[str, Any], server: ServerSettings, publishers: "Sequence[KVEventPublisher]" = ()
) -> "tuple[ReplicaTransport, Processor, Facts, Any]":
    """Start the replicas, and load the tokenizer here. Raises ConfigError without Ray.

    publishers: publish the events of cached blocks, one for each replica.
    """
    from lockstep.engine_args import EngineArgs
    from lockstep.llm import processor_of
    from lockstep.replicas.transport import ReplicaTransport
    from lockstep.serve.engine_factory import engine_factory

    try:
        from lockstep.replicas.ray_fleet import RayFleet
    except ImportError as error:
        if not (error.name or "").startswith("ray"):
            raise
        raise ConfigError(
            f"replicas={server.replicas} needs Ray Serve, which is not installed; allowed without "
            f"it: 1. Install it: {install_extra('ray')}."
        ) from None
    config, text = EngineArgs(**settings).read()
    make_engine = partial(engine_factory, config, text, server.log_format)
    fleet = RayFleet(make_engine, fleet_settings(server, config))
    with progress_bar() as show:
        fleet.start_application(show)
    try:
        facts, rates, numerics = fleet.facts()
        show_start(facts)
        minimum, maximum = replica_range(server)
        count = f"{minimum}" if minimum == maximum else f"{minimum} to {maximum}"
        note(f"{count} replicas in the Ray Serve application {fleet.name}")
        processor = processor_of(facts, text)
    except BaseException:
        fleet.stop()
        raise
    transport = ReplicaTransport(fleet, numerics, server.allow_other_numerics, publishers)
    return transport, processor, facts, rates


def fleet_settings(server: ServerSettings, config: "EngineConfig") -> "FleetSettings":
    """Return the settings of the replicas. Raises ConfigError."""
    from lockstep.replicas.ray_fleet import FleetSettings
    from lockstep.worker.build import pick_device

    if config.nnodes > 1:
        raise ConfigError(
            f"nnodes={config.nnodes} is not allowed with replicas; allowed: 1, since the ranks of "
            "a replica share a node. Leave --nnodes out, or start one server."
        )
    minimum, maximum = replica_range(server)
    target = server.target_ongoing_requests or config.max_num_seqs
    if minimum < maximum and target is None:
        raise ConfigError(
            f"target_ongoing_requests=None is not allowed with min_replicas={minimum} and "
            f"max_replicas={maximum} unless max_num_seqs is set; allowed: 0.1 to 1,000,000. Set "
            "--target-ongoing-requests or --max-num-seqs."
        )
    # On a cluster, this node may have no GPU while the others do.
    is_cpu = config.device == "cpu" or (server.ray_address is None and pick_device(config) == "cpu")
    return FleetSettings(
        min_replicas=minimum,
        max_replicas=maximum,
        initial_replicas=max(server.replicas, minimum),
        target_requests=target or 0,
        num_gpus=0 if is_cpu else config.tensor_parallel_size,
        address=server.ray_address,
        step_seconds=server.step_timeout,
        drain_seconds=server.shutdown_timeout,
        downscale_seconds=server.downscale_delay,
    )
