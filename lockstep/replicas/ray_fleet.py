"""Replicas as an application of Ray Serve. No other module imports ray, an optional package."""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, TaskCancelledError
from ray.serve.config import AutoscalingConfig, ProxyLocation, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from ray.serve.schema import ApplicationStatus, LoggingConfig

from lockstep.engine.engine_process import MakeEngine
from lockstep.engine.process_transport import ProcessTransport, ShowProgress
from lockstep.errors import CapacityError, ConfigError, EngineDeadError
from lockstep.replicas.host import ReplicaHost
from lockstep.replicas.messages import Call, Hello, OtherNumerics, Query, ReplicaReport
from lockstep.replicas.router import ReplicaRouter
from lockstep.replicas.transport import ReplicaLostError
from lockstep.worker.agreement import model_digest

log = logging.getLogger("lockstep.replicas")

DEPLOYMENT = "Engine"
NAMESPACE = "lockstep"
OBJECT_STORE_BYTES = 100 << 20
"""Size of the object store of a local Ray: requests and updates do not go through it."""
CONNECT_SECONDS = 5.0
"""Time that a connection to a cluster may take."""
POLL_SECONDS = 0.25
"""Polling interval of the replicas' state during the startup."""
HEALTH_SECONDS = 2.0
"""Interval of Ray Serve's health checks: it replaces a dead replica no sooner."""
STUCK_SECONDS = 60.0
"""Time that a health check may take; a replica's interpreter may be busy for seconds."""
UPSCALE_SECONDS = 3.0
"""Time of more load than the target before a replica is added."""
DOWNSCALE_SECONDS = 60.0
"""Time of less load than the target before a replica is drained."""
UNLIMITED_CALLS = 1 << 20
"""Maximum calls on a replica. Its scheduler queues requests; the server limits how many wait."""
QUIET_LOGS = LoggingConfig(log_level="WARNING", enable_access_log=False)
"""Logs of Ray Serve: the server has its own access log."""


@dataclass(frozen=True)
class FleetSettings:
    """Settings of replicas.

    min_replicas, max_replicas: they differ with autoscaling, which begins with initial_replicas and
    aims at target_requests open requests per replica. num_gpus: of one replica. address: of a
    cluster; None starts Ray on this machine. step_seconds: see ProcessTransport. drain_seconds:
    time for a replica to end. downscale_seconds: time of low load before a replica is removed.
    """

    min_replicas: int
    max_replicas: int
    initial_replicas: int
    target_requests: float
    num_gpus: int
    address: str | None
    step_seconds: float
    drain_seconds: float
    downscale_seconds: float = DOWNSCALE_SECONDS


class PrefixRequestRouter(RequestRouter):
    """Ray Serve's view of a ReplicaRouter, which the first query brings."""

    _router: ReplicaRouter | None = None

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the only replica that the client's router chooses or the query names."""
        if pending_request is None:
            return []
        # Without this flag, Ray Serve asks again at once where no replica is returned.
        pending_request.routing_context.should_backoff = True
        query: Query = pending_request.args[0]
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if self._router is None and query.router is not None:
            self._router = query.router
            self._router.update(by_id)
        if isinstance(query, Call) and query.router is not None:
            chosen = query.router.choose(query, by_id)
            return [[by_id[chosen]]] if chosen is not None else []
        if query.replica_id:
            return [[by_id[query.replica_id]]] if query.replica_id in by_id else []
        return [list(candidate_replicas)]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """See RequestRouter."""
        super().update_replicas(replicas)
        if self._router is not None:
            self._router.update(replica.replica_id.unique_id for replica in replicas)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """See RequestRouter."""
        super().on_replica_actor_died(replica_id)
        if self._router is not None:
            self._router.update(replica_id.unique_id for replica_id in self.curr_replicas)


