"""The generation config of a Hugging Face folder, against generate() of transformers."""

from __future__ import annotations

import logging
import string

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig

from tformer_export import export
from tformer_export.sources import load_source
from tformer_export.sources.finish import SourceOverrides, finish
from tformer_export.sources.hugging_face.folder import read_generation_defaults
from tformer_runtime import Model, OptionError
from tformer_runtime.decoding.options import GenerationOptions, Settings
from tformer_runtime.decoding.request import make_request
from tformer_runtime.decoding.sampling import warp

PAD_ID, START_ID, END_ID, FORCED_BOS_ID = 0, 1, 2, 7
VOCABULARY = 40
IDS = dict(vocab_size=VOCABULARY, pad_token_id=PAD_ID, bos_token_id=START_ID, eos_token_id=END_ID)
RULES = dict(
    repetition_penalty=1.3,
    no_repeat_ngram_size=3,
    bad_words_ids=[[9], [11, 12], [20, 21, 22]],
    suppress_tokens=[5, 6, VOCABULARY + 7],  # generate() passes over ids beyond the vocabulary
    begin_suppress_tokens=[13, 14, VOCABULARY],
    sequence_bias=[[[15], 1.5], [[16], -2.0]],
)
BEAMS = dict(
    num_beams=3, num_return_sequences=2, length_penalty=0.4, early_stopping="never", max_length=14, min_length=8,
    forced_bos_token_id=FORCED_BOS_ID,
)  # fmt: skip
GREEDY = dict(max_new_tokens=12, min_new_tokens=6)


def marian():
    config = transformers.MarianConfig(
        **IDS, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=48, init_std=0.6,
        decoder_start_token_id=START_ID, forced_eos_token_id=None,
    )  # fmt: skip
    return transformers.MarianMTModel(config)


def llama():
    config = transformers.LlamaConfig(
        **IDS, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=64, initializer_range=0.5,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize(("build", "options"), [(marian, BEAMS), (llama, GREEDY)])
def test_file_generates_like_its_folder(tmp_path, build, options, caplog):
    torch.manual_seed(3)
    module = build().eval()
    ids = {name: value for name, value in IDS.items() if name != "vocab_size"}
    module.generation_config = GenerationConfig(**ids, decoder_start_token_id=START_ID, **RULES, **options)
    module.save_pretrained(tmp_path / "folder")
    with caplog.at_level(logging.WARNING, "tformer_export"):
        export(load_source(tmp_path / "folder"), tmp_path / "model.onnx", max_length=40)
    assert "not carry over" not in caplog.text
    model, module = Model.load(tmp_path / "model.onnx", "cpu"), type(module).from_pretrained(tmp_path / "folder")
    random, distinct_results = np.random.default_rng(1), set()
    for length in (5, 1, 9, 3):
        row = random.integers(3, VOCABULARY, length)
        with torch.no_grad():
            input_ids = torch.from_numpy(row)[None]
            sequences = module.generate(input_ids, attention_mask=torch.ones_like(input_ids)).tolist()
        prompt = 1 if build is marian else length
        expected = [
            ids[prompt : ids.index(END_ID, prompt) + 1 if END_ID in ids[prompt:] else None] for ids in sequences
        ]
        result = model.generate(row)
        assert [list(r.token_ids) for r in (result, *result.alternatives)] == expected
        if build is marian:
            assert {ids[0] for ids in expected} == {FORCED_BOS_ID}
        distinct_results |= {tuple(ids) for ids in expected}
    assert len(distinct_results) >= 4
    equal = [
        model.generate(row).token_ids == greedy_without_defaults(model, row)
        for row in (np.arange(3, 9), np.array([30]))
    ]
    assert not all(equal)  # the config changes the results


def test_suppressed_ids_that_the_caller_names_are_not_dropped(tmp_path):
    stated = {"suppress_tokens": [VOCABULARY]}
    export(llama(), tmp_path / "model.onnx", generation_defaults=stated, max_length=40)
    with pytest.raises(OptionError, match=f"suppress_tokens names the id {VOCABULARY}"):
        Model.load(tmp_path / "model.onnx", "cpu").generate([5])


def letter_tokenizer():
    """A tokenizer with a token for each letter and digit, and a special token <stop>."""
    characters = string.ascii_lowercase + string.digits[: VOCABULARY - 4 - len(string.ascii_lowercase)]
    vocabulary = {name: i for i, name in enumerate(["<pad>", "<s>", "</s>", "<stop>", *characters])}
    letters = Tokenizer(models.BPE(vocabulary, []))
    letters.decoder = decoders.Fuse()
    tokens = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>", additional_special_tokens=["<stop>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=letters, **tokens)


