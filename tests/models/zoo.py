"""Tiny models of every family and data for every head: to add a model, add a row to the table.

A row of ``families.yaml`` names a configuration class of transformers, its settings and the tasks
to try; the classes of the models follow from the tasks. Everything is made from ``Config(...)`` and
random numbers: no network, no data. Where an engine refuses a model, the row says with which words.

Shapes: B samples in the batch, T positions.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
import yaml
from torch import Tensor, nn

VOCABULARY, HIDDEN, HEADS, LABELS, MAX_POSITIONS = 60, 32, 4, 3, 40
PAD, START, END, FIRST_WORD = 1, 2, 3, 5
IMAGE_START, IMAGE_TOKEN, IMAGE_END = 3, 4, 2
IGNORED = -100
CHOICES, TARGET_LENGTH = 3, 6
IMAGE, PATCH, PHOTO = 8, 4, 32
MELS, FRAMES, SOUND = 8, 16, 80

Batch = dict[str, Tensor]


def texts(batch_size, positions=9, seed=0, padding="right", *, target):
    """Returns random texts, the second and every third after it padded on one side.

    ``target`` says what the labels are: a ``class``, ``several`` classes, a ``number``, ``masked``
    tokens, all of the ``tokens``, only the last of them (``completion``), a class per token
    (``tags``), a ``span``, a ``choice`` among texts, or another text (``translation``). No text is
    shorter than 4 tokens: a causal model that predicts one token attends to one, so that all
    gradients of its queries and keys are zero but for rounding.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = batch_size * CHOICES if target == "choice" else batch_size
    ids = torch.randint(FIRST_WORD, VOCABULARY, (rows, positions), generator=generator)
    mask = torch.ones_like(ids)
    for i in range(1, rows, 3):
        length = min(4, positions) + max(0, positions - 4) * i // (rows + 1)
        mask[i, length:] = 0
        if padding == "left":
            mask[i] = mask[i].flip(0)
    ids[mask == 0] = PAD
    classes = torch.randint(0, LABELS, (batch_size,), generator=generator)
    tokens = ids.masked_fill(mask == 0, IGNORED)
    labels: Batch
    match target:
        case "class" | "choice":
            labels = {"labels": classes}
        case "several":
            labels = {"labels": torch.rand(batch_size, LABELS, generator=generator).round()}
        case "number":
            labels = {"labels": torch.randn(batch_size, generator=generator)}
        case "masked":
            chosen = torch.rand(ids.shape, generator=generator) < 0.4
            chosen[torch.arange(rows), mask.argmax(1)] = True  # at least one in each text
            labels = {"labels": tokens.masked_fill(~chosen, IGNORED)}
        case "tokens":
            labels = {"labels": tokens}
        case "completion":
            from_the_end = mask.flip(1).cumsum(1).flip(1)
            labels = {"labels": tokens.masked_fill(from_the_end > 2, IGNORED)}
        case "tags":
            tags = torch.randint(0, LABELS, ids.shape, generator=generator)
            labels = {"labels": tags.masked_fill(mask == 0, IGNORED)}
        case "span":
            first = mask.argmax(1)
            labels = {"start_positions": first + 1, "end_positions": first + 2}
        case "translation":
            labels = {"labels": answers(batch_size, generator)}
        case _:
            raise ValueError(f"{target=} is not known.")
    inputs = {"input_ids": ids, "attention_mask": mask}
    if target == "choice":
        inputs = {key: value.unflatten(0, (-1, CHOICES)) for key, value in inputs.items()}
    return {**inputs, **labels}


def answers(batch_size, generator):
    """Returns texts to generate, (B, T), every other one shorter."""
    labels = torch.randint(FIRST_WORD, VOCABULARY, (batch_size, TARGET_LENGTH), generator=generator)
    labels[1::2, 4:] = IGNORED
    return labels


def whole_texts(batch_size, **settings):
    batch = texts(batch_size, target="class", **settings)
    return {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}


def images(batch_size, seed=0, *, channels=1, size=IMAGE, **unused):
    """Returns random images, of 2 x 2 patches if small; there is nothing to pad."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(batch_size, channels, size, size, generator=generator)
    return {
        "pixel_values": pixels,
        "labels": torch.randint(0, LABELS, (batch_size,), generator=generator),
    }


def sounds(batch_size, seed=0, *, target, **unused):
    """Returns random spectrograms of one length, labelled with a ``class`` or with a ``text``."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(batch_size, MELS, FRAMES, generator=generator)
    classes = torch.randint(0, LABELS, (batch_size,), generator=generator)
    labels = classes if target == "class" else answers(batch_size, generator)
    return {"input_features": features, "labels": labels}


