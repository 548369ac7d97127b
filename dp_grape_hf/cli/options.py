"""The options and help texts of all commands.

A function ``add_NAME`` adds the options of a command. Its docstring is the help text: the summary,
the description, and after "Examples:" the examples. This module imports only the table of options,
so that ``--help`` and errors about options appear at once. Tests compare the names and defaults
that are not in the table with the code.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dp_grape_hf.options import OPTIONS, read


def add_convert(parser: argparse.ArgumentParser) -> None:
    """Make a training script private by a change of its imports.

    The imports are replaced by imports of the classes of this package, under the same names.
    Modules in the script's folder that it imports are changed too. The command replaces Trainer,
    Seq2SeqTrainer, and TRL's SFTTrainer, DPOTrainer and RewardTrainer, with their arguments or
    configs.

    Examples:
      $ dp-grape convert run_glue.py            # show the changes
      $ dp-grape convert run_glue.py --write    # write the changes
    """
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="a Python file")
    parser.add_argument("--write", action="store_true", help="change the files")


def add_suggest(parser: argparse.ArgumentParser) -> None:
    r"""Print the hyperparameters that a run would choose.

    If you pass no learning_rate, a run chooses batch size, steps, noise, trained parameters, and
    the learning rate of each group. The command also prints the effect of the noise of the whole
    run alone. It trains nothing, and needs no data but the number of examples. If you pass a
    learning_rate, it warns if the rate does not suit the run.

    Examples:
      $ dp-grape suggest sentence-transformers/all-MiniLM-L6-v2 --num_labels 6 \
          --num_samples 2635 --eps 2 --delta 1e-5 --epochs 3
    """
    add = parser.add_argument
    add("model", help="name of a model, or its folder")
    for name in ("num_samples", "target_epsilon", "target_delta"):
        _take(add, name, required=True)
    _take(add, "num_train_epochs", "--epochs")
    _add_head(parser)
    _take(add, "learning_rate", help="a learning rate to check (default: chosen)")
    _take(add, "expected_batch_size", help="default: chosen")
    for name in ("method", "max_steps"):
        _take(add, name)


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    r"""Compute the noise multiplier for a privacy budget, and back.

    A step includes each example with probability q = B / N. C (max_grad_norm) bounds the norm of
    its gradient in the sum of a step. The noise of this sum has standard deviation sigma * C, which
    is sigma * C / B for the mean. More noise, fewer steps or a smaller q reduce eps. C has no
    influence.

    Every epsilon is an upper bound, and every noise multiplier is rounded up. The guarantee
    requires Poisson sampling and secret random noise. It covers one training run: tuning on the
    same data, and other runs on them, have additional costs.

    Examples:
    The noise for a budget, with 1024 examples, batches of 64 and 1000 steps:

      $ dp-grape calibrate --num_samples 1024 --expected_batch_size 64 \
          --max_steps 1000 --delta 1e-5 --eps 2 6
      sample rate 0.0625, steps 1000, delta 1e-05, adjacency add_or_remove_one

      epsilon asked  noise multiplier  epsilon achieved  noise std on mean / C  accountant
                  2            4.0517            1.9996                0.06331         pld
                  6            1.6953            5.9985                0.02649         pld

    The epsilon of a given noise, over 3 epochs of the same data:

      $ dp-grape calibrate --num_samples 1024 --expected_batch_size 64 \
          --epochs 3 --delta 1e-5 --noise_multiplier 1
      sample rate 0.0625, steps 48, delta 1e-05, adjacency add_or_remove_one

      noise multiplier  epsilon achieved  noise std on mean / C  accountant
                     1            3.2405                0.01562         pld

    Correlated noise:

      $ dp-grape calibrate --num_samples 1024 --expected_batch_size 64 \
          --max_steps 200 --delta 1e-5 --eps 2 6 --noise banded
      sample rate 0.0625, steps 200, delta 1e-05, adjacency add_or_remove_one

      epsilon asked  noise multiplier  epsilon achieved  accountant  bands  releases  at rate   left
                  2            3.2896            1.9996         pld      3        67   0.1875  0.959
                  6            2.4716            5.9991         pld     12        17     0.75  0.743

      Sampling is cyclic Poisson: each example is in one of b groups (bands), and each step samples
      from one group, each member with probability b q. Epsilon is that of ceil(steps / b)
      Poisson-subsampled Gaussian releases ("releases") at the sampling rate b q ("at rate").

    "Left" is the noise in the final weights, relative to independent noise of the same epsilon.
    Each band but the first takes memory of the size of a release.
    """
    add = parser.add_argument
    _take(add, "num_samples")
    sampling = parser.add_mutually_exclusive_group().add_argument
    chosen = "the mean size of the sampled batch, q N (default: the choice of a run)"
    _take(sampling, "expected_batch_size", help=chosen)
    sampling("--sample_rate", type=float, metavar="q", help="the sampling rate, instead of B / N")
    length = parser.add_mutually_exclusive_group(required=True).add_argument
    _take(length, "max_steps")
    _take(length, "num_train_epochs", "--epochs", help="T is E / q, rounded up")
    _take(add, "target_delta", required=True)
    budget = parser.add_mutually_exclusive_group().add_argument
    several = "budgets for which to compute the noise (default: a table from 0.5 to 8)"
    _take(budget, "target_epsilon", nargs="+", help=several)
    _take(budget, "noise_multiplier", nargs="+", help="noise for which to compute epsilon")
    for name in ("accountant", "adjacency"):
        _take(add, name, default=OPTIONS[name].default)
    banded = (
        "independent, or banded: correlated over the number of steps that leaves the least noise "
        "in the weights, for a linear schedule of the learning rate (default: independent)"
    )
    _take(add, "noise", default="independent", help=banded)
    momentum = "momentum of the update rule, for --noise banded; 0 for SGD (default: 0.9)"
    add("--momentum", type=float, metavar="m", help=momentum)
    add("--json", action="store_true", help="print JSON instead of a table")


def add_memory(parser: argparse.ArgumentParser) -> None:
    r"""Compute the memory of a training step, and the batch that fits a GPU.

    The command runs a step of the training code on tensors without contents, and prints its peak
    memory by use. It needs no GPU and no weights, only the model's config.

      AdamW           training without privacy, torch's fused kernel
      DP-GRAPE        projected per-sample gradients
      DP-Adam         full gradients, in the form that takes least memory for each weight
      DP-Adam dense   full gradients, one of every weight for every sample

    The numbers are the memory of tensors. They do not include the CUDA context, workspaces,
    fragmentation and temporary memory inside kernels. --gpu_memory reserves 1 GiB for these.

    Examples:
      $ dp-grape memory --model_name_or_path ./roberta-large --batch_size 40 --seq_len 128 \
          --gpu_memory 24
    """
    add = parser.add_argument
    add("--model_name_or_path", required=True, metavar="path", help="folder or file of a config")
    _add_head(parser)
    add("--batch_size", type=_positive, required=True, metavar="B", help="the physical batch")
    add("--seq_len", type=_positive, default=128, metavar="T", help="tokens (default: 128)")
    methods = (
        "methods of the package, adamw or dp_adam_dense (default: adamw, dp_grape, dp_adam, "
        "dp_adam_dense)"
    )
    add("--methods", nargs="+", metavar="method", help=methods)
    projection = (
        "projection of dp_grape. principal, the default of a run, is computed in the simulated "
        "step, and takes as much memory as gaussian in later steps (default: gaussian)"
    )
    families = ("principal", "gaussian")
    add("--projection", choices=families, default="gaussian", help=projection)
    add("--rank", "--r", type=_positive, default=16, metavar="r", help="default: 16")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    add("--gradient_checkpointing", action="store_true", help="recompute activations")
    add("--gpu_memory", type=float, metavar="GiB", help="also find the largest batch that fits")
    add("--json", action="store_true", help="print JSON instead of tables; memory in bytes")


def add_card(parser: argparse.ArgumentParser) -> None:
    r"""Write the model card of a saved model from its ledger.

    The command prints the card, or writes it next to the weights. The privacy statement is written
    from the folder's privacy_ledger.json. You can declare information that is not in the ledger:
    license, language, metrics. With metrics, say whether the evaluation data are public. If the
    folder has a card, --write replaces its statement and the claim in its metadata, and keeps the
    rest.

    Examples:
      $ dp-grape card runs/digits --license apache-2.0 --metric "test accuracy=0.908" \
          --metrics_data public --write
    """
    add = parser.add_argument
    add("folder", type=Path, help="folder of the weights and privacy_ledger.json")
    add("--repo_id", metavar="user/model", help="repository in which the model is published")
    add("--model_name", help="the title (default: Model card)")
    add("--base_model", metavar="user/model", help="model from which training started")
    add("--license", help="the Hub's name of a licence, such as apache-2.0")
    add("--language", nargs="+", metavar="code")
    add("--pipeline_tag", help="the Hub's name of the task")
    add("--datasets", nargs="+", metavar="name", help="names on the Hub")
    add("--tags", nargs="+", default=[], metavar="tag")
    add("--metric", action="append", default=[], metavar="name=value", help="may be repeated")
    which = "whether the evaluation data are public; required with --metric"
    add("--metrics_data", choices=("public", "private"), help=which)
    add("--write", action="store_true", help="write FOLDER/README.md instead")


def add_audit(parser: argparse.ArgumentParser) -> None:
    """Attack a training run, and compare with the epsilon it claims.

    Canaries are examples with orthogonal gradients. Each is included in the training set with
    probability 1/2. The attack uses all weights of the run to guess, for the k canaries with the
    most evidence, whether they were included. In an (epsilon, delta)-private run, the number of
    correct guesses is limited (Steinke, Nasr and Jagielski 2023). So it gives a lower bound on
    epsilon.

    If the claim is true, the lower bound exceeds it with a probability of at most 1 - confidence.
    k is fixed in advance, so the confidence needs no correction. A bound below the claim does not
    prove the claim: an attack on one run shows only a part of epsilon, about half with the
    defaults. The exit code is 1 if the lower bound exceeds the claim, and 0 otherwise.

    Examples:
      $ dp-grape audit                                              # a minute on one CPU core
      $ dp-grape audit --projection principal --gradient_factors '{"body": 4}'
      $ dp-grape audit --method dp_sgd --sample_rate 0.5 --max_steps 20
    """
    parser.argument_default = argparse.SUPPRESS  # ``AuditSettings`` has the defaults
    saved = "not supported: the command explains why a saved run cannot be audited"
    parser.add_argument("audited", nargs="?", metavar="RUN", help=saved)
    parser.add_argument("--method", choices=("dp_grape", "dp_sgd"))
    _take(parser.add_argument, "clipping", help="flat or automatic (default: flat)")
    budget = parser.add_mutually_exclusive_group().add_argument
    _take(budget, "target_epsilon", help="claim of the run (default: 2)")
    _take(budget, "noise_multiplier", help="instead of eps")

    def add(name: str, kind: type, metavar: str, text: str, default: str, **more: Any) -> None:
        text = f"{text} (default: {default})"
        parser.add_argument(*name.split(), type=kind, metavar=metavar, help=text, **more)

    delta = "delta of the claim, below 1 / m"
    add("--target_delta --delta", float, "delta", delta, "1e-05", dest="delta")
    add("--max_steps", int, "T", "steps of the run", "4", dest="steps")
    add("--sample_rate", float, "q", "sampling rate; 1 reveals most", "1")
    add("--canaries", int, "m", "number of canaries", "20000")
    add("--guesses", int, "k", "number of guesses", "m / 40")
    add("--confidence", float, "c", "confidence of the lower bound", "0.95")
    add("--projection", str, "name", "projection of dp_grape, such as gaussian", "principal")
    add("--projection_rank", int, "r", "rank of dp_grape, 1 to 3", "2")
    add("--gradient_factors", str, "JSON", "factors of body, tables.0 ...", "none")
    add("--noise", str, "name", "independent or banded", "independent")
    parser.add_argument("--json", action="store_true", default=False, help="print JSON")


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Compare a saved or published model with its privacy ledger.

    The command checks the chain of digests, epsilon by several accountants, the statement of the
    model card (its claim and its table), and the digests of all files that were saved with the
    model. No model is loaded, and no code of it is run.

      ok        both values agree
      MISMATCH  they do not agree; the exit code is 1
      absent    there is nothing to compare, or the check does not apply; the row says why

    A change of one part alone is noticed: weights, configs and tokenizer, other weights in the
    folder, and config entries that name other weights or code. The statement of the card, between
    the two marks below the title, is compared byte for byte. The tags must not claim more. The rest
    of the card is not read, and may contradict the statement. A ledger of version 0.1 has digests
    of the weights only. Folders with a separate ledger are verified by their paths. If ledger, card
    and weights were all made anew, with new digests, they agree with each other. Only a digest that
    you noted before (--head, which dp-grape ledger shows) reveals this. The command cannot check
    that the run was made as it was recorded.

    Examples:
      $ dp-grape verify runs/digits
      $ dp-grape verify runs/digits/checkpoint-100
      $ dp-grape verify user/model --revision main
    """
    parser.add_argument("place", metavar="PATH_OR_REPO", help="a folder, a ledger's file or a repo")
    parser.add_argument("--revision", metavar="name", help="revision of the repository")
    parser.add_argument("--head", metavar="digest", help="an earlier last digest of the ledger")
    _take(parser.add_argument, "target_delta", help="default: the ledger's")


