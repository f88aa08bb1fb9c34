"""The command line: `python -m lockstep` and `lockstep`."""

import io
import signal
import sys


def main() -> None:
    """Run a command. What Lockstep raises on purpose ends in one line and status 2; Ctrl-C, which
    may come while modules are imported, in one line and status 130."""
    try:
        run_command()
    except KeyboardInterrupt:
        # Another Ctrl-C ends the process at once: Python would print a traceback of its own end.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        print("Interrupted: lockstep.", file=sys.stderr)
        sys.exit(
            130
        )  # lockstep.cli.interrupt.INTERRUPTED, whose import may be what was interrupted


def run_command() -> None:
    """Run the command that the command line names. Raises SystemExit."""
    from lockstep.cli import app
    from lockstep.errors import LockstepError

    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal cannot encode ends no command
            stream.reconfigure(errors=errors)
    try:
        app(prog_name="lockstep")
    except LockstepError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