class EngineReplica:
    """Replica of the application: an engine in a separate process. See ReplicaHost."""

    def __init__(self, make: MakeEngine, step_seconds: float) -> None:
        transport = ProcessTransport(make, step_seconds)
        facts = transport.facts
        # Replicas that start later may find other weights under the same path.
        numerics = f"{facts.fingerprint}-{model_digest(facts.config, facts.plan)}"
        hello = Hello(numerics, facts.plan.max_num_seqs, facts.plan.num_pages)
        self._facts = (facts, transport.rates, numerics)
        self._host = ReplicaHost(transport, hello)
        self._starting = asyncio.Lock()
        self._started = False

    async def _start(self) -> ReplicaHost:
        """Return the host, started in the event loop of the replica's methods."""
        async with self._starting:
            if not self._started:
                self._host.start()
                self._started = True
        return self._host

    async def run(self, call: Call) -> AsyncIterator[OtherNumerics]:
        """See ReplicaHost."""
        host = await self._start()
        async for refusal in host.run(call):
            yield refusal

    async def reports(self, query: Query) -> AsyncIterator[Sequence[ReplicaReport]]:
        """See ReplicaHost."""
        host = await self._start()
        async for reports in host.reports(query):
            yield reports

    async def facts(self, query: Query) -> Any:
        """Return the facts about the engine, its device's rates, and its numerics and weights."""
        return self._facts

    async def reset_prefix_cache(self, query: Query) -> None:
        """See ReplicaHost."""
        host = await self._start()
        await host.reset_prefix_cache()

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine has ended for good: Ray Serve replaces it."""
        self._host.check()

    def __del__(self) -> None:
        host: ReplicaHost | None = getattr(self, "_host", None)
        if host is not None:
            host.stop()


class RayFleet:
    """Replicas of an application of Ray Serve that belongs to this process.

    start_application() starts Ray where no cluster is named, and the replicas. stop() ends them,
    and all that was started.
    """

    def __init__(self, make: MakeEngine, settings: FleetSettings) -> None:
        self.name = f"lockstep-{socket.gethostname()}-{os.getpid()}".lower()
        self._make = make
        self._settings = settings
        self._handle: DeploymentHandle
        self._stopped = False

    def start_application(self, show: ShowProgress) -> None:
        """Start the replicas and return when the first ones are ready. show: see ProcessTransport.

        Raises ConfigError, CapacityError or EngineDeadError.
        """
        try:
            _start_ray(self._settings)
            self._check_gpus()
            self._deploy()
            self._wait_until_ready(show)
            handle = serve.get_deployment_handle(DEPLOYMENT, self.name)
            # Over gRPC a message costs half the time that Ray's objects take.
            self._handle = handle.options(_by_reference=False)
        except BaseException:
            self.stop()
            raise

    def facts(self) -> Any:
        """Return the facts about one of the engines, its device's rates, and its numerics and
        weights."""
        return self._handle.facts.remote(Query("")).result()

    def start(self, router: ReplicaRouter) -> None:
        """See Fleet: the first query with the router connects it to Ray Serve's."""
        self._handle.facts.remote(Query("", router=router)).result()

    async def run(self, call: Call) -> AsyncIterator[OtherNumerics]:
        """See Fleet."""
        async for refusal in self._stream("run", call):
            yield refusal

    async def reports(self, query: Query) -> AsyncIterator[Sequence[ReplicaReport]]:
        """See Fleet."""
        async for reports in self._stream("reports", query):
            yield reports

    async def reset_prefix_cache(self, query: Query) -> None:
        """See Fleet."""
        await self._handle.reset_prefix_cache.remote(query)

    async def _stream(self, method: str, query: Query) -> AsyncIterator[Any]:
        """Yield what a method of a replica yields. Raises ReplicaLostError."""
        responses = self._handle.options(method_name=method, stream=True).remote(query)
        is_complete = False
        try:
            async for item in responses:
                yield item
            is_complete = True
        except TaskCancelledError as error:
            raise ReplicaLostError("it cancelled a call") from error
        except (RayError, RayServeException, EngineDeadError, ConnectionError) as error:
            raise ReplicaLostError(_brief(error)) from error
        finally:
            if not is_complete:
                responses.cancel()

    def restart(self) -> None:
        """Begin a rolling restart: replicas are replaced one after the other, and drained."""
        # Each deployment is a new version to Ray Serve.
        self._deploy()

    def stop(self) -> None:
        """See Fleet."""
        if self._stopped or not ray.is_initialized():
            return
        self._stopped = True
        # A local Ray ends with this process's connection, and all replicas with it.
        if self._settings.address is not None:
            with contextlib.suppress(Exception):
                serve.delete(self.name)
                if not serve.status().applications:
                    serve.shutdown()
        ray.shutdown()

    def _check_gpus(self) -> None:
        """Raise CapacityError if the cluster has too few GPUs for the least number of replicas."""
        needed = self._settings.min_replicas * self._settings.num_gpus
        present = int(ray.cluster_resources().get("GPU", 0))
        if needed > present:
            raise CapacityError(
                f"replicas={self._settings.min_replicas} of {self._settings.num_gpus} GPU(s) each "
                f"need {needed} GPUs, and Ray has {present}. Start fewer replicas, lower "
                "--tensor-parallel-size, or add nodes."
            )

    def _deploy(self) -> None:
        """Deploy the application without waiting for it."""
        options = _deployment_options(self._settings)
        deployment = serve.deployment(EngineReplica, name=DEPLOYMENT, **options)
        application = deployment.bind(self._make, self._settings.step_seconds)
        target = serve.RunTarget(application, name=self.name, route_prefix=None)
        serve.run_many([target], wait_for_applications_running=False)

    def _wait_until_ready(self, show: ShowProgress) -> None:
        """Wait until the least number of replicas is ready. Raises EngineDeadError."""
        while True:
            application = serve.status().applications[self.name]
            deployments = application.deployments.values()
            num_ready = sum(
                deployment.replica_states.get("RUNNING", 0) for deployment in deployments
            )
            show("starting replicas", num_ready, self._settings.initial_replicas)
            if application.status == ApplicationStatus.RUNNING:
                return
            if application.status in (
                ApplicationStatus.DEPLOY_FAILED,
                ApplicationStatus.UNHEALTHY,
            ):
                details = [deployment.message for deployment in deployments if deployment.message]
                why = _last_error("\n".join(details) or application.message)
                raise EngineDeadError(f"the replicas did not start: {why}")
            time.sleep(POLL_SECONDS)


