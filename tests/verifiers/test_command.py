from __future__ import annotations

import pytest

from agenttrain import SandboxLimits, Task
from agenttrain.errors import RewardError
from agenttrain.sandbox_protocol import SandboxFile
from agenttrain.verifiers import command_exits

INITIAL = {"shop.py": "print(1 - 2)\n", "check.py": "raise SystemExit(1)\n"}
CHECK = (
    "import subprocess, sys\n"
    "said = subprocess.run([sys.executable, 'shop.py'], capture_output=True, text=True).stdout\n"
    "print('said', said.strip())\n"
    "sys.exit(said != '3\\n')\n"
)


def test_a_hidden_script_judges_what_the_agents_program_prints(judged):
    """Exit code 0 is success; the hidden script lies over the initial one of its name."""
    verifier = command_exits(["python", "check.py"], files={"check.py": CHECK})

    right, wrong = judged(verifier, INITIAL, {"shop.py": "print(3)\n"}), judged(verifier, INITIAL)

    assert (right["score"], right["success"], right["comment"]) == (1.0, True, "1 of 1 pass")
    assert right["evidence"]["output"] == "said 3"
    assert wrong["score"] == 0.0
    assert wrong["evidence"]["checks"] == [
        {"name": "python check.py", "passed": False, "reason": "ended with exit code 1, and 0 is expected"}
    ]


def test_the_evidence_tells_what_was_judged_and_what_was_left_behind(judged):
    """The agent's own changed and new files; nothing is told of what it left alone, or of caches."""
    verifier = command_exits(["true"], include=["shop.py"])
    written = {"shop.py": "print(3)\n", "notes.txt": "done", "shop2.py": "print(3)\n", "__pycache__/a.pyc": "x"}

    answer, untouched = judged(verifier, INITIAL, written), judged(verifier, INITIAL)

    assert answer["evidence"]["submitted"] == ["shop.py"]
    assert answer["evidence"]["left_behind"] == ["notes.txt", "shop2.py"]
    assert list(untouched["evidence"]) == ["exit_code", "output", "checks", "tampering"]


def test_the_evidence_names_twenty_paths_and_counts_the_rest(judged):
    answer = judged(command_exits(["true"]), INITIAL, {f"{n:02}.py": "" for n in range(23)})

    assert answer["evidence"]["submitted"] == [*(f"{n:02}.py" for n in range(20)), "and 3 more"]


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("check.py", "raise SystemExit(0)\n"),
        ("sitecustomize.py", "import os; os._exit(0)\n"),
        ("subprocess.py", "import os; os._exit(0)\n"),
        ("python", "#!/bin/sh\nexit 0\n"),
        ("shop.py", "import os; os.kill(os.getppid(), 9)\n"),
        ("shop.py", "open('check.py', 'w').write('raise SystemExit(0)')\n"),
    ],
)
def test_attacks_on_the_command_gain_nothing(judged, path, content):
    """Whatever is put in its way, wrong code is wrong."""
    answer = judged(command_exits(["python", "check.py"], files={"check.py": CHECK}), INITIAL, {path: content})

    assert answer["score"] == 0.0
    assert len(answer["evidence"]["tampering"]) == (0 if path == "shop.py" or path == "python" else 1)


def test_time_and_output_are_bounded(judged):
    """Endless work is the agent's failure, with the limit's name; output is kept to its end."""
    verifier = command_exits(["python", "check.py"], files={"check.py": CHECK})

    answer = judged(verifier, INITIAL, {"shop.py": "while True: print('x' * 999)\n"}, limits=SandboxLimits(seconds=0.5))

    assert answer["score"] == 0.0
    assert answer["evidence"]["exit_code"] is None
    assert answer["evidence"]["checks"][0]["reason"] == "was ended by its limit of seconds, and 0 is expected"


def test_another_exit_code_may_be_expected_and_files_may_differ_by_task(judged):
    """expect= and functions of the task."""
    verifier = command_exits(
        lambda task: ["sh", f"{task.id}.sh"], files=lambda task: {f"{task.id}.sh": "exit 7\n"}, expect=7
    )

    assert judged(verifier, INITIAL)["score"] == 1.0


def test_a_command_that_is_not_there_is_the_environments_failure(judged):
    """A RewardError that says what a command may be."""
    with pytest.raises(RewardError, match=r"can't run \['nowhere'\]: There is no program 'nowhere'"):
        judged(command_exits(["nowhere"]), INITIAL)


@pytest.mark.parametrize("content", ["#!/nowhere\n", None])
def test_an_initial_program_that_the_agent_broke_is_its_failure(judged, content):
    """No environment failure, which would be tried again; the same program as it stood at first is one."""
    runs = SandboxFile(data=b"#!/bin/sh\nexit 0\n", executable=True)
    initial = {"shop.py": runs, "check.py": SandboxFile(data=b"#!/nowhere\n", executable=True)}
    with pytest.raises(RewardError, match=r"can't run \['./check.py'\]"):
        judged(command_exits(["./check.py"]), initial)

    answer = judged(command_exits(["./shop.py"]), initial, {"shop.py": content})

    assert (answer["score"], answer["success"]) == (0.0, False)
    assert answer["evidence"]["checks"][0]["reason"].startswith("There is no program './shop.py'")


def test_a_submission_that_fits_in_no_judging_sandbox_is_not_taken(judged):
    """Right code, and 6 MiB beside it where 4 are allowed: else it would end as the environment's failure."""
    verifier = command_exits(["python", "check.py"], files={"check.py": CHECK}, limits=SandboxLimits(disk_mib=4))
    large = {f"m{n}.py": "#" * (1 << 20) for n in range(6)}

    answer = judged(verifier, INITIAL, {"shop.py": "print(3)\n", **large})

    assert answer["score"] == 0.0
    assert answer["evidence"]["tampering"][0].startswith("the submission can't be laid in a judging sandbox")


def test_the_folder_of_hidden_files_begins_at_the_calling_file(judged):
    """Tests and graph.py stand in other folders than the current one; none there is an error with the path."""
    with pytest.raises(RewardError, match=r"hidden files from .*/tests/verifiers/nowhere, and there are none"):
        judged(command_exits(["true"], folder="nowhere"), INITIAL)


def test_a_hidden_path_that_leads_out_is_refused(judged):
    """Before anything runs."""
    with pytest.raises(RewardError, match=r"the hidden file '../x'"):
        judged(command_exits(["true"], files={"../x": ""}), INITIAL)


def test_without_a_sandbox_it_says_what_to_write():
    """As the others do."""
    with pytest.raises(RewardError, match="command_exits judges what an agent left in its sandbox"):
        command_exits(["true"])(task=Task(id="a", input={}), sandbox=None)
