"""Messages become token ids, and sampled ids become a message again, for one tokenizer and chat template.

`open_renderer` takes a model folder and refuses, by name, a tokenizer or template that would make wrong ids. Two kinds
of renderer come out of it:

* a hand-written one of the `renderers` library, when `family` names it, or when the model's type suggests it and it
  makes the same ids as the folder's own template;
* otherwise the chat template itself, with a suffix bridge: the template renders the new messages behind a synthetic
  assistant message, and what follows the end of that message is appended to the stored ids.

Both are admitted by a probe, over conversations with tool calls, tool results and follow-ups. For a chat template a
longer conversation must begin with the ids of a shorter one, and the bridge must give the ids of the whole rendered
anew; a hand-written renderer may drop thinking from its history, so there only what its bridge adds is compared.

Invariants: stored ids are never made again; a turn cut at its length gets the end-of-turn id it lacks, as context; tool
calls are read by ids, so that a literal `<tool_call>` spelt in ordinary ids is text. A reply cut inside a tool call is
cut, not malformed. Text of users and tools goes through the tokenizer as the template gives it, as in serving.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal

from agenttrain.capture.json_calls import PROBE, with_json_call, writes_json_calls
from agenttrain.capture.model_folder import (
    QuickTokenizer,
    config_of,
    hashes_of,
    load_tokenizer,
    stop_ids_of,
    template_of,
)
from agenttrain.capture.probe import CONVERSATIONS, Conversation, bridge_fault, rendering_fault, suffix_fault
from agenttrain.capture.spelling import Spelling
from agenttrain.errors import ModelError, TemplateError
from agenttrain.protocols import Parsed
from agenttrain.records import Ids, InvalidCall, ParsedCall, Respelling

History = Literal["keep", "template"]
Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]

DEFAULT: Final = "default"
"""Family of a folder's own chat template."""
DEFAULT_NAMES: Final = (DEFAULT, "chat_template")
GUESSES: Final[Mapping[str, str]] = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_5": "qwen3.5",
    "llama": "llama-3",
    "deepseek_v3": "deepseek-v3",
    "glm4_moe": "glm-4.5",
    "minimax_m2": "minimax-m2",
    "gemma4": "gemma4",
}
"""model_type of config.json to a family worth trying."""
MARKER: Final = "agenttrain-7c1f"
"""Stands in the synthetic assistant message, so that its end can be found."""
N_CACHED: Final = 2048
"""Renderings that are kept; siblings share their first prompt and many tool results."""


def open_renderer(
    model_folder: str, *, family: str | None = None, history: History = "keep"
) -> TemplateRenderer | FamilyRenderer:
    """The renderer of a model folder, checked and probed.

    Args:
        model_folder: a Hugging Face folder on this machine.
        family: a name of the `renderers` library, or "default" for the folder's own chat template. None: guessed from
            the model's type; see `family` and `family_guessed` of what is returned.
        history: "keep" keeps the tokens as sampled; "template" ends a trajectory where the template would drop
            thinking.

    Raises:
        ModelError: the folder, its tokenizer or its template can't be used; says what differed.
    """
    folder = Path(model_folder)
    tokenizer = QuickTokenizer(load_tokenizer(folder))
    stop_ids = stop_ids_of(folder, tokenizer)
    identity = hashes_of(folder, tokenizer)
    if family is not None and family not in DEFAULT_NAMES:
        renderer = _family_renderer(tokenizer, family, history, stop_ids, identity, folder)
        _refuse(suffix_fault(renderer, tokenizer.encode, _taken(renderer)), folder, family)
        return renderer
    own = TemplateRenderer(tokenizer, history=history, stop_ids=stop_ids, hashes=identity, folder=folder)
    if family is None and (guessed := _guessed(own, folder, tokenizer, history, stop_ids, identity)) is not None:
        return guessed
    own.family_guessed = family is None
    own.probe()
    return own


