"""Tokenizers: GGUF split rules, the equality proof, conversion of the slow ones."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer, normalizers
from transformers import AutoTokenizer, CTRLTokenizer
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

from tapeout.model_defs import open_model
from tapeout.model_defs.gguf_file import read_gguf
from tapeout.model_defs.gguf_tokenizer import load_gguf_tokenizer
from tapeout.model_defs.tokenizer import default_template, prove_equal, tokenizer_parts
from tapeout.plugins.errors import UnsupportedError

WITHOUT_DIGITS = (
    "Hello, world!",
    "don't I'll they've we're it's HE'S",
    "  two  spaces   three\tand a tab ",
    "line one\nline two\r\n\r\n   indented\n",
    "Grüße, naïve café e\u0301, Привет, 你好世界, こんにちは, مرحبا, नमस्ते",
    "🙂 👩‍👩‍👧‍👦 👍🏽 🇩🇪",
    "<|im_start|>user\nhi<|im_end|>\n",
    "def f(x):\n    return x ** y  # square\n",
)


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2):
    return Tokenizer.from_str(smollm2.tokenizer_json)


class TestSmolLM2:
    """pre=smollm: digits one by one, then GPT-2's pattern on each piece."""

    def test_equals_transformers_where_there_are_no_digits(self, smollm2_tokenizer, smollm2_path):
        architecture, fields, _ = get_gguf_tokenizer(str(smollm2_path))
        reference, _ = convert_gguf_tokenizer(architecture, fields)
        for text in WITHOUT_DIGITS:
            assert smollm2_tokenizer.encode(text).ids == reference.encode(text).ids, text

    @pytest.mark.parametrize(
        ("text", "tokens"),
        [
            ("123", ["1", "2", "3"]),
            ("a1b22", ["a", "1", "b", "2", "2"]),
            ("in 2024", ["in", "Ġ", "2", "0", "2", "4"]),
            ("x   12   34", ["x", "ĠĠĠ", "1", "2", "ĠĠĠ", "3", "4"]),  # the rule that GPT-2's pattern lacks
            ("\n\n7", ["ĊĊ", "7"]),
            ("3.14", ["3", ".", "1", "4"]),
            ("the  cat", ["the", "Ġ", "Ġcat"]),
            ("don't", ["don", "'t"]),
            ("<|im_start|>user\n", ["<|im_start|>", "user", "Ċ"]),
        ],
    )
    def test_texts_split_into_the_tokens_of_the_original(self, smollm2_tokenizer, text, tokens):
        assert smollm2_tokenizer.encode(text).tokens == tokens

    def test_no_bos_is_added_and_every_text_comes_back(self, smollm2_tokenizer):
        for text in (*WITHOUT_DIGITS, "x   12   34", "\x00\x7f ½ ٣ 𝔘"):
            ids = smollm2_tokenizer.encode(text).ids
            assert 1 not in ids[:1] or text.startswith("<|im_start|>")
            assert smollm2_tokenizer.decode(ids, skip_special_tokens=False) == text


def test_llama_style_bos_is_in_the_post_processor(llama, write_gguf, tmp_path):
    source = open_model(str(write_gguf(llama, tmp_path / "m.gguf", arch="llama", pre="gpt-2")))
    tokenizer = Tokenizer.from_str(source.tokenizer_json)
    assert tokenizer.encode("the cat").ids[0] == 0
    assert tokenizer.encode("the cat", add_special_tokens=False).ids[0] != 0
    assert tokenizer.get_vocab_size() == source.tokenizer_vocab_size == 300
    original = Tokenizer.from_file(str(llama / "tokenizer.json"))
    for text in WITHOUT_DIGITS:
        assert tokenizer.encode(text).ids == original.encode(text).ids


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("falcon", "a12345 b,.. c's", ["a", "123", "45", "Ġb", ",..", "Ġc", "'", "s"]),
        ("bloom", "Hi, you(x) 12 34", ["Hi", ",", "Ġyou", "(", "x", ")", "Ġ12", "Ġ34"]),
        ("stablelm2", "don'T a12, b", ["don", "'T", "Ġa", "1", "2", ",", "Ġb"]),
    ],
)
def test_splits_that_transformers_table_lacks(llama, write_gguf, tmp_path, pre, text, pieces):
    path = write_gguf(llama, tmp_path / "m.gguf", arch="llama", pre=pre)
    tokenizer = Tokenizer.from_str(open_model(str(path)).tokenizer_json)
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize(("prefix", "first"), [(True, "▁the"), (False, "the")])
def test_sentencepiece_gguf(tmp_path, prefix, first):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces = ["▁t", "he", "▁the", "th", "the", "▁", "t", "h", "e", "a", "c", "▁c", "at", "▁cat"]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens + pieces)
    writer.add_token_scores([0.0] * len(tokens) + [-float(i) for i in range(len(pieces))])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(pieces))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_space_prefix(prefix)
    writer.add_tensor("x", np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = tokenizer_parts(load_gguf_tokenizer(read_gguf(tmp_path / "m.gguf")))
    tokenizer = Tokenizer.from_str(parts.json_text)
    encoded = tokenizer.encode("the cat é")
    assert encoded.tokens == ["<s>", first, "▁cat", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(encoded.ids) == "the cat é"
    assert parts.vocab_size == len(tokens) + len(pieces)


def test_parts_of_a_fast_tokenizer(llama):
    hf = AutoTokenizer.from_pretrained(llama)
    hf(
        "fill the state", padding="max_length", max_length=64, truncation=True
    )  # leaves settings in the backend
    parts = tokenizer_parts(hf)
    data = json.loads(parts.json_text)
    assert data["padding"] is None
    assert data["truncation"] is None
    assert (parts.vocab_size, parts.bos_token_id, parts.eos_token_id, parts.pad_token_id) == (300, 0, 1, 2)


def test_a_tokenizer_that_differs_is_refused_with_the_string(llama):
    hf = AutoTokenizer.from_pretrained(llama)
    text = hf.backend_tokenizer.to_str()
    prove_equal(hf, text)
    other = Tokenizer.from_str(text)
    other.normalizer = normalizers.Lowercase()
    with pytest.raises(UnsupportedError, match="Hello, world!"):
        prove_equal(hf, other.to_str())


def test_a_decoder_that_differs_is_refused(llama):
    hf = AutoTokenizer.from_pretrained(llama)
    data = json.loads(hf.backend_tokenizer.to_str())
    data["decoder"] = None
    with pytest.raises(UnsupportedError, match="decodes"):
        prove_equal(hf, json.dumps(data))


def test_a_slow_tokenizer_nobody_can_convert(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({"<unk>": 0, "a</w>": 1}))
    (tmp_path / "merges.txt").write_text("#version\na b\n")
    slow = CTRLTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    assert not slow.is_fast
    with pytest.raises(UnsupportedError, match="CTRLTokenizer") as error:
        tokenizer_parts(slow)
    assert "tokenizer.json" in error.value.hint


def test_default_template():
    assert default_template("T") == "T"
    assert default_template({"default": "D", "rag": "R"}) == "D"
    assert default_template({"rag": "R"}) is None
    assert default_template(None) is None
