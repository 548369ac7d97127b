"""What each command takes, and says of itself.

Only the table of options is imported here, so that ``--help`` and a wrong option are answered at
once. Names and defaults that are not in the table are compared by the tests.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dp_grape_hf.errors import PrivacyError, require
from dp_grape_hf.options import OPTIONS, read

# ---- convert ----

_CONVERT = """\
Show how a script that trains with the Trainer becomes private: it imports the classes of this
package under the names that it uses already. Modules in its folder that it imports are changed too.
Changed are Trainer, Seq2SeqTrainer, and SFTTrainer, DPOTrainer and RewardTrainer of TRL, with
their arguments or configs.
"""

_CONVERT_EXAMPLES = """\
  $ dp-grape convert run_glue.py            # shows the change
  $ dp-grape convert run_glue.py --write    # makes it
"""


def add_convert(parser: argparse.ArgumentParser) -> None:
    """Adds ``dp-grape convert``: a script made private."""
    parser.description, parser.epilog = _CONVERT, _CONVERT_EXAMPLES
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="a Python file")
    parser.add_argument("--write", action="store_true", help="change the files")


# ---- suggest ----

_SUGGEST = """\
Show what a run chooses where you give no learning_rate: batch, steps, noise, what is trained, the
rate of each group, and what the noise of the whole run does alone. Nothing is trained, and no data
is needed but how many examples there are. Give a learning_rate to see what is wrong with it.
"""

_SUGGEST_EXAMPLES = """\
  $ dp-grape suggest sentence-transformers/all-MiniLM-L6-v2 --num_labels 6 \\
      --num_samples 2635 --eps 2 --delta 1e-5 --epochs 3
"""


def add_suggest(parser: argparse.ArgumentParser) -> None:
    """Adds ``dp-grape suggest``: what a run would choose."""
    parser.description, parser.epilog = _SUGGEST, _SUGGEST_EXAMPLES
    add = parser.add_argument
    add("model", help="name of a model, or its folder")
    for name in ("num_samples", "target_epsilon", "target_delta"):
        _take(add, name, required=True)
    _take(add, "num_train_epochs", "--epochs")
    _add_head(parser)
    _take(add, "learning_rate", help="yours, which is measured (default: chosen)")
    _take(add, "expected_batch_size", help="default: chosen")
    for name in ("method", "max_steps"):
        _take(add, name)


# ---- calibrate ----

_CALIBRATE = """\
Turn a privacy budget into the noise that meets it, or noise into the budget it spends.

Each example takes part in a step with probability q = B / N. C (max_grad_norm) bounds what it adds
to the sum of gradients. The noise on that sum has standard deviation sigma * C, which is
sigma * C / B on the mean. More noise, fewer steps or a smaller q make eps smaller; C does not.
"""

_CALIBRATE_EXAMPLES = """\
What noise does a budget take, with 1024 examples, batches of 64 and 1000 steps?

  $ dp-grape calibrate --num_samples 1024 --expected_batch_size 64 \\
      --max_steps 1000 --delta 1e-5 --eps 2 6
  sample rate 0.0625, steps 1000, delta 1e-05, adjacency add_or_remove_one

  epsilon asked  noise multiplier  epsilon achieved  noise std on mean / C  accountant
              2            4.0520            1.9994                0.06331         pld
              6            1.6953            5.9985                0.02649         pld

What does a given noise spend, over 3 epochs of the same data?

  $ dp-grape calibrate --num_samples 1024 --expected_batch_size 64 \\
      --epochs 3 --delta 1e-5 --noise_multiplier 1
  sample rate 0.0625, steps 48, delta 1e-05, adjacency add_or_remove_one

  noise multiplier  epsilon achieved  noise std on mean / C  accountant
               1            3.2405                0.01562         pld

