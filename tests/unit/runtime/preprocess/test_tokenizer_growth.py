"""Tokenizers that make a text a billion times as long are refused; those of common models are not."""

from __future__ import annotations

import json

import pytest
from support import toy_tasks
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tformer_runtime import Model, ModelFileError
from tformer_runtime.preprocess.tokenizer import Codec

TEN = normalizers.Replace("a", "a" * 10)


def tokenizer(**parts):
    made = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    for name, part in parts.items():
        setattr(made, name, part)
    return made.to_str()


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": normalizers.Sequence([TEN] * 9)},
        {"normalizer": normalizers.Sequence([normalizers.Sequence([TEN] * 3), normalizers.Sequence([TEN] * 6)])},
        {"normalizer": normalizers.Replace(Regex("b*"), "a" * 5000)},
        {"decoder": decoders.Sequence([decoders.Replace("a", "a" * 10)] * 9)},
        {"post_processor": processors.TemplateProcessing(single=" ".join(["$A"] * 2000), special_tokens=[])},
    ],
)
def test_tokenizers_that_make_texts_far_longer_are_refused(parts, tmp_path):
    path = toy_tasks.write(tmp_path / "toy.onnx", tokenizers=(tokenizer(**parts),))
    with pytest.raises(ModelFileError, match="may make a text more than 1024 times as long"):
        Model.load(path, device="cpu")


FIRST, SECOND = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
TOKEN = {"SpecialToken": {"id": "<s>", "type_id": 0}}


def template(single, pair=(FIRST, SECOND)):
    return {"type": "TemplateProcessing", "single": [*single], "pair": [*pair], "special_tokens": {}}


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "the length of its pieces is 0"),
        ({"post_processor": template([SECOND])}, "template of one text has a second text"),
        ({"post_processor": template([FIRST, TOKEN])}, "the token '<s>', whose ids are missing"),
        ({"post_processor": template([FIRST], [FIRST, TOKEN, SECOND])}, "the token '<s>', whose ids are missing"),
        (
            {"post_processor": {"type": "Sequence", "processors": [template([TOKEN])]}},
            "the token '<s>', whose ids are missing",
        ),
    ],
)
def test_settings_with_which_the_package_panics_are_refused_before(parts, reason, capfd):
    definition = json.dumps(json.loads(tokenizer()) | parts)
    package = Tokenizer.from_str(definition)
    with pytest.raises(BaseException, match=r"chunk size|no entry found|out of bounds"):  # a panic is not an Exception
        package.encode_batch(["a", ("a", "a")])
    assert "panicked" in capfd.readouterr().err
    with pytest.raises(ModelFileError, match=reason):
        Codec(definition)
    assert not capfd.readouterr().err


def test_steps_of_common_tokenizers_are_allowed():
    normal = [normalizers.NFKD(), normalizers.Lowercase(), normalizers.StripAccents(), normalizers.Replace(" ", "▁")]
    Codec(
        tokenizer(
            normalizer=normalizers.Sequence([*normal, normalizers.Prepend("▁"), normalizers.Replace("``", '"')]),
            pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.ByteLevel()]),
            decoder=decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
            post_processor=processors.TemplateProcessing(
                single="[UNK] $A [UNK]", pair="[UNK] $A [UNK] $B [UNK]", special_tokens=[("[UNK]", 1)]
            ),
        )
    )


@pytest.mark.parametrize("definition", ["", "[]", "[" * 100_000, '{"normalizer": {"type": "Replace", "pattern": 3}}'])
def test_other_json_is_no_tokenizer(definition, tmp_path):
    path = toy_tasks.write(tmp_path / "toy.onnx", tokenizers=(definition,))
    with pytest.raises(ModelFileError, match="the file's tokenizer cannot be read"):
        Model.load(path, device="cpu")
