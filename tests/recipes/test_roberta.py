"""The few-shot recipe: prompts token by token, splits by hand, a head at the mask, short runs."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Value
from tokenizers import processors
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForMaskedLM,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
)

from dp_grape_hf import per_sample_gradients
from dp_grape_hf.gradients import flat
from dp_grape_hf.gradients.layerwise import LayerwiseEngine
from dp_grape_hf.projections import principal_directions, projection_targets, synthetic_batches
from recipes.paper import roberta
from recipes.paper.experiment import main, parse
from recipes.paper.roberta_prompts import TASKS, label_words, prompt, read_at_mask, read_the_mean
from tests.models.matrix import projectors_for
from tests.support.experiments import resumed
from tests.support.marks import slow_but
from tests.support.oracles import Largest, assert_gradients_equal, single_sample_gradients
from tests.support.questions import byte_level

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
TEXT = (
    "A a great film It was terrible bad okay good No Yes Maybe Description Entity Expression Human "
    "Location Number man sleeps the The Dog dog runs Who wrote it , . : ? "
)
SIZES = {
    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"intermediate_size": 32, "max_position_embeddings": 140, "type_vocab_size": 1},
    **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
COUNTS = {"DESC": 1162, "ENTY": 1250, "ABBR": 86, "HUM": 1223, "LOC": 835, "NUM": 896}  # of TREC
LAYERS = 2 * 6  # linear layers of the tiny encoder


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level BPE tokenizer like RoBERTa's, whose vocabulary has the words of the tests."""
    bpe = byte_level([f" {TEXT}"] * 3, 1000, SPECIAL)
    bpe.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    names = ("cls_token", "pad_token", "sep_token", "unk_token", "mask_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, **dict(zip(names, SPECIAL, strict=True)), model_max_length=512
    )


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    """A tiny RoBERTa with its tokenizer, as saved by its makers."""
    path = tmp_path_factory.mktemp("roberta")
    tokenizer.save_pretrained(path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = RobertaConfig(vocab_size=len(tokenizer), pad_token_id=1, **SIZES)
        RobertaForMaskedLM(config).save_pretrained(path)
    return path


def tokens(tokenizer, task, *texts, max_length=None):
    ids = prompt(TASKS[task], tokenizer, texts, max_length)
    return " ".join(tokenizer.convert_ids_to_tokens(ids))


ENTAILED = ("A man sleeps.", "The Dog runs.")
ASKED = "<s> A Ġman Ġsleeps ? <mask> , Ġthe ĠDog Ġruns . </s>"  # one letter is in lower case


@pytest.mark.parametrize(
    ("task", "texts", "expected"),
    [
        ("SST-2", ("a great film ",), "<s> a Ġgreat Ġfilm Ġ ĠIt Ġwas <mask> . </s>"),
        ("SST-5", ("A film .",), "<s> A Ġfilm Ġ. ĠIt Ġwas <mask> . </s>"),
        *(("SNLI", ENTAILED, ASKED), ("MNLI", ENTAILED, ASKED), ("RTE", ENTAILED, ASKED)),
        ("TREC", ("Who wrote it ?",), "<s> <mask> : ĠWho Ġwrote Ġit Ġ? </s>"),
    ],
)
def test_prompts_are_those_of_the_source(tokenizer, task, texts, expected):
    assert tokens(tokenizer, task, *texts) == expected


def test_a_long_prompt_loses_its_tail_and_never_its_mask(tokenizer):
    long = " ".join(["film"] * 300)
    cut = tokens(tokenizer, "SNLI", "A man.", long).split()
    assert len(cut) == 256
    assert cut[:7] == ["<s>", "A", "Ġman", "?", "<mask>", ",", "Ġfilm"]
    assert cut[-1] == "Ġfilm"  # not even the end mark is kept
    with pytest.raises(ValueError, match="more than 128 tokens before its mask"):
        tokens(tokenizer, "SST-2", long)


@pytest.mark.parametrize(("task", "limit"), [("SST-5", 110), ("TREC", 110), ("MNLI", 240)])
def test_the_first_text_has_a_limit_of_its_own(tokenizer, task, limit):
    texts = ["A " + " ".join(["film"] * 300)] + ["It"] * (task == "MNLI")
    written = tokens(tokenizer, task, *texts)
    assert written.split().count("Ġfilm") == limit - 1
    assert "<mask>" in written


def test_a_shorter_prompt_keeps_room_for_its_mask(tokenizer):
    long = "a " + " ".join(["film"] * 50)
    written = tokens(tokenizer, "SST-2", long, max_length=24)
    assert written == "<s> a " + "Ġfilm " * 5 + "ĠIt Ġwas <mask> . </s>"
    with pytest.raises(ValueError, match="max_length=18 must be above 18"):
        tokens(tokenizer, "SST-2", long, max_length=18)


def test_label_words_follow_a_space_and_are_one_token(tokenizer):
    words = tokenizer.convert_ids_to_tokens(label_words(TASKS["SNLI"], tokenizer))
    assert words == ["ĠNo", "ĠYes", "ĠMaybe"]
    task = replace(TASKS["SNLI"], words={"neutral": "Perhaps"})
    with pytest.raises(ValueError, match=r"no single token for the label words \['Perhaps'\]"):
        label_words(task, tokenizer)


def test_every_word_of_every_task_is_known(tokenizer):
    for task in TASKS.values():
        assert len(set(label_words(task, tokenizer))) == len(task.words)
        assert set(task.words) == set(task.names)


def test_the_few_shot_split_of_trec_has_the_papers_sizes():
    labels = [number for number, n in enumerate(COUNTS.values()) for _ in range(n)]
    train, dev = roberta.few_shot(labels, 512, seed=13)
    assert (len(train), len(dev)) == (2646, 2243)
    assert not set(train) & set(dev)
    counts = np.bincount([labels[row] for row in dev], minlength=6)
    assert counts.tolist() == [512, 512, 0, 512, 323, 384]


def test_the_few_shot_split_is_that_of_numpys_global_shuffle():
    seed = 13
    labels = [row % 3 for row in range(60)]
    with_global_state = list(range(60))
    np.random.seed(seed)
    np.random.shuffle(with_global_state)
    train, dev = roberta.few_shot(labels, 4, seed)
    for label in range(3):
        mine = [row for row in with_global_state if labels[row] == label]
        assert [row for row in train if labels[row] == label] == mine[:4]
        assert [row for row in dev if labels[row] == label] == mine[4:8]


def test_a_large_test_split_is_reduced_to_fixed_thousand_rows():
    assert roberta.rows_tested(872) == list(range(872))
    assert roberta.rows_tested(1000) == list(range(1000))
    found = roberta.rows_tested(2210)
    rows = list(range(2210))
    np.random.seed(42)
    np.random.shuffle(rows)
    assert found == rows[:1000]
    assert found == pd.DataFrame(range(2210)).sample(n=1000, random_state=42).index.tolist()


def test_labels_are_matched_by_name_and_unlabelled_rows_omitted(monkeypatch):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        names = ["neutral", "contradiction", "entailment"]  # not the order of the Hub
        columns = {"premise": Value("string"), "hypothesis": Value("string")}
        return Dataset.from_dict(
            {"premise": list("abcd"), "hypothesis": list("efgh"), "label": [0, 1, -1, 2]},
            features=Features({**columns, "label": ClassLabel(names=names)}),
        )

    monkeypatch.setattr("recipes.paper.data.load_dataset", load_dataset)
    script = SimpleNamespace(dataset_path=None)
    rows = roberta.rows_of(TASKS["MNLI"], script, "validation_matched")
    assert rows[:] == {"texts": [["a", "e"], ["b", "f"], ["d", "h"]], "labels": [2, 0, 1]}
    assert asked == [(("nyu-mll/glue", "mnli"), {"split": "validation_matched", "revision": None})]
    with pytest.raises(ValueError, match="The data have the labels"):
        roberta.rows_of(replace(TASKS["MNLI"], words={"yes": "Yes"}), script, "train")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_labels_of_a_folder_are_the_numbers_of_the_hub(tmp_path):
    rows = [{"text": name, "coarse_label": i} for i, name in enumerate(TASKS["TREC"].names)]
    write(tmp_path / "train.jsonl", rows)
    write(tmp_path / "validation.jsonl", rows[:2])
    script = SimpleNamespace(dataset_path=str(tmp_path))
    found = roberta.rows_of(TASKS["TREC"], script, "train+validation")
    assert found["labels"] == [2, 1, 0, 3, 4, 5, 2, 1]  # DESC first, then ENTY, then ABBR
    write(tmp_path / "train.jsonl", [{"text": "?", "coarse_label": 6}])
    with pytest.raises(ValueError, match=r"has \[6\], which are no labels"):
        roberta.rows_of(TASKS["TREC"], script, "train")
    script.dataset_path = str(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"none' is no folder"):
        roberta.rows_of(TASKS["TREC"], script, "train")


def batch_of(tokenizer):
    texts = (("TREC", "Who wrote it ?"), ("SST-2", "a film"), ("SST-2", "A great great dog runs"))
    examples = [
        {"input_ids": prompt(TASKS[task], tokenizer, [text]), "labels": i % 2}
        for i, (task, text) in enumerate(texts)
    ]
    return roberta.Collator(tokenizer, finds_mask=True)(examples)


def prompted(folder, tokenizer):
    model = AutoModelForMaskedLM.from_pretrained(folder)
    return read_at_mask(model, label_words(TASKS["SST-2"], tokenizer))


def test_the_head_reads_the_words_at_the_mask(folder, tokenizer):
    batch, words = batch_of(tokenizer), label_words(TASKS["SST-2"], tokenizer)
    labels = batch.pop("labels")
    whole = AutoModelForMaskedLM.from_pretrained(folder).eval()
    all_logits = whole(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert batch["mask_pos"].tolist() == [1, 5, 8]
    expected = torch.stack([all_logits[i, at][words] for i, at in enumerate((1, 5, 8))])
    outputs = prompted(folder, tokenizer).eval()(**batch)
    torch.testing.assert_close(outputs.logits, expected)
    torch.testing.assert_close(
        roberta.cross_entropy(outputs, labels), -expected.log_softmax(1)[torch.arange(3), labels]
    )


@pytest.mark.parametrize("rank", [None, 4])
def test_gradients_through_the_tied_embeddings_are_those_of_single_samples(folder, tokenizer, rank):
    model, batch = prompted(folder, tokenizer), batch_of(tokenizer)
    assert model.lm_head.decoder.weight is model.roberta.embeddings.word_embeddings.weight
    projectors = projectors_for(model, rank)
    losses, gradients = per_sample_gradients(
        model, batch, projections=projectors, loss=roberta.cross_entropy
    )
    expected_losses, expected = single_sample_gradients(
        model, batch, projectors, roberta.cross_entropy
    )
    torch.testing.assert_close(losses, expected_losses)
    assert_gradients_equal(gradients, expected)
    tied = expected["roberta.embeddings.word_embeddings.weight"]
    words, read = label_words(TASKS["SST-2"], tokenizer), batch["input_ids"][0]
    assert not set(words) & set(read.tolist())
    assert (tied[0, words].norm(dim=1) > 0).all()  # by the head alone
    assert (tied[0, read[:8]].norm(dim=1) > 0).all()  # by the table, beside the head


def test_all_layers_have_rules_and_one_position_has_logits(folder, tokenizer, monkeypatch):
    monkeypatch.setattr(flat, "MOST", 0)
    model, batch = prompted(folder, tokenizer), batch_of(tokenizer)
    engine = LayerwiseEngine(model, roberta.cross_entropy)
    engine(batch, {})
    assert [site.path for site in engine._sites if site.rule is None] == []
    with Largest() as largest:
        engine(batch, {})
    positions = batch["input_ids"].numel()
    assert largest.numbers < positions * len(tokenizer)


def test_the_presets_project_the_linear_layers_of_the_encoder(folder, tokenizer):
    model = prompted(folder, tokenizer)
    trainable = dict(model.named_parameters())
    _, args = parse(roberta.FAMILY, ["--config=paper", "--task=RTE", "--eps=2", "--use_cpu"])
    found = projection_targets(model, trainable, args.optim_target_modules)
    assert len(found) == LAYERS
    assert not any("lm_head" in name or "embeddings" in name for name in found)


def test_a_model_without_one_vocabulary_head_is_refused():
    config = DistilBertConfig(vocab_size=9, dim=8, hidden_dim=8, n_layers=1, n_heads=1)
    with pytest.raises(ValueError, match="DistilBertForMaskedLM computes its vocabulary's logits"):
        read_at_mask(DistilBertForMaskedLM(config), [1, 2])


@pytest.fixture
def data(tmp_path):
    words = {0: "bad", 1: "good"}
    rows = [{"sentence": f"{'a ' * (i % 7)}{words[i % 2]} film", "label": i % 2} for i in range(40)]
    write(tmp_path / "train.jsonl", rows)
    write(tmp_path / "validation.jsonl", rows[:11])
    return tmp_path


def words_of(folder, data, *others):
    given = {
        **{"config": "ours", "task": "SST-2", "model_name_or_path": folder, "dataset_path": data},
        **{"k": 8, "expected_batch_size": 8, "per_device_train_batch_size": 8, "max_steps": 2},
        **{
            "accountant": "rdp",
            "eps": 6,
            "output_dir": data / "run",
            "result_dir": data / "results",
        },
    }
    if "--method=adam" in others:
        del given["eps"]
    options = [f"--{name}={value}" for name, value in given.items()]
    return [*options, "--use_cpu", "--disable_tqdm=True", "--dataloader_pin_memory=False", *others]


@pytest.mark.slow
def test_a_killed_run_resumes_and_leaves_a_plain_model(folder, data):
    """By the same command; a masked language model reads the prompts as the trained one does."""
    others = ["--config=reference_code", "--max_steps=60", "--projection_rank=4", "--save_model"]
    words = words_of(folder, data, *others, "--learning_rate=1e-2")
    _, result, path = resumed(roberta.FAMILY, words, data / "run")
    assert result["splits"] == {"train": 16, "dev": 16, "test": 11}
    assert result["privacy"]["sample_rate"] == 8 / 16
    assert result["privacy"]["epsilon"] <= 6.0
    assert "The run was stopped" in result["notes"][-1]
    before, saved = map(AutoModelForMaskedLM.from_pretrained, (folder, path))
    assert saved.lm_head.decoder.weight is saved.roberta.embeddings.word_embeddings.weight
    moved = [not torch.equal(p, before.get_parameter(name)) for name, p in saved.named_parameters()]
    assert all(moved)
    task, tokenizer = TASKS["SST-2"], AutoTokenizer.from_pretrained(path)
    words_of_labels, right = label_words(task, tokenizer), []
    for line in (data / "validation.jsonl").read_text().splitlines():
        row = json.loads(line)
        ids = torch.tensor([prompt(task, tokenizer, [row["sentence"]])])
        logits = saved.eval()(ids).logits[ids == tokenizer.mask_token_id]
        right.append(int(logits[0, words_of_labels].argmax()) == row["label"])
    assert result["metrics"]["test"] == {"accuracy": pytest.approx(100 * sum(right) / 11)}


@pytest.mark.parametrize("method", slow_but(("adam",), ["dp_lora", "dpzero", "adam"]))
def test_the_prompted_model_trains_by_other_methods(folder, data, method):
    result = main(roberta.FAMILY, words_of(folder, data, f"--method={method}"))
    assert result["privacy"]["private"] == (method != "adam")
    assert result["privacy"]["steps"] == 2


def test_an_adapter_may_start_with_principal_directions(folder, tokenizer):
    options = ["--config=ours", "--task=RTE", "--eps=2", "--use_cpu", "--method=dp_lora"]
    options.append("--lora_rank=3")
    found = {}
    for start in ("random", "principal"):
        words = [*options, f"--lora_init={start}", f"--model_name_or_path={folder}"]
        script, args = parse(roberta.FAMILY, words)
        found[start] = roberta.model_for(TASKS["RTE"], tokenizer, script, args)
    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    name = "roberta.encoder.layer.0.attention.self.query"
    expected = principal_directions(
        model, {f"{name}.weight": 3}, lambda: synthetic_batches(model, tokenizer)
    )[f"{name}.weight"]
    layers = {
        start: adapter.get_submodule(f"base_model.model.{name}") for start, adapter in found.items()
    }
    a = layers["principal"].lora_A["default"].weight
    assert torch.allclose(a, expected.directions.T, atol=1e-4)
    assert not torch.allclose(layers["random"].lora_A["default"].weight, a, atol=1e-2)
    assert not layers["principal"].lora_B["default"].weight.any()


def test_the_head_reads_the_mean_of_what_is_no_padding(tokenizer):
    config = BertConfig(vocab_size=len(tokenizer), pad_token_id=1, **SIZES)
    model = read_the_mean(BertForSequenceClassification(config).eval(), 3)
    words = torch.tensor([[5, 6, 7, 1, 1], [5, 6, 7, 8, 9]])
    mask = (words != 1).long()
    hidden = model.bert(input_ids=words, attention_mask=mask).last_hidden_state
    means = torch.stack([hidden[0, :3].mean(0), hidden[1].mean(0)])
    torch.testing.assert_close(model(words, mask).logits, model.classifier(means))
    assert all("pooler" not in name for name, _ in model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "head"), [("dp_grape", "classification"), ("dp_grape", "mean"), ("dp_lora", "mean")]
)
def test_an_encoder_like_bert_trains_with_a_new_head(tokenizer, data, tmp_path, method, head):
    path = tmp_path / "bert"
    tokenizer.save_pretrained(path)
    config = BertConfig(vocab_size=len(tokenizer), pad_token_id=1, **SIZES)
    BertForSequenceClassification(config).bert.save_pretrained(path)  # an encoder, no head
    others = [f"--head={head}", "--max_length=20", f"--method={method}"]
    saving = ["--save_strategy=steps", "--save_steps=2"]
    result = main(roberta.FAMILY, words_of(path, data, *others, *saving))
    assert result["privacy"]["steps"] == 2
    if method == "dp_grape":
        (saved,) = (data / "run").glob("*/checkpoint-2")
        model = AutoModelForSequenceClassification.from_pretrained(saved)
        assert head != "classification" or model.config.id2label == {0: "negative", 1: "positive"}


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (["--zero_shot", "--head=classification"], "zero_shot=True needs head='prompt'"),
        (["--save_model", "--head=mean"], "no class of transformers reads the mean"),
        (["--save_model", "--zero_shot"], "nothing is trained"),
        (["--scored_splits=train"], "scored_splits='train' names none of: dev, test"),
        (["--k=20"], "k=20 leaves no examples for dev: lower --k"),
    ],
)
def test_a_run_that_cannot_be_is_refused(folder, data, others, message):
    with pytest.raises(ValueError, match=message):
        main(roberta.FAMILY, words_of(folder, data, *others))