And with correlated noise?

  $ dp-grape calibrate --num_samples 1024 --expected_batch_size 64 \\
      --max_steps 200 --delta 1e-5 --eps 2 6 --noise banded
  sample rate 0.0625, steps 200, delta 1e-05, adjacency add_or_remove_one

  epsilon asked  noise multiplier  epsilon achieved  accountant  bands  releases  at rate   left
              2            3.2900            1.9993         pld      3        67   0.1875  0.959
              6            2.4720            5.9979         pld     12        17     0.75  0.743

  Sampling is cyclic Poisson: each example is in one of b groups (bands), and each step samples from
  one group, each member with probability b q. Epsilon is that of ceil(steps / b) Poisson-subsampled
  Gaussian releases ("releases") at the sampling rate b q ("at rate").

"Left" is what weights have of the noise at the end, over what independent noise of that eps leaves.
Each band but the first takes memory of the size of a release.

The guarantee covers everything computed from the noisy steps, however it is used, against someone
who sees every step and knows every other example. Two datasets count as neighbours if one has one
example more, or with --adjacency replace_one if one example of the one is another in the other; so
it is a change of twice the size, and takes up to twice the noise. It holds for Poisson sampling
only (each example is included independently with the same probability q; batches vary in size; with
--noise banded, cyclic Poisson sampling), for noise nobody
can reproduce, and for one training run: tuning on the same data costs extra, and so does everything
else learnt from it. Every epsilon is an upper bound and every noise multiplier is rounded up.
"""


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """Adds ``dp-grape calibrate``: noise from a budget, and the budget from noise."""
    parser.description, parser.epilog = _CALIBRATE, _CALIBRATE_EXAMPLES
    add = parser.add_argument
    _take(add, "num_samples")
    sampling = parser.add_mutually_exclusive_group().add_argument
    chosen = "the mean size of the sampled batch, q N (default: as a run would choose it)"
    _take(sampling, "expected_batch_size", help=chosen)
    sampling("--sample_rate", type=float, metavar="q", help="outright, in place of B / N")
    length = parser.add_mutually_exclusive_group(required=True).add_argument
    _take(length, "max_steps")
    _take(length, "num_train_epochs", "--epochs", help="T is E / q, rounded up")
    _take(add, "target_delta", required=True)
    budget = parser.add_mutually_exclusive_group().add_argument
    several = "budgets to find the noise for (default: a table from 0.5 to 8)"
    _take(budget, "target_epsilon", nargs="+", help=several)
    _take(budget, "noise_multiplier", nargs="+", help="noise to find the budget for")
    for name in ("accountant", "adjacency"):
        _take(add, name, default=OPTIONS[name].default)
    _take(
        add,
        "noise",
        default="independent",
        help="independent, or banded: correlated over as many steps as leave the least noise in "
        "the weights at the end, for a learning rate that falls to 0 in a straight line (default: "
        "independent)",
    )
    add(
        "--momentum",
        type=float,
        metavar="m",
        help="of the update rule, for --noise banded; 0 for SGD (default: 0.9)",
    )
    add("--json", action="store_true", help="print JSON instead of a table")


# ---- memory ----

_MEMORY = """\
Simulate a training step and print its peak memory, by what the memory is for.

The step is run, forward to update, by the code that trains, on tensors without contents: no GPU
and no weights are needed, only the model's config.

  AdamW           training without privacy, torch's fused kernel
  DP-GRAPE        projected per-sample gradients
  DP-Adam         unprojected, of each weight the form of its gradients that takes least
  DP-Adam dense   unprojected, a gradient of every weight for every sample

What the GPU takes beyond tensors is not in the figures: the CUDA context, workspaces, fragmentation
and temporary memory inside kernels. --gpu_memory leaves 1 GiB of the card to it.
"""

_MEMORY_EXAMPLES = """\
What does RoBERTa-large take, and what fits a card of 24 GiB?

  $ dp-grape memory --model_name_or_path ./roberta-large --batch_size 40 --seq_len 128 \\
      --gpu_memory 24
