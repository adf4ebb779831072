"""Chat templates by Hugging Face's conventions, in Jinja's sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tapeout.plugins.errors import UsageError
from tapeout.plugins.sample.params import shown

if TYPE_CHECKING:
    import jinja2
    from jinja2 import nodes
    from jinja2.parser import Parser

Message = Mapping[str, Any]

#: What a template's own expressions raise on values they were not written for.
_TEMPLATE_FAILURES = (
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)


class ChatTemplate:
    """A compiled template. Jinja is imported when the first one is made.

    Args:
        source: Jinja text. special_tokens: variables such as bos_token and eos_token.

    Raises:
        UsageError: the template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        import jinja2

        if not isinstance(source, str):
            raise UsageError(f"chat_template = {shown(source)}, expected the text of a Jinja template")
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UsageError(
                f"the chat template is not valid Jinja: line {error.lineno}: {error.message}",
                hint="give another template, or use plain prompts",
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation. `variables` are passed on to the template.

        Encode it with add_special_tokens=False: the template writes BOS itself.

        Raises:
            UsageError: malformed messages (all of them named), or the template refused them.
        """
        import jinja2

        names = self._special_tokens | variables
        try:
            return self._template.render(
                messages=check_messages(messages),
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                **names,
            )
        except jinja2.TemplateError as error:
            raise UsageError(
                f"the chat template refused the conversation: {error.message or type(error).__name__}",
                hint="roles the template knows and their order are in the engine's chat template",
            ) from error
        except _TEMPLATE_FAILURES as error:
            raise UsageError(
                f"the chat template failed on the conversation: {type(error).__name__}: {error}"
            ) from error


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Copies of the messages with text parts joined; UsageError names every malformed one."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise UsageError(
            f"messages = {shown(messages)}, a {type(messages).__name__}, expected a list of "
            "{'role': ..., 'content': ...}"
        )
    problems: list[str] = []
    checked: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            problems.append(f"message {i} is a {type(message).__name__}, expected a mapping")
            continue
        if not isinstance(message.get("role"), str):
            problems.append(f"message {i}: role = {shown(message.get('role'))}, expected a string")
        content = message.get("content")
        if isinstance(content, Sequence) and not isinstance(content, str):
            bad = [p for p in content if not (isinstance(p, Mapping) and p.get("type") == "text")]
            problems += [
                f"message {i}: content part {shown(p)}, expected {{'type': 'text', ...}}" for p in bad
            ]
            content = "".join(str(p.get("text", "")) for p in content if isinstance(p, Mapping))
        elif content is not None and not isinstance(content, str):
            problems.append(
                f"message {i}: content = {shown(content)}, expected a string or a list of text parts"
            )
        checked.append({**message, "content": content} if "content" in message else dict(message))
    if not messages:
        problems.append("there are no messages")
    if problems:
        raise UsageError(
            "invalid chat messages:\n" + "\n".join(f"  {p}" for p in problems),
            hint="a message is {'role': 'user', 'content': 'text'}",
        )
    return checked


def _environment() -> jinja2.Environment:
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """`{% generation %}` marks assistant text for training; here it is transparent."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes HTML characters, which would change the prompt.
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment
