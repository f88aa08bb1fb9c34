"""lockstep bench: what an answer, a kernel or a server costs on this machine."""

import typer

from lockstep.cli.bench.drafters import drafters
from lockstep.cli.bench.kernels import kernels
from lockstep.cli.bench.offline import offline
from lockstep.cli.bench.serving import serving
from lockstep.cli.command import PlainCommand, group_with_default
from lockstep.cli.vllm.command import FlagCommand, epilog

VLLM_NAMES = {"latency": "offline", "throughput": "offline", "serve": "serving"}
"""Names that vllm bench has for these commands."""

bench = typer.Typer(
    cls=group_with_default("offline", VLLM_NAMES),
    rich_markup_mode=None,
    help="Measure the speed of offline inference, drafters, kernels or a server.",
)
for command in (offline, drafters):
    bench.command(cls=FlagCommand, epilog=epilog())(command)
for command in (kernels, serving):
    bench.command(cls=PlainCommand)(command)
