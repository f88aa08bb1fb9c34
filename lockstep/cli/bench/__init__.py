"""lockstep bench: what an answer, a kernel or a server costs on this machine."""

import typer

from lockstep.cli.bench.drafters import drafters
from lockstep.cli.bench.kernels import kernels
from lockstep.cli.bench.offline import offline
from lockstep.cli.bench.serving import serving
from lockstep.cli.groups import usual
from lockstep.cli.vllm.command import FlagCommand, epilog

bench = typer.Typer(cls=usual("offline"), help="Measure answers (offline), kernels, or a server.")
bench.command(cls=FlagCommand, epilog=epilog())(offline)
for command in (drafters, kernels, serving):
    bench.command()(command)
