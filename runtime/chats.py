"""Conversations as prompts, by the engine's chat template or another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tapeout.plugins.errors import UsageError
from tapeout.plugins.sample.params import shown
from tapeout.runtime.engine import Engine
from tapeout.runtime.loading import text_of
from tapeout.runtime.text.chat_template import ChatTemplate, Message
from tapeout.runtime.tokenizer import Tokenizer


def conversations(messages: Sequence[Any]) -> Sequence[Sequence[Message]]:
    """A list of conversations as it is, one conversation (a list of messages) as a list of it."""
    many = isinstance(messages, (list, tuple)) and messages and isinstance(messages[0], (list, tuple))
    return messages if many else [messages]


class ChatPrompts:
    """Of one engine; its own template is made on first use."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._own: ChatTemplate | None = None

    def prompt(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None,
        chat_template_kwargs: Mapping[str, Any] | None,
        **variables: Any,
    ) -> dict[str, Any]:
        """See `LLM.chat_prompt`."""
        if self._tokenizer is None:
            raise UsageError(
                "the engine has no tokenizer, so it cannot chat", hint="pass token ids to generate"
            )
        if not isinstance(chat_template_kwargs, Mapping | None):
            raise UsageError(f"chat_template_kwargs = {shown(chat_template_kwargs)}, expected a mapping")
        template = self._template(chat_template)
        text = template.render(messages, **variables, **dict(chat_template_kwargs or {}))
        return {"prompt": text, "prompt_token_ids": self._tokenizer.encode(text, add_special_tokens=False)}

    def _template(self, source: str | None) -> ChatTemplate:
        manifest = self._engine.manifest
        tokens = manifest.tokenizer.special_tokens if manifest.tokenizer else {}
        if source is not None:
            return ChatTemplate(source, tokens)
        if self._own is None:
            text = text_of(self._engine, "chat_template.jinja")
            if text is None:
                raise UsageError(
                    "the engine has no chat template", hint="pass chat_template=..., or use a plain prompt"
                )
            self._own = ChatTemplate(text, tokens)
        return self._own
