"""export/: a policy becomes a folder that other people load, and what was recorded is held against it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from agenttrain.export.exporting import export_check
from agenttrain.export.policy_source import find_policy
from agenttrain.folder_hash import policy_hash
from agenttrain.promotion.ledger import Ledger
from agenttrain.run_folder import RunFolder
from agenttrain.serving.served_policy import source_of_run
from agenttrain.testing import tiny_model, toy_project

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step with three held-out tasks; not to be changed."""
    return toy_project(tmp_path_factory.mktemp("export"), n_tasks=9).fit().folder.path


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, of an adapter of rank 4."""
    project = toy_project(tmp_path_factory.mktemp("export-lora"), n_tasks=9)
    return project.fit(trainer={"adapter": "lora", "lora_rank": 4, "learning_rate": 0.1}).folder.path


@pytest.fixture
def run(fitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A copy of the run under runs/ of the current directory."""
    monkeypatch.chdir(tmp_path)
    return RunFolder(Path(shutil.copytree(fitted, tmp_path / "runs" / fitted.name)))


@pytest.fixture
def lora(adapted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """The same of the run with an adapter."""
    monkeypatch.chdir(tmp_path)
    return RunFolder(Path(shutil.copytree(adapted, tmp_path / "runs" / adapted.name)))


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change weights of a folder."""
    weights = load_file(folder / WEIGHTS)
    edit(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def change_one(weights: dict[str, torch.Tensor], *, row: int, by: float) -> None:
    weights["model.embed_tokens.weight"][row, 0] += by


def test_fit_notes_the_bytes_that_it_exported(run: RunFolder) -> None:
    report = run.read_report()
    assert report is not None
    assert report["policy"]["hash"] == policy_hash(run.policy)
    assert sorted(report["policy"]["files"]) == sorted(file.name for file in run.policy.iterdir())


def test_an_exported_policy_is_loaded_and_answers_as_it_was_measured(run: RunFolder, command: Any) -> None:
    """By transformers, and by an engine that is named; what it says of itself is what was checked."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = command("export", run.id, "--engine", "local", "--set", "engine.process=shared", "--json")
    assert done.code == 0, done.err
    said, folder = done.json, run.path.parent.parent / "exports" / run.id
    assert (said["folder"], said["run_id"], said["form"], said["verified"]) == (str(folder), run.id, "merged", True)
    assert said["source"] == "turns of the run's held-out evaluation, which was greedy"
    assert said["weights"] == policy_hash(run.policy)
    assert [(each["by"], each["n_turns"], each["n_same_turns"]) for each in said["agreements"]] == [
        ("transformers", 3, 3),
        ("local", 3, 3),
    ]
    assert all(each["max_gap"] < 1e-5 for each in said["agreements"])
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "chat_template.jinja",
        "config.json",
        "fixed_set.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (folder / WEIGHTS).read_bytes() == (run.policy / WEIGHTS).read_bytes()
    turn = json.loads((folder / "fixed_set.json").read_text())["turns"][0]
    model = AutoModelForCausalLM.from_pretrained(folder)
    answer = model.generate(torch.tensor([turn["prompt_ids"]]), do_sample=False, max_new_tokens=6)
    assert answer[0, len(turn["prompt_ids"]) :].tolist() == turn["response_ids"]
    assert AutoTokenizer.from_pretrained(folder).decode(turn["prompt_ids"]).startswith("<|im_start|>user\n")
    assert command("export", "--check", folder).out.endswith(f"Verified: {folder}\n")
    assert f"# {run.id}\n" in (folder / "README.md").read_text()


@pytest.mark.slow
def test_the_order_desks_policy_is_exported_after_a_fit(project: Any, command: Any) -> None:
    """A base in half precision, with slices: the card has them, and the answers are those of the evaluation."""
    assert command("fit", "graph.py").code == 0
    done = command("export", project.run.id, "--json")
    assert done.code == 0, done.err
    (agreed,) = done.json["agreements"]
    assert (agreed["n_turns"], agreed["n_same_turns"]) == (3, 3)
    assert agreed["max_gap"] < 1e-4
    card = (Path(done.json["folder"]) / "README.md").read_text()
    assert "| kind = even | 2 |" in card
    assert "2 steps of grpo by the local trainer on the local engine" in card


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft 0.21 on transformers 5.24
def test_an_adapter_is_exported_alone_with_its_base_named(lora: RunFolder, command: Any, tmp_path: Path) -> None:
    """peft and transformers load it; with another base it is another policy, and the check says so."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "out"
    done = command("export", lora.id, "--form", "adapter", "--to", folder)
    assert done.code == 0, done.err
    assert not (folder / "config.json").exists()
    assert not (folder / WEIGHTS).exists()
    base = find_policy(lora.id, runs=lora.path.parent).base
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == base
    fixed = json.loads((folder / "fixed_set.json").read_text())
    assert (fixed["form"], fixed["base"]) == ("adapter", base)
    turn = fixed["turns"][0]
    for loaded in (AutoPeftModelForCausalLM, AutoModelForCausalLM):
        model = loaded.from_pretrained(folder)
        answer = model.generate(input_ids=torch.tensor([turn["prompt_ids"]]), do_sample=False, max_new_tokens=6)
        assert answer[0, len(turn["prompt_ids"]) :].tolist() == turn["response_ids"]

    other = tiny_model(tmp_path / "other", seed=1)
    done = command("export", "--check", folder, "--base", other)
    assert done.code == 1
    assert "differs: transformers gives " in done.err
    assert "apart in log probability" in done.err
    done = command("export", "--check", folder, "--engine", "local", "--set", "engine.process=shared")
    assert done.code == 2
    assert "Engine local samples with no adapter beside a base." in done.err


def test_a_run_without_an_adapter_has_none_to_export(run: RunFolder, command: Any) -> None:
    done = command("export", run.id, "--form", "adapter")
    assert done.code == 2
    assert "holds no adapter/: all of its weights were trained. Export it without --form adapter" in done.err


@pytest.mark.slow
def test_the_merged_form_of_an_adapter_is_the_same_policy(lora: RunFolder, command: Any) -> None:
    done = command("export", lora.policy, "--json")
    assert done.code == 0, done.err
    assert (done.json["run_id"], done.json["form"]) == (lora.id, "merged")
    assert not (Path(done.json["folder"]) / "adapter").exists()


def test_a_changed_policy_is_not_exported(run: RunFolder, command: Any) -> None:
    change(run.policy, lambda weights: change_one(weights, row=319, by=1e-3))
    done = command("export", run.id, "--json")
    assert done.code == 1
    assert f"policy/ of {run.id} has hash" in done.json["error"]["message"]
    assert "model.safetensors (has other bytes)" in done.json["error"]["message"]
    assert not (run.path.parent.parent / "exports" / run.id).exists()


def test_one_changed_weight_fails_the_check(run: RunFolder) -> None:
    """That of a token which no turn has shows in the bytes alone; that of one which is read shows in the answers."""
    whole = export_check(run)
    assert (whole.passed, whole.hash_same, whole.n_turns, whole.n_same_tokens) == (True, True, 3, 3)
    assert whole.max_gap is not None
    assert whole.max_gap < 1e-5

    change(run.policy, lambda weights: change_one(weights, row=319, by=1e-6))
    unseen = export_check(run)
    assert (unseen.passed, unseen.hash_same, unseen.n_same_tokens) == (False, False, 3)
    assert unseen.max_gap is not None
    assert unseen.max_gap < 1e-5
    assert "model.safetensors (has other bytes)." in unseen.why

    change(run.policy, lambda weights: change_one(weights, row=1, by=2.0))
    seen = export_check(run)
    assert (seen.passed, seen.hash_same) == (False, False)
    assert seen.max_gap is not None
    assert seen.max_gap > 1e-3
    assert "toy-6, turn 0: " in seen.why


def test_a_noted_hash_does_not_make_other_answers_right(run: RunFolder) -> None:
    """Whoever changes report.json too is told by what was recorded."""
    change(run.policy, lambda weights: change_one(weights, row=1, by=2.0))
    report = run.read_report()
    assert report is not None
    report["policy"]["hash"] = policy_hash(run.policy)
    run.report_json.write_text(json.dumps(report))
    seen = export_check(run)
    assert (seen.passed, seen.hash_same) == (False, True)
    assert seen.why.startswith("toy-6, turn 0: ")


def test_weights_that_are_gone_or_missing_in_part_fail_the_check(run: RunFolder) -> None:
    """transformers would fill what is missing with random numbers."""
    change(run.policy, lambda weights: weights.pop("model.norm.weight"))  # type: ignore[arg-type]
    seen = export_check(run)
    assert (seen.passed, seen.n_turns, seen.max_gap) == (False, 0, None)
    assert "lacks 1 of the model's weights, model.norm.weight among them" in seen.why
    (run.policy / WEIGHTS).unlink()
    seen = export_check(run)
    assert "model.safetensors (is gone)" in seen.why
    assert not seen.passed


def test_a_changed_template_fails_both_checks(run: RunFolder, command: Any, tmp_path: Path) -> None:
    """Other prompts are another policy, whatever the weights are."""
    folder = tmp_path / "out"
    assert command("export", run.id, "--to", folder).code == 0
    for template in (folder / "chat_template.jinja", run.policy / "chat_template.jinja"):
        template.write_text(template.read_text().replace("assistant", "agent"))
    done = command("export", "--check", folder, "--json")
    assert done.code == 1
    assert done.json["verified"] is False
    assert f"{folder / 'chat_template.jinja'} has other bytes than were exported" in done.json["faults"][0]
    assert "and the policy was trained with default:" in done.json["faults"][1]
    seen = export_check(run)
    assert (seen.passed, seen.hash_same) == (False, False)
    assert "and the policy was trained with default:" in seen.why


def test_a_folder_that_was_changed_on_its_way_is_told_file_by_file(
    run: RunFolder, command: Any, tmp_path: Path
) -> None:
    """Files that a hub puts beside it change nothing."""
    folder = tmp_path / "out"
    assert command("export", run.id, "--to", folder).code == 0
    (folder / ".gitattributes").write_text("*.safetensors lfs\n")
    (folder / "README.md").write_text("mine")
    assert command("export", "--check", folder).code == 0
    change(folder, lambda weights: change_one(weights, row=1, by=2.0))
    (folder / "generation_config.json").unlink()
    (folder / "modeling.py").write_text("")
    done = command("export", "--check", folder)
    assert done.code == 1
    for said in (
        "generation_config.json is gone: SHA-256 none in place of",
        "model.safetensors has other bytes than were exported: SHA-256",
        "modeling.py was not exported.",
        "differs: transformers gives ",
    ):
        assert said in done.err
    (folder / WEIGHTS).write_bytes(b"cut")
    done = command("export", "--check", folder)
    assert done.code == 1
    assert "generation_config.json is gone" in done.err
    assert f"differs: transformers can't load {folder} as a causal language model" in done.err


@pytest.mark.slow
def test_a_folder_of_somebody_elses_is_neither_replaced_nor_checked(
    run: RunFolder, command: Any, tmp_path: Path
) -> None:
    """An earlier export is replaced, and one that fails leaves it as it stands."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years")
    done = command("export", run.id, "--to", folder)
    assert done.code == 2
    assert f"{folder} holds something that agenttrain did not export" in done.err
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]
    assert "is no folder that agenttrain exported" in command("export", "--check", folder).err
    assert f"PromotionError: {tmp_path / 'no'} isn't there." in command("export", "--check", tmp_path / "no").err

    (folder / "thesis.txt").unlink()
    assert command("export", run.id, "--to", folder).code == 0
    (folder / "old").write_text("of the earlier one")
    assert command("export", run.id, "--to", folder).code == 0
    assert not (folder / "old").exists()
    before = policy_hash(folder)
    change(run.policy, lambda weights: change_one(weights, row=1, by=2.0))
    assert command("export", run.id, "--to", folder).code == 1
    assert policy_hash(folder) == before
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".part")]


