"""Every error that a user of rolloutctl can meet; the classes below say what each means.

::

    RolloutctlError
    ├── ConfigError
    │   ├── BusAddressError
    │   │   └── AddressInUse
    │   └── KeyFileError
    ├── CommandError
    │   └── SyncInProgress
    ├── CheckpointError
    ├── BusError
    │   ├── BusClosed
    │   ├── BusFaulted
    │   │   └── BusHeldUp
    │   ├── BusOverloaded
    │   ├── BusUnreachable
    │   ├── KeyRefused
    │   └── AgentsMissing
    ├── AgentError
    │   └── IdentityTaken
    ├── WireError
    ├── LogError
    │   ├── LogFull
    │   ├── LogCorrupt
    │   │   └── DecisionUnreadable
    │   └── LogLocked
    ├── ExtraMissing
    ├── ReplayDiffers
    ├── CommandFailed
    └── EngineError
        ├── RefusedError
        │   └── UnsupportedError
        └── UnansweredError

What happens in the fleet is data (`schemas.outcomes`). Exceptions are for mistakes of the caller, and for files and
sockets that can't be used. Each message says what was asked, what was found, what state that leaves and what to do.
"""


class RolloutctlError(Exception):
    """Root of all errors of this project."""


class ConfigError(RolloutctlError, ValueError):
    """A value is wrong. The message names the key, the value and what is allowed."""


class BusAddressError(ConfigError):
    """The address can't be bound or dialled."""


class AddressInUse(BusAddressError):
    """Another process listens on the address."""


class KeyFileError(ConfigError):
    """A key file is missing or damaged, or others than its owner can read the secret in it."""


class CommandError(RolloutctlError):
    """The command was refused before anything was published."""


class SyncInProgress(CommandError):
    """Another weight sync has not ended; two at once would split the fleet."""


class CheckpointError(RolloutctlError):
    """A checkpoint can't be used: it is missing, cut off, in an unsafe format, or of another model."""


class BusError(RolloutctlError):
    """The bus can't do what was asked."""


class BusClosed(BusError):
    """The bus is not open."""


class BusFaulted(BusError):
    """The log can't be written, or took no record in time; or the bus itself has failed. The message says which."""


class BusHeldUp(BusFaulted):
    """Nothing is known of the fleet while the log takes no record. The bus goes on with it, and ends after a lease."""


class BusOverloaded(BusError):
    """Too many commands are open at once; `queue` in BusConfig is the limit."""


class BusUnreachable(BusError):
    """Nothing answered at the address in time."""


class KeyRefused(BusError):
    """The bus and this side don't let each other in: a key is missing, unknown, revoked, or another bus's."""


class AgentsMissing(BusError):
    """Fewer agents than expected were ready in time. The message names those present and what they wait for."""


class AgentError(RolloutctlError):
    """The agent can't start or continue."""


class IdentityTaken(AgentError):
    """The bus refuses this agent for good: a live one has its place, it was retired, or its key may not be there."""


class WireError(RolloutctlError):
    """A peer sent bytes that are not a message of this protocol."""


class LogError(RolloutctlError):
    """A log or journal file can't be used."""


class LogFull(LogError):
    """No space is left for the file. Everything recorded before stays readable."""


class LogCorrupt(LogError):
    """The file is damaged.

    Args:
        message: What is damaged.
        position: First record that is damaged, counted from 1; the records before it are good. 0 if the header is
            damaged.
    """

    def __init__(self, message: str, position: int = 0) -> None:
        super().__init__(message)
        self.position = position


class DecisionUnreadable(LogCorrupt):
    """What an agent sent for the log is no decision that this version can read. The file is intact, the rest too."""


class LogLocked(LogError):
    """Another process is writing this file, or keeps it locked."""


class ExtraMissing(RolloutctlError):
    """A package is missing that one of rolloutctl's extras installs.

    Args:
        needs: What needs which package, as the beginning of a sentence.
        extra: The extra.
    """

    def __init__(self, needs: str, extra: str) -> None:
        super().__init__(f"{needs}: install rolloutctl with its extra `{extra}` (docs/installation.md)")


class ReplayDiffers(RolloutctlError):
    """A machine decides differently on a recorded event than the log says."""


class CommandFailed(RolloutctlError):
    """At least one agent failed, or did not answer by the deadline."""


class EngineError(RolloutctlError):
    """An engine failed a call, and may have been touched. Backends raise it; the agent answers `engine_error`."""


class RefusedError(EngineError):
    """The engine, or its backend, refused a call in the present state, or was not reached. Nothing was touched."""


class UnsupportedError(RefusedError):
    """The engine can't do what is asked, or not as it was launched. It was not called."""


class UnansweredError(EngineError):
    """The engine was called and did not answer. It may or may not have carried the call out."""
