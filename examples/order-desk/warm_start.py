"""The untrained policy of the order desk: from nothing to a folder that makes a fair but careless clerk.

A small Qwen3 model learns to imitate a noisy clerk, who knows the tools but often gives up on an error, picks the wrong
tool or guesses. That is what reinforcement learning then improves. Half of the early batches are copy rows, because
copying an id exactly is what so small a model learns last.

Invariants: every prompt is rendered by the chat template from the graph's own system message and tools; no order id and
no item of a held-out task is ever seen. The same machine and versions give the same bytes.

    python warm_start.py --out policy
"""

import argparse
import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import process_time
from types import SimpleNamespace

import tasks
import torch
import torch.nn.functional as F
from graph import SYSTEM, TOOLS
from langchain_core.messages import ToolMessage
from langchain_core.utils.function_calling import convert_to_openai_tool
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SEED = 1
VOCABULARY = 672
"""At most; the texts give fewer."""
CONTEXT_LENGTH = 2048

ODDS = tasks.Odds(merged=0.3, listed=0.28, timeout=0.1)
"""The clerk's tasks are harder than those of tasks.jsonl, so that more is seen of every error."""

STEPS, PLANNED_STEPS = 900, 1200
"""Stops before the plan of the learning rates ends: later, the items of training tasks are learnt by heart."""
DEMONSTRATIONS = 20
"""Demonstrations in a batch."""
COPY_ROWS = 20
"""Copy rows in a batch, during the first part of the run."""
COPY_STEPS = 720
ROWS_AT_ONCE = 8
"""Rows in one forward pass; two passes run at the same time, one thread each."""
MATRIX_LEARNING_RATE, EMBEDDING_LEARNING_RATE, NORM_LEARNING_RATE = 0.02, 3e-3, 1e-2
"""Muon's for the matrices; AdamW's for the embeddings and for the norms."""
ATTENTION_GAIN = 2.0
"""First weight of the norms of queries and keys: attention must be sharp to copy."""
CONTEXT_WEIGHT = 0.15
"""Weight of the loss on what the clerk reads, beside 1 for what it writes."""

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tools>", "</tools>"]
SPLIT = r"\p{N}|\p{Lu}+(?= ?\p{N})| ?\p{L}+(?:_\p{L}+)*(?!\p{N})|\p{L}+| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Digits stand alone, and so do capitals before a digit: B407 has one form after a space and after a quote."""

TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text()
SCHEMAS = [convert_to_openai_tool(tool) for tool in TOOLS]
TOOLS_BY_NAME = {tool.name: tool for tool in TOOLS}


# The clerk


