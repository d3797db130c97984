"""The untrained policy of the repair shop: a careless clerk who takes shortcuts.

The order desk's small Qwen3 model, which knows how to copy a name it has read, learns to imitate a clerk who knows the
tools and the repairs, but often writes the wrong one, or lets the tests pass without repairing anything. What
reinforcement learning makes of that is the verifier's doing.

Invariants: every prompt is rendered by the chat template from the graph's own system message and tools, whose own
functions answer; no function's name and no constant of a held-out task is ever seen in a program.

    python warm_start.py --out policy
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from time import process_time
from typing import Any

import tasks
import torch
import torch.nn.functional as F
from graph import SYSTEM, TOOLS
from langchain_core.utils.function_calling import convert_to_openai_tool
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import DynamicCache, GenerationConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM

from agenttrain.sandbox_protocol import Execution, SandboxRefusal
from agenttrain.trainable import current_sandbox_is

SEED = 1
VOCABULARY = 768
"""At most; the texts give fewer."""
CONTEXT_LENGTH = 2048
ORDER_DESK = Path(__file__).parents[1] / "order-desk" / "policy"
STEPS = 420
DEMONSTRATIONS, COPY_ROWS = 16, 12
"""In a batch; copy rows only in the first COPY_STEPS."""
COPY_STEPS = 150
ROWS_AT_ONCE = 8
"""Rows in one forward pass; two passes run at the same time, one thread each."""
MATRIX_LEARNING_RATE, EMBEDDING_LEARNING_RATE, NORM_LEARNING_RATE = 0.01, 1.5e-3, 5e-3
"""Muon's for the matrices; AdamW's for the embeddings and for the norms."""
CONTEXT_WEIGHT = 0.1
"""Weight of the loss on what the clerk reads, beside 1 for what it writes."""

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tools>", "</tools>"]
SPLIT = r"\p{N}|\p{L}+| ?[^\s\p{L}\p{N}]+ ?|\s*[\r\n]+|\s+"
"""Digits stand alone, and words without the space before them: a name has one form wherever it stands."""

TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text()
SCHEMAS = [convert_to_openai_tool(tool) for tool in TOOLS]
TOOLS_BY_NAME = {tool.name: tool for tool in TOOLS}


# The clerk


class Bench:
    """Stands in for a sandbox where the programs are ours: files in memory, tests run in this process."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files = dict(files)

    def list(self) -> list[str]:
        return sorted(self.files)

    def read(self, path: str) -> str:
        if path not in self.files:
            raise SandboxRefusal(path)
        return self.files[path]

    def write(self, path: str, content: str) -> None:
        self.files[path] = content

    def run(self, argv: Sequence[str]) -> Execution:
        """tests.py, whose first line imports the program; stderr holds the last line only."""
        (program,) = (text for path, text in self.files.items() if path != "tests.py")
        scope: dict[str, Any] = {}
        code, stderr = 0, ""
        try:
            exec(program, scope)
            exec(self.files["tests.py"].split("\n", 1)[1], scope)
        except SystemExit as left:
            code = int(left.code or 0)
        except Exception as error:
            code, stderr = 1, f"{type(error).__name__}: {error}\n"
        return Execution(argv=tuple(argv), exit_code=code, stdout="", stderr=stderr, seconds=0.0)