class _Lru:
    """Keeps the latest results of a function of text. Thread-safe."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Ids] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str, make: Callable[[], Ids]) -> Ids:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = make()
        with self._lock:
            self._kept[key] = made
            if len(self._kept) > N_CACHED:
                self._kept.popitem(last=False)
        return made


class _Reader:
    """What both renderers share: reading sampled ids, by a renderer of the library."""

    def __init__(
        self, tokenizer: Any, library: Any, *, family: str, history: History, stop_ids: Ids, hashes: str
    ) -> None:
        self.family, self.family_guessed = family, False
        self.identity, self.stop_ids = f"{family}:{hashes}", stop_ids
        self._tokenizer, self._library, self._history = tokenizer, library, history
        self._renderings = _Lru()
        self._spelling = Spelling(
            write=lambda messages, opens: _templated(tokenizer, messages, (), opens=opens),
            encode=tokenizer.encode,
            decode=self.decode,
            read=lambda ids: self.parse(ids, ()),
            stop_ids=stop_ids,
        )

    def parse(self, response_ids: Ids, tools: Tools, prompt_ids: Ids = ()) -> Parsed:
        end = next((i for i, id in enumerate(response_ids) if id in self.stop_ids), None)
        # The library looks back for the end of the turn before, to see whether the prompt opened a thinking block.
        try:
            read = self._library.parse_response(
                list(response_ids[:end]), tools=list(tools) or None, prompt_ids=list(prompt_ids[-256:])
            )
        except (RecursionError, ValueError) as error:
            # renderers 0.1.12 lets out what json says of a call that is nested deeply, or has a number of 4301 digits.
            return _unreadable(self.decode(response_ids[:end]), response_ids, error)
        calls, invalid = _read_calls(read.tool_calls, response_ids, cut=end is None)
        return Parsed(
            text=read.content.lstrip("\n") if read.reasoning_content else read.content or "",
            reasoning=(read.reasoning_content or "").strip("\n") or None,
            tool_calls=calls,
            invalid_tool_calls=invalid,
        )

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids))

    def encode(self, text: str) -> Ids:
        """The ids of a text, special tokens by their names."""
        return tuple(self._tokenizer.encode(text))

    def respelled(self, response_ids: Ids, message: Message, new_messages: Sequence[Message]) -> tuple[Respelling, ...]:
        return self._spelling.respelled(response_ids, message, new_messages)

    def drops_thinking(self, response_ids: Ids, new_messages: Sequence[Message]) -> bool:
        """Whether the history asked for is the template's, which drops this reply's thinking now that a user speaks."""
        speaks = any(message["role"] == "user" for message in new_messages)
        return self._history == "template" and speaks and self._thought(response_ids)

    def _thought(self, response_ids: Ids) -> bool:
        """Whether a reply holds thinking; an empty `<think></think>` counts, since templates drop that too."""
        return "</think>" in self.decode(response_ids) or self.parse(response_ids, ()).reasoning is not None


class FamilyRenderer(_Reader):
    """A hand-written renderer of the `renderers` library, and its bridge.

    Attributes:
        supports_tools: it writes tools; deepseek-v3 of renderers 0.1.12 reads calls and leaves the tools out.
    """

    def __init__(self, tokenizer: Any, library: Any, bridge: Any, **more: Any) -> None:
        """Take the library's renderer, and one that keeps all thinking for its bridge.

        The bridge of renderers 0.1.12 that follows the template's history gives up as soon as a user speaks, even where
        nothing was thought; what the template would drop is known here by `drops_thinking`.
        """
        super().__init__(tokenizer, library, **more)
        self._bridge = bridge

    @cached_property
    def supports_tools(self) -> bool:
        question = [{"role": "user", "content": "a"}]
        with_one = self._library.render_ids(question, tools=[PROBE], add_generation_prompt=True)
        return bool(with_one != self._library.render_ids(question, add_generation_prompt=True))

    def render(self, messages: Sequence[Message], tools: Tools) -> Ids:
        if tools and not self.supports_tools:
            raise ModelError(
                f"Renderer family {self.family} writes no tools into the prompt, so the policy would not know them. "
                f'Put a chat template that writes them into the folder, and set renderer.family to "{DEFAULT}".'
            )

        def make() -> Ids:
            clean = _clean(messages)
            return tuple(self._library.render_ids(clean, tools=list(tools) or None, add_generation_prompt=True))

        return self._renderings.get(_key(messages, tools), make)

    def extend(self, prompt_ids: Ids, response_ids: Ids, new_messages: Sequence[Message], tools: Tools) -> Ids | None:
        if self.drops_thinking(response_ids, new_messages):
            return None
        bridged = self._bridge.bridge_to_next_turn(
            list(prompt_ids), list(response_ids), _clean(new_messages), tools=list(tools) or None
        )
        if bridged is None:
            return None
        ids = tuple(bridged.token_ids)
        stored = prompt_ids + response_ids
        return ids if ids[: len(stored)] == stored else None


class TemplateRenderer(_Reader):
    """The folder's own chat template, and a suffix bridge.

    Attributes:
        supports_tools: the template writes tools and the tokenizer has ids by which calls are read back.
    """

    def __init__(self, tokenizer: Any, *, history: History, stop_ids: Ids, hashes: str, folder: Path) -> None:
        from renderers.configs import DefaultRendererConfig
        from renderers.default import DefaultRenderer

        parser = _tool_parser(tokenizer)
        self._reads_json = parser is None and writes_json_calls(
            lambda messages, opens: _templated(tokenizer, messages, (PROBE,), opens=opens)
        )
        library = DefaultRenderer(tokenizer, DefaultRendererConfig(tool_parser=parser))
        super().__init__(tokenizer, library, family=DEFAULT, history=history, stop_ids=stop_ids, hashes=hashes)
        self._folder = folder
        self.supports_tools = (parser is not None or self._reads_json) and "tools" in template_of(tokenizer)
        self._suffixes = _Lru()
        self._suffix_needs_tools = self._suffix_needs_ids = True
        self._close_id, self._close_text = self._end_of_turn()

    def parse(self, response_ids: Ids, tools: Tools, prompt_ids: Ids = ()) -> Parsed:
        parsed = super().parse(response_ids, tools, prompt_ids)
        ended = bool(response_ids) and response_ids[-1] in self.stop_ids
        return with_json_call(parsed, id=_call_id(response_ids, 0)) if self._reads_json and tools and ended else parsed

    def render(self, messages: Sequence[Message], tools: Tools) -> Ids:
        if tools and not self.supports_tools:
            raise ModelError(
                f"{self._folder} can't call tools: its chat template writes none, or its tokenizer has no ids for "
                "them. Choose a model that was made for tool calls, or name its family in renderer.family."
            )
        return self._renderings.get(_key(messages, tools), lambda: self.encode(self._text(messages, tools)))

    def extend(self, prompt_ids: Ids, response_ids: Ids, new_messages: Sequence[Message], tools: Tools) -> Ids | None:
        if not new_messages or any(message["role"] == "assistant" for message in new_messages):
            return None
        if self.drops_thinking(response_ids, new_messages):
            return None
        closed = bool(response_ids) and response_ids[-1] in self.stop_ids
        new = new_messages if self._suffix_needs_ids else _without_ids(new_messages)
        tools = tools if self._suffix_needs_tools else ()
        suffix = self._suffixes.get(_key(new, tools), lambda: self._suffix(new, tools))
        return prompt_ids + response_ids + (() if closed else (self._close_id,)) + suffix

    def probe(self) -> None:
        """Admit the template.

        Raises:
            ModelError: it is not append-only, or the bridge differs from it; names the first difference.
        """
        conversations = _taken(self)
        _refuse(bridge_fault(self, conversations), self._folder, self.family)
        # What the template does not write need not tell one rendering from another: siblings see the same results.
        last = [(each.messages[-1:], each.tools) for each in conversations if each.tools]
        self._suffix_needs_tools = any(self._suffix(new, tools) != self._suffix(new, ()) for new, tools in last)
        self._suffix_needs_ids = any(
            self._suffix(new, tools) != self._suffix(_without_ids(new), tools) for new, tools in last
        )
        self._suffixes = _Lru()

    def _suffix(self, new_messages: Sequence[Message], tools: Tools) -> Ids:
        """The ids that follow the end-of-turn id of an assistant message which the new messages answer."""
        text = self._text([*_opening(new_messages), *new_messages], tools)
        end = text.index(self._close_text, text.index(MARKER)) + len(self._close_text)
        return self.encode(text[end:])

    def _text(self, messages: Sequence[Message], tools: Tools) -> str:
        return _templated(self._tokenizer, messages, tools, opens=True)

    def _end_of_turn(self) -> tuple[int, str]:
        """The stop id with which the template ends an assistant message, and its text."""
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": MARKER}]
        try:
            text = self._text([*messages, {"role": "user", "content": "b"}], ())
        except Exception as error:  # a template's own error, of any class
            raise ModelError(
                f"The chat template of {self._folder} fails on a plain conversation: {error}. "
                "Put the model's own chat_template.jinja into the folder."
            ) from error
        after = self.encode(text[text.find(MARKER) + len(MARKER) :]) if MARKER in text else ()
        close = next((id for id in after if id in self.stop_ids), None)
        if close is None:
            stops = [self.decode([id]) for id in self.stop_ids]
            raise ModelError(
                f"The chat template of {self._folder} ends an assistant's message with none of the stop ids {stops}. "
                "Set eos_token in tokenizer_config.json or eos_token_id in generation_config.json to its end of turn."
            )
        return close, self.decode([close])


def _opening(new_messages: Sequence[Message]) -> list[Message]:
    """A synthetic conversation that the new messages can answer: a question, and an assistant who calls their tools."""
    answers = []
    for message in new_messages:
        if message["role"] != "tool":
            break
        answers.append(message)
    calls = [
        {
            "id": answer.get("tool_call_id") or f"call_{i:08x}",
            "type": "function",
            "function": {"name": answer.get("name") or "tool", "arguments": {"marker": MARKER}},
        }
        for i, answer in enumerate(answers)
    ]
    said: dict[str, Any] = {"role": "assistant", "content": "" if calls else MARKER}
    return [{"role": "user", "content": "a"}, said | ({"tool_calls": calls} if calls else {})]


# Choosing a renderer


def _tool_parser(tokenizer: Any) -> str | None:
    """The library's parser for the calls that a template writes. None: no ids mark a call."""
    template = template_of(tokenizer)

    def single(token: str) -> bool:
        id = tokenizer.convert_tokens_to_ids(token)
        return id is not None and id != tokenizer.unk_token_id

    if single("<tool_call>") and single("</tool_call>"):
        return "qwen3.5" if "<function=" in template else "glm" if "<arg_key>" in template else "qwen3"
    return "deepseek-v3" if single("<｜tool▁calls▁begin｜>") else None


