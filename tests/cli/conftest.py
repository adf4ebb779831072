"""A real engine small enough for any test: the alphabet.

Its "model" is a table of next-token logits: after a letter comes the next one, after z the end
of the sequence. So `abc` is answered with `defghijklmnopqrstuvwxyz`.
"""

from __future__ import annotations

import string
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from tapeout.compiler.engine_writer import write_engine
from tapeout.model_defs.weights import WeightRef
from tapeout.plugins.cpu import OpSignature, TensorType
from tapeout.plugins.native.host import detect_host
from tapeout.runtime.engine.manifest import (
    FORMAT_VERSION,
    KvCacheLayout,
    Limits,
    Manifest,
    ModelFacts,
    TokenizerFacts,
)
from tapeout.runtime.engine.program import Buffer, Program, Record, TacticRange, View

# Tests are imported by path (importlib mode), so their shared helpers need a place to be found.
sys.path.insert(0, str(Path(__file__).parent))

EOS, SPACE = 0, 27
VOCAB = 28
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% if not loop.last %} {% endif %}{% endfor %}"


def alphabet_tokenizer() -> str:
    """One token for each letter."""
    vocab = {"<eos>": EOS, **{c: i for i, c in enumerate(string.ascii_lowercase, 1)}, " ": SPACE}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=" "))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>"])
    text: str = tokenizer.to_str()
    return text


def next_logits() -> np.ndarray:
    """[VOCAB, VOCAB] float32; a letter's row prefers the next letter, z and the rest the end."""
    table = np.zeros((VOCAB, VOCAB), np.float32)
    for token in range(VOCAB):
        table[token, token + 1 if 1 <= token < SPACE - 1 else EOS] = 9.0
    return table


def alphabet_program(limits: Limits) -> Program:
    hidden = View("hidden", "float32", ("T", VOCAB), (VOCAB, 1))
    logits = View("logits", "float32", ("R", VOCAB), (VOCAB, 1))
    ids = View("token_ids", "int32", ("T",), (1,))
    rows = View("row_ids", "int32", ("R",), (1,))
    table = TensorType("float32", (VOCAB, VOCAB))
    embed = OpSignature(
        "embedding", (TensorType("int32", ("T",)),), (table,), (TensorType("float32", ("T", VOCAB)),)
    )
    select = OpSignature(
        "select_rows",
        (TensorType("float32", ("T", VOCAB)), TensorType("int32", ("R",))),
        (),
        (TensorType("float32", ("R", VOCAB)),),
    )
    hidden_bytes, logits_bytes = limits.max_num_tokens * VOCAB * 4, limits.max_batch_size * VOCAB * 4
    offset = -(-hidden_bytes // 64) * 64
    return Program(
        arena_bytes=offset + logits_bytes,
        buffers=(
            Buffer("hidden", "float32", ("T", VOCAB), 0, hidden_bytes),
            Buffer("logits", "float32", ("R", VOCAB), offset, logits_bytes),
        ),
        records=(
            Record("embedding", (ids,), ("table",), (hidden,), {}, embed.key()),
            Record("select_rows", (hidden, rows), (), (logits,), {}, select.key()),
        ),
        logits=logits,
        signatures={embed.key(): embed, select.key(): select},
        tactics={
            embed.key(): (TacticRange(limits.max_num_tokens, "aten"),),
            select.key(): (TacticRange(limits.max_batch_size, "aten"),),
        },
    )


def write_alphabet_engine(path: Path, max_seq_len: int = 256, shared: bool = False, **changes: Any) -> Path:
    limits = Limits(max_batch_size=4, max_num_tokens=64, max_seq_len=max_seq_len, tokens_per_page=16)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        target=f"cpu:{detect_host().level}",
        model=ModelFacts("Alphabet", "alphabet", "float32", "none", VOCAB, max_seq_len, "test:0"),
        limits=limits,
        kv_cache=KvCacheLayout(layers=1, kv_heads=1, head_dim=1, dtype="float32"),
        tokenizer=TokenizerFacts(VOCAB, None, (EOS,), None, {"eos_token": "<eos>"}),
        generation={"max_new_tokens": 200},
        options={"dtype": "float32"},
        versions={"tapeout": "test"},
        passes={"canonicalize": 2},
        parity={"verdict": "passed", "cases": 3},
        timed=True,
    )
    values = {**{name: getattr(manifest, name) for name in Manifest.__dataclass_fields__}, **changes}
    write_engine(
        path,
        Manifest(**values),
        alphabet_program(limits),
        {"table": WeightRef(("table",), (), "float32", (VOCAB, VOCAB))},
        lambda name: next_logits(),
        {},
        {"tokenizer.json": alphabet_tokenizer().encode(), "chat_template.jinja": CHAT_TEMPLATE.encode()},
        source_digest="0" * 64,
        shared=shared,
    )
    return path


@pytest.fixture(scope="session")
def alphabet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine that goes on with the alphabet, greedily."""
    return write_alphabet_engine(tmp_path_factory.mktemp("engine") / "alphabet.engine")


@pytest.fixture(scope="session", name="write_engine")
def write_engine_fixture() -> Callable[..., Path]:
    """Writes an alphabet engine to a path, with other limits or manifest fields."""
    return write_alphabet_engine


# ---- stores -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def alphabet_set(tmp_path_factory: pytest.TempPathFactory, write_engine: Callable[..., Path]) -> Path:
    """A set of two engines, one for this machine; no test changes it."""
    from stores import make_set

    return make_set(tmp_path_factory.mktemp("sets") / "alphabet", write_engine)


@pytest.fixture
def store_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of pulled sets, in a place of the test's own."""
    monkeypatch.setenv("TAPEOUT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TAPEOUT_CACHE_BYTES", raising=False)
    return tmp_path / "cache" / "store"


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store/alphabet"
