"""`python -m lockstep.probe`: the probe without the other commands and their packages."""

import sys

import typer

from lockstep.errors import LockstepError
from lockstep.probe.command import INTERRUPTED, probe


def main() -> None:
    """Run the probe. A LockstepError prints one line and exits with status 2."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(probe)
    try:
        app(prog_name="python -m lockstep.probe")
    except LockstepError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("Interrupted: lockstep probe.", file=sys.stderr)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
