"""Tokenizers: refusal with a place, and text that streams without being taken back."""

from __future__ import annotations

import json
from itertools import accumulate

import pytest
import regex
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tformer_runtime import InputError, ModelFileError
from tformer_runtime.preprocess import tokenizer as text_module
from tformer_runtime.preprocess.tokenizer import Codec, Detokenizer, text_before_stop

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
    tokenizer.add_tokens(["日本", "two words"])
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


def unigram() -> Codec:
    """As T5's and XLM-R's: ▁ for a space, the first one left out."""
    pieces = ["<unk>", "</s>", "▁", "▁a", "b", "é", "▁▁", "a▁b", "👩", "\u200d", "日", "▁\u0301"]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=False))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return Codec(tokenizer.to_str())


def unigram_with_bytes() -> Codec:
    pieces = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁a", "b", "é", "▁▁"]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=True))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return Codec(tokenizer.to_str())


def word_pieces() -> Codec:
    pieces = ["[UNK]", "[SEP]", "do", "n", "'", "t", ".", ",", "##ing", "##s", "!", "é", "日", "'m", "n't", "do not"]
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


KINDS = (characters, byte_level, byte_fallback, unigram, unigram_with_bytes, word_pieces, suffixes, words)
CODECS = {kind.__name__: kind() for kind in KINDS}


def test_a_text_and_what_is_put_around_it():
    codec = characters()
    assert codec.encode("aB'", add_special_tokens=True) == [3, 4, 11, 2]
    assert codec.encode("aB'", add_special_tokens=False) == [3, 4, 11]
    assert codec.encode("  ", add_special_tokens=True) == []
    assert codec.decode([3, 4, 2, 0]) == "ab"
    assert codec.size == 12


@pytest.mark.parametrize("unknown", ["<unk>", None])
@pytest.mark.parametrize(
    ("text", "character", "place"), [("abé", "é", 3), ("a b", " ", 2), ("zab", "z", 1), ("😀", "😀", 1)]
)
def test_a_character_outside_the_vocabulary_is_named_with_its_place(unknown, text, character, place):
    with pytest.raises(InputError) as caught:
        characters(unknown, normalizer=None if unknown is None else normalizers.Lowercase()).encode(
            text, add_special_tokens=True
        )
    assert str(caught.value) == f"{character!r} (character {place} of the input) is not in the model's vocabulary"


def test_a_place_is_counted_in_what_the_caller_wrote():
    with pytest.raises(InputError, match=r"'É' \(character 5"):
        characters().encode("  abÉ", add_special_tokens=True)


def test_a_character_that_the_tokenizer_drops():
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    codec = Codec(tokenizer.to_str())
    assert codec.encode("ab", add_special_tokens=True) == [0, 1]
    with pytest.raises(InputError, match=r"'é' \(character 2 of the input\)"):
        codec.encode("aéb", add_special_tokens=True)
    with pytest.raises(InputError, match=r"'日' \(character 1 of the input\)"):
        codec.encode("日", add_special_tokens=True)


def test_what_a_tokenizer_leaves_out_by_design_is_no_error():
    assert CODECS["words"].encode(" AA  B ", add_special_tokens=True) == [1, 2]
    assert CODECS["word_pieces"].encode("do n't", add_special_tokens=True) == [2, 3, 4, 5]
    stripped = characters(normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]))
    assert stripped.encode("áb", add_special_tokens=False) == [3, 4]


def test_a_word_outside_the_vocabulary():
    with pytest.raises(InputError, match=r"'xyz' \(character 4"):
        CODECS["word_pieces"].encode("do xyz", add_special_tokens=True)
    with pytest.raises(InputError, match=r"'QQ' \(character 4"):
        CODECS["words"].encode("AA QQ", add_special_tokens=True)


def test_unigram_tokenizers_know_their_unknown_by_number():
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -1.0)], unk_id=0, byte_fallback=False))
    with pytest.raises(InputError, match=r"'é' \(character 2"):
        Codec(tokenizer.to_str()).encode("aé", add_special_tokens=True)


@pytest.mark.parametrize("definition", ["", "{}", json.dumps({"model": {}})])
def test_a_damaged_tokenizer(definition):
    with pytest.raises(ModelFileError, match="tokenizer cannot be read"):
        Codec(definition)