"""


def add_memory(parser: argparse.ArgumentParser) -> None:
    """Adds ``dp-grape memory``: the memory of a step, before there is a GPU."""
    parser.description, parser.epilog = _MEMORY, _MEMORY_EXAMPLES
    add = parser.add_argument
    add("--model_name_or_path", required=True, metavar="path", help="folder or file of a config")
    _add_head(parser)
    add("--batch_size", type=_positive, required=True, metavar="B", help="the physical batch")
    add("--seq_len", type=_positive, default=128, metavar="T", help="tokens (default: 128)")
    add(
        "--methods",
        nargs="+",
        metavar="method",
        help="of the package, or adamw, dp_adam_dense (default: adamw, dp_grape, dp_adam, "
        "dp_adam_dense)",
    )
    add(
        "--projection",
        choices=("principal", "gaussian"),
        default="gaussian",
        help="of dp_grape; principal, as runs have it, is measured in the step that is simulated, "
        "and takes no more than gaussian after that (default: gaussian)",
    )
    add("--rank", "--r", type=_positive, default=16, metavar="r", help="default: 16")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    add("--gradient_checkpointing", action="store_true", help="recompute activations")
    add(
        "--bands",
        type=_positive,
        default=1,
        metavar="b",
        help="of noise='banded' (dp-grape calibrate); what is kept counts as optimizer state",
    )
    add("--processes", type=_positive, default=1, help="that share the weights, by FSDP2")
    add("--gpu_memory", type=float, metavar="GiB", help="also find the largest batch that fits")
    add("--json", action="store_true", help="print JSON instead of tables; memory in bytes")


# ---- card ----

_CARD = """\
Print the model card of a saved model, or write it beside the weights.

Every number comes from the folder's privacy_ledger.json. What the ledger cannot know (license,
language, metrics) is what you declare here, and metrics appear only with a word on whether the
data they were computed on is public. If the folder has a card, --write replaces its statement and
the claim in its metadata, and keeps the rest.
"""

_CARD_EXAMPLES = """\
  $ dp-grape card runs/digits --license apache-2.0 --metric "test accuracy=0.908" \\
      --metrics_data public --write
"""


def add_card(parser: argparse.ArgumentParser) -> None:
    """Adds ``dp-grape card``: the model card from the ledger."""
    parser.description, parser.epilog = _CARD, _CARD_EXAMPLES
    add = parser.add_argument
    add("folder", type=Path, help="where weights and privacy_ledger.json lie")
    add("--repo_id", metavar="user/model", help="where it is published")
    add("--model_name", help="the title (default: Model card)")
    add("--base_model", metavar="user/model", help="what training started from")
    add("--license", help="the Hub's name of a licence, such as apache-2.0")
    add("--language", nargs="+", metavar="code")
    add("--pipeline_tag", help="the Hub's name of the task")
    add("--datasets", nargs="+", metavar="name", help="names on the Hub")
    add("--tags", nargs="+", default=[], metavar="tag")
    add("--metric", action="append", default=[], metavar="name=value", help="may be repeated")
    add(
        "--metrics_data",
        choices=("public", "private"),
        help="what the metrics were computed on; needed with --metric",
    )
    add("--write", action="store_true", help="write FOLDER/README.md instead")


# ---- audit ----

_AUDIT = """\
Attack one private training run on this machine, and compare with the epsilon that it claims.

Canaries, examples whose gradient meets that of no other, are put into the training set by fair
coins. From all the weights of the run it is then guessed of k of them, those that the weights say
most about, whether they were in. A run that is (epsilon, delta)-private lets nobody be right too
often (Steinke, Nasr and Jagielski 2023), so the number of correct guesses bounds epsilon from
below.

The bound has to stay below the claim. It does so for every sound run but a share of 1 - confidence
at most; k is fixed in advance, so nothing was searched that the confidence would not cover. A bound
below the claim does not prove it: one run cannot show all of epsilon, about half at the defaults.

The exit code is 0 if the bound is at most the claim, and 1 if it exceeds it.
"""

_AUDIT_EXAMPLES = """\
Audit DP-GRAPE as this package trains it here (about a minute on one CPU core), with principal
directions and more of C for the projected layer, and DP-SGD with half of the canaries drawn in each
step:

  $ dp-grape audit
  $ dp-grape audit --projection principal --gradient_factors '{"body": 4}'
  $ dp-grape audit --method dp_sgd --sample_rate 0.5 --max_steps 20
