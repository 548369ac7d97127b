"""The card says what the ledger says: no more, and nothing rounded in the model's favour."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, ModelCardData

from dp_grape_hf.cli.main import main
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import LEDGER_NAME, Ledger
from dp_grape_hf.publishing import MISMATCH, CardDetails, declare, render, renewed, verify
from dp_grape_hf.publishing.statement import BEGIN, END, statement_in
from recipes.report import cards
from recipes.report.cards import CARDS, DETAILS
from tests.support import ledgers
from tests.support.cards import rows, section
from tests.support.hub_server import metadata_errors
from tests.support.marks import slow_but

MECHANISM = replace(
    ledgers.MECHANISM,
    noise_multiplier=1.0625,
    max_grad_norm=0.375,
    target_epsilon=60.0,
    accountant="rdp",
    projection_update_steps=90,
    projection_seed=1234,
)
NO_NOISE = {"noise_multiplier": 0.0, "target_epsilon": None, "target_delta": None}


def ledger(steps=137, **changes):
    return ledgers.ledger_of(steps, replace(MECHANISM, **changes)).snapshot(steps)


def claims_privacy(card):
    tags = ModelCard(card).data.tags
    return "trained with differential privacy" in card or "differential-privacy" in tags


def test_the_statement_stands_between_two_marks_below_the_title():
    for changes in ({}, NO_NOISE):
        one = ledger(**changes)
        names = {"model_name": "ViT, ε = 3", "metrics": {"epsilon": 3.0}}
        plain, other = render(one), render(one, CardDetails(**names, metrics_are_public=True))
        assert statement_in(plain) == statement_in(other)
        assert statement_in(plain).endswith(list(rows(plain).values())[-1] + " |")
        assert f"# Model card\n\n{BEGIN}\n\n" in plain
        assert "* epsilon: 3" in other.partition(END)[2]


DECLARED = {"language": ["en", "de"], "license": "mit", "datasets": ["nyu-mll/glue"]}
TAGS = ["dp-grape", "differential-privacy"]


@pytest.mark.parametrize(
    ("details", "more"),
    [
        ({}, {}),
        (
            {"base_model": "user/base", "adapter": True},
            {"library_name": "peft", "base_model": "user/base", "base_model_relation": "adapter"},
        ),
        (
            DECLARED | {"pipeline_tag": "fill-mask", "tags": ("vision", "dp-grape")},
            DECLARED | {"pipeline_tag": "fill-mask", "tags": [*TAGS, "vision"]},
        ),
    ],
)
def test_the_metadata_are_those_of_the_hub(details, more):
    text = render(ledger(), CardDetails(**details))
    card = ModelCard(text)
    claim = {"epsilon": float(rows(text)["ε spent (upper bound)"]), "delta": 1e-5}
    claim |= {"unit": "example", "adjacency": "add_or_remove_one", "accountant": "rdp"}
    usual = {"library_name": "transformers", "tags": TAGS, "differential_privacy": claim}
    assert card.data.to_dict() == usual | more
    assert ModelCardData(**card.data.to_dict()).to_dict() == card.data.to_dict()
    assert metadata_errors(text) == []
    assert card.text.lstrip().startswith("# ")


@pytest.mark.parametrize(
    ("card", "error"),
    [
        ("---\ntags: [\n---\n", "no YAML"),
        ("---\ntags: fine\nloss: 1\n---\n", "loss is unknown"),
        ("---\nbase_model: /data/model\n---\n", "base_model: '/data/model' is not valid"),
    ],
)
def test_the_check_of_metadata_can_fail(card, error):
    assert error in metadata_errors(card)[0]


def test_public_metrics_are_in_the_index_of_the_hub():
    given = {"metrics": {"accuracy": 0.9}, "datasets": ["nyu-mll/glue"], "model_name": "Mine"}
    for public in (True, False):
        details = CardDetails(
            **given, metrics_are_public=public, model_class="BertForSequenceClassification"
        )
        text = render(ledger(), details)
        assert metadata_errors(text) == []
        data = ModelCard(text).data
        assert data.pipeline_tag == "text-classification"
        assert (data.eval_results is not None) == public
        if public:
            (result,) = data.eval_results
            assert (result.metric_type, result.metric_value) == ("accuracy", 0.9)
            assert (result.dataset_name, result.task_type) == ("nyu-mll/glue", data.pipeline_tag)


def test_a_card_shows_loading_code_and_hyperparameters():
    details = CardDetails(
        model_class="OPTForCausalLM", repo_id="user/m", hyperparameters={"Schedule": "a|b"}
    )
    card = render(ledger(), details)
    assert "model = OPTForCausalLM.from_pretrained('user/m')\n```" in card
    assert "| Schedule | a\\|b |" in section(card, "Hyperparameters")
    adapter = render(ledger(), replace(details, adapter=True, base_model="user/base"))
    assert "model = PeftModel.from_pretrained(base, 'user/m')\n```" in adapter
    assert "num_labels" not in card + adapter
    classes = render(ledger(), replace(details, adapter=True, base_model="user/b", num_labels=6))
    assert "from_pretrained('user/b', num_labels=6)\n" in classes
    assert "How to use" not in render(ledger())


def test_only_the_statement_of_a_card_is_replaced():
    before, after = ledger(100), ledger(137)
    card = render(before, CardDetails(license="mit", tags=("mine",)))
    own = card.replace("## Verify", "## By hand\n\nMy words.\n\n## Verify")
    own = own.replace("license: mit", "license: mit\nwidget:\n- text: Hello")
    same = renewed(own, render(before))
    assert ModelCard(same).data.to_dict() == ModelCard(own).data.to_dict()
    assert same.partition(BEGIN)[2] == own.partition(BEGIN)[2]
    new = renewed(own, render(after, CardDetails(license="apache-2.0")))
    assert statement_in(new) == statement_in(render(after))
    data = ModelCard(new).data.to_dict()
    assert data["differential_privacy"] == ModelCard(render(after)).data["differential_privacy"]
    assert (data["license"], data["widget"]) == ("mit", [{"text": "Hello"}])
    assert data["tags"] == ["dp-grape", "differential-privacy", "mine"]
    assert new.partition(END)[2] == own.partition(END)[2]
    declared = renewed(own, render(after, CardDetails(license="apache-2.0")), {"license"})
    assert ModelCard(declared).data.license == "apache-2.0"


def test_a_claim_goes_where_a_run_has_no_guarantee():
    new = renewed(render(ledger()), render(ledger(**NO_NOISE)))
    assert not claims_privacy(new)
    assert "differential_privacy" not in ModelCard(new).data.to_dict()


def test_the_command_keeps_what_the_author_wrote(folder, capsys):
    path = folder / "README.md"
    path.write_text(render(ledger(100)) + "\nMy words.\n", encoding="utf-8")
    public = ["--metric", "f1=0.5", "--metrics_data", "public", "--pipeline_tag", "fill-mask"]
    assert main(["card", str(folder), *public, "--write"]) == 0
    written = path.read_text(encoding="utf-8")
    assert written.endswith("\nMy words.\n")
    assert statement_in(written) == statement_in(render(Ledger.load(folder / LEDGER_NAME)))
    assert ModelCard(written).data.eval_results[0].metric_value == 0.5
    private = [*public[:3], "private"]
    assert main(["card", str(folder), *private, "--write"]) == 2
    assert "of private data" in capsys.readouterr().err
    path.write_text("# Mine\n", encoding="utf-8")
    assert main(["card", str(folder), "--write"]) == 2
    assert "Move the file away" in capsys.readouterr().err
    assert path.read_text(encoding="utf-8") == "# Mine\n"


def test_every_number_is_that_of_the_ledger():
    one = ledger()
    found = rows(render(one))
    epsilon = one.epsilon()
    assert float(found.pop("ε spent (upper bound)")) == pytest.approx(epsilon, rel=1e-3)
    assert found == {
        "δ": "1e-05",
        "Adjacency": "add or remove one",
        "Privacy unit": "example (a row is an example: declared by the user)",
        "Sampling": "poisson, rate q = 0.0625",
        "Dataset size N, as declared": "1024",
        "Expected batch size q N": "64",
        "Noise multiplier sigma": "1.0625",
        "Clipping norm C": "0.375",
        "Norms": "exact",
        "Releases": "137",
        "Projection": "gaussian, r = 16, F = 90",
        "Projection seed (public)": "1234",
        "Method": "dp_grape",
        "Accountant": "rdp",
        "Accountant's software": f"dp_grape_hf {one.versions['dp_grape_hf']}",
    }


def test_the_accountant_is_named_with_its_version(monkeypatch):
    one = ledger(steps=1, accountant="prv")
    name, version = "Accountant's software", one.versions["prv-accountant"]
    assert rows(render(one))[name] == f"prv-accountant {version}"
    monkeypatch.setattr(Ledger, "versions", {}, raising=False)
    assert rows(render(one))[name] == "prv-accountant version not recorded"


@pytest.mark.parametrize("steps", [0, 1, 50, 1000])
def test_a_cards_epsilon_is_not_below_the_ledgers(steps):
    one = ledger(steps)
    card = render(one)
    claimed = re.search(r"\*\*ε = ([\d.e+-]+)\*\*", card)
    assert claimed is not None
    assert one.epsilon() <= float(claimed[1]) <= one.epsilon() + 0.002 * (steps > 0)
    assert rows(card)["ε spent (upper bound)"] == claimed[1]


NO_PROJECTION = dict.fromkeys(("projection_rank", "projection_update_steps", "projection_seed"))
NO_PROJECTION |= {"projection": "identity"}
CAPPED = {"privacy_unit": "author", "max_examples_per_unit": 4}


@pytest.mark.parametrize(
    ("changes", "row", "cell"),
    [
        ({"clipping": "automatic"}, "Clipping norm C", "0.375, to which all are scaled"),
        (NO_PROJECTION, "Projection", "identity"),
        (NO_PROJECTION, "Projection seed (public)", "-"),
        ({"privacy_unit": "author"}, "Privacy unit", "`author` with all its examples"),
        (CAPPED, "Privacy unit", "`author` with all its examples, at most 4 in a step"),
    ],
)
def test_what_is_unusual_has_its_words(changes, row, cell):
    found = rows(render(ledger(**changes)))
    assert found[row] == cell
    assert "None" not in "".join(found.values())


def test_gradient_factors_are_given_where_there_are_any(tmp_path, capsys):
    for factors, said in ((None, None), ('{"head": 4.0}', '{"head": 4.0}, before the clip')):
        one = ledger(gradient_factors=factors)
        assert rows(render(one)).get("Gradient factors") == said
        one.save(tmp_path / LEDGER_NAME)
        assert main(["ledger", str(tmp_path)]) == 0
        row = re.search(r"^Gradient factors +(.+)$", capsys.readouterr().out, re.MULTILINE)
        assert (row and row[1]) == said


def test_a_private_run_says_epsilon_delta_and_unit():
    card = render(ledger(privacy_unit="author"))
    assert claims_privacy(card)
    assert "∞" not in card
    assert "δ = 1e-05" in card
    assert "adding or removing one `author` with all its examples" in card
    card = render(ledger(adjacency="replace_one"))
    assert "for replacing one example of the training data" in card
    assert "adding" not in card


@pytest.mark.parametrize(
    ("changes", "reason"),
    [(NO_NOISE, "noise_multiplier is 0.0"), ({"sampling": "shuffled"}, "shuffled")],
    ids=str,
)
def test_a_run_without_a_guarantee_never_says_private(changes, reason):
    card = render(ledger(**changes), CardDetails(tags=("differential-privacy",)))
    assert not claims_privacy(card)
    assert "no privacy guarantee" in card
    assert reason in card
    assert rows(card)["ε spent (upper bound)"] == "∞"
    assert ModelCard(card).data.tags == ["dp-grape"]


def test_all_reasons_against_a_guarantee_are_given():
    one = ledger()
    assert claims_privacy(render(one))
    one.mark_not_private("test generators were passed")
    one.mark_not_private("un-noised statistics were logged")
    card = render(one)
    assert not claims_privacy(card)
    assert "test generators were passed; un-noised statistics were logged" in card


@pytest.mark.parametrize("changes", [{}, NO_NOISE], ids=["private", "not private"])
def test_a_card_holds_no_loss_metric_time_or_place(changes):
    one = ledger(**changes)
    card = render(one, CardDetails(base_model="facebook/opt-125m"))
    words = set(re.findall(r"[a-z_]+", card.lower()))
    assert not words & {"loss", "losses", "accuracy", "perplexity", "f1", "eval", "grad_norm"}
    assert one.run_id not in card
    assert one.runs[-1].start.at not in card
    assert ModelCard(card).data.eval_results is None
    assert "model-index" not in card


@pytest.mark.parametrize("changes", [{}, NO_NOISE], ids=["private", "not private"])
def test_a_card_states_usage_and_limits_of_epsilon(changes):
    card = render(ledger(**changes))
    assert "arxiv.org/abs/2506.15588" in section(card, "How to cite")
    use = section(card, "Intended use")
    assert ("does\nnot increase the ε" in use) == (not changes)
    assert "reveal" in use
    assert ("Not covered by ε" in card) == (not changes), "there is no ε that could cover anything"
    for what in ("hyperparameters", "metrics", "preprocessing", "dataset size N", "base model"):
        assert what in card or changes
    assert "privacy_ledger.json" in card
    for package, version in ledger().versions.items():
        assert f"{package} {version}" in card
    assert "\ndp-grape verify .\n" in card
    named = render(ledger(**changes), CardDetails(repo_id="user/model"))
    assert "\ndp-grape verify user/model\n" in named


@pytest.mark.parametrize("public", [True, False])
def test_metrics_appear_only_with_a_word_on_their_data(public):
    assert section(render(ledger()), "Metrics") == ""
    with pytest.raises(PrivacyError, match="metrics_are_public=None"):
        CardDetails(metrics={"accuracy": 0.5})
    details = CardDetails(metrics={"accuracy": 0.91234}, metrics_are_public=public)
    shown = section(render(ledger(), details), "Metrics")
    assert "* accuracy: 0.9123\n" in shown
    assert ("declares public" in shown) == public
    assert ("ε does not cover these metrics" in shown) == (not public)


def test_what_is_declared_adds_to_what_was():
    first = declare(CardDetails(), True, "en", tags="a", tasks=["text-classification", "other"])
    assert first == CardDetails(language="en", tags=("a",), pipeline_tag="text-classification")
    second = declare(first, False, license="mit", metrics={"f1": 0.5}, dataset_name="d/e")
    assert (second.language, second.license, second.datasets) == ("en", "mit", "d/e")
    assert second.metrics_are_public is False
    third = declare(second, True, model_name="Mine", finetuned_from="u/base", tags=["b", "c"])
    assert third.metrics_are_public is False, "these metrics were declared before"
    assert (third.model_name, third.base_model, third.tags) == ("Mine", "u/base", ("b", "c"))
    assert declare(third, True, metrics={"f1": 0.6}).metrics_are_public is True
    glue = declare(third, True, dataset_tags="glue", dataset="GLUE SST2", dataset_args="sst2")
    assert glue.datasets == "glue"


def test_no_text_writes_the_card():
    row = "x |\n| ε spent (upper bound) | 0.001 |\n## Privacy\n"
    cards = [
        render(ledger(steps=3, privacy_unit=row)),
        render(ledger(steps=3), CardDetails(model_name=row)),
        render(ledger(steps=3), CardDetails(metrics={row: 1}, metrics_are_public=True)),
    ]
    one = ledger(steps=3)
    one.mark_not_private(row)
    for card in (*cards, render(one)):
        assert card.count("\n## Privacy\n") == 1
        assert card.count("\n| ε spent (upper bound) |") == 1
        assert rows(card)["ε spent (upper bound)"] != "0.001"
        table = re.findall(r"^\|.*$", section(card, "Privacy"), re.MULTILINE)
        assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {3}


def test_a_ledger_without_weights_or_delta_has_no_card():
    one = Ledger.start(MECHANISM)
    one.record(3)
    with pytest.raises(PrivacyError, match="updates=None"):
        render(one)
    assert claims_privacy(render(one, updates=3))
    with pytest.raises(PrivacyError, match="target_delta=None"):
        render(ledger(target_delta=None))


def test_an_infinite_epsilon_is_no_claim(monkeypatch):
    monkeypatch.setattr(Ledger, "epsilon", lambda self: math.inf)
    card = render(ledger())
    assert not claims_privacy(card)
    assert "no finite ε" in card
    assert rows(card)["ε spent (upper bound)"] == "∞"


@pytest.fixture
def folder(tmp_path):
    ledger().save(tmp_path / LEDGER_NAME)
    return tmp_path


def test_the_command_prints_the_card_of_a_saved_folder(folder, capsys):
    assert main(["card", str(folder)]) == 0
    assert capsys.readouterr().out == render(Ledger.load(folder / LEDGER_NAME))
    assert not (folder / "README.md").exists()
    (folder / LEDGER_NAME).unlink()
    assert main(["card", str(folder)]) == 2
    assert LEDGER_NAME in capsys.readouterr().err


def test_the_command_writes_what_is_declared(folder):
    options = "--repo_id user/m --license mit --language en --tags a b --datasets d/e --write"
    more = "--base_model u/base --pipeline_tag text-classification --model_name Mine"
    metrics = ["--metric", "test accuracy=0.908", "--metric", "f1=0.5", "--metrics_data", "private"]
    (folder / "adapter_config.json").write_text("{}")
    assert main(["card", str(folder), *options.split(), *more.split(), *metrics]) == 0
    details = CardDetails(
        repo_id="user/m",
        model_name="Mine",
        base_model="u/base",
        adapter=True,
        language=["en"],
        license="mit",
        pipeline_tag="text-classification",
        datasets=["d/e"],
        tags=("a", "b"),
        metrics={"test accuracy": 0.908, "f1": 0.5},
        metrics_are_public=False,
    )
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert card == render(Ledger.load(folder / LEDGER_NAME), details)
    assert metadata_errors(card) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--metric", "accuracy=0.9"], "metrics_are_public=None"),
        (["--metric", "accuracy", "--metrics_data", "public"], "--metric 'accuracy'"),
        (["--metric", "a=high", "--metrics_data", "public"], "--metric 'a=high'"),
        (["--metric", "=1", "--metrics_data", "public"], "--metric '=1'"),
    ],
)
def test_the_command_refuses_a_metric_that_says_too_little(options, message, folder, capsys):
    assert main(["card", str(folder), *options]) == 2
    assert message in capsys.readouterr().err


ROOT = Path(__file__).parents[2]


def test_all_committed_cards_are_rendered():
    """``make tables`` renders them from their ledgers, and another test compares the pages."""
    assert {path.parent.name for path in (ROOT / CARDS).glob("*/README.md")} == DETAILS.keys()


@pytest.mark.parametrize("folder", slow_but({"digits"}, DETAILS))
def test_the_committed_cards_are_what_their_ledgers_render(folder):
    path = ROOT / CARDS / folder
    one, card = Ledger.load(path / LEDGER_NAME), (path / "README.md").read_text(encoding="utf-8")
    assert card == cards.card(ROOT, folder)
    assert metadata_errors(card) == []
    assert claims_privacy(card) == one.private == (folder != "digits_not_private")
    statuses = {check.what: check.status for check in verify(path)}
    assert MISMATCH not in statuses.values()
    assert statuses["card: statement"] == "ok"