# What decoders treat in ways of their own: first and last pieces, broken bytes, spaces, suffixes, repetitions.
PIECES = ["<eos>", "", "a", "a", "b ", "  ", " c", "▁", "▁a▁", "##d", "##", " .", ".", "n't", "'m", " do not", "e</w>f"]
PIECES += ["</w>", "<pad>", "|", "<0xE6>", "<0x97>", "<0xA5>", "<0x41>", "<0xFF>", "<0x+1>", "<0xG1>", "æĹ¥", "æ", "Ĺ"]
STEPS = {
    "bytes": decoders.ByteFallback,
    "byte level": decoders.ByteLevel,
    "fuse": decoders.Fuse,
    "metaspace": decoders.Metaspace,
    "metaspace, first one kept": lambda: decoders.Metaspace(prepend_scheme="never"),
    "pieces": decoders.WordPiece,
    "pieces, no clean-up": lambda: decoders.WordPiece("a", cleanup=False),
    "suffixes": decoders.BPEDecoder,
    "ctc": decoders.CTC,
    "strip": lambda: decoders.Strip(" ", 1, 0),
    "strip both": lambda: decoders.Strip(" ", 2, 3),
    "strip broken": lambda: decoders.Strip("\N{REPLACEMENT CHARACTER}", 1, 1),
    "character": lambda: decoders.Replace("▁", " "),
    "two characters": lambda: decoders.Replace("aa", "a"),
    "expression": lambda: decoders.Replace(Regex(r"^| +|a$"), "-"),
}


def chained(steps: list[str]) -> Codec:
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(PIECES))}
    vocabulary["z"] = len(vocabulary) + 1  # an id below has no piece
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.add_special_tokens(["<eos>"])
    if steps:
        tokenizer.decoder = decoders.Sequence([STEPS[step]() for step in steps])
    return Codec(tokenizer.to_str())


def _streamed(codec: Codec, ids: list[int], stop=()) -> tuple[list[str], Detokenizer]:
    text = Detokenizer(codec, stop)
    pieces = [text.push(i) for i in ids]
    return [*pieces, text.finish()], text


def _is_exact(codec: Codec, ids: list[int], stop: list[str]) -> None:
    pieces, text = _streamed(codec, ids, stop)
    before = text_before_stop(codec.decode(ids), stop)
    assert "".join(pieces) == (codec.decode(ids) if before is None else before) == text.text
    assert text.stopped == (before is not None)
    assert text.push(ids[0] if ids else 0) == text.finish() == ""


@st.composite
def _stops(draw, text: str) -> list[str]:
    """Some that the text holds, some that it holds the beginning of."""
    stop = []
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, max(len(text) - 1, 0)))
        stop.append(text[start : start + draw(st.integers(1, 6))] + draw(st.sampled_from(["", "", "a", " "])))
    return [string for string in stop if string]


@settings(max_examples=600)
@given(data=st.data())
def test_any_ids_of_any_tokenizer_stream_to_their_text(data):
    codec = CODECS[data.draw(st.sampled_from(sorted(CODECS)))]
    ids = data.draw(st.lists(st.integers(0, codec.size + 1), max_size=160))
    _is_exact(codec, ids, data.draw(_stops(codec.decode(ids))))


@settings(max_examples=1500)
@given(data=st.data())
def test_any_chain_of_decoders(data):
    codec = chained(data.draw(st.lists(st.sampled_from(sorted(STEPS)), max_size=4)))
    ids = data.draw(st.lists(st.integers(0, codec.size), max_size=20))
    try:
        text = codec.decode(ids)
    except BaseException as panic:  # the package's Strip, if it is to take more from an end than there is
        if type(panic).__name__ != "PanicException":
            raise
        reject()
    _is_exact(codec, ids, data.draw(_stops(text)))


@settings(max_examples=300)
@given(data=st.binary(max_size=12), parts=st.sampled_from(["byte_level", "byte_fallback", "unigram_with_bytes"]))
def test_any_bytes(data, parts):
    codec = CODECS[parts]
    names = {codec.token(i): i for i in range(codec.size)}
    spelled = {**text_module._ALPHABET, **{f"<0x{byte:02X}>": byte for byte in range(256)}}
    bytes_ = {spelled[name]: i for name, i in names.items() if name in spelled}
    _is_exact(codec, [bytes_[byte] for byte in data], [])


# What Unicode's rules of text segmentation (UAX #29) make one cluster each.
CLUSTERS = {
    "combining marks": ["e\u0301", "o\u0302\u0323", "x"],
    "marks of a script": ["நி", "กำ", "ต่"],
    "conjuncts": ["क्ष", "ক্ষ", "क"],
    "family": ["👩\u200d👩\u200d👧\u200d👦", "👍"],
    "skin tones": ["👍🏽", "👩🏾\u200d🚀", "a"],
    "variation selectors": ["❤\ufe0f", "1\ufe0f\u20e3", "2"],
    "flags": ["🇩🇪", "🇫🇷", "🇺🇸", "🇺"],
    "flag of a region": ["🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f", "!"],
    "jamo": ["\u1112\u1161\u11ab", "\u1100\u1173\u11af", "가\u11a8", "ㄱ"],
    "line ends": ["a", "\r\n", "\n", "\n", "\r", "b"],
    "a control character carries no mark": ["\n", "\u0301", "\t", "c"],
    "before a digit": ["\u06001", "2"],
}


