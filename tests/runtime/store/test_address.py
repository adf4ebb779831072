"""Where a set is: URLs, tags, and what messages show of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeout.plugins.errors import UsageError
from tapeout.runtime.store.address import SetAddress, parse_address


@pytest.mark.parametrize(
    ("text", "url", "tag"),
    [
        ("s3://bucket/sets/m", "s3://bucket/sets/m", "latest"),
        ("s3://bucket/sets/m/", "s3://bucket/sets/m", "latest"),
        ("s3://bucket/sets/m@v1.2", "s3://bucket/sets/m", "v1.2"),
        ("HTTPS://user:pass@host/m@v1", "https://user:pass@host/m", "v1"),
        ("https://user:pass@host", "https://user:pass@host", "latest"),
        ("memory://m", "memory://m", "latest"),
    ],
)
def test_addresses(text: str, url: str, tag: str) -> None:
    assert parse_address(text) == SetAddress(url, tag)


def test_messages_hold_no_password() -> None:
    address = parse_address("https://user:secret@host:8080/m@v1")
    assert address.text() == "https://***@host:8080/m@v1"
    with pytest.raises(UsageError) as raised:
        parse_address("https://user:secret@host/m@v1", "v2")
    assert "secret" not in raised.value.render()


@given(st.text(max_size=40), st.none() | st.text(max_size=10))
def test_any_text_is_an_address_or_a_usage_error(text: str, tag: str | None) -> None:
    for candidate in (text, f"s3://{text}", f"https://h/{text}"):
        try:
            address = parse_address(candidate, tag)
        except UsageError:
            continue
        assert parse_address(f"{address.url}/x", address.tag).tag == address.tag
        assert tag in (None, address.tag)
