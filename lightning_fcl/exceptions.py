"""Errors a caller may want to catch, and the warning of a method that did nothing."""


class FCLError(Exception):
    """Parent of all errors that this library raises on purpose."""


class ParamMismatchError(FCLError, ValueError):
    """Two trees of parameters do not hold the same names, shapes or dtypes."""


class MisconfigurationError(FCLError, ValueError):
    """Arguments that cannot work together, found before any work starts."""


class ClientFailedError(FCLError, RuntimeError):
    """A client's job failed and the policy is to raise."""


class EmptyRoundError(FCLError, RuntimeError):
    """Too many rounds in a row ended without a usable update."""


class NoTrainingError(FCLError, RuntimeError):
    """A client's job finished without a single optimiser step."""


class CheckpointError(FCLError, RuntimeError):
    """A checkpoint is missing, damaged or of another version."""


class ResumeMismatchError(CheckpointError):
    """A run is resumed with another configuration than it was started with."""


class DatasetError(FCLError, ValueError):
    """A dataset cannot be made into a stream as asked."""


class MissingExtraError(FCLError, ImportError):
    """An optional package is needed; the message holds the pip line."""


class NoEffectWarning(UserWarning):
    """A method was switched on for a whole task and changed nothing."""