def generate_new_ids(module, row, **options):
    """Return the ids that generate() adds to a prompt."""
    input_ids = torch.tensor([row])
    with torch.no_grad():
        ids = module.generate(input_ids, attention_mask=torch.ones_like(input_ids), **options)[0].tolist()
    return ids[len(row) :]


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}])
def test_stop_strings_of_a_folder_end_texts_like_generate(tmp_path, options, caplog):
    torch.manual_seed(4)
    module, tokenizer, rows = llama().eval(), letter_tokenizer(), [[5, 6, 7], [30], [9, 35, 8, 20], [12, 13]]
    module.generation_config = GenerationConfig(eos_token_id=END_ID, pad_token_id=PAD_ID, max_new_tokens=16, **options)
    whole_text = tokenizer.decode(generate_new_ids(module, rows[0]), skip_special_tokens=True)
    module.generation_config.stop_strings = [whole_text[4:7], "££"]
    module.save_pretrained(tmp_path / "folder")
    tokenizer.save_pretrained(tmp_path / "folder")
    with caplog.at_level(logging.WARNING, "tformer_export"):
        export(load_source(tmp_path / "folder"), tmp_path / "model.onnx", max_length=40)
    assert "not carr" not in caplog.text
    model = Model.load(tmp_path / "model.onnx", "cpu")
    results = [model.generate(row) for row in rows]
    assert [list(result.token_ids) for result in results] == [
        generate_new_ids(module, row, tokenizer=tokenizer) for row in rows
    ]
    assert options or (results[0].text, results[0].finish_reason) == (whole_text[:4], "stop")
    assert len({len(result.token_ids) for result in results}) > 1


@pytest.mark.parametrize(
    ("has_tokenizer", "stop_strings", "carried", "reason"),
    [
        (True, ["a", "<stop>", "b<stop>"], {"stop_strings": ["a"]}, "'<stop>', 'b<stop>' are not carried"),
        (True, "<stop>", {}, "special tokens are not part of a generated text"),
        (False, ["a"], {}, "'a' are not carried over: the file has no tokenizer"),
    ],
)
def test_stop_strings_that_no_text_can_hold_are_named(has_tokenizer, stop_strings, carried, reason, tmp_path, caplog):
    module = llama()
    module.generation_config = GenerationConfig(stop_strings=stop_strings)
    module.save_pretrained(tmp_path)
    if has_tokenizer:
        letter_tokenizer().save_pretrained(tmp_path)
    source = load_source(tmp_path)
    with caplog.at_level(logging.WARNING, "tformer_export"):
        assert finish(source, SourceOverrides()).generation_defaults == carried
    assert reason in caplog.text
    stated = SourceOverrides(generation_defaults={"stop_strings": ["<stop>"]})
    assert finish(source, stated).generation_defaults == stated.generation_defaults


def greedy_without_defaults(model, row):
    """Decode greedily as if the file had no defaults."""
    settings = Settings.of(GenerationOptions(max_new_tokens=12), {})
    task = model.generator.make_task(make_request(model.manifest, model.inputs, row, 0, settings), settings)
    scheduler = model.generator.new_scheduler(settings, 1)
    scheduler.submit(task)
    while not scheduler.idle:
        scheduler.step()
    return model.generator.make_result(task).token_ids


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"top_k": 9, "top_p": 0.8}, {"top_k": 0, "min_p": 0.1}, {"top_p": 0.5}]
)
def test_sampling_distribution_matches_generate(options):
    """generate() has its own defaults for options that the config leaves open."""
    module = llama()
    module.generation_config = GenerationConfig(do_sample=True, eos_token_id=END_ID, **options)
    config, _ = module._prepare_generation_config(None)
    module._prepare_special_tokens(config, False, "cpu")
    logits = np.random.default_rng(2).standard_normal(VOCABULARY * 3).astype(np.float32)
    processors = module._get_logits_processor(config, input_ids_seq_length=3)
    expected = processors(torch.zeros(1, 3, dtype=torch.int64), torch.tensor(logits)[None]).softmax(-1)[0].numpy()
    settings = Settings.of(GenerationOptions(), read_generation_defaults(module.generation_config, 0, 64))
    assert settings.sampling
    sampling_options = (settings.temperature or 1.0, settings.top_k or 0, settings.top_p or 1.0, settings.min_p or 0.0)
    tokens, probabilities = warp(logits, *sampling_options)
    np.testing.assert_array_equal(tokens, np.flatnonzero(expected))
    np.testing.assert_allclose(probabilities, expected[tokens], atol=1e-6)


