"""The command line, ``dp-grape``: one subcommand per entry of `COMMANDS`."""

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version

from dp_grape_hf.cli import options
from dp_grape_hf.errors import PrivacyError

COMMANDS = {
    "convert": "make a training script private by a change of its imports",
    "suggest": "what a run would choose: batch, steps, what is trained, and rates",
    "calibrate": "noise multiplier from a privacy budget, and back",
    "memory": "the memory of a training step, and which batch fits a card",
    "card": "the model card of a saved model, from its ledger",
    "audit": "attack a training run, and compare with the epsilon it claims",
    "verify": "check a saved or published model against its privacy ledger",
    "report": "a run on one page: epsilon, signal beside noise, rates, metrics",
    "ledger": "show what a run recorded, and the epsilon it spent",
}
"""By name: a line of help. ``options.add_NAME`` has the options; ``run`` of the module runs it.

Only the command that runs is imported: some need torch, which takes seconds.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs ``dp-grape`` and returns its exit code: 0, or 2 for a request that was refused.

    A command returns what to print, and with it an exit code where a result is bad news.
    """
    parser = argparse.ArgumentParser(
        prog="dp-grape", description="Private training with DP-GRAPE: the tools around it."
    )
    parser.add_argument("--version", action="version", version=f"dp-grape {version('dp_grape_hf')}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, text in COMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        getattr(options, f"add_{name}")(subparser)
    args = parser.parse_args(argv)
    try:
        options.refuse_values(args)
        options.refuse_missing(args)
        command = import_module(f"dp_grape_hf.cli.{args.command}")
        run: Callable[[argparse.Namespace], str | tuple[str, int]] = command.run
        result = run(args)
    except PrivacyError as error:
        sys.stderr.write(f"dp-grape {args.command}: {error}\n")
        return 2
    report, code = (result, 0) if isinstance(result, str) else result
    sys.stdout.write(report)
    return code


if __name__ == "__main__":
    sys.exit(main())
