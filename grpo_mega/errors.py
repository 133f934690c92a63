"""Errors that the user can correct: each text is one line that names the value, the rule that it breaks, and the fix.

The command line prints the text without a traceback and exits with code 2. Conditions that cannot happen are asserts instead.
"""

import errno

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
# Of a disk that takes nothing more: full, past a quota or a limit, read-only, or gone.
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE}


class UserError(Exception):
    """The base of all errors that the user can correct."""


class ConfigError(UserError):
    """A config value that is unknown, malformed, or contradicts another."""


class PlanError(UserError):
    """A layout or batch arithmetic that cannot run."""


class WeightMappingError(UserError):
    """A checkpoint or model whose tensors do not match the family's table."""


class SyncError(UserError):
    """Weights in the engine that differ from those that the trainer sent."""


class ResumeError(UserError):
    """A checkpoint from which the run cannot go on."""


class RunFolderError(UserError):
    """A run's folder that cannot be written any more, or is gone."""


class RewardError(UserError):
    """A reward function that does not work on any sample."""


class RefreshError(UserError):
    """A refresh of the reward model that failed between two iterations."""


class NonFiniteError(UserError):
    """Losses or gradients that stay infinite or NaN for several steps."""


class EngineError(UserError):
    """An engine that died, hangs or refuses a request; the text names rank, phase and the server's log."""


class MismatchError(UserError):
    """Engine and trainer that give the same tokens too different probabilities."""
