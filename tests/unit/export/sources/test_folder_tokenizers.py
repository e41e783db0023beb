"""Tokenizers of Hugging Face folders in the JSON format of tokenizers, against the tokenizers of transformers."""

from __future__ import annotations

import json
import shutil
from pydoc_data.topics import topics

import pytest
import sentencepiece
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tformer_export.sources.tokenizer import has_tokenizer, read_chat_template, read_tokenizers
from tformer_runtime import InputError, SourceError
from tformer_runtime.preprocess.tokenizer import Codec

TEXTS = (  # none of these texts is in the sample of the exporter
    "A compiler turns a model into a file.",
    "  many   spaces, \t tabs \n and lines ",
    "CAPITALS 1984 + 0.5% = ½ ﬁne?! (yes) [no] <unk",
    "Straße, déjà vu, ты где, 漢字かな, 🙂🙃",
    "x",
    "y" * 40,
)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Return name → a SentencePiece model, trained on a chapter of the documentation of Python."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    words = topics["assignment"] + topics["class"]
    (folder / "text").write_text("\n".join([*words.split("\n"), *TEXTS]), encoding="utf-8")
    settings = {
        "unigram": {"model_type": "unigram", "vocab_size": 200},
        "other": {"model_type": "unigram", "vocab_size": 150, "user_defined_symbols": ["<sep>"]},
        "padded": {"model_type": "unigram", "vocab_size": 200, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
        "plain": {"model_type": "unigram", "vocab_size": 200, "normalization_rule_name": "identity"},
        "merges": {"model_type": "bpe", "vocab_size": 420, "byte_fallback": True},
    }
    for name, options in settings.items():
        sentencepiece.SentencePieceTrainer.train(
            input=str(folder / "text"), model_prefix=str(folder / name), character_coverage=0.99, minloglevel=2,
            hard_vocab_limit=False, **options,
        )  # fmt: skip
    return {name: folder / f"{name}.model" for name in settings}


def read_pieces(path):
    model = sentencepiece.SentencePieceProcessor(str(path))
    return [model.id_to_piece(i) for i in range(3, model.get_piece_size())]


def translation_tokenizer(trained, folder, separate=False):
    """Return a tokenizer of a translation model: two SentencePiece models, and a vocabulary that lacks some pieces."""
    source, target = read_pieces(trained["unigram"]), read_pieces(trained["other"])
    joint = ["</s>", "<unk>", *(target if separate else sorted({*source[:-9], *target})), ">>fra<<", ">>deu<<", "<pad>"]
    source_pieces = ["</s>", "<unk>", *source, "<pad>"]
    vocabulary = dict(zip(source_pieces if separate else joint, range(1000), strict=False))
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "target_vocab.json").write_text(json.dumps(dict(zip(joint, range(1000), strict=False))))
    shutil.copy(trained["unigram"], folder / "source.spm")
    shutil.copy(trained["other"], folder / "target.spm")
    files = [str(folder / name) for name in ("source.spm", "target.spm", "vocab.json")]
    return transformers.MarianTokenizer(
        *files, target_vocab_file=str(folder / "target_vocab.json") if separate else None, separate_vocabs=separate
    )


def language_code_tokenizer(trained, folder):
    """Return a tokenizer that adds codes of languages to each text."""
    vocabulary = ["<s>", "<pad>", "</s>", "<unk>", *read_pieces(trained["unigram"])]
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(vocabulary)}))
    shutil.copy(trained["unigram"], folder / "sentencepiece.bpe.model")
    model = str(folder / "sentencepiece.bpe.model")
    return transformers.M2M100Tokenizer(str(folder / "vocab.json"), model, src_lang="en", tgt_lang="fr")