class _Other:
    """An engine whose every answer is another token than the policy's."""

    name, max_length, weight_version = "other", 1024, 0

    def generate(self, prompt_ids: Any, sampling: Any, *, session: str) -> Any:
        from concurrent.futures import Future

        from agenttrain.records import Generation

        future: Future[Generation] = Future()
        future.set_result(Generation(token_ids=(5,), logprobs=(-1.0,), weight_versions=(0,), stop_reason="length"))
        return future

    def release(self, session: str) -> None: ...
    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


def test_an_engine_that_answers_otherwise_keeps_the_folder_from_its_place(run: RunFolder, tmp_path: Path) -> None:
    from agenttrain.export.exporting import Wanted, export_policy
    from agenttrain.markers import hookimpl
    from agenttrain.plugins import Plugins

    class Plugin:
        @hookimpl
        def agenttrain_register_engines(self, register: Any) -> None:
            register("other", lambda context: _Other())

    plugins = Plugins.load(only=None)
    plugins.add(Plugin(), "other")
    wanted = Wanted(plugins=plugins, engine="other")
    done = export_policy(find_policy(run.id, runs=run.path.parent), tmp_path / "out", wanted=wanted)
    (fault,) = done.faults
    assert fault.startswith("other gives 0 of 3 turns again token by token; log probabilities within 0.0e+00. toy-6, ")
    assert "token 0 is 5 in place of " in fault
    assert not (tmp_path / "out").exists()


