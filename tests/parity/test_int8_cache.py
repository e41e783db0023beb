"""Int8 caches take a quarter of the bytes, stay near the source, and follow copied, rewound and reordered rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.families import LOUD_ID, PAD, VOCABULARY

from tformer_export import Quantization, export
from tformer_runtime import GenerationOptions, MemoryBudgetError, Model, OptionError, UnsupportedModelError

both = pytest.mark.parametrize("name", ["wide-llama", "seq2seq"])
LENGTHS, NUM_STEPS = (4, 1, 3), 6
TOLERANCE = 0.04  # of the logits' range


@pytest.fixture(scope="module")
def with_int8_cache(exported):
    """Return a function that exports a family with int8 caches.

    With 2048 positions, the file has both forms of attention, in the branches of an `If`.
    """
    options_by_name = {"wide-llama": {"max_length": 2048}}
    return lambda name: exported(name, quantization=Quantization(kv_cache="int8"), **options_by_name.get(name, {}))


def draw_ids(seed, *shape):
    return np.random.default_rng(seed).integers(LOUD_ID + 1, VOCABULARY - 6, shape)


def start_batch(file, rows, sources, **options):
    requests = {file.family.request: [sources[i] for i in rows]} if file.family.request else None
    return file.engine.start(requests, len(rows), **options)


def step_ragged_rows(file, sources, tokens):
    """Return each row's logits and the state. The first step has ragged prompts, each further step has one token."""
    state, counts = start_batch(file, range(len(tokens)), sources), np.array(LENGTHS)
    prompt = np.full((len(tokens), max(LENGTHS)), PAD)
    for row, count in enumerate(counts):
        prompt[row, :count] = tokens[row, :count]
    first = file.engine.step(state, prompt, counts, logit_positions="all")
    rows = [[first[row, :count].copy()] for row, count in enumerate(counts)]
    for i in range(NUM_STEPS):
        new = tokens[np.arange(len(tokens)), counts + i][:, None]
        for row, logits in zip(rows, file.engine.step(state, new), strict=True):
            row.append(logits[None].copy())
    return [np.concatenate(row) for row in rows], state


@both
def test_ragged_rows_are_near_the_source(with_int8_cache, name):
    """The tolerance is derived from the rounding of keys and values.

    The error of a key or value is 1.1/127 of its channel's largest over √12, which is 0.25 %, with random signs. The
    error of attention is the same. A wrong scale or a wrong slot has an error of the whole range.
    """
    file, sources, tokens = with_int8_cache(name), draw_ids(0, 3, 7), draw_ids(1, 3, 12)
    actual, _ = step_ragged_rows(file, sources, tokens)
    for row, logits in enumerate(actual):
        expected = file.family.logits(sources[row], tokens[row, : len(logits)])
        assert 0 < np.abs(logits - expected).max() <= TOLERANCE * np.ptp(expected)


@both
def test_single_row_differs_from_the_row_in_a_batch_by_roundings_only(with_int8_cache, name):
    """Float products of one row and of three differ in their last digit, so that a value may round to the next integer.

    This difference is below the error of rounding.
    """
    file, sources, tokens = with_int8_cache(name), draw_ids(0, 3, 7), draw_ids(1, 3, 12)
    actual, _ = step_ragged_rows(file, sources, tokens)
    for row, count in enumerate(LENGTHS):
        state = start_batch(file, [row], sources)
        alone = file.engine.step(state, tokens[row : row + 1, : count + NUM_STEPS], logit_positions="all")[0]
        expected = file.family.logits(sources[row], tokens[row, : count + NUM_STEPS])
        assert np.abs(alone - actual[row]).max() <= 2 * TOLERANCE * np.ptp(expected)
        assert rms(alone - actual[row]) <= 3 * rms(actual[row] - expected)


def rms(values):
    """Return the root mean square."""
    return np.sqrt(np.mean(np.square(values)))


def test_with_int8_weights_single_row_equals_the_row_in_a_batch(exported):
    file = exported("wide-llama", quantization=Quantization("int8", kv_cache="int8"))
    sources, tokens = draw_ids(2, 3, 7), draw_ids(3, 3, 10)
    together = [file.engine.step(state := start_batch(file, range(3), sources), tokens[:, :4]).copy()]
    together += [file.engine.step(state, tokens[:, i : i + 1]).copy() for i in range(4, 10)]
    for row in range(3):
        state = start_batch(file, [row], sources)
        alone = [file.engine.step(state, tokens[row : row + 1, :4])[0].copy()]
        alone += [file.engine.step(state, tokens[row : row + 1, i : i + 1])[0].copy() for i in range(4, 10)]
        assert np.array_equal(alone, [logits[row] for logits in together])


@both
def test_caches_take_a_quarter_of_the_bytes(with_int8_cache, exported, name):
    file, plain = with_int8_cache(name), exported(name)
    assert {cache.dtype for cache in file.engine.decode.caches} == {"int8"}
    sources, tokens = draw_ids(0, 3, 7), draw_ids(1, 3, 12)
    sizes = [step_ragged_rows(exported_file, sources, tokens)[1].cache.nbytes for exported_file in (file, plain)]
    assert sizes[0] * 4 == sizes[1] > 0
    info = file.model.info()
    assert 4 * info["cache_bytes_per_token"] == plain.model.info()["cache_bytes_per_token"]


