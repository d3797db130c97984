"""Every error agenttrain raises.

    AgenttrainError
    ├── ConfigError          (ValueError)   a key, flag or value that can't be used
    ├── GraphError           (TypeError)    graph.py holds no graph that can be run
    │   ├── RoleError        (ValueError)   a model call nobody said who answers
    │   ├── EscapeError      (RuntimeError) a model call got past the gate while rollouts run
    │   └── EffectError      (RuntimeError) a tool that may not run in a rollout
    ├── TaskError            (ValueError)   a row of the task file
    ├── ModelError           (ValueError)   the policy's folder, tokenizer or chat template
    │   └── TemplateError                   a chat template that doesn't only append
    ├── PluginError          (LookupError)  a plugin that is missing, broken or misspelt
    ├── CaptureError         (RuntimeError) a model call that could not be recorded whole
    ├── WorldError           (RuntimeError) a setup= or on_interrupt= that raised
    ├── SandboxError         (RuntimeError) a sandbox that can't be made, or failed by itself
    ├── RewardError          (RuntimeError) a verifier that raised or answered with no number
    ├── SampleError          (ValueError)   ids, mask and log probabilities that don't fit
    ├── EngineError          (RuntimeError) an engine that answers nothing
    │   └── NoRoomError      (ValueError)   a prompt that fills all the positions the policy has
    ├── TrainerError         (RuntimeError) an update that can't be made
    ├── RunError             (OSError)      the run folder: missing, unwritable, full, damaged
    └── PromotionError       (RuntimeError) what serves, or may: a damaged ledger, a policy that is not as promoted
    PolicyFailure            (Exception)    raised by a user's tool or verifier: the policy did wrong
    RolloutStop              (BaseException) raised inside the graph to end a rollout; never leaves agenttrain

A message says where and what, what was seen against what is accepted, and the next step. All are picklable.
"""

from __future__ import annotations


class AgenttrainError(Exception):
    """The root: catching it catches every error of ours, and nothing else."""


class ConfigError(AgenttrainError, ValueError):
    """A key, flag or value that can't be used."""


class GraphError(AgenttrainError, TypeError):
    """graph.py holds no graph that can be run."""


class RoleError(GraphError, ValueError):
    """A model call of which nobody said who answers it, or a selector that matches nothing."""


class EscapeError(GraphError, RuntimeError):
    """A model call, or one of an external tool, got past the gate while rollouts run."""


class EffectError(GraphError, RuntimeError):
    """A tool that may not run in a rollout, or a stand-in that doesn't take its arguments."""


class TaskError(AgenttrainError, ValueError):
    """A row of the task file that can't be used."""


class ModelError(AgenttrainError, ValueError):
    """The policy's folder, tokenizer or chat template can't be used."""


class TemplateError(ModelError):
    """A chat template writes earlier messages otherwise when later ones come: sampled ids would not stay."""


class PluginError(AgenttrainError, LookupError):
    """A plugin that is missing, broken or misspelt."""


class CaptureError(AgenttrainError, RuntimeError):
    """A model call that could not be recorded whole."""


class WorldError(AgenttrainError, RuntimeError):
    """What stands around the graph raised: `setup=`, or `on_interrupt=` in a human's place."""


class SandboxError(AgenttrainError, RuntimeError):
    """A sandbox that can't be made as it was asked for, or that failed by itself."""


class RewardError(AgenttrainError, RuntimeError):
    """A verifier that raised, hung, or answered with something that is no number."""


class SampleError(AgenttrainError, ValueError):
    """Ids, mask and log probabilities that don't fit together."""


class EngineError(AgenttrainError, RuntimeError):
    """An engine that answers nothing though there was room."""


class NoRoomError(EngineError, ValueError):
    """A prompt that fills all the positions of the policy: no answer fits behind it."""


class TrainerError(AgenttrainError, RuntimeError):
    """An update that can't be made."""


class RunError(AgenttrainError, OSError):
    """The run folder is missing, unwritable, full or damaged."""


class PromotionError(AgenttrainError, RuntimeError):
    """The ledger is damaged, or a policy is not what was promoted, or there is nothing to go back to."""


class PolicyFailure(Exception):
    """Raise it in a tool or verifier when the policy itself did wrong: the rollout ends as policy_failure."""


class RolloutStop(BaseException):
    """Ends a rollout from inside the graph; a BaseException, so that an agent's `except Exception` lets it pass."""
