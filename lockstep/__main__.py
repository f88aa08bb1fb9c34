"""Command line: `python -m lockstep` and `lockstep`."""

import io
import signal
import sys


def main() -> None:
    """Run a command. A LockstepError prints one line and exits with status 2, Ctrl-C with status
    130.

    Ctrl-C may arrive while modules are imported.
    """
    try:
        run_command()
    except KeyboardInterrupt:
        # A second Ctrl-C kills the process: otherwise Python prints a traceback of its shutdown.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        print("Interrupted: lockstep.", file=sys.stderr)
        # The value of lockstep.cli.interrupt.INTERRUPTED: its import may be what was interrupted.
        sys.exit(130)


def run_command() -> None:
    """Run the command that the command line names. Raises SystemExit."""
    from lockstep.cli import app
    from lockstep.errors import LockstepError

    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        # Text that the terminal cannot encode must not end the command.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    try:
        app(prog_name="lockstep")
    except LockstepError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
