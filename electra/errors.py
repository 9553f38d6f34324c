"""Mistakes a user can mend. The command line prints their one sentence and exits with code 2."""


class ConfigError(ValueError):
    """A setting that cannot be: says what came, what is allowed, what to do."""


class DataError(ValueError):
    """A file or folder that cannot be used: says which, why, what to do."""


class TrainingError(ValueError):
    """A run that cannot go on: says at which step, why, and what is left of it."""