def word_piece_tokenizer(trained, folder):
    """Return a lower-case tokenizer with the clean-up of spaces of transformers."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz.,!?'", "##a", "##e", "model", "file"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", clean_up_tokenization_spaces=True
    )


def byte_level_tokenizer(trained, folder):
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


KINDS = {
    "two SentencePiece models": translation_tokenizer,
    "two vocabularies": lambda trained, folder: translation_tokenizer(trained, folder, separate=True),
    "coded": language_code_tokenizer,
    "word pieces": word_piece_tokenizer,
    "bytes, merged": byte_level_tokenizer,
    "bytes": lambda trained, folder: transformers.ByT5Tokenizer(),
    "unigram with a converter": lambda trained, _: transformers.T5Tokenizer.from_pretrained(str(trained["padded"])),
    "merges with a converter": lambda trained, _: transformers.LlamaTokenizer.from_pretrained(str(trained["merges"])),
    "unigram": lambda trained, _: transformers.BertGenerationTokenizer(str(trained["unigram"])),
    "user's symbols": lambda trained, _: transformers.BertGenerationTokenizer(str(trained["other"])),
    "identity": lambda trained, _: transformers.BertGenerationTokenizer(str(trained["plain"])),
    "merges": lambda trained, _: transformers.GPTSw3Tokenizer(str(trained["merges"])),
}


@pytest.fixture
def save_tokenizer(trained, tmp_path):
    """Return a function that makes a tokenizer of a kind and saves it. It returns the folder and the tokenizer of
    transformers."""

    def save(kind):
        (tmp_path / "made").mkdir()
        KINDS[kind](trained, tmp_path / "made").save_pretrained(tmp_path / "folder")
        config = transformers.PretrainedConfig()  # the config of a model of no particular type
        return tmp_path / "folder", transformers.AutoTokenizer.from_pretrained(tmp_path / "folder", config=config)

    return save


@pytest.mark.filterwarnings("ignore:Recommended")
@pytest.mark.parametrize("kind", KINDS)
def test_tokenizer_matches_transformers(kind, save_tokenizer):
    folder, original = save_tokenizer(kind)
    assert has_tokenizer(folder)
    tokenizers = {name: Tokenizer.from_str(text) for name, text in read_tokenizers(folder, "source", "target").items()}
    size = len(original) if kind.startswith("two") else 1000  # larger ids are pieces outside the vocabulary
    for text in TEXTS:
        for name, expected in (("source", original(text)), ("target", original(text_target=text))):
            actual = tokenizers[name].encode(text).ids
            assert [i if i < size else original.unk_token_id for i in actual] == expected["input_ids"]
        target = original(text_target=text)["input_ids"]
        expected_text = original.decode(target, skip_special_tokens=True)
        assert tokenizers["target"].decode(target, skip_special_tokens=True) == expected_text


@pytest.mark.filterwarnings("ignore:Recommended")
def test_translation_model_has_a_tokenizer_for_each_side(save_tokenizer):
    folder, original = save_tokenizer("two SentencePiece models")
    texts = read_tokenizers(folder, "source", "target")
    text = "a compiler turns"
    source, target = (Tokenizer.from_str(texts[name]).encode(text).ids for name in ("source", "target"))
    assert (source, target) == (original(text)["input_ids"], original(text_target=text)["input_ids"])
    assert texts["source"] != texts["target"]
    code = original.convert_tokens_to_ids(">>deu<<")
    assert original(">>deu<< a model")["input_ids"][0] == code
    assert Tokenizer.from_str(texts["source"]).encode(">>deu<< a model").ids == original(">>deu<< a model")["input_ids"]


@pytest.mark.filterwarnings("ignore:Recommended")
def test_runtime_refuses_piece_outside_vocabulary(save_tokenizer):
    folder, original = save_tokenizer("two SentencePiece models")
    codec = Codec(read_tokenizers(folder, "source", "target")["source"])
    for piece in read_pieces(folder / "source.spm")[-9:]:
        text = piece.strip("▁")
        if original.unk_token_id in original(text)["input_ids"]:
            with pytest.raises(InputError, match="is not in the model's vocabulary"):
                codec.encode(text, add_special_tokens=True, vocabulary_size=len(original))
            return
    pytest.fail("no piece is lacking")


def test_common_tokenizer_is_the_same_for_both_sides(save_tokenizer):
    folder, _ = save_tokenizer("unigram")
    source, target = read_tokenizers(folder, "source", "target").values()
    assert source == target
    assert list(read_tokenizers(folder, None, "ids")) == ["ids"]


# -- refusals --------------------------------------------------------------------------------------------------------


def test_tokenizer_with_extra_preprocessing_is_refused(trained, tmp_path):
    """The tokenizer lower-cases texts and removes punctuation before SentencePiece."""
    transformers.SiglipTokenizer(str(trained["padded"])).save_pretrained(tmp_path)
    with pytest.raises(
        SourceError, match=r"SiglipTokenizer cannot be .*: it would read '.*' as \[.*\], not \[.*--tokenizer"
    ):
        read_tokenizers(tmp_path, None, "ids")


def test_tokenizer_without_json_form_is_refused(tmp_path):
    transformers.CanineTokenizer().save_pretrained(tmp_path)
    with pytest.raises(SourceError, match="CanineTokenizer cannot be turned into tokenizers' JSON format: it has nei"):
        read_tokenizers(tmp_path, None, "ids")


@pytest.mark.parametrize("kind", ["unigram with a converter", "merges with a converter"])
def test_missing_vocabulary_is_refused(kind, save_tokenizer):
    folder, _ = save_tokenizer(kind)
    for file in folder.iterdir():
        if file.name != "tokenizer_config.json":
            file.unlink()
    with pytest.raises(SourceError, match="vocabulary is empty: the folder lacks the file"):
        read_tokenizers(folder, None, "ids")


def test_damaged_tokenizer_is_refused(save_tokenizer):
    folder, _ = save_tokenizer("unigram")
    (folder / "spiece.model").write_bytes(b"once upon a time")
    with pytest.raises(SourceError, match=r"'s tokenizer cannot be loaded: .*--tokenizer"):
        read_tokenizers(folder, None, "ids")


# -- chat templates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("chat_template.jinja", "{{ messages }}"),
        ("tokenizer_config.json", json.dumps({"chat_template": "{{ messages }}"})),
        (
            "tokenizer_config.json",
            json.dumps(
                {"chat_template": [{"name": "rag", "template": ""}, {"name": "default", "template": "{{ messages }}"}]}
            ),
        ),
    ],
)
def test_chat_template_is_read(file, content, tmp_path):
    assert read_chat_template(tmp_path) is None
    (tmp_path / file).write_text(content)
    assert read_chat_template(tmp_path) == "{{ messages }}"


def test_damaged_chat_template_is_refused(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(SourceError, match=r"tokenizer_config\.json cannot be read"):
        read_chat_template(tmp_path)


def test_folder_without_tokenizer_is_detected(tmp_path):
    for name in ("config.json", "generation_config.json", "model.safetensors", "pytorch_model.bin"):
        (tmp_path / name).write_text("")
    assert not has_tokenizer(tmp_path)