def _family_renderer(
    tokenizer: Any, family: str, history: History, stop_ids: Ids, hashes: str, folder: Path
) -> FamilyRenderer:
    from pydantic import TypeAdapter, ValidationError
    from renderers import RendererConfig, create_renderer

    def create(**settings: Any) -> Any:
        config = TypeAdapter(RendererConfig).validate_python({"name": family, **settings})
        return create_renderer(tokenizer, config)

    try:
        bridge = create(thinking_retention="all")
        library = bridge if history == "keep" else create()
    except ValidationError as error:
        raise ModelError(f"No renderer is named {family!r}. Families: {', '.join(_families())}.") from error
    except Exception as error:  # a missing special token is an assertion in one family, a KeyError in another
        raise ModelError(
            f"{folder} is no {family} model: {error}. Leave renderer.family out, or name the model's own family."
        ) from error
    stops = tuple(dict.fromkeys([*stop_ids, *library.get_stop_token_ids()]))
    return FamilyRenderer(tokenizer, library, bridge, family=family, history=history, stop_ids=stops, hashes=hashes)


def _families() -> list[str]:
    from renderers import base

    base._populate_registry()
    return sorted(base.RENDERER_REGISTRY)


def _guessed(
    own: TemplateRenderer, folder: Path, tokenizer: Any, history: History, stop_ids: Ids, hashes: str
) -> FamilyRenderer | None:
    """The family that the model's type suggests. None: there is none, or it makes other ids than the template."""
    family = GUESSES.get(config_of(folder).get("model_type", ""))
    if family is None or not own.supports_tools:
        return None
    try:
        renderer = _family_renderer(tokenizer, family, history, stop_ids, hashes, folder)
        if not renderer.supports_tools:
            return None
        taken = _taken(renderer)
        if rendering_fault(renderer, own, taken) or suffix_fault(renderer, tokenizer.encode, taken):
            return None
    except Exception:  # a wrong guess may fail anywhere in the library or the template
        return None
    renderer.family_guessed = True
    return renderer


