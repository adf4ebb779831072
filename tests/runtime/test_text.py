"""Text in and out: characters are never split, stop strings never leak, templates as HF renders."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from tapeout.plugins.errors import EngineCorruptError, UsageError
from tapeout.runtime.engine.manifest import TokenizerFacts
from tapeout.runtime.text.chat_template import ChatTemplate
from tapeout.runtime.text.detokenizer import Detokenizer
from tapeout.runtime.text.stop_strings import StopStrings
from tapeout.runtime.tokenizer import Tokenizer

FACTS = TokenizerFacts(vocab_size=400, bos_token_id=0, eos_token_ids=(1,), pad_token_id=None)


def byte_level() -> tokenizers.Tokenizer:
    """Every byte is one token, so an emoji is four; a few merges; special tokens 256 and 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    return made


def byte_fallback() -> tokenizers.Tokenizer:
    """Llama-2's kind: metaspace pieces, bytes as <0xNN>, a leading space stripped when decoding."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{i:02X}>": 3 + i for i in range(256)}
    for piece in ("▁", "▁a", "b", "▁the", "c", "▁▁", "x", "é"):
        vocab[piece] = len(vocab)
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<s>", "</s>"])
    return made


KINDS = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}


def stream(backend: tokenizers.Tokenizer, ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(lambda some: backend.decode(some, skip_special_tokens=True))
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


def fallback_ids(text: str) -> list[int]:
    vocab = KINDS["byte_fallback"].get_vocab()
    ids: list[int] = []
    for character in text.replace(" ", "▁"):
        known = vocab.get(character)
        ids += [known] if known is not None else [vocab[f"<0x{b:02X}>"] for b in character.encode()]
    return ids


@pytest.mark.parametrize("kind", KINDS)
def test_an_emoji_of_four_tokens_comes_out_whole(kind: str) -> None:
    backend, text = KINDS[kind], "a👍🏽b 漢字x"
    ids = backend.encode(text).ids if kind == "byte_level" else fallback_ids(text)
    pieces = stream(backend, ids)
    assert "".join(pieces) == text == backend.decode(ids)
    assert all("\ufffd" not in piece for piece in pieces)
    assert pieces[1:5] == ["", "", "", "👍"], "held until the last byte, then given at once"


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_tail_is_flushed_once(kind: str) -> None:
    backend = KINDS[kind]
    ids = (backend.encode("ab👍").ids if kind == "byte_level" else fallback_ids("ab👍"))[:-1]
    pieces = stream(backend, ids)
    assert "".join(pieces[:-1]) == "ab"
    assert "".join(pieces) == backend.decode(ids)
    assert pieces[-1].strip("\ufffd") == ""
    assert pieces[-1] != ""


@given(text=st.text(max_size=40))
def test_byte_level_stream_equals_batch_decode(text: str) -> None:
    backend = KINDS["byte_level"]
    ids = backend.encode(text).ids
    assert "".join(stream(backend, ids)) == text


@given(ids=st.lists(st.integers(0, 261), max_size=40))
def test_byte_level_stream_of_any_ids_equals_batch_decode(ids: list[int]) -> None:
    """Invalid UTF-8, special tokens that are skipped, characters cut anywhere."""
    backend = KINDS["byte_level"]
    assert "".join(stream(backend, ids)) == backend.decode(ids)


@given(
    parts=st.lists(
        st.sampled_from(["a", " ", " a", "b", "the", "é", "ü", "漢", "👍", "  ", "<s>", "</s>", "c"]),
        max_size=30,
    )
)
def test_byte_fallback_stream_equals_batch_decode(parts: list[str]) -> None:
    """Spaces, special tokens between, characters as pieces and as runs of bytes."""
    backend, ids = KINDS["byte_fallback"], []
    for part in parts:
        whole = backend.token_to_id(part.replace(" ", "▁"))
        ids += [whole] if whole is not None else fallback_ids(part)
    assert "".join(stream(backend, ids)) == backend.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@given(parts=st.lists(st.lists(st.integers(0, 261), max_size=12), max_size=8), data=st.data())
def test_ids_pushed_together_give_what_they_give_one_by_one(
    kind: str, parts: list[list[int]], data: st.DataObject
) -> None:
    """Any ids, cut anywhere, mixed with whole characters: the same text so far after every part."""
    backend = KINDS[kind]
    text = data.draw(st.sampled_from(["", "the a 漢字 👍🏽x", "é  b"]))
    parts = [*parts, backend.encode(text).ids if kind == "byte_level" else fallback_ids(text)]

    def new() -> Detokenizer:
        return Detokenizer(
            lambda some: backend.decode(some, skip_special_tokens=True), byte_fallback=kind == "byte_fallback"
        )

    together, single = new(), new()
    for part in parts:
        assert together.push_all(part) == "".join(map(single.push, part))
    assert together.flush() == single.flush()


def test_a_long_text_is_decoded_once() -> None:
    calls: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        calls.append(len(ids))
        return KINDS["byte_level"].decode(list(ids))

    ids = KINDS["byte_level"].encode("hello w" * 50).ids
    detokenizer = Detokenizer(decode, byte_fallback=False)
    assert detokenizer.push_all(ids) + detokenizer.flush() == "hello w" * 50
    assert calls == [len(ids)]


def test_the_decoder_says_whether_bytes_fall_back() -> None:
    made = {name: Tokenizer(backend.to_str(), FACTS).byte_fallback for name, backend in KINDS.items()}
    assert made == {"byte_level": False, "byte_fallback": True}


def test_bad_bytes_do_not_take_back_what_was_given() -> None:
    backend = KINDS["byte_fallback"]
    ids = [*fallback_ids("é漢"), backend.token_to_id("<0xFF>"), *fallback_ids("x漢b")]
    assert "".join(stream(backend, ids)) == "é漢\ufffdx漢b"


def test_endless_invalid_bytes_stay_cheap() -> None:
    decoded = 0
    backend = KINDS["byte_level"]

    def decode(ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return backend.decode(list(ids))

    detokenizer = Detokenizer(decode)
    bad = backend.token_to_id(pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("é")[0][0][1])
    shown = "".join(detokenizer.push(bad) for _ in range(2_000)) + detokenizer.flush()
    assert set(shown) == {"\ufffd"}
    assert decoded < 2_000 * 80


# ---- stop strings -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "stop", "shown", "matched"),
    [
        (["Hello wo", "rld!"], ["world"], "Hello ", "world"),
        (["ab", "\n", "\nc"], ["\n\n"], "ab", "\n\n"),
        (["one ST", "O", "P two"], ["STOP"], "one ", "STOP"),
        (["a", "a", "a", "b"], ["aab"], "a", "aab"),
        (["xx end", "ing"], ["ending!", "nd"], "xx e", "nd"),
        (["abcd"], ["cd", "abcd"], "", "abcd"),
        (["stop", " not"], ["stopped"], "stop not", None),
        (["almost sto"], ["stop"], "almost sto", None),
    ],
)
def test_stop_strings_cut_exactly(
    pieces: list[str], stop: list[str], shown: str, matched: str | None
) -> None:
    watcher = StopStrings(stop)
    out = "".join(watcher.push(piece) for piece in pieces) + watcher.flush()
    assert (out, watcher.matched) == (shown, matched)
    kept = StopStrings(stop, include=True)
    assert "".join(kept.push(piece) for piece in pieces) + kept.flush() == shown + (matched or "")


@given(
    text=st.text(alphabet="abc", max_size=30),
    stop=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 5), max_size=30),
)
def test_the_result_does_not_depend_on_the_pieces(text: str, stop: list[str], cuts: list[int]) -> None:
    watcher, shown, rest = StopStrings(stop), "", text
    for size in cuts:
        shown += watcher.push(rest[:size])
        rest = rest[size:]
    shown += watcher.push(rest) + watcher.flush()
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stop if s in text]
    if ends:
        _, start, matched = min(ends)
        assert (shown, watcher.matched) == (text[:start], matched)
    else:
        assert (shown, watcher.matched) == (text, None)


def test_below_min_tokens_stop_strings_do_nothing() -> None:
    watcher = StopStrings(["ab"])
    assert watcher.push("a", active=False) == "a"
    assert watcher.push("b ab") == "b "
    assert watcher.matched == "ab"


# ---- chat templates -----------------------------------------------------------------------

TEMPLATES = [
    (
        "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\n[{{ m['content'] }}]\n"
        "  {% endif %}\n{% endfor %}\n{% if add_generation_prompt %}>{% endif %}"
    ),
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content | trim }}{% endgeneration %}{% endfor %}{{ tools }}",
    "{{ messages | tojson(indent=2) }}{{ extra }}{{ eos_token }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
]
MESSAGES = [{"role": "user", "content": " <Hé> & 'you' "}, {"role": "assistant", "content": "ok"}]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_render_as_hf_renders(template: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    expected, _ = render_jinja_template(
        [MESSAGES], chat_template=template, add_generation_prompt=True, extra="E", **tokens
    )
    assert ChatTemplate(template, tokens).render(MESSAGES, extra="E") == expected[0]


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    template = ChatTemplate("{{ messages[0]['content'] + '!' }}")
    assert template.render([{"role": "user", "content": parts}]) == "ab!"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "refused"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
    ],
)
def test_a_template_that_fails_is_a_usage_error(template: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ChatTemplate(template).render([{"role": "user", "content": "x"}])


def test_bad_templates_and_messages_are_named() -> None:
    with pytest.raises(UsageError, match="line 2"):
        ChatTemplate("ok\n{% if %}")
    with pytest.raises(UsageError) as error:
        ChatTemplate("").render(
            ["hi", {"content": "x"}, {"role": "user", "content": [{"type": "image"}]}]  # type: ignore[list-item]
        )
    for part in ("message 0 is a str", "message 1: role = None", "message 2: content part"):
        assert part in error.value.message


# ---- tokenizer ----------------------------------------------------------------------------


def with_bos() -> Tokenizer:
    backend = byte_level()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    backend.enable_truncation(4)
    return Tokenizer(backend.to_str(), FACTS)


def test_chat_text_gets_one_bos_and_raw_prompts_keep_the_tokenizer_s() -> None:
    tokenizer = with_bos()
    bos = tokenizer.backend.token_to_id("<s>")
    chat = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<s>"})
    rendered = chat.render([{"role": "user", "content": "hello"}])
    assert tokenizer.encode(rendered, add_special_tokens=False).count(bos) == 1
    assert tokenizer.encode("hello")[0] == bos
    assert tokenizer.encode("hello").count(bos) == 1


def test_prompts_are_never_truncated() -> None:
    assert len(with_bos().encode("a" * 50)) == 51


def test_a_damaged_tokenizer_is_an_engine_error() -> None:
    with pytest.raises(EngineCorruptError, match=r"tokenizer\.json"):
        Tokenizer(json.dumps({"model": 1}), FACTS)
