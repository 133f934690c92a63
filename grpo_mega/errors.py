"""Errors that the user can correct. Each is one line per broken rule, which names the value, the rule, and the fix.

The command line prints the lines without a traceback and exits with code 2. Conditions that cannot happen are asserts
instead.
"""

import errno
from collections.abc import Iterable, Iterator

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
MAX_ERROR_CHARS = 600  # per line; longer lines repeat what they were given
# A disk that accepts no more data: full, beyond a quota or limit, read-only, or gone.
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE}


class UserError(Exception):
    """The base of all errors that the user can correct. The arguments are the broken rules."""

    @property
    def lines(self) -> list[str]:
        """Return one line per broken rule. A long line keeps its start, with the key, and its end, with the remedy."""
        return [shorten(" ".join(str(problem).split())) for problem in self.args]

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class ConfigError(UserError):
    """A config value that is unknown, malformed, or contradicts another."""


class PlanError(UserError):
    """A layout or batch arithmetic that cannot run."""


class WeightMappingError(UserError):
    """A checkpoint or model whose tensors do not match the family's table."""


class SyncError(UserError):
    """Weights in the engine differ from the weights that the trainer sent."""


class ResumeError(UserError):
    """The run cannot continue from a checkpoint."""


class RunFolderError(UserError):
    """A run's folder cannot be written any more, or is gone."""


class RewardError(UserError):
    """A reward function does not work on any sample."""


class WorkerError(UserError):
    """A worker process cannot start."""


class RefreshError(UserError):
    """A refresh of the reward model failed between two iterations."""


class NonFiniteError(UserError):
    """Losses or gradients stay infinite or NaN for several steps."""


class EngineError(UserError):
    """An engine died, hangs or refuses a request. The text names rank, phase and the server's log."""


class MismatchError(UserError):
    """Engine and trainer compute too different probabilities for the same tokens."""


class RunFailed(Exception):
    """A run that was started from Python has failed. Its ranks have reported why. `code` is their exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the run ended with exit code {code}; its lines above and the logs in its run_dir say why")
        self.code = code


def raise_all(problems: Iterable[str]) -> None:
    """Raise one ConfigError for all problems, and for the UserError that may end them, if there are any."""
    if lines := dict.fromkeys(with_error(problems)):
        raise ConfigError(*lines)


def with_error(problems: Iterable[str]) -> Iterator[str]:
    """Yield the problems, and the lines of the UserError that may end them."""
    try:
        yield from problems
    except UserError as error:
        yield from error.lines


def shorten(text: str) -> str:
    """Return a line of at most MAX_ERROR_CHARS characters: its start and its end, if it is longer."""
    half = MAX_ERROR_CHARS // 2 - 3
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[:half]} ... {text[-half:]}"
