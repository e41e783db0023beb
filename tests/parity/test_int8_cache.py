"""Keys and values of earlier positions in 8 bits: near the source, a quarter of the bytes, and all that moves rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.families import LOUD, PAD, VOCABULARY

from tformer_export import Quantization, export
from tformer_runtime import GenerationOptions, MemoryBudgetError, Model, OptionError, UnsupportedModelError

both = pytest.mark.parametrize("name", ["wide-llama", "seq2seq"])
LENGTHS, STEPS = (4, 1, 3), 6
NEAR = 0.04  # of the logits' range


@pytest.fixture(scope="module")
def held(exported):
    """The longer file has attention in both forms that there are, in the branches of an `If`."""
    longer = {"wide-llama": {"max_length": 2048}}
    return lambda name: exported(name, quantization=Quantization(kv_cache="int8"), **longer.get(name, {}))


def draw(seed, *shape):
    return np.random.default_rng(seed).integers(LOUD + 1, VOCABULARY - 6, shape)


def started(file, rows, sources, **options):
    requests = {file.family.request: [sources[i] for i in rows]} if file.family.request else None
    return file.engine.start(requests, len(rows), **options)


def ragged(file, sources, tokens):
    """Each row's logits: its prompt beside the others', then a token at a time."""
    state, counts = started(file, range(len(tokens)), sources), np.array(LENGTHS)
    prompt = np.full((len(tokens), max(LENGTHS)), PAD)
    for row, count in enumerate(counts):
        prompt[row, :count] = tokens[row, :count]
    first = file.engine.step(state, prompt, counts, logit_positions="all")
    rows = [[first[row, :count].copy()] for row, count in enumerate(counts)]
    for i in range(STEPS):
        new = tokens[np.arange(len(tokens)), counts + i][:, None]
        for row, logits in zip(rows, file.engine.step(state, new), strict=True):
            row.append(logits[None].copy())
    return [np.concatenate(row) for row in rows], state


@both
def test_ragged_rows_are_near_the_source(held, name):
    """A key or value errs by 1.1/127 of its channel's largest over √12, 0.25 %, with random signs, and so does what
    attention gives; a wrong scale or a row at another's slot errs by all of it."""
    file, sources, tokens = held(name), draw(0, 3, 7), draw(1, 3, 12)
    found, _ = ragged(file, sources, tokens)
    for row, logits in enumerate(found):
        expected = file.family.logits(sources[row], tokens[row, : len(logits)])
        assert 0 < np.abs(logits - expected).max() <= NEAR * np.ptp(expected)


@both
def test_a_row_alone_is_the_row_in_a_batch_but_for_single_roundings(held, name):
    """Float products of one row and of three differ in their last digit; what is rounded after them may be to the next
    integer. That is less than what rounding changes at all."""
    file, sources, tokens = held(name), draw(0, 3, 7), draw(1, 3, 12)
    found, _ = ragged(file, sources, tokens)
    for row, count in enumerate(LENGTHS):
        state = started(file, [row], sources)
        alone = file.engine.step(state, tokens[row : row + 1, : count + STEPS], logit_positions="all")[0]
        expected = file.family.logits(sources[row], tokens[row, : count + STEPS])
        assert np.abs(alone - found[row]).max() <= 2 * NEAR * np.ptp(expected)
        assert rms(alone - found[row]) <= 3 * rms(found[row] - expected)


def rms(values):
    return np.sqrt(np.mean(np.square(values)))


def test_with_int8_weights_a_row_is_the_same_alone_bit_for_bit(exported):
    file = exported("wide-llama", quantization=Quantization("int8", kv_cache="int8"))
    sources, tokens = draw(2, 3, 7), draw(3, 3, 10)
    together = [file.engine.step(state := started(file, range(3), sources), tokens[:, :4]).copy()]
    together += [file.engine.step(state, tokens[:, i : i + 1]).copy() for i in range(4, 10)]
    for row in range(3):
        state = started(file, [row], sources)
        alone = [file.engine.step(state, tokens[row : row + 1, :4])[0].copy()]
        alone += [file.engine.step(state, tokens[row : row + 1, i : i + 1])[0].copy() for i in range(4, 10)]
        assert np.array_equal(alone, [logits[row] for logits in together])


@both
def test_the_caches_take_a_quarter_of_the_bytes(held, exported, name):
    file, plain = held(name), exported(name)
    assert {cache.dtype for cache in file.engine.decode.caches} == {"int8"}
    sources, tokens = draw(0, 3, 7), draw(1, 3, 12)
    sizes = [ragged(one, sources, tokens)[1].cache.nbytes for one in (file, plain)]
    assert sizes[0] * 4 == sizes[1] > 0
    info = file.model.info()
    assert 4 * info["cache_bytes_per_token"] == plain.model.info()["cache_bytes_per_token"]


