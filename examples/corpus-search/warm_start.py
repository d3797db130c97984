"""The untrained policy of the corpus search: a folder that makes a careless searcher.

A small Qwen3 model learns to imitate somebody who knows the tools, but often searches for the wrong words, takes the
first snippet for the answer, reads the first document whatever it is, or gives up. That is what reinforcement learning
then improves. It begins with the layers of the order desk's policy, because copying a name exactly is what so small a
model learns last, and that one can. Half of the early batches are copy rows all the same.

Invariants: every prompt is rendered by the chat template from the graph's own system message and tools. Every
demonstration comes from a world of its own, so the policy knows no fact of corpus.jsonl; and no name of a held-out
question is ever seen.

    python warm_start.py --out policy
"""

import argparse
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from time import process_time

import corpus
import tasks
import torch
import torch.nn.functional as F
from graph import SYSTEM, TOOLS
from langchain_core.utils.function_calling import convert_to_openai_tool
from library import Library
from searcher import Searcher
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SEED = 1
VOCABULARY = 840
"""At most; the texts give fewer."""
CONTEXT_LENGTH = 2048
SIZES = corpus.Sizes(towns=24, twice_counted=16, people=20, relatives=12, machines=10)
"""A demonstration's world is smaller than the corpus, and has more that leads astray."""
TALKS_PER_WORLD = 12

STEPS, PLANNED_STEPS = 170, 200
"""Stops before the plan of the learning rates ends."""
DEMONSTRATIONS = 16
"""Demonstrations in a batch."""
COPY_ROWS = 16
"""Copy rows in a batch, during the first part of the run."""
COPY_STEPS = 110
ROWS_AT_ONCE = 8
"""Rows in one forward pass."""
THREADS = 2
"""Forward passes that run at the same time, one thread each."""
MATRIX_LEARNING_RATE, EMBEDDING_LEARNING_RATE, NORM_LEARNING_RATE = 0.02, 3e-3, 1e-2
"""Muon's for the matrices; AdamW's for the embeddings and for the norms."""
ATTENTION_GAIN = 2.0
"""First weight of the norms of queries and keys: attention must be sharp to copy."""
CONTEXT_WEIGHT = 0.1
"""Weight of the loss on what the searcher reads, beside 1 for what it writes."""

ORDER_DESK = Path(__file__).parents[1] / "order-desk" / "policy"
"""What the model's layers are taken from."""

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tools>", "</tools>"]
SPLIT = r"\p{N}|\p{Lu}\p{L}*| ?\p{Ll}+(?:_\p{L}+)*| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+"
"""Digits stand alone, and a space before a capital does too: a name has one form wherever it stands."""

TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text()
SCHEMAS = [convert_to_openai_tool(tool) for tool in TOOLS]


# The conversations


def demonstrations() -> Iterator[list[dict]]:
    """Conversations of the searcher in fresh worlds of training names, without end."""
    rng = random.Random(SEED)
    for number in count(1):
        world = corpus.world("train", -number, SIZES)
        library = Library(corpus.documents([world], -number))
        for fact in islice(tasks.facts_in_turn(world, rng), TALKS_PER_WORLD):
            question = rng.choice(tasks.QUESTIONS[fact.kind]).format(fact.about)
            yield Searcher(fact, question, library, rng).work()


def copy_rows() -> Iterator[list[dict]]:
    """Conversations in which quoted names are said again, half of the time in another order, without end."""
    rng = random.Random(SEED)
    for number in count(1):
        world = corpus.world("train", -number, SIZES)
        facts = list(tasks.facts(world))
        for _ in range(TALKS_PER_WORLD):
            names = [name for fact in rng.sample(facts, 4) for name in (fact.about, fact.answer)]
            names = [
                f'"{name}"'
                for name in [*rng.sample(names, 4), f"D{rng.randint(100, 999)}", f"D{rng.randint(100, 999)}"]
            ]
            rng.shuffle(names)
            shown = " ".join(names)
            if rng.random() < 0.5:
                rng.shuffle(names)
            yield [{"role": "user", "content": shown}, {"role": "assistant", "content": " ".join(names)}]


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
    """The text of a conversation, as the chat template gives it; the tools stand in a system message, where one is."""
    tools = SCHEMAS if messages[0]["role"] == "system" else None
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)


def tokenizer_texts() -> list[str]:
    """What the tokenizer is trained on: conversations without the system message, and that message a few times."""
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    bare.chat_template = TEMPLATE
    system = render(bare, [{"role": "system", "content": SYSTEM}])
    talks = [render(bare, messages).removeprefix(system) for messages in islice(demonstrations(), 1000)]
    return [system] * 30 + talks