@pytest.mark.parametrize("case", CLUSTERS)
def test_a_cluster_comes_whole_and_as_soon_as_the_next_one_begins(case):
    codec, text = CODECS["byte_level"], "".join(CLUSTERS[case])
    ends = list(accumulate(map(len, CLUSTERS[case]), initial=0))
    detokenizer = Detokenizer(codec)
    for at, character in enumerate(text, start=1):
        ids = codec.encode(character, add_special_tokens=False)
        assert len(ids) == len(character.encode())  # a token for every byte
        given = [detokenizer.push(i) for i in ids]
        assert not any(given[:-1])
        complete = [end for end in ends if end < at or (end == at and character in "\n\t")]  # nothing extends those
        assert detokenizer.text == text[: complete[-1]]
    detokenizer.finish()
    assert detokenizer.text == text


JOINERS = "e\u0301\u0323\u200d\ufe0f👩👍🏽🇩🇪ก\u0e33क\u094dष\u1112\u1161\u11ab\r\n \u0600a日"


@settings(max_examples=400)
@given(
    data=st.data(),
    text=st.text(JOINERS, max_size=60) | st.text(st.characters(exclude_categories=["Cs"]), max_size=80),
    which=st.sampled_from(["byte_level", "byte_fallback", "unigram_with_bytes"]),
)
def test_no_piece_ends_in_a_character_or_a_cluster(data, text, which):
    codec = CODECS[which]
    ids = codec.encode(text, add_special_tokens=False)
    decoded = codec.decode(ids)
    pieces, state = _streamed(codec, ids, data.draw(_stops(decoded)))
    places = set(accumulate(map(len, regex.findall(r"\X", decoded)), initial=0))
    if state.stopped:  # within a cluster perhaps
        places.add(len(state.text))
    assert decoded.startswith("".join(pieces))
    assert set(accumulate(map(len, pieces))) <= places


@settings(max_examples=300)
@given(
    text=st.text("abc é日", max_size=40),
    stop=st.lists(st.text("abc é日", min_size=1, max_size=4), max_size=3),
    which=st.sampled_from(["byte_level", "byte_fallback"]),
)
def test_stop_strings_are_never_shown(text, stop, which):
    codec = CODECS[which]
    _is_exact(codec, codec.encode(text, add_special_tokens=False), stop)


def test_text_comes_as_soon_as_it_is_certain():
    codec = CODECS["byte_level"]
    pieces, _ = _streamed(codec, codec.encode("a日b", add_special_tokens=False))
    assert pieces == ["", "", "", "a", "日", "b"]
    pieces, _ = _streamed(codec, codec.encode("abxyz", add_special_tokens=False), stop=["bxz"])
    assert pieces == ["", "a", "", "bx", "y", "z"]
    pieces, text = _streamed(codec, codec.encode("abxz", add_special_tokens=False), stop=["bxz"])
    assert (pieces, text.stopped) == (["", "a", "", "", ""], True)
    codec = CODECS["byte_fallback"]  # a run of bytes is certain when it ends, or when it is broken
    pieces, _ = _streamed(
        codec, [codec.encode("b", add_special_tokens=False)[-1], *(2 + b for b in b"\n\xe6\x97\xff\x41A")]
    )
    assert pieces == ["", "", "", "", "b" + "�" * 3, "�", "�", "�"]


def test_a_stop_string_that_begins_first_wins_over_one_that_ends_first():
    codec = CODECS["byte_level"]
    for text, shown in [("abcd", "a"), ("abce", "ab")]:
        pieces, state = _streamed(codec, codec.encode(text, add_special_tokens=False), stop=["c", "bcd"])
        assert ("".join(pieces), state.stopped) == (shown, True)


def test_a_stop_string_may_begin_within_a_cluster():
    codec = CODECS["byte_level"]
    pieces, _ = _streamed(codec, codec.encode("ae\u0301b", add_special_tokens=False), stop=["\u0301b"])
    assert "".join(pieces) == "ae"
    pieces, _ = _streamed(codec, codec.encode("ae\u0301c", add_special_tokens=False), stop=["\u0301b"])
    assert [piece for piece in pieces if piece] == ["a", "e\u0301", "c"]


@pytest.mark.parametrize("text", ["hello wörld " * 400, "z" + "\u0301" * 5000, "👩\u200d" * 2000, "🇩🇪" * 1000])
@pytest.mark.parametrize("which", ["byte_level", "byte_fallback"])
def test_the_cost_of_a_token_does_not_grow_with_the_text(text, which, monkeypatch):
    codec, looked_at = CODECS[which], []
    boundary = text_module._boundary

    def counting(text, most):
        looked_at.append(len(text))
        return boundary(text, most)

    monkeypatch.setattr(text_module, "_boundary", counting)
    monkeypatch.setattr(Codec, "decode", None)  # never the whole again
    pieces, _ = _streamed(codec, codec.encode(text, add_special_tokens=False), stop=["lo there"])
    assert "".join(pieces) == text
    # Characters looked at: for each one no more than what may wait before it is doubled, and four on average beyond.
    assert sum(looked_at) <= 270**2 + 4 * len(text) or max(looked_at) <= 12


def test_cut_takes_the_first():
    assert text_before_stop("abcdef", ("de", "bc")) == "a"
    assert text_before_stop("abc", ("x",)) is None
    assert text_before_stop("abc", ()) is None
