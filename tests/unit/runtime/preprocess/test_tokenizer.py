"""Codec and Detokenizer: unknown characters are refused with their place, and the pieces of a stream join to the text
that the package tokenizers decodes.
"""

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
    """Return a codec of single lower-case letters that appends an end token to a text."""
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
    """Return a codec like SentencePiece's: ▁ is a space, and characters outside the vocabulary are bytes."""
    pieces = ["<unk>", "<s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁a", "b", "é", "▁é"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return Codec(tokenizer.to_str())


def unigram() -> Codec:
    """Return a codec like T5's and XLM-R's: ▁ is a space, and the decoder omits the first one."""
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


def test_codec_adds_special_tokens_and_decodes_without_them():
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
def test_unknown_character_is_refused_with_its_place(unknown, text, character, place):
    with pytest.raises(InputError) as caught:
        characters(unknown, normalizer=None if unknown is None else normalizers.Lowercase()).encode(
            text, add_special_tokens=True
        )
    assert str(caught.value) == f"{character!r} (character {place} of the input) is not in the model's vocabulary"


def test_place_of_an_unknown_character_is_counted_before_normalization():
    with pytest.raises(InputError, match=r"'É' \(character 5"):
        characters().encode("  abÉ", add_special_tokens=True)


def test_character_that_the_tokenizer_drops_is_refused():
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    codec = Codec(tokenizer.to_str())
    assert codec.encode("ab", add_special_tokens=True) == [0, 1]
    with pytest.raises(InputError, match=r"'é' \(character 2 of the input\)"):
        codec.encode("aéb", add_special_tokens=True)
    with pytest.raises(InputError, match=r"'日' \(character 1 of the input\)"):
        codec.encode("日", add_special_tokens=True)


def test_characters_that_a_tokenizer_removes_by_design_are_accepted():
    assert CODECS["words"].encode(" AA  B ", add_special_tokens=True) == [1, 2]
    assert CODECS["word_pieces"].encode("do n't", add_special_tokens=True) == [2, 3, 4, 5]
    stripped = characters(normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]))
    assert stripped.encode("áb", add_special_tokens=False) == [3, 4]


def test_unknown_word_is_refused_with_its_place():
    with pytest.raises(InputError, match=r"'xyz' \(character 4"):
        CODECS["word_pieces"].encode("do xyz", add_special_tokens=True)
    with pytest.raises(InputError, match=r"'QQ' \(character 4"):
        CODECS["words"].encode("AA QQ", add_special_tokens=True)


def test_unigram_tokenizer_with_an_unknown_id_refuses_unknown_characters():
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -1.0)], unk_id=0, byte_fallback=False))
    with pytest.raises(InputError, match=r"'é' \(character 2"):
        Codec(tokenizer.to_str()).encode("aé", add_special_tokens=True)


@pytest.mark.parametrize("definition", ["", "{}", json.dumps({"model": {}})])
def test_damaged_tokenizer_raises_model_file_error(definition):
    with pytest.raises(ModelFileError, match="tokenizer cannot be read"):
        Codec(definition)


# Special cases of decoders: first and last pieces, broken bytes, spaces, suffixes, repetitions.
PIECES = ["<eos>", "", "a", "a", "b ", "  ", " c", "▁", "▁a▁", "##d", "##", " .", ".", "n't", "'m", " do not", "e</w>f"]
PIECES += ["</w>", "<pad>", "|", "<0xE6>", "<0x97>", "<0xA5>", "<0x41>", "<0xFF>", "<0x+1>", "<0xG1>", "æĹ¥", "æ", "Ĺ"]
STEPS = {
    "bytes": decoders.ByteFallback,
    "byte level": decoders.ByteLevel,
    "fuse": decoders.Fuse,
    "metaspace": decoders.Metaspace,
    "metaspace, first space kept": lambda: decoders.Metaspace(prepend_scheme="never"),
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
    vocabulary["z"] = len(vocabulary) + 1  # the id before this one has no piece
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.add_special_tokens(["<eos>"])
    if steps:
        tokenizer.decoder = decoders.Sequence([STEPS[step]() for step in steps])
    return Codec(tokenizer.to_str())


def stream(codec: Codec, ids: list[int], stop=()) -> tuple[list[str], Detokenizer]:
    text = Detokenizer(codec, stop)
    pieces = [text.push(i) for i in ids]
    return [*pieces, text.finish()], text


def assert_stream_is_exact(codec: Codec, ids: list[int], stop: list[str]) -> None:
    """Assert that the pieces of a stream join to the decoded text before the first stop string."""
    pieces, text = stream(codec, ids, stop)
    before = text_before_stop(codec.decode(ids), stop)
    assert "".join(pieces) == (codec.decode(ids) if before is None else before) == text.text
    assert text.stopped == (before is not None)
    assert text.push(ids[0] if ids else 0) == text.finish() == ""


@st.composite
def stop_strings(draw, text: str) -> list[str]:
    """Draw stop strings: substrings of the text, and strings of which the text has only the beginning."""
    stop = []
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, max(len(text) - 1, 0)))
        stop.append(text[start : start + draw(st.integers(1, 6))] + draw(st.sampled_from(["", "", "a", " "])))
    return [string for string in stop if string]