def _taken(renderer: TemplateRenderer | FamilyRenderer) -> list[Conversation]:
    """The probe's conversations that a renderer can write: some refuse a system message, some two calls in a reply."""
    conversations = [each for each in CONVERSATIONS if renderer.supports_tools or not each.tools]
    return [each for each in conversations if not each.optional or _writes(renderer, each)]


def _writes(renderer: TemplateRenderer | FamilyRenderer, conversation: Conversation) -> bool:
    try:
        renderer.render(conversation.messages, conversation.tools)
    except Exception:  # a template's own error, of any class
        return False
    return True


def _refuse(fault: str | None, folder: Path, family: str) -> None:
    if fault is not None:
        raise TemplateError(
            f"{folder} can't be trained with renderer family {family}: {fault} "
            "Name the model's family in renderer.family, or use a chat template that only appends."
        )


# Messages


def _templated(tokenizer: Any, messages: Sequence[Message], tools: Tools, *, opens: bool) -> str:
    """A conversation as the chat template writes it; `opens` adds the generation prompt."""
    text = tokenizer.apply_chat_template(
        _clean(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=opens
    )
    return str(text)


def _key(messages: Sequence[Message], tools: Tools) -> str:
    return json.dumps([messages, tools], default=str, separators=(",", ":"))


def _without_ids(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages without the ids of tool calls, which differ in every rollout."""
    return [{name: value for name, value in message.items() if name != "tool_call_id"} for message in messages]


def _clean(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates take them: text where there is none, and tool arguments as data."""
    return [{**message, "content": message.get("content") or "", **_clean_calls(message)} for message in messages]


def _clean_calls(message: Message) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return {}
    return {"tool_calls": [{**call, "function": _clean_function(call["function"])} for call in calls]}


def _clean_function(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            pass  # An unreadable call that the graph hands back stays as the model wrote it.
    return {**function, "arguments": arguments}


def _read_calls(
    read: Sequence[Any], response_ids: Ids, *, cut: bool
) -> tuple[tuple[ParsedCall, ...], tuple[InvalidCall, ...]]:
    """The library's calls as ours; one that the end of a cut reply left open is left out."""
    calls: list[ParsedCall] = []
    invalid: list[InvalidCall] = []
    for place, each in enumerate(read):
        if each.status == "unclosed_block" and cut:
            continue
        id = each.id or _call_id(response_ids, place)
        arguments = _arguments(each)
        if each.name and arguments is not None:
            calls.append(ParsedCall(id=id, name=each.name, arguments=arguments))
        else:
            invalid.append(InvalidCall(id=id, name=each.name, arguments=each.raw, error=_fault(each)))
    return tuple(calls), tuple(invalid)


def _unreadable(text: str, response_ids: Ids, error: Exception) -> Parsed:
    """A reply as one call that nobody can read."""
    why = f"The tool call can't be read: {error}."
    call = InvalidCall(id=_call_id(response_ids, 0), name=None, arguments=text, error=why)
    return Parsed(text="", reasoning=None, tool_calls=(), invalid_tool_calls=(call,))


def _call_id(response_ids: Ids, place: int) -> str:
    return f"call_{sha256(f'{response_ids} {place}'.encode()).hexdigest()[:8]}"


def _arguments(read: Any) -> dict[str, Any] | None:
    """Arguments as data. None: they can't be read."""
    if read.status in ("unclosed_block", "missing_name", "malformed_structure"):
        return None
    arguments = read.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    # XML formats write plain text as a value; the library reads it, and calls it invalid JSON.
    return arguments if isinstance(arguments, dict) else None


def _fault(read: Any) -> str:
    if read.status == "invalid_json" or read.status == "ok":
        try:
            kind = type(json.loads(read.raw)).__name__
        except (ValueError, RecursionError) as error:
            return f"The tool call is no JSON: {error}."
        return f"The tool call is a {kind} without an object of arguments."
    return {
        "unclosed_block": "The tool call has no end.",
        "missing_name": "The tool call names no tool.",
    }.get(str(read.status), "The tool call has not the form that the model was taught.")
