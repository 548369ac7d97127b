"""The command line, ``dp-grape``: one subcommand per entry of `COMMANDS`."""

import argparse
import sys
from collections.abc import Callable
from importlib import import_module

from dp_grape_hf.errors import PrivacyError

COMMANDS = {
    "calibrate": ("calibrate_command", "noise multiplier from a privacy budget, and back"),
    "memory": (
        "memory_command",
        "the memory of a training step, and which batch fits a card",
    ),
    "card": ("card_command", "the model card of a saved model, from its ledger"),
    "audit": ("audit_command", "attack a training run, and compare with the epsilon it claims"),
    "verify": ("ledger_command", "check a saved or published model against its privacy ledger"),
    "ledger": ("ledger_command", "show what a run recorded, and the epsilon it spent"),
}
"""By name: the module whose ``add_NAME`` gives a parser its options, and the line of help.

Only the command that was asked for is imported: some need torch, which takes seconds.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs ``dp-grape`` and returns its exit code: 0, or 2 for a request that was refused.

    A command returns what to print, and with it an exit code where a result is bad news.
    """
    parser = argparse.ArgumentParser(
        prog="dp-grape", description="Private training with DP-GRAPE: the tools around it."
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    words = sys.argv[1:] if argv is None else argv
    asked = next((word for word in words if not word.startswith("-")), None)
    for name, (module, text) in COMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if name == asked:
            getattr(import_module(f"dp_grape_hf.{module}"), f"add_{name}")(subparser)
    args = parser.parse_args(words)
    run: Callable[[argparse.Namespace], str | tuple[str, int]] = args.run
    try:
        result = run(args)
    except PrivacyError as error:
        sys.stderr.write(f"dp-grape {args.command}: {error}\n")
        return 2
    report, code = (result, 0) if isinstance(result, str) else result
    sys.stdout.write(report)
    return code


if __name__ == "__main__":
    sys.exit(main())
