"""Where a set is stored: `s3://bucket/sets/model`, and a tag behind an @ if it is not the latest."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from tapeout.plugins.errors import UsageError

LATEST = "latest"
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
#: Users type a directory as one, too.
_HINT = "give s3://bucket/sets/model, gs://..., https://..., file:///directory or memory://name"


@dataclass(frozen=True)
class SetAddress:
    """A set's place and the tag that is meant.

    Attributes:
        url: without the tag and without a slash at its end.
    """

    url: str
    tag: str = LATEST

    @property
    def shown(self) -> str:
        """The URL for messages: without a password."""
        return shown_url(self.url)

    def text(self) -> str:
        """For messages: `s3://bucket/sets/model@v1`; the latest goes without saying."""
        return self.shown if self.tag == LATEST else f"{self.shown}@{self.tag}"


def is_url(text: str) -> bool:
    """Whether `text` names a place in a store and no path."""
    return _URL.match(text) is not None


def parse_address(text: str, tag: str | None = None) -> SetAddress:
    """The address in `text`, a URL with or without `@TAG` behind its last slash.

    Args:
        tag: the same as `@TAG`, for commands that have an option for it.

    Raises:
        UsageError: no URL, a bad tag, or two tags that differ.
    """
    if not is_url(text):
        raise UsageError(f"{text!r} is not the URL of a store", hint=_HINT)
    scheme, _, rest = text.partition("://")
    place, slash, last = rest.rstrip("/").rpartition("/")
    name, at, behind = last.partition("@") if slash else (last, "", "")
    if at:
        if tag not in (None, behind):
            raise UsageError(
                f"{shown_url(text)} names tag {behind!r}, and --tag {tag!r}", hint="give one tag"
            )
        tag = behind
    if not place + name:
        raise UsageError(f"{text!r} names no place in the store", hint=_HINT)
    chosen = LATEST if tag is None else tag
    if not _TAG.fullmatch(chosen):
        raise UsageError(
            f"tag {chosen!r} is not a name", hint="expected letters, digits and . _ -, such as latest or v1.2"
        )
    return SetAddress(f"{scheme.lower()}://{place}{slash}{name}", chosen)


def shown_url(url: str) -> str:
    """A URL as messages show it: what stands before an @ in its host may be a password."""
    parts = urlsplit(url)
    if "@" not in parts.netloc or parts.password is None:
        return url
    return urlunsplit(parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]))