def test_what_a_base_samples_by_is_left_out(run: RunFolder, command: Any) -> None:
    """`generate` and servers would apply a penalty unasked, and the policy was measured without."""
    path = run.policy / "generation_config.json"
    given = {"eos_token_id": 7, "repetition_penalty": 1.9, "top_k": 3, "do_sample": True, "temperature": 0.4}
    path.write_text(json.dumps(given))
    done = command(
        "export",
        run.policy.rename(run.path.parent / "alone"),
        "--to",
        "out",
        "--turns",
        1,
        "--set",
        "engine.process=shared",
    )
    assert done.code == 0, done.err
    assert json.loads(Path("out/generation_config.json").read_text()) == {"eos_token_id": [2, 7]}


@pytest.mark.slow
def test_a_policy_of_no_run_answers_prompts_of_no_task(tmp_path: Path, command: Any, monkeypatch: Any) -> None:
    """The engine answers them when it is exported; two tokens with equal weights are a near tie, which is counted."""
    monkeypatch.chdir(tmp_path)
    model = tiny_model(tmp_path / "model")
    done = command("export", model, "--turns", 2, "--set", "engine.process=shared", "--json")
    assert done.code == 0, done.err
    assert (done.json["run_id"], done.json["turns"]) == (None, 2)
    assert done.json["source"] == "prompts of no task, answered greedily by the local engine"
    first = json.loads((tmp_path / "exports/model/fixed_set.json").read_text())["turns"][0]["response_ids"][0]

    change(
        model,
        lambda weights: weights["model.embed_tokens.weight"][319].copy_(weights["model.embed_tokens.weight"][first]),
    )
    assert command("export", model, "--turns", 2, "--set", "engine.process=shared").code == 0
    path = tmp_path / "exports/model/fixed_set.json"
    fixed = json.loads(path.read_text())
    fixed["turns"][0]["response_ids"][0] = 319
    path.write_text(json.dumps(fixed))
    done = command("export", "--check", "exports/model", "--json")
    assert done.code == 0, done.json
    (agreed,) = done.json["agreements"]
    assert (agreed["n_turns"], agreed["n_same_turns"], agreed["n_near_ties"]) == (2, 1, 1)