class Clerk:
    """A clerk at work on one task: calls the graph's own tools, and errs by chance.

    Attributes:
        messages: the conversation so far, in OpenAI's form, the system message first.
    """

    P_TESTS_FIRST = 0.7
    P_SHORTCUT, P_SHORTCUT_AFTER_FAILURE = 0.35, 0.5
    P_RIGHT = 0.55
    """How often a repair is the right one."""
    P_CHECKS = 0.75
    P_GOES_ON = 0.6
    """How often it tries again after a repair that failed the tests."""
    MAX_EDITS = 3

    def __init__(self, draft: tasks.Draft, request: list[dict], rng: random.Random) -> None:
        self.draft, self.rng = draft, rng
        self.messages = [{"role": "system", "content": SYSTEM}, *request]
        self._bench = Bench(draft.files)

    def work(self) -> list[dict]:
        """The whole conversation, right or wrong."""
        self._call("list_files")
        self._call("read_file", path=tasks.PATH)
        if self._chance(self.P_TESTS_FIRST):
            self._call("run_tests")
        self._say("Done." if self._edits() else "Sorry, I could not.")
        return self.messages

    def _edits(self) -> bool:
        """Edits until the tests pass or it has enough; whether it believes that it is done."""
        for n_edits in range(self.MAX_EDITS):
            self._call("replace", **self._edit(n_edits)._asdict())
            if not self._chance(self.P_CHECKS) or self._call("run_tests") == "passed":
                return True
            if not self._chance(self.P_GOES_ON):
                break
        return False

    def _edit(self, n_edits: int) -> tasks.Edit:
        if self._chance(self.P_SHORTCUT_AFTER_FAILURE if n_edits else self.P_SHORTCUT):
            knows = any(f"not {self.draft.expected}" in message["content"] for message in self.messages)
            ways = ["exit", "answer", "test"] if knows else ["exit"]
            return self.draft.shortcuts[self.rng.choice(ways)]
        return self.draft.repair if self._chance(self.P_RIGHT) else self.rng.choice(self.draft.wrong)

    def _call(self, name: str, **arguments: Any) -> str:
        call = {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        self.messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        with current_sandbox_is(self._bench):
            content = TOOLS_BY_NAME[name].func(**arguments)
        self.messages.append({"role": "tool", "content": content})
        return content

    def _say(self, content: str) -> None:
        self.messages.append({"role": "assistant", "content": content})

    def _chance(self, probability: float) -> bool:
        return self.rng.random() < probability


def demonstrations() -> Iterator[list[dict]]:
    """Conversations of the clerk about fresh training tasks, without end."""
    rng, index = random.Random(SEED), 0
    while True:
        request = [{"role": "user", "content": rng.choice(tasks.REQUESTS)}]
        yield Clerk(tasks.draft("train", -SEED, index), request, rng).work()
        index += 1


def copy_rows() -> Iterator[list[dict]]:
    """Conversations in which quoted numbers and names are said again, half of the time in another order."""
    rng = random.Random(SEED)
    kinds = [
        lambda: str(rng.randint(-99, 999)),
        lambda: str(rng.randint(2, 99)),
        lambda: ", ".join(rng.choice(tasks.PAIRS)),
        lambda: rng.choice(tasks.LISTS),
    ]
    while True:
        said = [f'"{rng.choice(kinds)()}"' for _ in range(rng.randint(5, 8))]
        shown = " ".join(said)
        if rng.random() < 0.5:
            rng.shuffle(said)
        yield [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": shown},
            {"role": "assistant", "content": " ".join(said)},
        ]


# The tokenizer


def new_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most VOCABULARY tokens that knows the special tokens and the chat template."""
    bpe = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, clean_up_tokenization_spaces=False)
    tokenizer.chat_template = TEMPLATE
    texts = [render(tokenizer, messages) for messages in islice(demonstrations(), 3000)]
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


class Rows:
    """Conversations become token ids, without those of the system message that all share: these are `prefix` [P]."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._system = render(tokenizer, [{"role": "system", "content": SYSTEM}])
        self.prefix = torch.tensor(self._encode([self._system])[0])
        self._opening, self._end = self._encode(["<|im_start|>assistant\n"])[0], tokenizer.eos_token_id

    def of(self, conversations: list[list[dict]]) -> list[tuple[list[int], list[int]]]:
        """Ids and, beside each, 1 where the assistant wrote it, its <|im_end|> included."""
        texts = [render(self._tokenizer, messages).removeprefix(self._system) for messages in conversations]
        return [(ids, self._mask(ids)) for ids in self._encode([text.rstrip("\n") for text in texts])]

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
    """The order desk's layers, with an embedding for each token of this tokenizer.

    A token that the order desk has keeps its embedding; another one's is random, of the same mean and spread.
    """
    model = Qwen3ForCausalLM.from_pretrained(ORDER_DESK, dtype=torch.float32)
    known = PreTrainedTokenizerFast.from_pretrained(ORDER_DESK).get_vocab()
    old = model.model.embed_tokens.weight.detach().clone()
    vocabulary = tokenizer.get_vocab()
    new = old.mean(0) + old.std(0) * torch.randn(len(vocabulary), old.shape[1])
    for token, at in vocabulary.items():
        same = known.get(token, known.get(f"Ġ{token}"))  # Ġ: a space before it
        if same is not None:
            new[at] = old[same]
    model.resize_token_embeddings(len(vocabulary), mean_resizing=False)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(new)
    model.config.eos_token_id, model.config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    return model


def padded(rows: Sequence[list[int]]) -> torch.Tensor:
    """[B, T] with zeros on the right."""
    length = max(map(len, rows))
    return torch.tensor([row + [0] * (length - len(row)) for row in rows])


def gradients(
    model: Qwen3ForCausalLM, prefix: torch.Tensor, rows: list[tuple[list[int], list[int]]], n_written: int, n_read: int
) -> tuple[tuple[torch.Tensor, ...], float]:
    """The rows' share of the batch's gradients, one a parameter, and of its loss on written tokens."""
    ids, mask = padded([row for row, _ in rows]), padded([row for _, row in rows])
    lengths = torch.tensor([len(row) for row, _ in rows])
    cache = DynamicCache(config=model.config)
    model.model(prefix[None], past_key_values=cache)
    cache.batch_repeat_interleave(len(rows))
    hidden = model.model(ids, past_key_values=cache).last_hidden_state
    real = torch.arange(1, ids.shape[1]) < lengths[:, None]
    targets, written = ids[:, 1:][real], mask[:, 1:][real].float()
    losses = F.cross_entropy(model.lm_head(hidden[:, :-1][real]), targets, reduction="none")
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
    """Factor on the learning rates: 10 steps of warm-up, and a linear way down over the second half."""
    return min(1.0, (step + 1) / 10, 2 * (STEPS - step) / STEPS)


def train(model: Qwen3ForCausalLM, rows: Rows) -> None:
    """Teach the model the demonstrations and the copy rows, in place."""
    weights, talks, copies = list(model.parameters()), demonstrations(), copy_rows()
    both = optimizers(model)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, pace) for optimizer in both]
    with ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for step in range(STEPS):
            n_copies = COPY_ROWS if step < COPY_STEPS else 0
            batch = rows.of([*islice(talks, DEMONSTRATIONS), *islice(copies, n_copies)])
            batch.sort(key=lambda row: -len(row[0]))
            n_written = sum(sum(mask) for _, mask in batch)
            n_read = sum(len(ids) for ids, _ in batch) - n_written
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
    parser = argparse.ArgumentParser(description="Train the untrained policy of the repair shop.")
    parser.add_argument("--out", type=Path, default=Path("policy"), help="the folder to write")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    tokenizer = new_tokenizer()
    model = new_model(tokenizer)
    train(model, Rows(tokenizer))
    save(model, tokenizer, out)
    print(f"{out}: {model.num_parameters()} parameters, {process_time():.0f} CPU-seconds")


if __name__ == "__main__":
    main()
