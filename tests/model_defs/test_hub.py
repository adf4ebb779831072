"""Hub ids without a network: the cache, and what is said when it has nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tapeout.model_defs import open_model
from tapeout.plugins.errors import UsageError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(llama: Path, tmp_path: Path) -> Path:
    """A hub cache holding `org/tiny`, laid out as huggingface_hub does."""
    repo = tmp_path / "hub" / "models--org--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "snapshots").mkdir()
    llama.rename(repo / "snapshots" / COMMIT)
    return tmp_path / "hub"


def test_a_cached_model_opens_without_network(cache):
    source = open_model("org/tiny", cache_dir=str(cache))
    assert source.config.hidden_size == 64
    assert source.origin == "hf"
    assert source.hf_path.endswith(COMMIT)
    assert open_model("org/tiny", cache_dir=str(cache), revision=COMMIT).hf_path == source.hf_path


def test_hf_home_is_respected(cache):
    code = (
        "from tapeout.model_defs.hub import fetch_snapshot\n"
        "print(fetch_snapshot('org/tiny', revision=None, cache_dir=None, with_code=False).name)"
    )
    env = os.environ | {"HF_HOME": str(cache.parent), "HF_HUB_OFFLINE": "1"}
    env.pop("HF_HUB_CACHE", None)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert result.stdout.strip() == COMMIT


@pytest.mark.parametrize("revision", [None, "v2"])
def test_a_model_that_is_not_there(cache, revision, monkeypatch):
    """Told without asking the network, which would be waited for."""
    asked = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **_: asked.append(address) or [])
    with pytest.raises(UsageError) as error:
        open_model("org/absent", cache_dir=str(cache), revision=revision)
    assert asked == []
    assert "'org/absent'" in error.value.message
    assert revision is None or "'v2'" in error.value.message
    assert "HF_HUB_OFFLINE" in error.value.hint
    assert error.value.exit_code == 2


def test_an_incomplete_cache_says_what_is_missing(cache):
    (cache / "models--org--tiny" / "snapshots" / COMMIT / "model.safetensors").unlink()
    with pytest.raises(
        UsageError, match=r"'org/tiny': .* no config\.json with complete safetensors"
    ) as error:
        open_model("org/tiny", cache_dir=str(cache))
    assert "HF_HUB_OFFLINE" in error.value.hint


def test_a_path_has_no_revisions(llama):
    with pytest.raises(UsageError, match=r"revision 'v2' was given, but model .* is a path") as error:
        open_model(str(llama), revision="v2")
    assert "--revision" in error.value.hint


def test_a_path_wins_over_an_id(llama, monkeypatch, tmp_path):
    (tmp_path / "org").mkdir()
    llama.rename(tmp_path / "org" / "tiny")
    monkeypatch.chdir(tmp_path)
    assert open_model("org/tiny").config.model_type == "llama"