@pytest.mark.slow
def test_where_the_evaluation_was_sampled_the_engine_answers_its_prompts(
    tmp_path: Path, command: Any, monkeypatch: Any
) -> None:
    """And the recorded turns are held against the weights at the temperature that they were sampled at."""
    monkeypatch.chdir(tmp_path)
    run = toy_project(tmp_path, n_tasks=6).fit(eval={"temperature": 0.7}).folder
    seen = export_check(run)
    assert (seen.passed, seen.n_turns, seen.n_same_tokens) == (True, 2, 2)
    done = command("export", run.path, "--json")
    assert done.code == 0, done.err
    assert done.json["source"] == (
        "prompts of the run's held-out evaluation, which was sampled, answered greedily by the local engine"
    )
    assert "evaluated sampled at 0.7" in (tmp_path / "exports" / run.id / "README.md").read_text()


@pytest.mark.slow
def test_promoted_names_what_the_ledger_says(run: RunFolder, command: Any) -> None:
    """And the card says since when; without a ledger it is an error that says what begins one."""
    done = command("export", "promoted")
    assert done.code == 2
    assert "Nothing was promoted here: " in done.err
    ledger = Ledger(Path("promotions/desk"))
    ledger.append(
        "promoted",
        graph="graph.py:graph",
        run_id=run.id,
        policy=run.policy,
        weights=policy_hash(run.policy),
        why="all rules hold",
    )
    done = command("export", "promoted:desk", "--json")
    assert done.code == 0, done.err
    assert done.json["run_id"] == run.id
    assert "promoted in the place of `base`, all rules hold" in (Path(done.json["folder"]) / "README.md").read_text()
    assert "/promotions: desk. Say which: promoted:NAME." in command("export", "promoted:desc").err
    assert (
        find_policy("promotions/desk", runs=Path("runs")).run == find_policy("promoted", runs=Path("runs")).run == run
    )
    change(run.policy, lambda weights: change_one(weights, row=319, by=1e-6))
    assert "is not as it was accepted: its hash is " in command("export", "promoted").err


