"""Text to tokens and back: a decoder's tokenizer, its chat template, and texts decoded while their tokens arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import Any, Final

import numpy as np

from .. import compat
from ..errors import InputTypeError, InputValueError, ModelError, did_you_mean
from ..proto.files import path_of

UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"
"""Ends a decoded text whose last character needs further tokens."""
SPECIAL: Final = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")
"""The settings of tokenizer_config.json that chat templates read."""


class Tokenizer:
    """Encodes prompts and decodes tokens.

    Args:
        source: a folder with ``tokenizer.json``, the path of that file, or an object with ``encode`` and ``decode``, as
            a tokenizer of the libraries tokenizers or transformers.

    Raises:
        FileNotFoundError: there is no such file or folder, or no tokenizer.json in it.
        InputValueError: ``source`` is none of these.
    """

    def __init__(self, source: Any) -> None:
        self._object, self._file = source, None
        if isinstance(source, str | PathLike):
            path = path_of(source)
            self._object, self._file = None, path / "tokenizer.json" if path.is_dir() else path
            if not path.exists():
                hub = f"; of Hugging Face's hub: tokenizer=tokenizers.Tokenizer.from_pretrained({str(path)!r})"
                named = hub if re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", str(path)) and path.suffix != ".json" else ""
                raise FileNotFoundError(2, f"there is no such folder or file of a tokenizer{named}", str(path))
            if not self._file.is_file():
                raise FileNotFoundError(
                    2, "no tokenizer found; pass token ids (at a terminal: --prompt-ids 1,2,3)", str(self._file)
                )
        elif not (callable(getattr(source, "encode", None)) and hasattr(source, "decode")):
            raise InputValueError(
                f"tokenizer is {type(source).__name__}: a folder with tokenizer.json, or an object with encode and "
                "decode"
            )

    @cached_property
    def library(self) -> Any:
        """The tokenizer of the library.

        Raises:
            ImportError: tokenizers is not installed.
            ModelError: it cannot read the file.
        """
        if self._file is None:
            return self._object
        tokenizers = compat.optional("tokenizers", "text")
        try:
            return tokenizers.Tokenizer.from_file(str(self._file))
        except Exception as error:  # the library raises Exception itself
            raise ModelError(
                f"{self._file} cannot be read by tokenizers {tokenizers.__version__}: {error}. Replace the file, or "
                "update the package; for token ids alone: decoder(..., tokenizer=False), or --prompt-ids 1,2,3"
            ) from None

    @cached_property
    def _decoding(self) -> dict[str, bool]:
        return _accepted(self.library.decode, skip_special_tokens=True)

    @cached_property
    def _settings(self) -> dict[str, Any]:
        return {} if self._file is None else read_json(self._file.with_name("tokenizer_config.json"))

    def _setting(self, name: str) -> Any:
        """A setting of tokenizer_config.json, or an attribute of a library's tokenizer; None if there is none."""
        return getattr(self._object, name, None) if self._file is None else self._settings.get(name)

    @cached_property
    def template(self) -> str | None:
        """The chat template: of chat_template.jinja, or else of tokenizer_config.json; None if there is none.

        Raises:
            ModelError: it is no text.
        """
        if self._template_place.endswith(".jinja"):
            return read_text(Path(self._template_place))
        template = self._setting("chat_template")
        if isinstance(template, list) and all(isinstance(t, Mapping) for t in template):  # several, by name
            template = {t.get("name"): t.get("template") for t in template}
        template = template.get("default") if isinstance(template, Mapping) else template
        if not isinstance(template, str | None):
            raise ModelError(f"chat_template of {self._template_place} is {template!r:.80}, not a text")
        return template

    @property
    def _template_place(self) -> str:
        """Where the chat template is, for messages."""
        if self._file is None:
            return type(self._object).__name__
        file = self._file.with_name("chat_template.jinja")
        return str(file if file.is_file() else self._file.with_name("tokenizer_config.json"))

    def check(self) -> None:
        """Reads the files, as far as the libraries for them are installed.

        Raises:
            ModelError: one is broken.
        """
        _ = self._settings
        for read in (lambda: self.library, self._compiled_template):
            with suppress(ImportError):
                read()

    def __str__(self) -> str:
        source = type(self._object).__name__ if self._file is None else self._file.name
        return f"{source}{', with a chat template' if self.template else ''}"

    def encode(self, prompt: str | Sequence[Mapping[str, Any]], *, continues: bool = False) -> list[int]:
        """The tokens of a text, or of a conversation by the chat template.

        Args:
            prompt: a text, or messages ``{"role": "user", "content": "..."}``.
            continues: no special token begins the text, because it continues another.

        Raises:
            InputTypeError: the prompt is neither.
            InputValueError: a message has no role or no content, or there is no chat template.
        """
        if isinstance(prompt, str):
            text, special = prompt, not continues
        elif _is_conversation(prompt):
            text, special = self._rendered(prompt), False
        else:
            raise InputTypeError(
                f"prompt is {prompt!r:.80}: a text, or messages [{{'role': 'user', 'content': '...'}}]"
            )
        encoding = self.library.encode(text, **_accepted(self.library.encode, add_special_tokens=special))
        return [int(t) for t in getattr(encoding, "ids", encoding)]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, without special ones."""
        return str(self.library.decode([int(t) for t in tokens], **self._decoding))

    def _rendered(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of a conversation, which ends where the model answers."""
        _check_messages(messages)
        if (template := self._compiled_template()) is None:
            raise InputValueError(
                "the prompt is a conversation, and there is no chat template (chat_template.jinja or "
                "tokenizer_config.json beside the model): pass the text as the model was trained on it"
            )
        values = {n: _content(self._setting(n) or "") for n in SPECIAL}
        try:
            return template.render(messages=messages, add_generation_prompt=True, **values)
        except InputValueError:  # of raise_exception
            raise
        except Exception as error:  # any error of the template's expressions
            raise InputValueError(
                f"the chat template of {self._template_place} cannot render the conversation: {error}"
            ) from error

    def _compiled_template(self) -> Any:
        """The chat template compiled; None if there is none.

        Raises:
            ModelError: it has a syntax error.
        """
        if self.template is None:
            return None
        sandbox = compat.optional("jinja2.sandbox", "text")
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals |= {"raise_exception": _reject, "strftime_now": lambda form: datetime.now().strftime(form)}
        # Marks what a model is trained on; nothing else follows from it.
        template = re.sub(r"(\{%-?)\s*generation\s*(-?%\})", r"\1 if true \2", self.template)
        template = re.sub(r"(\{%-?)\s*endgeneration\s*(-?%\})", r"\1 endif \2", template)
        try:
            return environment.from_string(template)
        except compat.optional("jinja2", "text").TemplateSyntaxError as error:
            raise ModelError(
                f"the chat template of {self._template_place} has an error in line {error.lineno}: {error.message}"
            ) from None