def test_memory_budget_fits_four_times_the_tokens(with_int8_cache, exported):
    prompt, options = draw_ids(4, 30).tolist(), GenerationOptions(max_new_tokens=20)
    files = [with_int8_cache("wide-llama"), exported("wide-llama")]
    num_bytes = [file.engine.memory_estimate.bytes_needed(50, {}) for file in files]
    assert num_bytes[0] * 4 == num_bytes[1]
    limited = [Model.load(file.path, device="cpu", threads=1, max_memory=num_bytes[0]) for file in files]
    assert len(limited[0].generate(prompt, options).token_ids) > 0
    with pytest.raises(MemoryBudgetError):
        limited[1].generate(prompt, options)


@both
def test_rewound_copied_and_reordered_rows_give_the_same_logits(with_int8_cache, name):
    file, sources, tokens = with_int8_cache(name), draw_ids(5, 2, 7), draw_ids(6, 2, 9)
    engine, state = file.engine, start_batch(file, range(2), sources)
    engine.step(state, tokens[:, :5])
    copied = engine.copy(state, np.array([1, 0]))
    expected = engine.step(state, tokens[:, 5:6]).copy()
    state.rewind(5)
    assert np.array_equal(engine.step(state, tokens[:, 5:6]), expected)
    assert np.array_equal(engine.step(copied, tokens[::-1, 5:6]), expected[::-1])
    continued = engine.step(state, tokens[:, 6:7]).copy()
    state.rewind(6)
    engine.reorder(state, np.array([1, 1, 0]))
    assert np.array_equal(engine.step(state, tokens[[1, 1, 0], 6:7]), continued[[1, 1, 0]])


def test_speculation_gives_the_same_tokens(with_int8_cache):
    file, prompt = with_int8_cache("wide-llama"), np.tile(draw_ids(7, 5), 4).tolist()
    options = GenerationOptions(max_new_tokens=24)
    plain = file.model.generate(prompt, options)
    speculative = file.model.generate(prompt, options, prompt_lookup=True)
    assert speculative.token_ids == plain.token_ids
    assert speculative.speculation is not None


def test_cached_prefix_gives_the_same_tokens(with_int8_cache):
    file, prompt = with_int8_cache("wide-llama"), draw_ids(8, 12).tolist()
    options = GenerationOptions(max_new_tokens=8)
    whole = file.model.generate(prompt, options)
    continued = file.model.generate(prompt[7:], options, prefix=file.model.cache_prefix(prompt[:7]))
    assert continued.token_ids == whole.token_ids


@both
def test_beam_log_probabilities_are_near_the_source(with_int8_cache, name):
    """The log-probabilities of each hypothesis are near the source's for its tokens."""
    file, source = with_int8_cache(name), draw_ids(9, 1, 7)
    options = GenerationOptions(num_beams=4, num_return_sequences=4, max_new_tokens=8, length_penalty=0.0)
    result = file.model.generate(source[0].tolist(), options)
    assert len(result.alternatives) == 3
    start = [] if file.family.decoder_only else list(file.engine.manifest.special_tokens.bos_token_ids)
    for hypothesis in (result, *result.alternatives):
        prompt = source[0].tolist() if file.family.decoder_only else start
        tokens = np.array([*prompt, *hypothesis.token_ids])
        logits = torch.from_numpy(file.family.logits(source[0], tokens[:-1]))[len(prompt) - 1 :]
        expected = torch.log_softmax(logits, -1)[range(len(hypothesis.token_ids)), list(hypothesis.token_ids)]
        span = float(np.ptp(logits.numpy()))
        np.testing.assert_allclose(hypothesis.token_logprobs, expected, rtol=0, atol=2 * TOLERANCE * span)


def test_int8_caches_are_refused_for_other_targets_types_and_models(exported, tmp_path):
    family = exported("wide-llama").family
    with pytest.raises(OptionError, match="leave out either them or the target portable"):
        export(family.module, tmp_path / "a.onnx", quantization=Quantization(kv_cache="int8"), target="portable")
    with pytest.raises(OptionError, match="kv_cache must be one of float, int8, not 'fp16'"):
        export(family.module, tmp_path / "a.onnx", quantization=Quantization(kv_cache="fp16"))
    with pytest.raises(UnsupportedModelError, match="no cache of this model can be int8"):
        export(model_of_odd_heads(), tmp_path / "a.onnx", quantization=Quantization(kv_cache="int8"), max_length=16)
    assert not list(tmp_path.iterdir())


def model_of_odd_heads():
    """Return a GPT-2 whose head size int8 caches do not support."""
    import transformers

    torch.manual_seed(0)
    sizes = dict(vocab_size=50, n_embd=24, n_head=2, n_layer=1, n_positions=16, bos_token_id=1, eos_token_id=2)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
