"""Render tables of results: of studies that are over, and of what ``dp-grape memory`` prints."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from recipes.common.markdown import mean_and_error, score_text, table
from recipes.gpu_report.table import GIB


def allocation(record: Mapping[str, Any]) -> str:
    """Return noise multipliers, noise in the weights, and the simulated δ of random allocation."""
    rows = []
    for found in record["cells"]:
        sigma, left, delta = found["sigma"], found["left"], record["delta"]
        worst, error = max(found["simulated_delta"].values())
        noises = [*(sigma[name] for name in ("poisson", "allocation", "banded"))]
        noises += [left["allocation"][0], *left["banded"]]
        simulated = f"{worst / delta:.2f} ± {error / delta:.2f}"
        setting = [f"{found['epsilon']:g}", f"{found['steps']}"]
        rows.append([*setting, *(f"{noise:.2f}" for noise in noises), simulated])
    titles = ["ε", "Steps per epoch", "Noise multiplier, Poisson", "random allocation"]
    titles += ["correlated noise", "Noise left by random allocation", "by correlated noise"]
    titles += ["the same, over the run", "δ of random allocation, simulated / asked"]
    return table(titles, rows)


def pairs_head(record: Mapping[str, Any]) -> str:
    """Return the accuracy of a head on features of pairs, with a column for each budget."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for cell in record["cells"]:
        setting = cell["features"], f"{cell['share']:g}", f"{cell['epochs']}"
        rows.setdefault(setting, []).append(score_text(mean_and_error(cell["accuracy"])))
    titles = ["Features of the head", "Share of C", "Epochs"]
    titles += [f"ε = {e:g}" for e in sorted({cell["epsilon"] for cell in record["cells"]})]
    ordered = sorted(rows, key=lambda s: (s[0] != "pair", -float(s[1]), int(s[2])))
    return table(titles, ([*setting, *rows[setting]] for setting in ordered))


def head_texts(record: Mapping[str, Any]) -> str:
    """Return the accuracy of a head by the texts of its P, over the seeds of these texts."""
    means: dict[tuple[str, int], dict[str, list[float]]] = {}
    for cell in record["cells"]:
        column = f"ε = {cell['epsilon']}, noise in logits {cell['logit_noise']:g}"
        row = means.setdefault((cell["task"], cell["texts"]), {})
        row.setdefault(column, []).append(sum(cell["accuracy"]) / len(cell["accuracy"]))
    titles = ["Task", "Texts of 8 tokens", *next(iter(means.values()))]
    return table(
        titles,
        (
            [task, f"{texts:,}", *(score_text(mean_and_error(some)) for some in row.values())]
            for (task, texts), row in means.items()
        ),
    )


def adapter_rules(record: Mapping[str, Any]) -> str:
    """Return the accuracy of LoRA by update rule, of runs that differ in nothing else."""
    rules: dict[str, dict[str, dict[int, float]]] = {}
    for run in record["runs"]:
        if (run["method"], run["epsilon"]) == ("LoRA", 4.0):
            task = rules.setdefault(run["task"], {"adam": {}, "momentum": {}})
            task[run["update_rule"]][run["seed"]] = run["accuracy"]
    rows = []
    for task, found in rules.items():
        gains = [found["momentum"][seed] - adam for seed, adam in found["adam"].items()]
        of_each = found["adam"].values(), found["momentum"].values(), gains
        rows.append([task, *(score_text(mean_and_error([*values])) for values in of_each)])
    return table(["Task", "Adam", "Momentum", "Difference"], rows)


def membership(record: Mapping[str, Any]) -> str:
    """Return what attacks found, and in brackets the most that (ε, δ)-privacy allows."""
    attacks = {"loss": "loss threshold", "lira": "LiRA, offline"}
    rows = []
    for title, way in record["ways"].items():
        epsilon = math.inf if way["epsilon_spent"] is None else way["epsilon_spent"]
        for name, attack in way["attacks"].items():
            rates = [
                f"{at['tpr']:.2%}, {at['true_positives']} of {at['members']} "
                f"({min(1.0, math.exp(epsilon) * at['fpr'] + record['delta']):.1%})"
                for at in attack["at"]
            ]
            share = f"{way['accuracy_of_members']:.1%}, {way['accuracy_of_others']:.1%}"
            rows.append([title, attacks[name], f"{attack['auc']:.3f}", *rates, share])
    titles = ["Trained by", "Attack", "AUC", "TPR at 1.0% FPR (allowed)"]
    return table([*titles, "TPR at 0.1% FPR (allowed)", "Accuracy: members, others"], rows)


def subspace(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the energy that directions keep, of all layers, and median, minimum and maximum."""
    sources = {
        "synthetic": "synthetic inputs",
        "public": "public data",
        "data": "the data's own inputs (not private)",
        "gradients": "the data's own gradients (not private, the bound)",
        "weights": "singular vectors of the weights",
        "random": "random",
    }
    rows = []
    for record in sorted(records, key=lambda record: record["model"].lower()):
        for source, shares in record["shares"].items():
            cells = [
                f"{s['together']:.0%} ({s['median']:.0%}, {s['min']:.0%} to {s['max']:.0%})"
                for s in shares.values()
            ]
            rows.append([f"{record['model']}, {record['data']}", sources[source], *cells])
    return table(["Model, data", "P from", "r = 4", "r = 16", "r = 64"], rows)


def memory(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return a table in GiB: a row for each method of each report, smaller models first."""
    kinds = ["weights", "optimizer state", "projections", "saved activations", "temporary"]
    titles = {"adamw": "AdamW", "dp_grape": "DP-GRAPE", "dp_lora": "DP-LoRA"}
    rows = []
    for report in sorted(reports, key=lambda report: report["parameters"]):
        model = f"{report['model']}, {report['parameters'] / 1e6:,.0f} million parameters"
        bits, processes = report.get("bits"), report.get("processes", 1)
        for method, found in report["methods"].items():
            title = titles.get(method, method)
            if found["kinds"]["projections"]:
                title += ", principal" * (report["projection"] == "principal")
            if method != "adamw":
                title += f", r = {report['rank']}"
            title += f", {bits} bits" * bool(bits)
            title += f", one of {processes} processes" * (processes > 1)
            sizes = [*(found["kinds"][kind] for kind in kinds), found["peak"]]
            batch = f"B = {report['batch_size']}, {report['length']}"
            rows.append([model, batch, title, *(f"{size / GIB:.2f}" for size in sizes)])
    return table(["Model", "Batch", "Step", *kinds, "peak"], rows)