class Text:
    """A text that is decoded while its tokens arrive.

    Characters that need several tokens appear with the last of these. Decoding begins at tokens before the new ones,
    the prompt's at first, because some tokenizers drop a space that begins a text.

    Attributes:
        text: the text so far, up to a stop string, which is included.
        ended: whether a stop string has ended it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Iterable[int], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = tokenizer.decode, stop
        self._tokens = list(prompt)
        self._before = self._decode(self._tokens)
        self._new = len(self._tokens)
        self.text: str = ""
        self.ended: bool = False

    def add(self, token: Any) -> str:
        """The text that one more token adds."""
        self._tokens.append(int(token))
        return self._added(finished=False)

    def rest(self) -> str:
        """What the last tokens add, although their last character is incomplete."""
        return self._added(finished=True)

    def _added(self, finished: bool) -> str:
        decoded = self._decode(self._tokens)
        new = decoded[len(self._before) :]
        if self.ended or not new or (new.endswith(UNFINISHED) and not finished):
            return ""
        self._tokens = self._tokens[self._new :]
        self._new, self._before = len(self._tokens), self._decode(self._tokens)
        start, self.text = len(self.text), self.text + new
        places = ((self.text.find(s, max(0, start - len(s) + 1)), s) for s in self._stop)
        if ends := [at + len(s) for at, s in places if at >= 0]:
            self.text, self.ended = self.text[: min(ends)], True
        return self.text[start:]


def conversations(prompts: Any) -> tuple[list[Any], bool] | None:
    """The texts and conversations that prompts consist of, and whether it is a single one; None for tokens.

    Raises:
        InputValueError: they are a dict, or some are texts and others not.

    >>> conversations("one"), conversations(["one", "two"]), conversations([1, 2])
    ((['one'], True), (['one', 'two'], False), None)
    """
    if isinstance(prompts, np.ndarray) and prompts.dtype.kind == "U":
        prompts = prompts.tolist()
    if isinstance(prompts, Mapping):
        raise InputValueError(
            "the prompt is a dict: pass its input_ids, generate(d['input_ids'], attention_mask=d['attention_mask'])"
            if "input_ids" in prompts
            else f"the prompt is a dict, {dict(prompts)!r:.80}: a conversation is a list of messages, [message]"
        )
    if isinstance(prompts, str) or _is_conversation(prompts):
        return [prompts], True
    if not isinstance(prompts, list | tuple):
        return None
    are_text = [isinstance(p, str | Mapping) or _is_conversation(p) for p in prompts]
    if not any(are_text):
        return None
    if any(isinstance(p, Mapping) for p in prompts):
        raise InputValueError(
            "the prompts are messages and others; a conversation is a list of its own: [text, [message]]"
        )
    if not all(are_text):
        text, tokens = are_text.index(True), are_text.index(False)
        raise InputValueError(
            f"prompt {text} is a text, and prompt {tokens} is {prompts[tokens]!r:.80}: pass texts alone or token ids "
            "alone; decoder.encode(text) returns those of a text"
        )
    return list(prompts), False


def split_stop(stop: Any) -> tuple[list[str], Any]:
    """The stop strings, and the other stop sequences; None for these if there are strings alone.

    >>> split_stop("."), split_stop([2, "end"]), split_stop(())
    ((['.'], None), (['end'], [2]), ([], ()))
    """
    every = [stop] if isinstance(stop, str) else stop
    if not isinstance(every, list | tuple) or not any(isinstance(s, str) for s in every):
        return [], stop
    strings = [s for s in every if isinstance(s, str)]
    if not all(strings):
        raise InputValueError(f"stop is {stop!r}: an empty string ends every text")
    return strings, [s for s in every if not isinstance(s, str)] or None


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file.

    Raises:
        ModelError: the file is not valid JSON, or contains no object.
    """
    try:
        facts = json.loads(read_text(file)) if file.is_file() else {}
    except json.JSONDecodeError as e:
        raise ModelError(f"{file} is not valid JSON: {e}") from None
    if not isinstance(facts, dict):
        raise ModelError(f"{file} contains {facts!r:.80}, not a JSON object")
    return facts


