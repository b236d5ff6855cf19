"""Tokenization with one tokenizer: whole texts, continuations of a text, and spans of a conversation."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from xtoken_core.alignment.tables import SPECIAL, TokenTable, encode_each, token_table
from xtoken_core.errors import InputError

NO_TEMPLATE = "has no chat template: it cannot take messages (set its chat_template to a chat model's directory)"
NO_ANSWER = "no assistant message that every chat template shows as it is"
SHOWN_CHARACTERS = 20
"""Length of the part of a text that an error quotes."""
_SENTINELS = ("\n", ":", "x", "。")
"""Prefixes of a continuation: a tokenizer adds its dummy space to them and not to it."""
MESSAGE_PARTS = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""What a message says beside its content. A template may leave it out of earlier answers, but has to know it."""

_TURN = ({"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"})

Tools = Sequence[Mapping[str, Any]] | None


class ConversationError(ValueError):
    """A conversation cannot be rendered for training; the text is the reason."""


class UnspellableError(InputError, ValueError):
    """A tokenizer without unknown token has no token for a character of a text."""


class TextTokenizer:
    """A tokenizer with the operations of a collator.

    Attributes:
        tokenizer: The Hugging Face tokenizer.
        name: `student`, `teacher` or `teacher 1`, for errors.
        pad_id: Id for padding: the pad token, or else eos, or else 0.
        eos_id: Id of the end-of-text token; None without one.
    """

    def __init__(self, tokenizer: Any, name: str, table: TokenTable | None = None) -> None:
        self.tokenizer = tokenizer
        self.name = name
        self.eos_id: int | None = getattr(tokenizer, "eos_token_id", None)
        pad = getattr(tokenizer, "pad_token_id", None)
        self.pad_id: int = next((i for i in (pad, self.eos_id) if i is not None), 0)
        self._table = table

    @cached_property
    def table(self) -> TokenTable:
        """The tokens' bytes and kinds."""
        return self._table or token_table(self.tokenizer)

    @cached_property
    def ends(self) -> tuple[list[int], list[int]]:
        """Special tokens that the tokenizer adds before and after a text by default."""
        bare, whole = (self.encode(["a"], specials=s)[0].tolist() for s in (False, True))
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return whole[:start], whole[start + len(bare) :]
        return [], []

    @cached_property
    def turn_end(self) -> int | None:
        """The special token that the chat template puts right behind an answer; `eos_id` if it puts none there."""
        try:
            text, spans = self.render(_TURN)
            after = self.proceed(text[spans[1][1] :])
            return int(after[0]) if len(after) and self.table.kinds[after[0]] == SPECIAL else self.eos_id
        except Exception:  # templates raise whatever they like, and this one may not be used at all
            return self.eos_id

    def encode(self, texts: Sequence[str], *, specials: bool) -> list[np.ndarray]:
        """Return the token ids of every text, int64 and not truncated.

        Args:
            texts: The texts.
            specials: Add the tokenizer's default special tokens.

        Raises:
            UnspellableError: The tokenizer has no unknown token, and no token for a character of a text.
        """
        if not texts:
            return []
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            found = self.tokenizer(list(texts), add_special_tokens=specials)["input_ids"]
            return [np.asarray(ids, dtype=np.int64) for ids in found]
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = bool(getattr(self.tokenizer, "split_special_tokens", False))
        rows = []
        for text, ids in zip(texts, encode_each(backend, texts, specials=specials), strict=True):
            if ids is None:
                raise self._unspellable(backend, text)
            rows.append(np.array(ids, dtype=np.int64))
        return rows

    def _unspellable(self, backend: Any, text: str) -> UnspellableError:
        """Return the error that names the first character which the tokenizer cannot write."""
        ends = range(1, len(text))
        length = 1 + bisect_left(
            ends, True, key=lambda end: encode_each(backend, [text[:end]], specials=False) == [None]
        )
        character, around = text[length - 1], text[max(0, length - SHOWN_CHARACTERS) : length]
        return UnspellableError(
            f"the {self.name}'s tokenizer has no token for {character!r} (U+{ord(character):04X}), in {around!r}, and "
            "no unknown token: leave such texts out, or give the tokenizer an unknown token (unk_id)"
        )

    def begin(self, text: str) -> np.ndarray:
        """Tokenize a text that is to be continued, with the default special tokens before it and none after it."""
        before, _ = self.ends
        return np.concatenate([np.array(before, dtype=np.int64), *self.encode([text], specials=False)])

    def proceed(self, text: str) -> np.ndarray:
        """Tokenize a text that continues another, without the dummy space that some tokenizers put before a text."""
        if self.table.prefix == "none" or not text:
            return self.encode([text], specials=False)[0]
        for sentinel in _SENTINELS:
            try:
                alone, both = self.encode([sentinel, sentinel + text], specials=False)
            except UnspellableError:
                continue
            if len(both) > len(alone) and np.array_equal(both[: len(alone)], alone):
                return both[len(alone) :]
        return self.encode([text], specials=False)[0]

    def prompt(self, value: Mapping[str, Any], prefix: str = "") -> np.ndarray:
        """Tokenize a prompt that is to be completed.

        Args:
            value: `text`, or `messages`, whose next message is the completion, and their `tools`.
            prefix: What is read before it.

        Raises:
            ConversationError: As `render`.
        """
        if "messages" not in value:
            text = str(value["text"])
            return np.concatenate([self.begin(prefix), self.proceed(text)]) if prefix else self.begin(text)
        if not getattr(self.tokenizer, "chat_template", None):
            raise ConversationError(f"the {self.name}'s tokenizer {NO_TEMPLATE}")
        messages, _ = with_system(value["messages"], prefix)
        text = self._apply(messages, add_generation_prompt=True, **self._tools(value.get("tools")))
        return self.encode([text], specials=False)[0]

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, every_role: bool = False, tools: Tools = None
    ) -> tuple[str, dict[int, tuple[int, int]]]:
        """Render a conversation by its chat template, and locate each assistant message's content in it.

        Args:
            messages: The conversation.
            every_role: Locate the content of all messages.
            tools: What the assistant may call, for a template that shows it.

        Returns:
            The text, and (begin, end) character positions by the number of the message, whitespace around the content
            left out; a message whose content the template does not show as it is is missing.

        Raises:
            ConversationError: The tokenizer has no chat template, or it refuses the conversation.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise ConversationError(f"the {self.name}'s tokenizer {NO_TEMPLATE}")
        shown = self._tools(tools)
        text = self._apply(messages, **shown)
        spans: dict[int, tuple[int, int]] = {}
        at = 0
        for number, message in enumerate(messages):
            content = str(message["content"]).strip()
            if not content or not (message["role"] == "assistant" or every_role):
                continue
            begin = self._locate(content, messages, number, text, at, shown)
            if begin >= 0:
                at = begin + len(content)
                spans[number] = (begin, at)
        return text, spans

    def _locate(
        self,
        content: str,
        messages: Sequence[Mapping[str, Any]],
        number: int,
        text: str,
        at: int,
        options: Mapping[str, Any],
    ) -> int:
        """Return where a message's content begins in the whole text; -1 if it is not shown or is ambiguous.

        Args:
            content: The content without whitespace around it.
            messages: The whole conversation.
            number: The message.
            text: The conversation as rendered.
            at: Position behind the content that was located before.
            options: Of the template.
        """
        before = messages[:number]
        start = (
            self._length_of(before, text, add_generation_prompt=True, **options)
            if messages[number]["role"] == "assistant"
            else None
        )
        if start is None:  # some templates open the answer in another way than they show it later
            start = self._length_of(before, text, **options)
        end = self._length_of(messages[: number + 1], text, **options)
        begin = text.find(content, max(at, start or 0), end)
        if start is None and begin >= 0 and text.find(content, begin + 1, end) >= 0:
            return -1  # the same words are in another message
        return begin

    def tokenize_spans(
        self, text: str, spans: Sequence[tuple[int, int]], *, ends: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids of a rendered conversation, and a mask with 1 for those of the given character spans.

        Every span is tokenized by itself, as a model prompted for the answer sees it. Where the tokenizer writes
        words with the space before them, a space before a span belongs to the span's first token.

        Args:
            text: The conversation.
            spans: Beginning and end of each span, in order.
            ends: Mark also the special token right behind a span, by which a model ends its turn.
        """
        stretches: list[tuple[str, int]] = []
        at = 0
        for begin, end in spans:
            own = int(self.table.prefix != "none" and begin > at and text[begin - 1] == " ")
            stretches += [(text[at : begin - own], 0), (text[begin - own : end], 1)]
            at = end
        stretches.append((text[at:], 0))
        ids, learn = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for number, (part, learned) in enumerate(stretches):
            if part:
                ids.append(self.proceed(part) if number else self.encode([part], specials=False)[0])
                learn.append(np.full(len(ids[-1]), learned, dtype=np.int64))
                if ends and number and not learned:
                    learn[-1][:1] = self.table.kinds[ids[-1][:1]] == SPECIAL
        return np.concatenate(ids), np.concatenate(learn)

    def _length_of(self, messages: Sequence[Mapping[str, Any]], text: str, **options: Any) -> int | None:
        """Return the length of these first messages in the whole text; None if they are rendered otherwise there."""
        try:
            before = self._apply(messages, **options) if messages else ""
        except ConversationError:
            return None
        return len(before) if text.startswith(before) else None

    def _tools(self, tools: Tools) -> dict[str, Any]:
        """Return the options that pass tools to a chat template that takes them; none to another."""
        takes = tools and re.search(r"\btools\b", str(self.tokenizer.chat_template))
        return {"tools": [*tools]} if tools and takes else {}

    def _reads(self, part: str) -> bool:
        """Return True if the chat template asks for a part of a message."""
        return re.search(rf"[.'\"]{part}\b", str(self.tokenizer.chat_template)) is not None

    def _apply(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        from jinja2 import TemplateError

        for part in MESSAGE_PARTS:
            if any(message.get(part) for message in messages) and not self._reads(part):
                raise ConversationError(f"the {self.name}'s chat template does not show `{part}` of a message")
        try:
            return str(self.tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, **options))
        except (TemplateError, ValueError, TypeError, KeyError, IndexError) as error:
            line = " ".join(str(error).split())
            raise ConversationError(f"the {self.name}'s chat template refuses the messages: {line}") from error


