"""Windows of a pair of texts tell to which text each token belongs."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tformer_runtime.preprocess.text_reader import TextReader

QUESTION, CONTEXT = "a b", "c d e f g h c d e f"


@pytest.mark.parametrize("has_post_processor", [True, False])
def test_tokens_of_later_windows_belong_to_the_second_text(has_post_processor):
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", *"abcdefgh"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if has_post_processor:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B:1", [("<s>", 1)])
    windows = TextReader(tokenizer.to_str()).windows((QUESTION, CONTEXT), 7, 1)
    assert len(windows) > 2
    for window in windows:
        tokens = [tokenizer.id_to_token(int(i)) for i in window.ids]
        expected = [-1 if token == "<s>" else int(token not in QUESTION) for token in tokens]
        assert window.texts.tolist() == expected
        assert window.in_text.tolist() == [text >= 0 for text in expected]
        assert [CONTEXT[a:b] for (a, b), t in zip(window.offsets, window.texts, strict=True) if t == 1] == [
            token for token, text in zip(tokens, expected, strict=True) if text == 1
        ]
