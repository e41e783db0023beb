"""Tokenizers: refusal with a place, and text that streams without being taken back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tformer_runtime import InputError, ModelFileError
from tformer_runtime.text import Codec, Detokenizer, cut

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def characters(unknown: str | None = "<unk>", **parts) -> Codec:
    """Single lower-case letters, with an end token put behind a text."""
    vocabulary = {"<pad>": 0, "<unk>": 1, "<eos>": 2} | {c: i for i, c in enumerate("abcdefgh'", start=3)}
    if unknown is None:
        del vocabulary["<unk>"]
    tokenizer = Tokenizer(models.WordLevel(vocabulary, **({"unk_token": unknown} if unknown else {})))
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in vocabulary if t.startswith("<")])
    tokenizer.normalizer = parts.get("normalizer", normalizers.Sequence([normalizers.Strip(), normalizers.Lowercase()]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 2)])
    tokenizer.decoder = decoders.Fuse()
    return Codec(tokenizer.to_str())


def byte_level() -> Codec:
    vocabulary = {c: i for i, c in enumerate([*BYTES, "<eos>", "he", "Ġw"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("h", "e"), ("Ġ", "w")]))
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Codec(tokenizer.to_str())


def byte_fallback() -> Codec:
    """As SentencePiece's: ▁ for a space, bytes for what is not in the vocabulary."""
    pieces = ["<unk>", "<s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁a", "b", "é", "▁é"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return Codec(tokenizer.to_str())


def word_pieces() -> Codec:
    pieces = ["[UNK]", "[SEP]", "do", "n", "'", "t", ".", ",", "##ing", "##s", "!", "é", "日"]
    tokenizer = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[SEP]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    return Codec(tokenizer.to_str())


def suffixes() -> Codec:
    pieces = ["<unk>", "a", "b</w>", "ab</w>", "c", "é</w>"]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder()
    return Codec(tokenizer.to_str())


def words() -> Codec:
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<eos>", "AA", "B", "CH", "."])}))
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Codec(tokenizer.to_str())


CODECS = {f.__name__: f() for f in (characters, byte_level, byte_fallback, word_pieces, suffixes, words)}


def test_a_text_and_what_is_put_around_it():
    codec = characters()
    assert codec.encode("aB'", special=True) == [3, 4, 11, 2]
    assert codec.encode("aB'", special=False) == [3, 4, 11]
    assert codec.encode("  ", special=True) == []
    assert codec.decode([3, 4, 2, 0]) == "ab"
    assert codec.size == 12


@pytest.mark.parametrize("unknown", ["<unk>", None])
@pytest.mark.parametrize(
    ("text", "character", "place"), [("abé", "é", 3), ("a b", " ", 2), ("zab", "z", 1), ("😀", "😀", 1)]
)
def test_a_character_outside_the_vocabulary_is_named_with_its_place(unknown, text, character, place):
    with pytest.raises(InputError) as caught:
        characters(unknown, normalizer=None if unknown is None else normalizers.Lowercase()).encode(text, special=True)
    assert str(caught.value) == f"{character!r} (character {place} of the input) is not in the model's vocabulary"


def test_a_place_is_counted_in_what_the_caller_wrote():
    with pytest.raises(InputError, match=r"'É' \(character 5"):
        characters().encode("  abÉ", special=True)


def test_a_character_that_the_tokenizer_drops():
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    codec = Codec(tokenizer.to_str())
    assert codec.encode("ab", special=True) == [0, 1]
    with pytest.raises(InputError, match=r"'é' \(character 2 of the input\)"):
        codec.encode("aéb", special=True)
    with pytest.raises(InputError, match=r"'日' \(character 1 of the input\)"):
        codec.encode("日", special=True)


def test_what_a_tokenizer_leaves_out_by_design_is_no_error():
    assert CODECS["words"].encode(" AA  B ", special=True) == [1, 2]
    assert CODECS["word_pieces"].encode("do n't", special=True) == [2, 3, 4, 5]
    stripped = characters(normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]))
    assert stripped.encode("áb", special=False) == [3, 4]


def test_a_word_outside_the_vocabulary():
    with pytest.raises(InputError, match=r"'xyz' \(character 4"):
        CODECS["word_pieces"].encode("do xyz", special=True)
    with pytest.raises(InputError, match=r"'QQ' \(character 4"):
        CODECS["words"].encode("AA QQ", special=True)


def test_unigram_tokenizers_know_their_unknown_by_number():
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -1.0)], unk_id=0, byte_fallback=False))
    with pytest.raises(InputError, match=r"'é' \(character 2"):
        Codec(tokenizer.to_str()).encode("aé", special=True)


@pytest.mark.parametrize("definition", ["", "{}", json.dumps({"model": {}})])
def test_a_damaged_tokenizer(definition):
    with pytest.raises(ModelFileError, match="tokenizer cannot be read"):
        Codec(definition)


def _streamed(codec: Codec, ids: list[int], stop=()) -> tuple[list[str], Detokenizer]:
    text = Detokenizer(codec, stop)
    pieces = [text.push(i) for i in ids]
    return [*pieces, text.finish()], text


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_pieces_together_are_the_text(data):
    codec = CODECS[data.draw(st.sampled_from(sorted(CODECS)))]
    ids = data.draw(st.lists(st.integers(0, codec.size - 1), max_size=160))
    pieces, text = _streamed(codec, ids)
    assert "".join(pieces) == codec.decode(ids) == text.text


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), max_size=150),
    which=st.sampled_from(["byte_level", "byte_fallback"]),
)
def test_no_piece_ends_in_a_broken_character(text, which):
    codec = CODECS[which]
    ids = codec.encode(text, special=False)
    pieces, _ = _streamed(codec, ids)
    assert "".join(pieces) == codec.decode(ids)
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text("abc é日", max_size=40), stop=st.lists(st.text("abc é日", min_size=1, max_size=4), max_size=3))
def test_stop_strings_are_never_shown(text, stop):
    codec = CODECS["byte_level"]
    ids = codec.encode(text, special=False)
    pieces, state = _streamed(codec, ids, stop)
    before = cut(codec.decode(ids), stop)
    assert "".join(pieces) == (text if before is None else before)
    assert state.stopped == (before is not None)


def test_text_comes_as_soon_as_it_is_certain():
    codec = CODECS["byte_level"]
    pieces, _ = _streamed(codec, codec.encode("a日b", special=False))
    assert pieces == ["a", "", "", "日", "b", ""]
    pieces, _ = _streamed(codec, codec.encode("abxy", special=False), stop=["bxz"])
    assert pieces == ["a", "", "", "bxy", ""]


def test_long_texts_are_not_decoded_again_from_the_start():
    codec, longest = CODECS["byte_level"], 0

    class Counting:
        def decode(self, ids):
            nonlocal longest
            longest = max(longest, len(ids))
            return codec.decode(ids)

        def is_part(self, id_):
            return codec.is_part(id_)

    text = Detokenizer(Counting())
    ids = codec.encode("hello wörld " * 40, special=False)
    assert "".join(text.push(i) for i in ids) == "hello wörld " * 40
    assert longest < 100 < len(ids)


def test_cut_takes_the_first():
    assert cut("abcdef", ("de", "bc")) == "a"
    assert cut("abc", ("x",)) is None
    assert cut("abc", ()) is None