def tokenize_conversation(
    sides: Sequence[TextTokenizer],
    messages: Sequence[Mapping[str, Any]],
    *,
    every_role: bool = False,
    ends: bool = True,
    tools: Tools = None,
    prefixes: Sequence[str] = (),
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokenize a conversation on every side, each by its own chat template.

    Args:
        sides: The tokenizers.
        prefixes: Per side the words of a system message that it alone reads, or an empty text; none: no side has one.
        messages: The conversation.
        every_role: Mark the messages of every role instead of the assistant's.
        ends: Mark also the special token that a template puts right behind an answer.
        tools: As of `TextTokenizer.render`.

    Returns:
        Per side token ids `[n]` and a mask `[n]`, int64: 1 for an answer that every side's template shows as it is.

    Raises:
        ConversationError: A template refuses the messages, or there is no such answer.
    """
    rendered = []
    for side, prefix in zip(sides, prefixes or [""] * len(sides), strict=True):
        own, added = with_system(messages, prefix)
        text, spans = side.render(own, every_role=every_role, tools=tools)
        if prefix and 0 in spans:
            _, end = spans.pop(0)
            content = "" if added else str(messages[0]["content"]).strip()
            if content:  # of the two in one message, the record's own words
                spans[0] = end - len(content), end
        rendered.append((text, {number - added: span for number, span in spans.items()}))
    shared = sorted(set.intersection(*(set(spans) for _, spans in rendered)))
    if not shared:
        raise ConversationError(NO_ANSWER)
    return [
        side.tokenize_spans(text, [spans[number] for number in shared], ends=ends)
        for side, (text, spans) in zip(sides, rendered, strict=True)
    ]


def with_system(messages: Sequence[Mapping[str, Any]], words: str) -> tuple[list[Mapping[str, Any]], int]:
    """Return a conversation that begins with a system message of some words, and the number of messages added.

    Args:
        messages: The conversation; the words come before those of a system message at its beginning.
        words: An empty text changes nothing.
    """
    if not words:
        return list(messages), 0
    first = messages[0]
    if first["role"] == "system":
        return [{**first, "content": f"{words}\n\n{first['content']}"}, *messages[1:]], 0
    return [{"role": "system", "content": words}, *messages], 1


def only_answer(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the text that is aligned, if it is one stretch: the answer of a conversation that has a single one."""
    answers = [str(message["content"]).strip() for message in messages if message["role"] == "assistant"]
    return answers[0] if len(answers) == 1 else None