@settings(max_examples=600)
@given(data=st.data())
def test_random_ids_of_all_tokenizers_stream_to_their_text(data):
    codec = CODECS[data.draw(st.sampled_from(sorted(CODECS)))]
    ids = data.draw(st.lists(st.integers(0, codec.size + 1), max_size=160))
    assert_stream_is_exact(codec, ids, data.draw(stop_strings(codec.decode(ids))))


@settings(max_examples=1500)
@given(data=st.data())
def test_random_ids_of_all_decoder_chains_stream_to_their_text(data):
    codec = chained(data.draw(st.lists(st.sampled_from(sorted(STEPS)), max_size=4)))
    ids = data.draw(st.lists(st.integers(0, codec.size), max_size=20))
    try:
        text = codec.decode(ids)
    except ModelFileError:  # Strip of the package tokenizers panics if the text is too short
        reject()
    assert_stream_is_exact(codec, ids, data.draw(stop_strings(text)))


def byte_level_alphabet() -> dict[str, int]:
    """Return the bytes of GPT-2's characters: a printable byte is itself, and the others are numbered from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
    assert sorted(alphabet) == BYTES
    return alphabet


@settings(max_examples=300)
@given(data=st.binary(max_size=12), kind=st.sampled_from(["byte_level", "byte_fallback", "unigram_with_bytes"]))
def test_random_bytes_stream_to_their_text(data, kind):
    codec = CODECS[kind]
    token_ids = {codec.token(i): i for i in range(codec.size)}
    byte_tokens = {**byte_level_alphabet(), **{f"<0x{byte:02X}>": byte for byte in range(256)}}
    byte_ids = {byte_tokens[token]: i for token, i in token_ids.items() if token in byte_tokens}
    assert_stream_is_exact(codec, [byte_ids[byte] for byte in data], [])


# Each string is one extended grapheme cluster by Unicode's rules of text segmentation (UAX #29).
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
def test_cluster_is_emitted_whole_when_the_next_one_begins(case):
    codec, text = CODECS["byte_level"], "".join(CLUSTERS[case])
    ends = list(accumulate(map(len, CLUSTERS[case]), initial=0))
    detokenizer = Detokenizer(codec)
    for num_characters, character in enumerate(text, start=1):
        ids = codec.encode(character, add_special_tokens=False)
        assert len(ids) == len(character.encode())  # one token per byte
        pieces = [detokenizer.push(i) for i in ids]
        assert not any(pieces[:-1])
        # Nothing extends a line feed or a tab.
        complete = [end for end in ends if end < num_characters or (end == num_characters and character in "\n\t")]
        assert detokenizer.text == text[: complete[-1]]
    detokenizer.finish()
    assert detokenizer.text == text


JOINERS = "e\u0301\u0323\u200d\ufe0f👩👍🏽🇩🇪ก\u0e33क\u094dष\u1112\u1161\u11ab\r\n \u0600a日"


@settings(max_examples=400)
@given(
    data=st.data(),
    text=st.text(JOINERS, max_size=60) | st.text(st.characters(exclude_categories=["Cs"]), max_size=80),
    kind=st.sampled_from(["byte_level", "byte_fallback", "unigram_with_bytes"]),
)
def test_pieces_end_at_cluster_boundaries(data, text, kind):
    codec = CODECS[kind]
    ids = codec.encode(text, add_special_tokens=False)
    decoded = codec.decode(ids)
    pieces, state = stream(codec, ids, data.draw(stop_strings(decoded)))
    boundaries = set(accumulate(map(len, regex.findall(r"\X", decoded)), initial=0))
    if state.stopped:  # a stop string may begin within a cluster
        boundaries.add(len(state.text))
    assert decoded.startswith("".join(pieces))
    assert set(accumulate(map(len, pieces))) <= boundaries


@settings(max_examples=300)
@given(
    text=st.text("abc é日", max_size=40),
    stop=st.lists(st.text("abc é日", min_size=1, max_size=4), max_size=3),
    kind=st.sampled_from(["byte_level", "byte_fallback"]),
)
def test_stop_strings_are_not_emitted(text, stop, kind):
    codec = CODECS[kind]
    assert_stream_is_exact(codec, codec.encode(text, add_special_tokens=False), stop)


def test_text_is_emitted_when_no_later_token_can_change_it():
    codec = CODECS["byte_level"]
    pieces, _ = stream(codec, codec.encode("a日b", add_special_tokens=False))
    assert pieces == ["", "", "", "a", "日", "b"]
    pieces, _ = stream(codec, codec.encode("abxyz", add_special_tokens=False), stop=["bxz"])
    assert pieces == ["", "a", "", "bx", "y", "z"]
    pieces, text = stream(codec, codec.encode("abxz", add_special_tokens=False), stop=["bxz"])
    assert (pieces, text.stopped) == (["", "a", "", "", ""], True)
    codec = CODECS["byte_fallback"]  # a run of bytes is final when it ends or is invalid
    pieces, _ = stream(
        codec, [codec.encode("b", add_special_tokens=False)[-1], *(2 + b for b in b"\n\xe6\x97\xff\x41A")]
    )
    assert pieces == ["", "", "", "", "b" + "�" * 3, "�", "�", "�"]


def test_stop_string_that_begins_first_takes_precedence_over_one_that_ends_first():
    codec = CODECS["byte_level"]
    for text, expected in [("abcd", "a"), ("abce", "ab")]:
        pieces, state = stream(codec, codec.encode(text, add_special_tokens=False), stop=["c", "bcd"])
        assert ("".join(pieces), state.stopped) == (expected, True)


def test_stop_string_may_begin_within_a_cluster():
    codec = CODECS["byte_level"]
    pieces, _ = stream(codec, codec.encode("ae\u0301b", add_special_tokens=False), stop=["\u0301b"])
    assert "".join(pieces) == "ae"
    pieces, _ = stream(codec, codec.encode("ae\u0301c", add_special_tokens=False), stop=["\u0301b"])
    assert [piece for piece in pieces if piece] == ["a", "e\u0301", "c"]


@pytest.mark.parametrize("text", ["hello wörld " * 400, "z" + "\u0301" * 5000, "👩\u200d" * 2000, "🇩🇪" * 1000])
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_cost_of_a_token_does_not_grow_with_the_text(text, kind, monkeypatch):
    codec, examined_lengths = CODECS[kind], []
    cluster_boundary = text_module.cluster_boundary

    def count_characters(text, limit):
        examined_lengths.append(len(text))
        return cluster_boundary(text, limit)

    monkeypatch.setattr(text_module, "cluster_boundary", count_characters)
    monkeypatch.setattr(Codec, "decode", None)  # the whole text must not be decoded again
    pieces, _ = stream(codec, codec.encode(text, add_special_tokens=False), stop=["lo there"])
    assert "".join(pieces) == text
    # Up to 270 waiting characters are examined at each token. A longer waiting text is examined again only when its
    # length has doubled, so each of its characters is examined four times on average.
    assert sum(examined_lengths) <= 270**2 + 4 * len(text) or max(examined_lengths) <= 12


def test_text_before_stop_ends_at_the_first_stop_string():
    assert text_before_stop("abcdef", ("de", "bc")) == "a"
    assert text_before_stop("abc", ("x",)) is None
    assert text_before_stop("abc", ()) is None


@pytest.mark.parametrize("kind", ["ByteLevel", "ByteFallback"])
def test_bytes_of_tokens_join_to_the_characters_of_which_they_are_parts(kind):
    fallback = kind == "ByteFallback"
    names = [f"<0x{byte:02X}>" for byte in range(256)] if fallback else BYTES
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=fallback))
    tokenizer.pre_tokenizer = None if fallback else pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteFallback() if fallback else decoders.ByteLevel()
    codec = Codec(tokenizer.to_str())
    text = "a 中😀"
    assert b"".join(codec.token_bytes(id_) for id_ in tokenizer.encode(text).ids).decode() == text