def test_a_budget_holds_four_times_the_tokens(held, exported):
    prompt, options = draw(4, 30).tolist(), GenerationOptions(max_new_tokens=20)
    files = [held("wide-llama"), exported("wide-llama")]
    slots = [file.engine.memory_estimate.bytes_needed(50, {}) for file in files]
    assert slots[0] * 4 == slots[1]
    limited = [Model.load(file.path, device="cpu", threads=1, max_memory=slots[0]) for file in files]
    assert len(limited[0].generate(prompt, options).token_ids) > 0
    with pytest.raises(MemoryBudgetError):
        limited[1].generate(prompt, options)


@both
def test_rewound_copied_and_reordered_rows_go_on_as_they_were(held, name):
    file, sources, tokens = held(name), draw(5, 2, 7), draw(6, 2, 9)
    engine, state = file.engine, started(file, range(2), sources)
    engine.step(state, tokens[:, :5])
    kept = engine.copy(state, np.array([1, 0]))
    expected = engine.step(state, tokens[:, 5:6]).copy()
    state.rewind(5)
    assert np.array_equal(engine.step(state, tokens[:, 5:6]), expected)
    assert np.array_equal(engine.step(kept, tokens[::-1, 5:6]), expected[::-1])
    after = engine.step(state, tokens[:, 6:7]).copy()
    state.rewind(6)
    engine.reorder(state, np.array([1, 1, 0]))
    assert np.array_equal(engine.step(state, tokens[[1, 1, 0], 6:7]), after[[1, 1, 0]])


def test_speculation_chooses_the_same_tokens(held):
    file, prompt = held("wide-llama"), np.tile(draw(7, 5), 4).tolist()
    options = GenerationOptions(max_new_tokens=24)
    plain = file.model.generate(prompt, options)
    guessed = file.model.generate(prompt, options, prompt_lookup=True)
    assert guessed.token_ids == plain.token_ids
    assert guessed.speculation is not None


def test_a_prefix_is_gone_on_from(held):
    file, prompt = held("wide-llama"), draw(8, 12).tolist()
    options = GenerationOptions(max_new_tokens=8)
    whole = file.model.generate(prompt, options)
    after = file.model.generate(prompt[7:], options, prefix=file.model.cache_prefix(prompt[:7]))
    assert after.token_ids == whole.token_ids


@both
def test_beams_keep_their_own_past(held, name):
    """The score of each hypothesis is what the source gives its tokens."""
    file, source = held(name), draw(9, 1, 7)
    options = GenerationOptions(num_beams=4, num_return_sequences=4, max_new_tokens=8, length_penalty=0.0)
    result = file.model.generate(source[0].tolist(), options)
    assert len(result.alternatives) == 3
    start = [] if file.family.decoder_only else list(file.engine.manifest.special_tokens.bos_token_ids)
    for found in (result, *result.alternatives):
        given = source[0].tolist() if file.family.decoder_only else start
        tokens = np.array([*given, *found.token_ids])
        logits = torch.from_numpy(file.family.logits(source[0], tokens[:-1]))[len(given) - 1 :]
        own = torch.log_softmax(logits, -1)[range(len(found.token_ids)), list(found.token_ids)]
        span = float(np.ptp(logits.numpy()))
        np.testing.assert_allclose(found.token_logprobs, own, rtol=0, atol=2 * NEAR * span)


def test_what_cannot_be_held_in_int8_is_refused(exported, tmp_path):
    family = exported("wide-llama").family
    with pytest.raises(OptionError, match="leave out either them or the target portable"):
        export(family.module, tmp_path / "a.onnx", quantization=Quantization(kv_cache="int8"), target="portable")
    with pytest.raises(OptionError, match="cache is one of float, int8, not 'fp16'"):
        export(family.module, tmp_path / "a.onnx", quantization=Quantization(kv_cache="fp16"))
    with pytest.raises(UnsupportedModelError, match="no cache of this model can be held in int8"):
        export(family_of_odd_heads(), tmp_path / "a.onnx", quantization=Quantization(kv_cache="int8"), max_length=16)
    assert not list(tmp_path.iterdir())


def family_of_odd_heads():
    import transformers

    torch.manual_seed(0)
    sizes = dict(vocab_size=50, n_embd=24, n_head=2, n_layer=1, n_positions=16, bos_token_id=1, eos_token_id=2)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