def test_an_exported_folder_is_served_by_the_renderer_it_was_trained_with(run: RunFolder, command: Any) -> None:
    """Family and history are read from it; a template of somebody else's is refused."""
    assert command("export", run.id, "--to", "out").code == 0
    path = Path("out/fixed_set.json")
    path.write_text(path.read_text().replace('"history": "keep"', '"history": "template"'))
    source = source_of_run("out")
    assert (source.config.renderer.family, source.config.renderer.history) == ("default", "template")
    assert source.renderer == run.read_config()[1]["hashes"]["renderer"]


def test_a_run_that_has_no_policy_is_told(run: RunFolder, command: Any) -> None:
    run.report_json.unlink()
    assert f"Run {run.id} has no report of a fit yet." in command("export", run.id).err
    shutil.rmtree(run.policy)
    done = command("export", run.id)
    assert done.code == 2
    assert f"Run {run.id} holds no policy: it has not ended, or was an evaluation." in done.err


def test_a_full_disk_is_told_before_anything_is_copied(run: RunFolder, command: Any, monkeypatch: Any) -> None:
    full = shutil._ntuple_diskusage(10, 9, 1)  # type: ignore[attr-defined]
    monkeypatch.setattr("agenttrain.export.exported_files.shutil.disk_usage", lambda path: full)
    done = command("export", run.id)
    assert done.code == 1
    assert "has 0 MiB free, and the exported folder takes 0 MiB. Make room" in done.err
