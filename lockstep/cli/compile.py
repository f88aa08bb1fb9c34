"""lockstep compile: compile the kernels of a model before a server starts."""

from typing import Annotated, Any

import typer

from lockstep.cli.gpu_memory import GPUMemory, read_gpu_memory
from lockstep.cli.options import engine_options
from lockstep.cli.show import note, print_json
from lockstep.progress import progress_bar


@engine_options
def compile(
    model: Annotated[str | None, typer.Argument(help="model folder or hub id")] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    arch: Annotated[
        str | None,
        typer.Option("--arch", help="architecture of the GPU that will serve, e.g. sm_86"),
    ] = None,
    gpu_memory_bytes: GPUMemory = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Compile all kernels of a model, in as many processes as there are cores.

    A server compiles them when it starts. Compiled here first, with the same options, they are
    loaded from Triton's cache instead. The cache may be copied to other machines that have the same
    releases of Triton and Lockstep: TRITON_CACHE_DIR names its folder. With --arch this machine
    needs no GPU.

    The exit status is 1 if a kernel did not compile.
    """
    total = read_gpu_memory(arch, gpu_memory_bytes)
    # Imported here: options are checked before torch is imported.
    from lockstep.config import EngineConfig
    from lockstep.engine_args import resolve_auto_drafter
    from lockstep.worker.compile_model import compile_model

    config = EngineConfig.read(**resolve_auto_drafter(settings, weights=False))
    with progress_bar() as show:
        compiled = compile_model(config, arch, total, show)
    if json:
        print_json(compiled.as_dict())
    else:
        for error in compiled.errors:
            note(error, "red")
        done = compiled.kernels - len(compiled.errors)
        typer.echo(
            f"{done} of {compiled.kernels} kernels for {compiled.architecture} are in "
            f"{compiled.folder} ({compiled.seconds:.0f} s)"
        )
    if compiled.errors:
        raise typer.Exit(1)
