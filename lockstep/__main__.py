"""The command line: `python -m lockstep` and `lockstep`."""

import io
import sys


def main() -> None:
    """Runs a command; what Lockstep raises on purpose ends in one line and status 2."""
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