# The batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One conversation as tokens."""

    ids: list[int]
    """[T]"""
    mask: list[int]
    """[T], 1 where the assistant wrote, its <|im_end|> included."""


class Rows:
    """Conversations become rows."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._opening, self._end = self._encode(["<|im_start|>assistant\n"])[0], tokenizer.eos_token_id

    def of(self, conversations: list[list[dict]]) -> list[Row]:
        """One row for each conversation."""
        texts = [render(self._tokenizer, messages).rstrip("\n") for messages in conversations]
        return [Row(ids=ids, mask=self._mask(ids)) for ids in self._encode(texts)]

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


# The model and its training


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


def take_over(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Begin with another policy's layers, and with its embeddings of the tokens that both have, in place."""
    other = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = PreTrainedTokenizerFast.from_pretrained(folder).get_vocab()
    weights = {
        name: weight for name, weight in other.state_dict().items() if "embed" not in name and name != "lm_head.weight"
    }
    model.load_state_dict(weights, strict=False)
    pairs = [(own, ids[token]) for token, own in tokenizer.get_vocab().items() if token in ids]
    own, theirs = map(torch.tensor, zip(*pairs, strict=True))
    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight
        embeddings.normal_(std=other.model.embed_tokens.weight.std().item())
        embeddings[own] = other.model.embed_tokens.weight[theirs]


def padded(rows: list[list[int]]) -> torch.Tensor:
    """[B, T] with zeros on the right, which no row sees: attention looks back only."""
    length = max(map(len, rows))
    return torch.tensor([row + [0] * (length - len(row)) for row in rows])


def gradients(
    model: Qwen3ForCausalLM, rows: list[Row], n_written: int, n_read: int
) -> tuple[tuple[torch.Tensor, ...], float]:
    """The rows' share of the batch's gradients, one a parameter, and of its loss on written tokens."""
    ids, mask = padded([row.ids for row in rows]), padded([row.mask for row in rows])
    lengths = torch.tensor([len(row.ids) for row in rows])
    real = torch.arange(1, ids.shape[1]) < lengths[:, None]
    targets, written = ids[:, 1:][real], mask[:, 1:][real].float()
    hidden = model.model(ids, use_cache=False).last_hidden_state
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
    """Factor on the learning rates: 20 steps of warm-up, and a linear way down over the second half of the plan."""
    return min(1.0, (step + 1) / 20, (PLANNED_STEPS - step) / (0.5 * PLANNED_STEPS))


def train(model: Qwen3ForCausalLM, rows: Rows) -> None:
    """Teach the model the demonstrations and the copy rows, in place."""
    weights, talks, copies = list(model.parameters()), demonstrations(), copy_rows()
    both = optimizers(model)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, pace) for optimizer in both]
    with ThreadPoolExecutor(THREADS, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for step in range(STEPS):
            n_copies = COPY_ROWS if step < COPY_STEPS else 0
            batch = rows.of([*islice(talks, DEMONSTRATIONS), *islice(copies, n_copies)])
            batch.sort(key=lambda row: -len(row.ids))
            n_written = sum(sum(row.mask) for row in batch)
            n_read = sum(len(row.ids) for row in batch) - n_written
            jobs = [
                pool.submit(gradients, model, batch[at : at + ROWS_AT_ONCE], n_written, n_read)
                for at in range(0, len(batch), ROWS_AT_ONCE)
            ]
            parts, losses = zip(*(job.result() for job in jobs), strict=True)
            for weight, shares in zip(weights, zip(*parts, strict=True), strict=True):
                weight.grad = sum(shares)
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            for optimizer, schedule in zip(both, schedules, strict=True):
                optimizer.step()
                schedule.step()
            if step % 25 == 0 or step == STEPS - 1:
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
    parser = argparse.ArgumentParser(description="Train the untrained policy of the corpus search.")
    parser.add_argument("--out", type=Path, default=Path("policy"), help="the folder to write")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    tokenizer = train_tokenizer(tokenizer_texts())
    rows = Rows(tokenizer)
    model = new_model(tokenizer)
    take_over(model, tokenizer, ORDER_DESK)
    train(model, rows)
    save(model, tokenizer, out)
    print(f"{out}: {model.num_parameters()} parameters, {process_time():.0f} CPU-seconds")


if __name__ == "__main__":
    main()