def spectra(batch_size, **settings):
    batch = sounds(batch_size, target="class", **settings)
    return {"input_values": batch["input_features"].mT.contiguous(), "labels": batch["labels"]}


def waves(batch_size, seed=0, *, target="class", width=0, **unused):
    """Returns random sounds with a ``class`` or a ``text``, every third from the second shorter.

    Their frames are numbers, or ``width`` numbers each.
    """
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(batch_size, SOUND, dtype=torch.long)
    mask[1::3, 3 * SOUND // 4 :] = 0
    sound = torch.randn(batch_size, SOUND, width or 1, generator=generator) * mask[:, :, None]
    classes = torch.randint(0, LABELS, (batch_size,), generator=generator)
    spoken = answers(batch_size, generator)[:, :3] if target == "text" else classes
    if target == "text":
        spoken[1::2, 2:] = IGNORED
    heard = {"input_features": sound} if width else {"input_values": sound[:, :, 0]}
    return {**heard, "attention_mask": mask, "labels": spoken}


def described(batch_size, *, several=False, patches=False, **settings):
    """Returns images, each with a text that begins with its four image tokens and describes it.

    The images are one, or a list of one (``several``), or rows of ``patches`` with their grid.
    """
    batch = texts(batch_size, target="tokens", **settings)
    starts = batch["attention_mask"].argmax(1)
    mask = torch.ones(batch_size, 6, dtype=torch.long)
    ids = torch.full((batch_size, 6), IMAGE_TOKEN)
    ids[:, 0], ids[:, -1] = IMAGE_START, IMAGE_END
    merged = {}
    for name, before in (
        *(("input_ids", ids), ("attention_mask", mask)),
        ("labels", torch.full_like(ids, IGNORED)),
    ):
        pairs = zip(batch[name], before, starts, strict=True)
        merged[name] = torch.stack([torch.cat([x[:at], new, x[at:]]) for x, new, at in pairs])
    generator = torch.Generator().manual_seed(settings.get("seed", 0))
    if patches:
        values = 3 * 2 * PATCH * PATCH
        merged["pixel_values"] = torch.randn(batch_size, 16, values, generator=generator)
        merged["image_grid_thw"] = torch.tensor([1, 4, 4]).expand(batch_size, 1, 3).contiguous()
        merged["mm_token_type_ids"] = (merged["input_ids"] == IMAGE_TOKEN).long()
        return merged
    pixels = torch.randn(batch_size, 3, IMAGE, IMAGE, generator=generator)
    merged["pixel_values"] = pixels[:, None] if several else pixels
    return merged


def as_models_take(batch):
    """Returns a batch with the patches of all its images in one row, if it has patches."""
    if "image_grid_thw" not in batch:
        return batch
    patches = {name: batch[name].flatten(0, 1) for name in ("pixel_values", "image_grid_thw")}
    return {**batch, **patches}


def masked_images(batch_size, seed=0, *, noise, **unused):
    """Returns images, and which of their 2 x 2 patches are masked: as such, or by ``noise``."""
    generator = torch.Generator().manual_seed(seed)
    pixels = images(batch_size, seed=seed)["pixel_values"]
    drawn = torch.rand(batch_size, 4, generator=generator)
    if noise:
        return {"pixel_values": pixels, "noise": drawn}
    masked = drawn < 0.5
    masked[torch.arange(batch_size), drawn.argmin(1)] = True
    return {"pixel_values": pixels, "bool_masked_pos": masked}


def end_texts(batch):
    """Ends every text with the end-of-text token, at which some models classify."""
    mask = batch["attention_mask"]
    last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
    ids = batch["input_ids"].clone()
    ids[torch.arange(len(ids)), last] = END
    return {**batch, "input_ids": ids}


@dataclass(frozen=True)
class Task:
    """A head: how the classes of models that have it end, and what it is trained on."""

    suffix: str
    batch: Callable[..., Batch]  # (B, T=positions, seed=0, padding="right")
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the model's configuration
    peft: str | None = None  # PEFT's task type


TASKS = {
    "sequence classification": Task(
        "ForSequenceClassification", partial(texts, target="class"), peft="SEQ_CLS"
    ),
    "multi-label classification": Task(
        "ForSequenceClassification",
        partial(texts, target="several"),
        {"problem_type": "multi_label_classification"},
    ),
    "regression": Task(
        "ForSequenceClassification", partial(texts, target="number"), {"num_labels": 1}
    ),
    "token classification": Task(
        "ForTokenClassification",
        partial(texts, target="tags"),
        {"classifier_dropout": 0.0},
        peft="TOKEN_CLS",
    ),
    "question answering": Task(
        "ForQuestionAnswering",
        partial(texts, target="span"),
        {"num_labels": 2},
        peft="QUESTION_ANS",
    ),
    "multiple choice": Task("ForMultipleChoice", partial(texts, target="choice")),
    "masked LM": Task("ForMaskedLM", partial(texts, target="masked")),
    "causal LM": Task("ForCausalLM", partial(texts, target="tokens"), peft="CAUSAL_LM"),
    "seq2seq LM": Task(
        "ForConditionalGeneration", partial(texts, target="translation"), peft="SEQ_2_SEQ_LM"
    ),
    "image classification": Task("ForImageClassification", images),
    "speech recognition": Task("ForConditionalGeneration", partial(sounds, target="text")),
    "audio classification": Task("ForAudioClassification", partial(sounds, target="class")),
    "classification of whole texts": Task("ForSequenceClassification", whole_texts),
    "classification of photographs": Task(
        "ForImageClassification", partial(images, channels=3, size=PHOTO)
    ),
    "classification of spectra": Task("ForAudioClassification", spectra),
    "classification of waves": Task("ForSequenceClassification", waves),
    "CTC": Task("ForCTC", partial(waves, target="text")),
    "masked images": Task("ForMaskedImageModeling", partial(masked_images, noise=False)),
    "masked autoencoding": Task("ForPreTraining", partial(masked_images, noise=True)),
    "descriptions": Task("ForConditionalGeneration", described),
    "descriptions of several": Task("ForConditionalGeneration", partial(described, several=True)),
    "descriptions of patches": Task("ForConditionalGeneration", partial(described, patches=True)),
    "detection": Task("ForObjectDetection", images),
    "CTC of features": Task("ForCTC", partial(waves, target="text", width=MELS)),
}


@dataclass(frozen=True)
class Family:
    """A row of the table, ``families.yaml``: one architecture as configured.

    Args:
        name: what tests and the rendered table call it.
        config: the configuration's class in transformers.
        settings: what the configuration is made with.
        tasks: the names of the tasks to try.
        models: what the models' classes start with, if not as the configuration's does.
        without_part: parts of the names of parameters that have no part in the loss.
        adapter: PEFT's method, of ``ADAPTERS``.
        bits: how the weights are quantised below the adapter, of ``QUANTISED``.
        ends: whether the model looks for the end-of-text token.
        refused: engine, or "engine, task" -> a part of the message it is refused with.
    """

    name: str
    config: str
    settings: Mapping[str, Any]
    tasks: Sequence[str]
    models: str = ""
    without_part: Sequence[str] = ()
    adapter: str | None = None
    bits: str | None = None
    ends: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A model with a head and its data; both factories leave the global seed alone."""

    family: Family
    task: str

    def __str__(self):
        return f"{self.family.name}, {self.task}"

    def model(self, seed=0, **changes):
        family, task = self.family, TASKS[self.task]
        prefix = family.models or family.config.removesuffix("Config")
        cls = _MODEL_CLASSES.get((prefix, self.task), prefix + task.suffix)
        model = build(
            getattr(transformers, cls),
            getattr(transformers, family.config),
            {**family.settings, **task.settings},
            seed,
            **changes,
        )
        for name, parameter in model.named_parameters():
            if any(part in name for part in family.without_part):
                parameter.requires_grad_(False)
        if family.bits is not None:
            model = quantised(model, family.bits)
        return adapted(model, family.adapter, task.peft, seed) if family.adapter else model

    def batch(self, batch_size, **settings):
        """Returns a batch; settings are ``positions``, ``seed`` and ``padding``."""
        batch = TASKS[self.task].batch(batch_size, **settings)
        return end_texts(batch) if self.family.ends and "attention_mask" in batch else batch

    def refused(self, engine):
        """Returns a part of the message that the engine refuses the model with, if it does."""
        refused = self.family.refused
        return refused.get(f"{engine}, {self.task}", refused.get(engine))


_MODEL_CLASSES = {
    **{(name, "causal LM"): f"{name}LMHeadModel" for name in ("CTRL", "GPT2", "OpenAIGPT")},
    ("Marian", "seq2seq LM"): "MarianMTModel",
}


def build(cls, config, settings, seed=0, **changes):
    """Returns a model in training mode, with no parameter at a special value such as 0 or 1.

    No layer, number or path is dropped but for what settings and changes say.
    """
    made = config(**{**settings, **changes})
    for name, value in vars(made).items():
        if "drop" in name and isinstance(value, float) and name not in {**settings, **changes}:
            setattr(made, name, 0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cls(made)
        _disturb(model)
    return model.train()


def _nf4():
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )


def _torchao():
    from torchao.quantization import Int8WeightOnlyConfig

    return transformers.TorchAoConfig(Int8WeightOnlyConfig())


QUANTISED = {
    "nf4": _nf4,
    "int8": lambda: transformers.BitsAndBytesConfig(load_in_8bit=True),
    "torchao": _torchao,
}
"""Ways to load weights in 4 or 8 bits."""


def quantised(model, how):
    attention = model.config._attn_implementation
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return type(model).from_pretrained(
            folder,
            quantization_config=QUANTISED[how](),
            dtype=torch.float32,
            attn_implementation=attention,
        )


def adapted(model, adapter, task_type, seed=0):
    import peft

    inside = ["query", "value", "q_proj", "v_proj", "q", "v", "c_attn"]
    targets = [n for n in inside if any(m.endswith(f".{n}") for m, _ in model.named_modules())]
    cls, settings = ADAPTERS[adapter]
    kind = getattr(peft, f"{cls}Config")
    where = {} if issubclass(kind, peft.PromptLearningConfig) else {"target_modules": targets}
    config = kind(**{"task_type": task_type, **where, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with warnings.catch_warnings(action="ignore"):  # LN tuning of another class than LayerNorm
            model = peft.get_peft_model(model, config)
        _disturb(model)
    return model.train()


@torch.no_grad()
def _disturb(model):
    for parameter in model.parameters():
        if parameter.is_floating_point() and type(parameter) is nn.Parameter:  # not quantised
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


_TABLE = yaml.safe_load(Path(__file__).with_name("families.yaml").read_text(encoding="utf-8"))
SETTINGS = _TABLE["settings"]
BERT, OPT, GPT2, LLAMA, VIT = (SETTINGS[name] for name in ("BERT", "OPT", "GPT2", "LLAMA", "VIT"))
NO_VMAP = _TABLE["words"]["NO_VMAP"]
ADAPTERS = {name: (cls, made_with) for name, (cls, made_with) in _TABLE["adapters"].items()}
"""Name of PEFT's method -> what its configuration's class starts with, and what it is made with."""


def _families(key):
    return [Family(name, **row) for name, row in _TABLE[key].items()]


FAMILIES = _families("families")
"""What the package is made for, with all heads and conditions; adapters follow below."""
WIDE = _families("wide")
"""Many more, with a head or two."""


def _with_adapters():
    """Yields PEFT's methods on one model of each kind."""
    bases = {family.name: family for family in FAMILIES}
    usual = ("LoRA", "IA3", "prompt tuning")
    for base, adapters, tasks in (
        ("BERT", usual, ("sequence classification", "question answering")),
        ("BERT", usual[:2], ("token classification",)),  # PEFT's prompts break its loss
        ("Llama", usual, ("sequence classification", "causal LM")),
        ("Llama", tuple(ADAPTERS)[len(usual) :], ("causal LM",)),
        ("T5", usual, ("seq2seq LM",)),
        ("ViT", usual[:2], ("image classification",)),
        ("Mixtral", usual[:2], ("causal LM",)),
    ):
        family = bases[base]
        for adapter in adapters:
            yield Family(
                f"{base} + {adapter}",
                family.config,
                family.settings,
                tasks,
                models=family.models,
                adapter=adapter,
                ends=family.ends,
                refused=NO_VMAP if adapter in _TABLE["adapters not vectorised"] else {},
            )


def _quantised():
    sizes = {"hidden_size": 64, "intermediate_size": 128}  # a block of 4-bit weights has 64
    for how, name in (("nf4", "4 bits"), ("int8", "8 bits"), ("torchao", "8 bits of torchao")):
        yield Family(
            f"Llama in {name} + LoRA",
            "LlamaConfig",
            {**SETTINGS["DECODER"], **sizes},
            ("causal LM",),
            adapter="LoRA",
            bits=how,
            refused={"functorch": "setup_context"} if how == "int8" else {},
        )


FAMILIES += [*_with_adapters(), *_quantised()]


def rows(families=FAMILIES):
    return [Row(family, task) for family in families for task in family.tasks]
