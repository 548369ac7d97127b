"""A model made of its configuration alone, and its batches: every head gets a loss per sample."""

import pytest
import torch
from transformers import GPT2Config, MarianConfig, RobertaConfig, T5Config, ViTConfig, WhisperConfig

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.gradients import loss_for
from dp_grape_hf.memory import ModelOfConfig

SIZES = {
    **{"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"intermediate_size": 32, "max_position_embeddings": 20},
}
T5 = T5Config(
    **{"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
    decoder_start_token_id=0,
    architectures=["T5ForConditionalGeneration"],
)
WHISPER = WhisperConfig(
    **{"vocab_size": 50, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 4},
    **{"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_source_positions": 8},
    **{"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0},
)
GPT2 = GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, architectures=["GPT2LMHeadModel"])
VIT = ViTConfig(image_size=8, patch_size=4, **{k: SIZES[k] for k in list(SIZES)[1:5]})


def roberta(**changes):
    return RobertaConfig(**SIZES, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "head", "name"),
    [
        (roberta(), "sequence-classification", "RobertaForSequenceClassification"),
        (roberta(num_labels=1), "sequence-classification", "RobertaForSequenceClassification"),
        (roberta(), "token-classification", "RobertaForTokenClassification"),
        (roberta(), "question-answering", "RobertaForQuestionAnswering"),
        (roberta(), "multiple-choice", "RobertaForMultipleChoice"),
        (roberta(), "masked-lm", "RobertaForMaskedLM"),
        (roberta(is_decoder=True), "causal-lm", "RobertaForCausalLM"),
        (GPT2, None, "GPT2LMHeadModel"),
        (T5, None, "T5ForConditionalGeneration"),
        (T5, "seq2seq-lm", "T5ForConditionalGeneration"),
        (WHISPER, "speech-seq2seq", "WhisperForConditionalGeneration"),
        (VIT, "image-classification", "ViTForImageClassification"),
    ],
)
def test_every_head_takes_the_batches(config, head, name):
    found = ModelOfConfig(config, head, 8)
    model = found.build(torch.float32)
    assert found.name == type(model).__name__ == name
    assert found.length == ("8x8 pixels" if config is VIT else "8 tokens")
    assert found.parameters == sum(p.numel() for p in model.parameters())
    loss = loss_for(model)
    inputs, labels = loss.split(found.batch(3))
    losses = loss(model(**inputs), labels)
    assert losses.shape == (3,)
    assert losses.isfinite().all()


def test_a_model_without_head_is_built_as_a_classifier():
    found = ModelOfConfig(roberta(architectures=["RobertaModel"]), None, 8)
    assert found.name == "RobertaForSequenceClassification"
    with pytest.raises(PrivacyError, match=r"names the architecture 'NoModel'.*Give --head"):
        ModelOfConfig(MarianConfig(architectures=["NoModel"]), None, 8)


def test_a_text_longer_than_its_model_takes_is_refused():
    with pytest.raises(PrivacyError, match="seq_len=21"):
        ModelOfConfig(roberta(), "causal-lm", 21)
