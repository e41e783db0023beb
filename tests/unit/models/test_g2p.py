"""The g2p benchmark: splits are fixed, tokenizers match the dataset, and error rates equal counts by hand."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from examples.training import g2p
from tformer_models.decoding import decode_greedily
from tformer_runtime.base.errors import InputError


def test_split_is_fixed():
    counts = {split: len(g2p.load_split(split)) for split in g2p.SPLITS}
    assert counts == {"train": 112628, "validation": 6166, "test": 6132}
    splits = [set(g2p.load_split(split)) for split in g2p.SPLITS]
    assert sum(map(len, splits)) == len(set.union(*splits)) == len(g2p.load_lexicon())
    for split in g2p.SPLITS:
        assert all(g2p.assign_split(word) == split for word in list(g2p.load_split(split))[:100])
    # SHA-256 of "hello" begins 2cf24dba5fb0a30e, of "the" b9776d7ddf459c9a.
    assert g2p.assign_split("hello") == expected_split(0x2CF24DBA5FB0A30E)
    assert g2p.assign_split("the") == expected_split(0xB9776D7DDF459C9A)


def expected_split(number):
    return "test" if number % 100 < 5 else "validation" if number % 100 < 10 else "train"


def test_lexicon_has_no_stress_no_duplicates_and_the_alphabet_of_the_literature():
    words = g2p.load_lexicon()
    assert {letter for word in words for letter in word} == set(g2p.LETTERS)
    assert {p for options in words.values() for option in options for p in option} == set(g2p.PHONEMES)
    assert len(g2p.PHONEMES) == 39
    assert all(len(set(options)) == len(options) > 0 for options in words.values())
    assert words["tomato"] == [("T", "AH", "M", "EY", "T", "OW"), ("T", "AH", "M", "AA", "T", "OW")]
    assert words["a"] == [("AH",), ("EY",)]


@pytest.fixture(scope="module")
def source():
    return Tokenizer.from_str(g2p.source_tokenizer())


@pytest.fixture(scope="module")
def target():
    return Tokenizer.from_str(g2p.target_tokenizer())


def test_source_tokenizer_normalizes_text_and_appends_eos(source):
    assert source.encode("Don’t ").ids == source.encode("don't").ids
    assert source.encode("ab'z").tokens == ["a", "b", "'", "z", "<eos>"]
    assert source.encode("abz").ids == [5, 6, 30, g2p.EOS]
    assert source.decode(source.encode("abz").ids) == "a b z"


@pytest.mark.parametrize("text", ["naïve", "a b", "e-mail", "3", "a\nb", "日本"])
def test_source_tokenizer_maps_other_characters_to_unk(source, text):
    assert g2p.UNK in source.encode(text).ids


def test_source_tokenizer_knows_every_word_of_the_lexicon(source):
    assert all(g2p.UNK not in encoding.ids for encoding in source.encode_batch(list(g2p.load_lexicon())))


def test_target_tokenizer_round_trip(target):
    text = " ".join(g2p.PHONEMES)
    ids = target.encode(text).ids
    assert ids == list(range(3, 42))
    assert target.decode([g2p.BOS, *ids, g2p.EOS, g2p.PAD]) == text
    with pytest.raises(Exception, match="UNK"):
        target.encode("HH AH0")


def test_dataset_ids_equal_tokenizer_ids(source, target):
    data = g2p.dataset(limit=50)
    words = [(word, option) for word, options in list(g2p.load_split("train").items())[:50] for option in options]
    assert len(data.train) == len(words)
    for (src, tgt), (word, option) in zip(data.train, words, strict=True):
        assert src == source.encode(word).ids
        assert tgt == [g2p.BOS, *target.encode(" ".join(option)).ids, g2p.EOS]
    assert data.model_arguments == {
        "source_vocabulary": source.get_vocab_size(),
        "target_vocabulary": target.get_vocab_size(),
    }


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        ("kitten", "sitting", 3),
        ("", "abc", 3),
        ("abc", "", 3),
        ("flaw", "lawn", 2),
        ("same", "same", 0),
        ("ab", "ba", 2),
    ],
)
def test_edit_distance_of_known_pairs(a, b, distance):
    assert g2p.edit_distance(a, b) == distance


def recursive_edit_distance(a, b):
    if not a or not b:
        return len(a) + len(b)
    return min(
        recursive_edit_distance(a[1:], b) + 1,
        recursive_edit_distance(a, b[1:]) + 1,
        recursive_edit_distance(a[1:], b[1:]) + (a[0] != b[0]),
    )


@given(st.text("xyz", max_size=5), st.text("xyz", max_size=5))
def test_edit_distance_equals_its_recursive_definition(a, b):
    assert g2p.edit_distance(a, b) == recursive_edit_distance(a, b)


def split_phonemes(*texts):
    return [text.split() for text in texts]


def test_error_rates_equal_hand_counts():
    references = [
        split_phonemes("K AE T"),
        split_phonemes("T AH M EY T OW", "T AH M AA T OW"),
        split_phonemes("AH", "EY"),
    ]
    assert g2p.error_rates(split_phonemes("K AE T", "T AH M AA T OW", "EY"), references) == (0.0, 0.0)
    # One deletion of 3; one substitution and one insertion of 6 against the closer reference; 2 insertions of 1.
    per, wer = g2p.error_rates(split_phonemes("K AE", "T AH N AA T OW Z", "AH B C"), references)
    assert per == pytest.approx((1 + 2 + 2) / (3 + 6 + 1))
    assert wer == 1.0
    assert g2p.error_rates(split_phonemes(""), [split_phonemes("K")]) == (1.0, 1.0)


def test_words_and_score_commands_use_the_same_order(tmp_path):
    run = CliRunner().invoke
    words = run(g2p.main, ["words", "--split", "validation"]).stdout.splitlines()
    assert words == sorted(words)
    assert len(words) == 6166
    lines = [" ".join(g2p.load_lexicon()[word][-1]) for word in words]
    lines[0] = "ZH " * 9
    (tmp_path / "predictions.txt").write_text("\n".join(lines) + "\n")
    result = run(g2p.main, ["score", str(tmp_path / "predictions.txt"), "--split", "validation"])
    assert result.stdout.startswith("validation: 6166 words, PER 0.0")
    assert result.stdout.endswith("WER 0.02%\n")
    piped = run(g2p.main, ["score", "--split", "validation"], input="\n".join(lines))
    assert piped.stdout == result.stdout


def test_report_refuses_a_wrong_number_of_predictions():
    with pytest.raises(InputError, match="1 predictions for the 6132 words"):
        g2p.format_report([["AH"]], "test")


class LengthCopier(torch.nn.Module):
    """Predicts as many tokens 3 as the source has tokens, then the end token (2)."""

    def forward(self, src, tgt):
        remaining = (src != 0).sum(1)[:, None] - torch.arange(tgt.shape[1])[None]
        return torch.nn.functional.one_hot(torch.where(remaining > 0, 3, 2), 5).float()


def test_greedy_decoding_ends_each_row_separately():
    options = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    assert decode_greedily(LengthCopier(), [[7], [7, 7, 7], [7, 7]], **options, max_new_tokens=9) == [
        [3],
        [3] * 3,
        [3] * 2,
    ]
    assert decode_greedily(LengthCopier(), [[7, 7, 7]], **options, max_new_tokens=2) == [[3, 3]]


def test_committed_model_pronounces_held_out_words():
    path = Path(g2p.__file__).parents[2] / "models" / "g2p" / "model.pt"
    words = list(g2p.load_split("test"))[::60]
    predictions = g2p.predict(path, ["hello", *words])
    assert tuple(predictions[0]) in g2p.load_lexicon()["hello"]
    per, wer = g2p.error_rates(predictions[1:], [g2p.load_split("test")[word] for word in words])
    assert per < 0.12  # on about a hundred words; the model card has the error rates of the whole split
    assert wer < 0.4
