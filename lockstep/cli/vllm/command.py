"""Command that also accepts the flags of vllm serve."""

from functools import cache
from typing import Any

from lockstep.cli.command import PlainCommand
from lockstep.cli.show import note
from lockstep.cli.vllm.read import Option, Reader
from lockstep.flags.flag import Kind
from lockstep.flags.table import GROUPS, all_flags

OWN_GROUP = "Lockstep only"
"""Group of `--help` for options whose settings no flag of vLLM sets."""


class FlagCommand(PlainCommand):
    """Command that translates vLLM's flags and --config before its options are parsed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Translate and parse a command line. Raises ConfigError for an invalid flag."""
        options = [
            Option(
                name=name.removeprefix("--"),
                switch=bool(getattr(param, "is_flag", False)),
                repeatable=bool(getattr(param, "multiple", False)),
                negatable=bool(param.secondary_opts),
                short=tuple(other for other in param.opts if not other.startswith("--")),
            )
            for param in self.get_params(ctx)
            for name in param.opts
            if name.startswith("--")
        ]
        reader = Reader(options, lambda line: note(line, "yellow"))
        return super().parse_args(ctx, reader.line(list(args)))


@cache
def _panels() -> dict[str, str]:
    """Return setting -> group of `--help`; the first group of the table wins."""
    return {
        flag.setting.partition(".")[0]: group
        for group, flags in reversed(GROUPS.items())
        for flag in flags
        if flag.setting
    }


def panel_of(setting: str) -> str:
    """Return the group of `--help` that lists a setting's option."""
    return _panels().get(setting, OWN_GROUP)


def epilog() -> str:
    """Return the paragraph of `--help` on vLLM's flags."""
    counts = {kind: sum(flag.kind is kind for flag in all_flags()) for kind in Kind}
    return (
        f"The flags of vllm serve are read by their names, and from --config FILE.yaml: "
        f"{counts[Kind.ACTS]} act, {counts[Kind.NOTED]} are ignored with a note, "
        f"{counts[Kind.REFUSED]} are refused with a remedy. "
        "docs/vllm_flags.md, or lockstep vllm-flags, has them all."
    )