def read_text(file: Path) -> str:
    """The text in a file.

    Raises:
        ModelError: it is not UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise ModelError(f"{file} is not a text in UTF-8: {e}") from None


def _accepted(function: Callable[..., Any], **options: bool) -> dict[str, bool]:
    """Those of the options that a function of a tokenizer takes."""
    try:
        parameters = signature(function).parameters
    except ValueError:  # a built-in function without a signature
        return options
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {n: v for n, v in options.items() if takes_any or n in parameters}


def _is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and all(isinstance(m, Mapping) for m in prompt)


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise InputValueError for a message without role or content, which a template renders as nothing."""
    for i, message in enumerate(messages):
        needed = ("role",) if "tool_calls" in message else ("role", "content")
        if missing := [n for n in needed if message.get(n) is None]:
            others = [n for n in map(str, message) if n not in ("role", "content")]
            raise InputValueError(
                f"message {i} is {dict(message)!r:.80}; it needs 'role' and 'content'{did_you_mean(others, missing)}"
            )


def _content(token: Any) -> str:
    """A special token's text; tokenizer_config.json may have it in a dict."""
    return str(token.get("content", "") if isinstance(token, Mapping) else token)


def _reject(message: str) -> None:
    raise InputValueError(f"the chat template rejects the conversation: {message}")


class Reader:
    """Decodes the texts of a batch while their tokens arrive."""

    def __init__(self, tokenizer: Tokenizer, prompts: Iterable[Iterable[int]], stop: Sequence[str] = ()) -> None:
        self._texts = [Text(tokenizer, prompt, stop) for prompt in prompts]

    @property
    def ended(self) -> np.ndarray:
        """bool[batch], the texts that a stop string has ended."""
        return np.array([t.ended for t in self._texts])

    @property
    def texts(self) -> list[str]:
        """The texts so far."""
        return [t.text for t in self._texts]

    def add(self, tokens: np.ndarray, live: np.ndarray) -> list[str]:
        """What the next token of each text adds; nothing where ``live`` is False."""
        return [t.add(token) if on else "" for t, token, on in zip(self._texts, tokens, live, strict=True)]

    def read(self, texts: Iterable[Iterable[int]]) -> None:
        """Reads all tokens of each text."""
        for text, tokens in zip(self._texts, texts, strict=True):
            for token in tokens:
                text.add(token)

    def rest(self) -> list[str]:
        """What is left of each text at its end."""
        return [t.rest() for t in self._texts]