def add_report(parser: argparse.ArgumentParser) -> None:
    """Draw epsilon, signal, noise, learning rates and metrics of a run.

    The command writes report.png and report.md into the folder of the run.

    Examples:
      $ dp-grape report runs/digits
    """
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="output_dir of the run")
    _take(parser.add_argument, "target_delta", help="default: the ledger's")


def add_ledger(parser: argparse.ArgumentParser) -> None:
    """Show the entries of a ledger, and the epsilon spent.

    This includes the mechanism of the run, the releases that are counted, and the bound on epsilon
    by each accountant. The bound by the run's accountant is the claim.

    Each digest depends on all entries before it. Note the last digest in a place that the owner of
    the ledger cannot change. Later, dp-grape verify --head shows whether these entries were edited.

    Examples:
      $ dp-grape ledger runs/digits
    """
    parser.add_argument("place", type=Path, metavar="PATH", help="a ledger's file, or its folder")
    _take(parser.add_argument, "target_delta", help="default: the ledger's")


# ---- Options of several commands ----


def _take(add: Callable[..., Any], name: str, *names: str, **settings: Any) -> None:
    """Add an option of the table. ``settings`` override its type, names, symbol and meaning."""
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
    """Refuse a value that is out of range in the table of options.

    Raises:
        PrivacyError: a value is out of range.
    """
    for name, given in vars(args).items():
        if name in OPTIONS and given is not None:
            for value in given if isinstance(given, list) else [given]:
                read(name, value)


def _add_head(parser: argparse.ArgumentParser) -> None:
    head = "an AutoModelFor... in small letters, such as causal-lm (default: the config's)"
    parser.add_argument("--head", metavar="head", help=head)
    labels = "labels of a classifier (default: the config's)"
    parser.add_argument("--num_labels", type=_positive, metavar="n", help=labels)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value