"""


def add_audit(parser: argparse.ArgumentParser) -> None:
    """Adds ``dp-grape audit``: an attack on a run. What is not given, ``AuditSettings`` decides."""
    parser.description, parser.epilog = _AUDIT, _AUDIT_EXAMPLES
    parser.argument_default = argparse.SUPPRESS
    parser.add_argument(
        "audited",
        nargs="?",
        metavar="RUN",
        help="a saved run, which cannot be audited: the command then says why, and what can be",
    )
    parser.add_argument("--method", choices=("dp_grape", "dp_sgd"))
    _take(parser.add_argument, "clipping", help="flat or automatic (default: flat)")
    budget = parser.add_mutually_exclusive_group().add_argument
    _take(budget, "target_epsilon", help="what the run claims (default: 2)")
    _take(budget, "noise_multiplier", help="instead of eps")

    def add(name: str, kind: type, metavar: str, text: str, default: str, **more: Any) -> None:
        text = f"{text} (default: {default})"
        parser.add_argument(*name.split(), type=kind, metavar=metavar, help=text, **more)

    delta = "delta of the claim, below 1 / m"
    add("--target_delta --delta", float, "delta", delta, "1e-05", dest="delta")
    add("--max_steps", int, "T", "noisy steps of the run", "4", dest="steps")
    add("--sample_rate", float, "q", "share drawn in a step; 1 shows most", "1")
    add("--canaries", int, "m", "examples that may be in", "20000")
    add("--guesses", int, "k", "how many are guessed", "m / 40")
    add("--confidence", float, "c", "of the lower bound", "0.95")
    add("--projection", str, "name", "of dp_grape, as gaussian", "principal")
    add("--projection_rank", int, "r", "of dp_grape, 1 to 3", "2")
    add("--gradient_factors", str, "JSON", "of body, tables.0 ...", "none")
    add("--noise", str, "name", "independent or banded", "independent")
    parser.add_argument(
        "--json", action="store_true", default=False, help="print JSON instead of a table"
    )


# ---- verify and ledger ----

_VERIFY = """\
Check a saved model against its ledger: the chain of digests, epsilon by several accountants, the
statement of the model card (its claim and its table), and the digests of all files that were saved
with the model. No model is loaded, and no code of it is run.

The claimed epsilon is the bound by the run's accountant, which the ledger names. The bounds by
other accountants are second opinions. All are valid upper bounds on the same epsilon.

  ok        both say the same
  MISMATCH  they do not, and the exit code is 1
  absent    there is nothing to compare, or a check does not apply, and why

A part that was changed on its own is found: weights, configs and tokenizer, other weights in the
folder, and entries of a config that name other weights or code. On a card, the text between the two
marks below its title is compared byte for byte, and the tags must not claim more; all other words
are its author's, are not read and may contradict it. A ledger of version 0.1 has digests of the
weights alone. Folders with a ledger of their own are verified by their paths. Whoever makes
ledger, card and weights anew, digests included, has something that agrees with itself: only a
digest noted before (--head, which dp-grape ledger shows) tells. Whether a run was made as it was
recorded is its owner's word.
"""

_VERIFY_EXAMPLES = """\
  $ dp-grape verify runs/digits
  $ dp-grape verify runs/digits/checkpoint-100
  $ dp-grape verify user/model --revision main
"""

_LEDGER = """\
Show what a run recorded: its mechanism, its entries, the releases that are accounted, and the bound
on epsilon by each accountant. The bound by the run's accountant is the claim.

Each entry's digest stands for all that comes before it. Note the last one where it is out of the
reach of whoever keeps the ledger, and dp-grape verify --head tells later whether this was edited.
"""

_LEDGER_EXAMPLES = """\
  $ dp-grape ledger runs/digits
"""

_REPORT = """\
Draw a run: epsilon by releases, signal of the releases beside their noise, the learning rate, and
metrics of evaluations; report.png and report.md are written into the folder of the run.
"""

_REPORT_EXAMPLES = """\
  $ dp-grape report runs/digits