def _deployment_options(settings: FleetSettings) -> dict[str, Any]:
    """Return the options of the deployment."""
    options: dict[str, Any] = {
        "max_ongoing_requests": UNLIMITED_CALLS,
        "health_check_period_s": HEALTH_SECONDS,
        "health_check_timeout_s": STUCK_SECONDS,
        "graceful_shutdown_timeout_s": max(settings.drain_seconds, 1.0),
        "graceful_shutdown_wait_loop_s": POLL_SECONDS,
        "max_constructor_retry_count": 1,
        "logging_config": QUIET_LOGS,
        "request_router_config": RequestRouterConfig(request_router_class=PrefixRequestRouter),
        "ray_actor_options": {"num_cpus": 0},
    }
    if settings.num_gpus:
        # The ranks of a replica share a node.
        options["ray_actor_options"] = {"num_cpus": 0, "num_gpus": settings.num_gpus}
        options["placement_group_bundles"] = [{"GPU": settings.num_gpus}]
        options["placement_group_strategy"] = "STRICT_PACK"
    if settings.min_replicas == settings.max_replicas:
        return {**options, "num_replicas": settings.initial_replicas}
    scaling = AutoscalingConfig(
        min_replicas=settings.min_replicas,
        max_replicas=settings.max_replicas,
        initial_replicas=settings.initial_replicas,
        target_ongoing_requests=settings.target_requests,
        upscale_delay_s=UPSCALE_SECONDS,
        downscale_delay_s=settings.downscale_seconds,
        metrics_interval_s=1.0,
        look_back_period_s=UPSCALE_SECONDS,
    )
    return {**options, "autoscaling_config": scaling}


def _start_ray(settings: FleetSettings) -> None:
    """Connect to a cluster, or start Ray on this machine, and start Ray Serve without its proxies.

    Raises ConfigError.
    """
    common: dict[str, Any] = {
        "namespace": NAMESPACE,
        "logging_level": logging.ERROR,
        "log_to_driver": True,
    }
    if settings.address is None:
        local = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        # Without this address Ray joins a cluster that runs on this machine, or RAY_ADDRESS.
        ray.init(address="local", **common, **local)
    else:
        try:
            _check_reachable(settings.address)
            ray.init(address=settings.address, **common)
        except (OSError, ValueError, RayError, RuntimeError) as error:
            raise ConfigError(
                f"ray_address={settings.address!r} cannot be reached: {_brief(error)}. Name the "
                "address of a running cluster (`ray start --head` prints it), or leave it out."
            ) from None
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(
        proxy_location=ProxyLocation.Disabled,
        logging_config=QUIET_LOGS,
    )


def _check_reachable(address: str) -> None:
    """Raise OSError if nothing listens at a cluster's HOST:PORT; Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if host:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()


def _brief(error: BaseException) -> str:
    """Return the first line of an error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _last_error(text: str) -> str:
    """Return the last line of a text that names an error; all of it if none does."""
    lines = [line.strip() for line in text.splitlines() if "Error" in line]
    return lines[-1].partition("Error: ")[2] or lines[-1] if lines else text.strip()
