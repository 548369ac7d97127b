"""The command line, ``dp-grape``: one subcommand per entry of `COMMANDS`."""

import argparse
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version

from dp_grape_hf.cli import options
from dp_grape_hf.errors import PrivacyError

COMMANDS = {
    name: getattr(options, f"add_{name}")
    for name in (
        *("convert", "suggest", "calibrate", "memory", "card"),
        *("audit", "verify", "report", "ledger"),
    )
}
"""Name -> function that adds the options and has the help text; ``run`` of the module runs it.

Only the module of the given command is imported: some need torch, which takes seconds.
"""


def main(argv: list[str] | None = None) -> int:
    """Run ``dp-grape`` and return its exit code: 0, or 2 for a ``PrivacyError``.

    A command returns the text to print, or this text and an exit code.
    """
    parser = argparse.ArgumentParser(
        prog="dp-grape", description="Tools for private training with DP-GRAPE."
    )
    parser.add_argument("--version", action="version", version=f"dp-grape {version('dp_grape_hf')}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, add_options in COMMANDS.items():
        description, _, examples = (inspect.getdoc(add_options) or "").partition("\nExamples:\n")
        subparser = subparsers.add_parser(
            name,
            help=description.partition(".\n")[0],
            description=description,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        add_options(subparser)
    args = parser.parse_args(argv)
    try:
        options.refuse_values(args)
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