"""


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Adds ``dp-grape verify``: a model's ledger, card and weights compared."""
    parser.description, parser.epilog = _VERIFY, _VERIFY_EXAMPLES
    parser.add_argument("place", metavar="PATH_OR_REPO", help="a folder, a ledger's file or a repo")
    parser.add_argument("--revision", metavar="name", help="of the repository on the Hub")
    parser.add_argument("--head", metavar="digest", help="one that the ledger once ended with")
    _take(parser.add_argument, "target_delta", help="default: the ledger's")


def add_ledger(parser: argparse.ArgumentParser) -> None:
    """Adds ``dp-grape ledger``: a ledger for people."""
    parser.description, parser.epilog = _LEDGER, _LEDGER_EXAMPLES
    parser.add_argument("place", type=Path, metavar="PATH", help="a ledger's file, or its folder")
    _take(parser.add_argument, "target_delta", help="default: the ledger's")


def add_report(parser: argparse.ArgumentParser) -> None:
    """Adds ``dp-grape report``: a run on one page."""
    parser.description, parser.epilog = _REPORT, _REPORT_EXAMPLES
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="output_dir of the run")
    _take(parser.add_argument, "target_delta", help="default: the ledger's")


# ---- What several commands take ----


def _take(add: Callable[..., Any], name: str, *names: str, **settings: Any) -> None:
    """Adds an option of the table: its type, names, symbol and meaning, unless settings differ."""
    option = OPTIONS[name]
    symbol, colon, text = option.brief.partition(": ")
    if not (colon and symbol.isidentifier()):
        symbol, text = name.rpartition("_")[2], option.brief
    if option.default is not None:
        text += f" (default: {option.default})"
    short = [] if option.short is None else [f"--{option.short}"]
    settings = {"metavar": option.short or symbol, "help": text, **settings}
    add(f"--{name}", *short, *names, type=option.range.kind, **settings)


def refuse_values(args: argparse.Namespace) -> None:
    """Refuses a value that is out of the range of its option in the table.

    Raises:
        PrivacyError: with the name and the value.
    """
    for name, given in vars(args).items():
        if name in OPTIONS and given is not None:
            for value in given if isinstance(given, list) else [given]:
                read(name, value)


def _add_head(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--head",
        metavar="head",
        help="an AutoModelFor... in small letters, as causal-lm (default: config's)",
    )
    parser.add_argument(
        "--num_labels", type=_positive, metavar="n", help="of a classifier (default: config's)"
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


# ---- Refused before anything is imported that takes seconds ----

LEDGER = "privacy_ledger.json"  # ``ledger.LEDGER_NAME``


def refuse_missing(args: argparse.Namespace) -> None:
    """Refuses a folder without a ledger, and a model without a configuration.

    Raises:
        PrivacyError: with the path or name.
    """
    place = getattr(args, "folder", None) or getattr(args, "place", None)
    if place is not None and (args.command != "verify" or Path(place).exists()):
        path = Path(place)
        path = path / LEDGER if path.is_dir() or args.command in ("card", "report") else path
        require(
            path.is_file(),
            f"{path} is not there: without a ledger nothing is known of a run. Give the folder "
            "that a run saved to.",
        )
    for option in ("model", "model_name_or_path"):
        name = getattr(args, option, None)
        if name is not None:
            _refuse_no_config(option, name)


def _refuse_no_config(option: str, name: str) -> None:
    path = Path(name)
    if path.exists():
        require(
            path.is_file() or (path / "config.json").is_file(),
            f"{option}={name!r} has no config.json: give the folder that a model was saved to.",
        )
        return
    from huggingface_hub import hf_hub_download  # a third of a second; Transformers takes seconds

    try:
        hf_hub_download(name, "config.json")
    except (OSError, ValueError) as error:
        raise PrivacyError(
            f"{option}={name!r} has no config: it is no folder here, and the Hub cannot be asked "
            f"for one ({type(error).__name__}). Give the folder that a model was saved to, or its "
            "name there."
        ) from error