# (number of start tokens, generation config, carried defaults, lost options)
CARRIED = [
    (1, {"max_length": 20}, {"max_new_tokens": 19}, ""),
    (1, {"max_length": 20, "max_new_tokens": 5}, {"max_new_tokens": 5}, ""),
    (1, {"min_length": 4}, {"min_new_tokens": 3}, ""),
    (0, {"max_length": 20}, {}, "max_length"),
    (0, {"max_length": 64}, {}, ""),
    (0, {"min_length": 4}, {}, "min_length"),
    (0, {"min_length": 4, "min_new_tokens": 2}, {"min_new_tokens": 2}, ""),
    (1, {"forced_bos_token_id": 7}, {"forced_bos_token_id": 7}, ""),
    (0, {"forced_bos_token_id": 7}, {}, "forced_bos_token_id"),
    (1, {"forced_eos_token_id": 2}, {}, "forced_eos_token_id"),
    (1, {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
     {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, ""),
    (1, {"num_beams": 2, "do_sample": True, "top_k": 5}, {"num_beams": 2}, r"do_sample \(with num_beams\)"),
    (0, {"do_sample": True, "min_p": 0.1}, {"temperature": 1.0, "top_k": 50, "min_p": 0.1}, ""),
    (0, {"do_sample": True, "typical_p": 0.5}, {"temperature": 1.0, "top_k": 50}, "typical_p"),
    (0, {"temperature": 0.5, "top_k": 4}, {}, ""),
    (0, {"stop_strings": "ab"}, {"stop_strings": "ab"}, ""),
    (0, {"sequence_bias": {(5,): 1.0, (6, 7): 2.0}}, {}, r"sequence_bias \(of several tokens\)"),
    (0, {"sequence_bias": {(5,): 1.0, (6,): 2.0}}, {"logit_bias": [[5, 1.0], [6, 2.0]]}, ""),
    (1, {"encoder_no_repeat_ngram_size": 3, "guidance_scale": 2.0, "renormalize_logits": True}, {},
     "encoder_no_repeat_ngram_size, guidance_scale, renormalize_logits"),
    (1, {"encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0}, {"no_repeat_ngram_size": 0}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("num_start_tokens", "config", "carried", "lost"), CARRIED)
def test_config_is_carried_over_and_lost_options_are_named(num_start_tokens, config, carried, lost, caplog):
    with caplog.at_level(logging.WARNING, "tformer_export"):
        assert read_generation_defaults(GenerationConfig(**config), num_start_tokens, 64) == carried
    Settings.of(GenerationOptions(), carried)
    messages = [r.getMessage() for r in caplog.records if r.name.startswith("tformer_export")]
    expected = [f"the model's generation config sets {lost}, which the file does not carry over".replace("\\", "")]
    assert messages == (expected if lost else [])


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"beam_size": 4}, "the model file's generation defaults: there is no option 'beam_size'"),
        (
            {"suppress_tokens": "ab"},
            "the model file's generation defaults: suppress_tokens must be a sequence of token ids",
        ),
        ({"logits_processor": max}, "logits_processor is a function, which a file cannot hold"),
        ({"num_return_sequences": 2}, "num_return_sequences=2 needs a num_beams of at least 2, or sampling"),
    ],
)
def test_invalid_generation_defaults_are_refused(tmp_path, defaults, message):
    with pytest.raises(OptionError, match=message):
        export(llama(), tmp_path / "model.onnx", generation_defaults=defaults)