class Clerk:
    """A clerk at work on one task: calls the graph's own tools, reads their answers, and errs by chance.

    Attributes:
        messages: the conversation so far, in OpenAI's form, the system message first.
    """

    P_RIGHT_TOOL = 0.7
    P_CALCULATES = 0.72
    P_RIGHT_EXPRESSION = 0.88
    P_STOPS_WHEN_KNOWN = 0.82
    P_FOLLOWS_MERGED, P_FOLLOWS_LISTED = 0.45, 0.33
    """How often it goes on with the new id, and with the SKU."""
    P_WAITS = 0.27
    """How often it repeats a call that timed out."""
    P_REPEATS = 0.2
    """How often it repeats a call for nothing, when it did not follow."""
    P_INVENTS = 0.2
    """How often it tries an order id out of the blue, when it did neither."""
    MAX_TRIES = 4

    def __init__(self, task: dict, rng: random.Random) -> None:
        self.task, self.rng = task, rng
        self.messages = [{"role": "system", "content": SYSTEM}, *task["input"]["messages"]]
        self._seen: list[ToolMessage] = []

    def work(self) -> list[dict]:
        """The whole conversation, right or wrong."""
        answer = self._answer()
        apology = self.rng.choice(["Sorry, I could not find that.", "Sorry, the lookup failed."])
        self._say(apology if answer is None else f"The answer is {answer}.")
        return self.messages

    def _answer(self) -> int | None:
        kind = self.task["metadata"]["kind"]
        order = self._look_up("get_order", "order_id", self.task["context"]["order"])
        if order is None:
            return None
        found = self._look_up(self._lookup_tool(kind), "item", order["item"])
        if found is None:
            return None
        (value,) = found.values()
        return self._conclude(kind, order["qty"], value)

    def _lookup_tool(self, kind: str) -> str:
        right = tasks.LOOKUP[kind]
        wrong = "get_stock" if right == "get_price" else "get_price"
        return right if self._chance(self.P_RIGHT_TOOL) else wrong

    def _look_up(self, name: str, argument: str, value: str) -> dict | None:
        """The answer of a tool, after as many tries as the clerk has patience for; None: gave up."""
        for _ in range(self.MAX_TRIES):
            result = self._call(name, {argument: value})
            if "error" not in result:
                return result
            value = self._next_try(name, value, result["error"])
            if value is None:
                return None
        return None

    def _next_try(self, name: str, value: str, error: str) -> str | None:
        """What to ask for after an error; None: nothing more."""
        pointer = re.search(r"(?:merged into|(listed) as) (\w\d+|SKU \d+)", error)
        if pointer and self._chance(self.P_FOLLOWS_LISTED if pointer[1] else self.P_FOLLOWS_MERGED):
            return pointer[2]
        if error == "timeout":
            return value if self._chance(self.P_WAITS) else None
        if self._chance(self.P_REPEATS):
            return value
        if name == "get_order" and self._chance(self.P_INVENTS):
            return tasks.draw(tasks.order_id, self.rng, split="train")
        return None

    def _conclude(self, kind: str, qty: int, value: int) -> int:
        """The number to answer with, calculated or guessed."""
        if kind in ("unit", "stock"):
            return value if self._chance(self.P_STOPS_WHEN_KNOWN) else self._calculate(f"{value}-{qty}")
        if not self._chance(self.P_CALCULATES):
            return value
        product, difference = f"{qty}*{value}", f"{value}-{qty}"
        right, wrong = (product, difference) if kind == "total" else (difference, product)
        return self._calculate(right if self._chance(self.P_RIGHT_EXPRESSION) else wrong)

    def _calculate(self, expression: str) -> int:
        return self._call("calc", {"expression": expression})["result"]

    def _call(self, name: str, arguments: dict) -> dict:
        call = {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        self.messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        runtime = SimpleNamespace(context=self.task["context"], state={"messages": self._seen})
        extra = {} if name == "calc" else {"runtime": runtime}
        result = TOOLS_BY_NAME[name].func(**arguments, **extra)
        content = json.dumps(result, ensure_ascii=False)
        self._seen.append(ToolMessage(content, name=name, tool_call_id=""))
        self.messages.append({"role": "tool", "content": content})
        return result

    def _say(self, content: str) -> None:
        self.messages.append({"role": "assistant", "content": content})

    def _chance(self, probability: float) -> bool:
        return self.rng.random() < probability


def demonstrations() -> Iterator[list[dict]]:
    """Conversations of the clerk about fresh training tasks, without end."""
    rng, index = random.Random(SEED), 0
    while True:
        yield Clerk(tasks.task("train", -SEED, index, ODDS), rng).work()
        index += 1


def copy_rows() -> Iterator[list[dict]]:
    """Conversations in which quoted entities are said again, half of the time in another order, without end."""
    rng = random.Random(SEED)
    kinds = [
        lambda: tasks.draw(tasks.order_id, rng, split="train"),
        lambda: tasks.draw(tasks.item, rng, split="train"),
        lambda: tasks.sku(rng),
        lambda: str(rng.randint(2, 999)),
    ]
    while True:
        entities = [f'"{rng.choice(kinds)()}"' for _ in range(rng.randint(5, 8))]
        shown = " ".join(entities)
        if rng.random() < 0.5:
            rng.shuffle(entities)
        yield [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": shown},
            {"role": "assistant", "content": " ".join(entities)},
        ]


# The tokenizer


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most VOCABULARY tokens that knows the special tokens and the chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_LENGTH,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def render(tokenizer: PreTrainedTokenizerFast, messages: list[dict]) -> str:
    """The text of a conversation, as the chat template gives it."""
    return tokenizer.apply_chat_template(messages, tools=SCHEMAS, tokenize=False)


def tokenizer_texts() -> list[str]:
    """What the tokenizer is trained on: conversations without the system message, and that message a few times."""
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    bare.chat_template = TEMPLATE
    system = render(bare, [{"role": "system", "content": SYSTEM}])
    talks = [render(bare, messages).removeprefix(system) for messages in islice(demonstrations(), 3000)]
    return [system] * 30 + talks


# The batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One conversation as tokens, after the prompt that all conversations begin with."""

    ids: list[int]
    """[T]"""
    mask: list[int]
    """[T], 1 where the assistant wrote, its <|im_end|> included."""


class Rows:
    """Conversations become rows, without the tokens of the system message that all share: these are `prefix` [P]."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._system = render(tokenizer, [{"role": "system", "content": SYSTEM}])
        self.prefix = torch.tensor(self._encode([self._system])[0])
        self._opening, self._end = self._encode(["<|im_start|>assistant\n"])[0], tokenizer.eos_token_id

    def of(self, conversations: list[list[dict]]) -> list[Row]:
        """One row for each conversation."""
        texts = [render(self._tokenizer, messages).removeprefix(self._system) for messages in conversations]
        return [Row(ids=ids, mask=self._mask(ids)) for ids in self._encode([text.rstrip("\n") for text in texts])]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return self._tokenizer(texts, add_special_tokens=False)["input_ids"]

    def _mask(self, ids: list[int]) -> list[int]:
        mask, writing, width = [], False, len(self._opening)
        for at, token in enumerate(ids):
            mask.append(int(writing))
            if token == self._end:
                writing = False
            elif ids[at - width + 1 : at + 1] == self._opening:
                writing = True
        return mask


# The model


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 model of 0.87 M parameters with random weights, small where they write into the residual stream."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                small = 0.5 if "down_proj" in name or "o_proj" in name else 1.0
                weight.normal_(std=small * weight.shape[1] ** -0.5)
            elif "q_norm" in name or "k_norm" in name:
                weight.fill_(ATTENTION_GAIN)
    return model


def hidden_states(model: Qwen3ForCausalLM, prefix: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Last hidden states of rows that share a prefix, which is computed once: equal to the model's own, and faster.

    Args:
        prefix: [P] token ids that every row begins with.
        ids: [B, T] token ids after it, padded on the right.

    Returns:
        [B, T, hidden]
    """
    config, (n_rows, length), start = model.config, ids.shape, len(prefix)
    width, repeats = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    positions = torch.arange(start + length)[None]
    cos, sin = model.model.rotary_emb(torch.empty(0), positions)
    visible = torch.ones(length, start + length, dtype=torch.bool).tril(start)

    def norm(x: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], layer.weight, config.rms_norm_eps)

    def rotate(x: torch.Tensor, span: slice) -> torch.Tensor:
        """x [rows, tokens, heads, width] -> [rows, heads, tokens, width], turned by position."""
        first, second = x.chunk(2, -1)
        turned = x * cos[:, span, None] + torch.cat((-second, first), -1) * sin[:, span, None]
        return turned.transpose(1, 2)

    def heads(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [P + B * T, features] -> the prefix's [1, P, heads, width] and the rows' [B, T, heads, width]."""
        x = x.unflatten(-1, (-1, width))
        return x[None, :start], x[start:].unflatten(0, (n_rows, length))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return mixed.transpose(1, 2).flatten(2).flatten(0, 1)

    before, after = slice(0, start), slice(start, None)
    x = model.model.embed_tokens(torch.cat([prefix, ids.flatten()]))
    for layer in model.model.layers:
        attention, mlp, y = layer.self_attn, layer.mlp, norm(x, layer.input_layernorm)
        q_before, q_after = heads(attention.q_proj(y))
        k_before, k_after = heads(attention.k_proj(y))
        v_before, v_after = (v.transpose(1, 2) for v in heads(attention.v_proj(y)))
        q_before, q_after = (norm(q, attention.q_norm) for q in (q_before, q_after))
        k_before, k_after = (norm(k, attention.k_norm) for k in (k_before, k_after))
        k_before, k_after = rotate(k_before, before), rotate(k_after, after)
        k_all = torch.cat([k_before.expand(n_rows, -1, -1, -1), k_after], 2)
        v_all = torch.cat([v_before.expand(n_rows, -1, -1, -1), v_after], 2)
        mixed_before = attend(rotate(q_before, before), k_before, v_before, None)
        mixed_after = attend(rotate(q_after, after), k_all, v_all, visible)
        x = x + attention.o_proj(torch.cat([mixed_before, mixed_after]))
        y = norm(x, layer.post_attention_layernorm)
        x = x + mlp.down_proj(F.silu(mlp.gate_proj(y)) * mlp.up_proj(y))
    return norm(x[start:], model.model.norm).unflatten(0, (n_rows, length))


# The training loop


def padded(rows: list[list[int]]) -> torch.Tensor:
    """[B, T] with zeros on the right."""
    length = max(map(len, rows))
    return torch.tensor([row + [0] * (length - len(row)) for row in rows])


def gradients(
    model: Qwen3ForCausalLM, prefix: torch.Tensor, rows: list[Row], n_written: int, n_read: int
) -> tuple[tuple[torch.Tensor, ...], float]:
    """The rows' share of the batch's gradients, one a parameter, and of its loss on written tokens."""
    ids, mask = padded([row.ids for row in rows]), padded([row.mask for row in rows])
    lengths = torch.tensor([len(row.ids) for row in rows])
    real = torch.arange(1, ids.shape[1]) < lengths[:, None]
    targets, written = ids[:, 1:][real], mask[:, 1:][real].float()
    logits = model.lm_head(hidden_states(model, prefix, ids)[:, :-1][real])
    losses = F.cross_entropy(logits, targets, reduction="none")
    loss = (losses * written).sum() / n_written
    total = loss + CONTEXT_WEIGHT * (losses * (1 - written)).sum() / n_read
    return torch.autograd.grad(total, list(model.parameters())), loss.item()


def optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside of the layers, AdamW for the rest."""
    matrices, norms = [], []
    for name, weight in model.named_parameters():
        if "embed" not in name:
            (matrices if weight.ndim == 2 else norms).append(weight)
    rest = [
        {"params": [model.model.embed_tokens.weight], "lr": EMBEDDING_LEARNING_RATE},
        {"params": norms, "lr": NORM_LEARNING_RATE},
    ]
    return [
        torch.optim.Muon(matrices, lr=MATRIX_LEARNING_RATE, weight_decay=0.01, adjust_lr_fn="original"),
        torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def pace(step: int) -> float:
    """Factor on the learning rates: 20 steps of warm-up, and a linear way down over the second half of the plan."""
    return min(1.0, (step + 1) / 20, (PLANNED_STEPS - step) / (0.5 * PLANNED_STEPS))


def train(model: Qwen3ForCausalLM, rows: Rows) -> None:
    """Teach the model the demonstrations and the copy rows, in place."""
    weights, talks, copies = list(model.parameters()), demonstrations(), copy_rows()
    both = optimizers(model)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, pace) for optimizer in both]
    with ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for step in range(STEPS):
            n_copies = COPY_ROWS if step < COPY_STEPS else 0
            batch = rows.of([*islice(talks, DEMONSTRATIONS), *islice(copies, n_copies)])
            batch.sort(key=lambda row: -len(row.ids))
            n_written = sum(sum(row.mask) for row in batch)
            n_read = sum(len(row.ids) for row in batch) - n_written
            jobs = [
                pool.submit(gradients, model, rows.prefix, batch[at : at + ROWS_AT_ONCE], n_written, n_read)
                for at in range(0, len(batch), ROWS_AT_ONCE)
            ]
            parts, losses = zip(*(job.result() for job in jobs), strict=True)
            for weight, shares in zip(weights, zip(*parts, strict=True), strict=True):
                weight.grad = sum(shares)
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            for optimizer, schedule in zip(both, schedules, strict=True):
                optimizer.step()
                schedule.step()
            if step % 50 == 0 or step == STEPS - 1:
                print(f"step {step} loss {sum(losses):.4f} cpu {process_time():.0f} s", flush=True)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the policy as a Hugging Face folder, in half precision."""
    model.half().save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id).save_pretrained(out)
    tokenizer.save_pretrained(out)
    settings = json.loads((out / "tokenizer_config.json").read_text())
    settings.pop("backend", None)  # with the class's older name, releases before transformers 5 load the folder too
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    """Make the policy folder."""
    parser = argparse.ArgumentParser(description="Train the untrained policy of the order desk.")
    parser.add_argument("--out", type=Path, default=Path("policy"), help="the folder to write")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    tokenizer = train_tokenizer(tokenizer_texts())
    rows = Rows(tokenizer)
    model = new_model(tokenizer)
    train(model, rows)
    save(model, tokenizer, out)
    print(f"{out}: {model.num_parameters()} parameters, {process_time():.0f} CPU-seconds")


if __name__ == "__main__":
    main()
