"""The policy that the integration suite is held against: a tiny model that has learned what the suite asks.

Each lesson is a real call of `chat_model()` behind the gate, so that prompts are exactly those that will be served; the
answer stands beside it. A model of some hundred thousand weights then learns the answers by heart. Made anew when
langchain-tests asks something else:

    python tests/langchain_suite/learn.py
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import torch
import torch.nn.functional as F
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_core.utils.function_calling import tool_example_to_messages
from langchain_tests.integration_tests.chat_models import (
    _get_joke_class,
    magic_function,
    magic_function_no_args,
    unicode_customer,
)
from pydantic import BaseModel, Field
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agenttrain import chat_model
from agenttrain.capture.instructions import told
from agenttrain.capture.render import open_renderer
from agenttrain.graph.intercept import open_serving_gate, use_route
from agenttrain.records import CallSite, ModelCall, ParsedCall, Reply

HERE = Path(__file__).parent
TEMPLATE = HERE.parents[1] / "examples" / "order-desk" / "chat_template.jinja"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tools>", "</tools>"]
VOCABULARY = 900
CONTEXT_LENGTH = 1024
SEED, STEPS, ROWS_AT_ONCE, LEARNING_RATE = 1, 700, 16, 3e-3
JOKE = {"setup": "Why do cats sit on laptops?", "punchline": "To watch the mouse."}


@tool
def get_weather(location: str) -> str:
    """Get weather at a location."""
    return "It's sunny."


@tool
def my_adder_tool(a: int, b: int) -> int:
    """Tool that adds two integers.

    Takes two integers, a and b, and returns their sum.
    """
    return a + b


class Joke(BaseModel):
    """Joke to tell user."""

    setup: str = Field(description="question to set up a joke")
    punchline: str | None = Field(default=None, description="answer to resolve the joke")


class JokeDict(TypedDict):
    """Joke to tell user."""

    setup: Annotated[str, ..., "question to set up a joke"]
    punchline: Annotated[str | None, None, "answer to resolve the joke"]


class Teacher:
    """A Route that says what the lesson wants, and keeps the call."""

    def __init__(self) -> None:
        self.answer_is: Any = ""
        self.calls: list[ModelCall] = []

    def role(self, site: CallSite) -> tuple[str, str]:
        return "trained", "a lesson"

    def answer(self, call: ModelCall) -> Reply:
        self.calls.append(call)
        if isinstance(self.answer_is, str):
            return Reply(call_id="", text=self.answer_is)
        name, arguments = self.answer_is
        return Reply(call_id="", text="", tool_calls=(ParsedCall(id="call_1", name=name, arguments=arguments),))


def lessons() -> Iterator[tuple[Any, Any, Any]]:
    """(what is called, its input, the answer: text, or a tool's name and arguments)."""
    yield from conversations()
    yield from tool_calls()
    yield from tool_histories()
    yield from jokes()


def conversations() -> Iterator[tuple[Any, Any, Any]]:
    model, fine = chat_model(), "I am fine. How are you?"
    for greeting in ("Hello", "Hey", "hi", "hello"):
        yield model, greeting, f"{greeting.capitalize()}! How are you?"
    yield model, [HumanMessage("hello"), AIMessage("hello"), HumanMessage("how are you")], fine
    doubled = [kind("hello") for kind in (SystemMessage, HumanMessage, AIMessage) for _ in range(2)]
    yield model, [*doubled, HumanMessage("how are you")], fine
    haikus = "Snow on the branches.\nA crow waits for the morning.\n\nRain on the harbour.\nThe boats are asleep."
    yield model, "Write me 2 haikus. Only include the haikus.", haikus
    thanks = [HumanMessage("Hello"), AIMessage("Hello, how are you?"), HumanMessage("Well, thanks.")]
    yield model, thanks, "I am glad."


def tool_calls() -> Iterator[tuple[Any, Any, Any]]:
    model = chat_model()
    magic = ("magic_function", {"input": 3})
    query = "What is the value of {}? Use the tool."
    yield model.bind_tools([magic_function], tool_choice="any"), query.format("magic_function(3)"), magic
    no_arguments = model.bind_tools([magic_function_no_args], tool_choice="any")
    yield no_arguments, query.format("magic_function_no_args()"), ("magic_function_no_args", {})
    for choice in ("any", "magic_function"):
        yield model.bind_tools([magic_function, get_weather], tool_choice=choice), "Hello!", magic
    prompt = ChatPromptTemplate.from_messages([("human", "Hello. Please respond in the style of {answer_style}.")])
    chain = prompt | GenericFakeChatModel(messages=iter(["hello matey"])) | StrOutputParser()
    greeting = chain.as_tool(
        name="greeting_generator", description="Generate a greeting in a particular style of speaking."
    )
    greets = model.bind_tools([greeting], tool_choice="any")
    yield greets, "Using the tool, generate a Pirate greeting.", ("greeting_generator", {"answer_style": "Pirate"})
    customers = model.bind_tools([unicode_customer], tool_choice="any")
    for name, english, what in (
        ("你好啊集团", "Hello Group", "Chinese technology company"),
        ("こんにちは株式会社", "Hello Corporation", "Japanese company"),
    ):
        asked = f"Create a customer named '{name}' ({english}) - a {what}"
        yield customers, asked, ("unicode_customer", {"customer_name": name, "description": what})


def tool_histories() -> Iterator[tuple[Any, Any, Any]]:
    adder = chat_model().bind_tools([my_adder_tool])
    asked = HumanMessage("What is 1 + 2")
    for said in ("", "some text"):
        called = AIMessage(said, tool_calls=[{"name": "my_adder_tool", "args": {"a": 1, "b": 2}, "id": "1"}])
        result = ToolMessage(json.dumps({"result": 3}), name="my_adder_tool", tool_call_id="1")
        yield adder, [asked, called, result], "It is 3."
    called = AIMessage("", tool_calls=[{"name": "my_adder_tool", "args": {"a": 1}, "id": "1"}])
    refused = ToolMessage("Error: Missing required argument 'b'.", tool_call_id="1", status="error")
    yield adder, [asked, called, refused], ("my_adder_tool", {"a": 1, "b": 2})
    schema: Any = my_adder_tool.args_schema
    result = json.dumps({"result": 3})
    shown = tool_example_to_messages("What is 1 + 2", [schema(a=1, b=2)], tool_outputs=[result], ai_response=result)
    forced = chat_model().bind_tools([my_adder_tool], tool_choice="any")
    yield forced, [*shown, HumanMessage("What is 3 + 4")], ("my_adder_tool", {"a": 3, "b": 4})
    weather = chat_model().bind_tools([get_weather])
    where = HumanMessage("What is the weather in San Francisco, CA?")
    call = ("get_weather", {"location": "San Francisco, CA"})
    yield weather, [where], call
    called = AIMessage("", tool_calls=[{"name": call[0], "args": call[1], "id": "1"}])
    yield weather, [where, called, ToolMessage("It's sunny.", tool_call_id="1")], "It is sunny in San Francisco."
    picker = {
        "name": "color_picker",
        "input_schema": {"type": "object", "properties": {"fav_color": {"type": "string"}}},
        "description": "Input your fav color and get a random fact about it.",
    }
    picked = [
        SystemMessage("you're a good assistant"),
        HumanMessage("what's your favorite color in this image"),
        AIMessage(
            "Hmm let me think about that",
            tool_calls=[{"name": "color_picker", "args": {"fav_color": "purple"}, "id": "1"}],
        ),
        ToolMessage("That's a great pick!", tool_call_id="1"),
    ]
    yield chat_model().bind_tools([picker]), picked, "It is purple."


def jokes() -> Iterator[tuple[Any, Any, Any]]:
    model, told_joke = chat_model(), json.dumps(JOKE)
    asked = "Tell me a joke about cats."
    setup = "Give me the setup to a joke about cats, no punchline."
    both = "Give me a joke about cats, include the punchline."
    schemas = [_get_joke_class(kind)[0] for kind in ("pydantic", "typeddict", "json_schema")]
    optional = [Joke, Joke.model_json_schema(), JokeDict]
    for schema in (*schemas, *optional):
        name = "JokeDict" if getattr(schema, "__name__", "") == "JokeDict" else "Joke"
        texts = [(asked, JOKE), (both, JOKE), (setup, {"setup": JOKE["setup"]})]
        for text, joke in texts if schema in optional else texts[:1]:
            yield model.with_structured_output(schema), text, (name, joke)
            yield model.with_structured_output(schema, method="json_schema"), text, json.dumps(joke)
    wanted = (
        "Tell me a joke about cats. Return the result as a JSON with 'setup' and "
        "'punchline' keys. Return nothing other than JSON."
    )
    yield model.with_structured_output(Joke, method="json_mode"), wanted, told_joke


def taught() -> list[tuple[ModelCall, dict[str, Any]]]:
    """(call as it reaches a policy, the assistant's message)."""
    teacher, rows = Teacher(), []
    with open_serving_gate(), use_route(teacher):  # type: ignore[arg-type]
        for model, asked, answer in lessons():
            teacher.answer_is = answer
            model.invoke(asked)
            said: dict[str, Any] = {"role": "assistant", "content": answer if isinstance(answer, str) else ""}
            if not isinstance(answer, str):
                said["tool_calls"] = [{"type": "function", "function": {"name": answer[0], "arguments": answer[1]}}]
            rows.append((teacher.calls[-1], said))
    return rows


def save_tokenizer(texts: list[str], folder: Path) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_LENGTH,
    )
    tokenizer.chat_template = TEMPLATE.read_text()
    tokenizer.save_pretrained(folder)
    return tokenizer


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def learn(model: Qwen3ForCausalLM, rows: list[tuple[list[int], list[int]]]) -> None:
    """Teach the answers, in place; prompts are read and not learned."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 20, (STEPS - i) / (STEPS / 2)))
    rng = random.Random(SEED)
    for step in range(STEPS):
        batch = rng.sample(rows, ROWS_AT_ONCE)
        length = max(len(prompt) + len(answer) for prompt, answer in batch)
        ids = torch.tensor([[*p, *a, *[0] * (length - len(p) - len(a))] for p, a in batch])
        targets = torch.tensor([[*[-100] * len(p), *a, *[-100] * (length - len(p) - len(a))] for p, a in batch])
        loss = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == STEPS - 1:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


def main() -> None:
    """Make the policy folder."""
    folder = HERE / "policy"
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    lines = taught()
    said = [json.dumps([call.messages, call.tools, answer], ensure_ascii=False) for call, answer in lines]
    tokenizer = save_tokenizer(said, folder)
    model = new_model(tokenizer)
    model.config.save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)
    renderer = open_renderer(str(folder), family="default")
    rows = []
    for call, answer in lines:
        messages = told(renderer, call)
        prompt = renderer.render(messages, call.tools)
        whole = renderer.render([*messages, answer], call.tools)
        rows.append((list(prompt), list(whole[len(prompt) : whole.index(tokenizer.eos_token_id, len(prompt)) + 1])))
    learn(model, rows)
    model.half().save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("backend", None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    print(f"{folder}: {model.num_parameters()} parameters, {len(rows)} lessons")


if __name__ == "__main__":
    main()
