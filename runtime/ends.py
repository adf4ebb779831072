"""How requests end: the `Finish` of each kind, and its words."""

from __future__ import annotations

import logging

from tapeout.runtime.scheduler.request import Finish, FinishReason, Request

logger = logging.getLogger("tapeout")


def failed(error: Exception | str) -> Finish:
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return Finish(FinishReason.ERROR, text)


def output_failed(request: Request, error: Exception) -> Finish:
    """One request's text must not take down the others."""
    logger.error("request %s: its output failed", request.request_id, exc_info=error)
    return failed(error)


def not_finite(position: int) -> str:
    return (
        f"no token can be chosen at position {position}: logits or what penalties make of them are not finite"
    )


def ended_by_id(request: Request, token_id: int, output_tokens: int) -> Finish | None:
    if output_tokens < request.params.min_tokens:
        return None
    # A stop id the user named is told even where it is an EOS id as well.
    return Finish(FinishReason.STOP, token_id if token_id in request.stop_token_ids else None)
