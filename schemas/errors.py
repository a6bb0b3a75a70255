"""Every error a user of rolloutctl can meet.

    RolloutctlError
    ├── ConfigError             an argument, option or file is wrong; nothing was sent
    │   └── BusAddressError     the address can't be used
    │       └── AddressInUse    somebody else listens there
    ├── CommandError            the command can't be issued as asked; nothing was sent
    │   └── SyncInProgress      one weight sync runs already
    ├── CheckpointError         a checkpoint is missing, cut off, or of another model
    ├── BusError                the bus itself
    │   ├── BusClosed           it was closed, or never opened
    │   ├── BusFaulted          it can no longer record, so it no longer publishes
    │   ├── BusOverloaded       the bounded queue towards the bus is full
    │   ├── BusUnreachable      nobody answered at that address
    │   └── AgentsMissing       the fleet was not complete in time
    ├── AgentError              an agent can't start or go on
    │   └── IdentityTaken       another live agent holds this replica and node rank
    ├── WireError               a peer sent bytes that are not a message
    ├── LogError                a log or journal file
    │   ├── LogFull             no space: what was recorded before stays readable
    │   ├── LogCorrupt          damage: says where, and what is readable before it
    │   └── LogLocked           another process writes this file
    ├── ReplayDiffers           a replayed decision is not the recorded one
    ├── CommandFailed           `report.raise_for_failures()`: some agents failed or did not answer
    └── EngineError             raised by an engine adapter; becomes `failed(...)` in an outcome
        └── UnsupportedError    the engine was not called: it can't do what is asked

What happens in the fleet is data (`schemas.outcomes`); exceptions are for the caller's own faults and for files and
sockets that can't be used. Every text says what was asked, what was seen, what holds now and what to do.
"""


class RolloutctlError(Exception):
    """Root of all errors of this project."""


class ConfigError(RolloutctlError, ValueError):
    """A value is wrong. The text names the key, the value and what is allowed."""


class BusAddressError(ConfigError):
    """The address is not one that can be bound or dialled."""


class AddressInUse(BusAddressError):
    """Another process listens on the address."""


class CommandError(RolloutctlError):
    """The command was refused before anything was published."""


class SyncInProgress(CommandError):
    """A weight sync is running; two at once would split the fleet."""


class CheckpointError(RolloutctlError):
    """A checkpoint can't be used: missing, cut off, unsafe format, or another model's."""


class BusError(RolloutctlError):
    """The bus can't do what was asked."""


class BusClosed(BusError):
    """The bus is not open."""


class BusFaulted(BusError):
    """The log can't be written any more. A bus that can't record does not publish."""


class BusOverloaded(BusError):
    """The queue between the trainer's thread and the bus is full."""


class BusUnreachable(BusError):
    """Nobody answered at the address within the time allowed."""


class AgentsMissing(BusError):
    """Fewer agents than expected were ready in time. The text names those that are there and what they wait for."""


class AgentError(RolloutctlError):
    """The agent can't start or go on."""


class IdentityTaken(AgentError):
    """A live agent already holds this replica and node rank."""


class WireError(RolloutctlError):
    """Bytes from a peer are not a message of this protocol."""


class LogError(RolloutctlError):
    """A log or journal file can't be used."""


class LogFull(LogError):
    """No space left to record in. Everything recorded before stays readable."""


class LogCorrupt(LogError):
    """The file is damaged. `position` is the first record that can't be trusted; those before it can.

    position: 1-based record position, or 0 when not even the header can be read.
    """

    def __init__(self, message: str, position: int = 0) -> None:
        super().__init__(message)
        self.position = position


class LogLocked(LogError):
    """Another process is writing this file."""


class ReplayDiffers(RolloutctlError):
    """A machine fed with a recorded event decided something other than what was recorded."""


class CommandFailed(RolloutctlError):
    """At least one agent failed, or did not answer by the deadline."""


class EngineError(RolloutctlError):
    """An engine refused or failed a call. Raised by adapters; the agent turns it into `failed(engine_error)`."""


class UnsupportedError(EngineError):
    """An engine can't do what is asked, as it was launched or at all. It was not called."""
