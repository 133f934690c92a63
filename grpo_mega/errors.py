"""What a person can mend, each as an exception whose text is one line: what is wrong with its value, and what to do.

The command line prints the text without a traceback and exits with code 2 (`UserError`). Everything that cannot happen is an
assert instead.
"""


class UserError(Exception):
    """Base of the errors that the user can mend; the command line prints `str(error)` and exits with code 2."""


class ConfigError(UserError):
    """A config value that is unknown, malformed, or contradicts another."""


class PlanError(UserError):
    """A layout or batch arithmetic that cannot run."""


class WeightMappingError(UserError):
    """A checkpoint or model whose tensors do not match the family's table."""


class SyncError(UserError):
    """Weights that did not reach the engine as they left the trainer."""


class ResumeError(UserError):
    """A checkpoint from which the run cannot go on."""


class RewardError(UserError):
    """A reward function that does not work on any sample."""


class NonFiniteError(UserError):
    """Training that gives infinities or NaN step after step."""


class EngineError(UserError):
    """An engine that died, hangs or refuses; says rank, phase and the server's log."""


class MismatchError(UserError):
    """Engine and trainer that give the same tokens too different probabilities."""
