"""The contract between trainer and agents: commands, outcomes, messages, reports, settings and errors.

Import names from here: modules below may change between versions, these names do not without notice. `X as X` says to
type checkers that a name is meant for others, as `import *` does.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # a folder of this name without an `__init__.py`, in a user's repository

from schemas.agent_status import AgentStatus as AgentStatus
from schemas.commands import AdapterVersion as AdapterVersion
from schemas.commands import Broadcast as Broadcast
from schemas.commands import Checkpoint as Checkpoint
from schemas.commands import EngineCommand as EngineCommand
from schemas.commands import Manifest as Manifest
from schemas.commands import ProfileCommand as ProfileCommand
from schemas.commands import ProfilePlan as ProfilePlan
from schemas.commands import Pushed as Pushed
from schemas.commands import Source as Source
from schemas.commands import Target as Target
from schemas.commands import Window as Window
from schemas.config import AgentConfig as AgentConfig
from schemas.config import BusConfig as BusConfig
from schemas.config import ObservePolicy as ObservePolicy
from schemas.errors import *  # noqa: F403 (every error is public)
from schemas.events import Abort as Abort
from schemas.events import CheckAdapter as CheckAdapter
from schemas.events import CheckProfile as CheckProfile
from schemas.events import CheckSource as CheckSource
from schemas.events import EngineCall as EngineCall
from schemas.events import Flush as Flush
from schemas.events import Load as Load
from schemas.events import LoadAdapter as LoadAdapter
from schemas.events import Observation as Observation
from schemas.events import Pause as Pause
from schemas.events import Remedies as Remedies
from schemas.events import Restore as Restore
from schemas.events import Resume as Resume
from schemas.events import Returned as Returned
from schemas.events import Sleep as Sleep
from schemas.events import StartProfile as StartProfile
from schemas.events import StopProfile as StopProfile
from schemas.events import UnloadAdapter as UnloadAdapter
from schemas.events import Wake as Wake
from schemas.identity import Identity as Identity
from schemas.identity import Operation as Operation
from schemas.identity import RolloutMode as RolloutMode
from schemas.identity import Tag as Tag
from schemas.outcomes import Acted as Acted
from schemas.outcomes import Conclusion as Conclusion
from schemas.outcomes import ErrorKind as ErrorKind
from schemas.outcomes import Failed as Failed
from schemas.outcomes import Missing as Missing
from schemas.outcomes import Outcome as Outcome
from schemas.outcomes import Reason as Reason
from schemas.outcomes import Skipped as Skipped
from schemas.outcomes import Trace as Trace
from schemas.profiler.config import ProfilerConfig as ProfilerConfig
from schemas.reports import AdapterStatus as AdapterStatus
from schemas.reports import AgentLine as AgentLine
from schemas.reports import AgentOutcome as AgentOutcome
from schemas.reports import FleetStatus as FleetStatus
from schemas.reports import RecentFailure as RecentFailure
from schemas.reports import ReplicaStatus as ReplicaStatus
from schemas.reports import Report as Report
from schemas.reports import Stopped as Stopped
from schemas.reports import SyncReport as SyncReport
from schemas.safetensors.format import TensorSpec as TensorSpec
from schemas.safetensors.format import read_layout as read_layout
from schemas.safetensors.manifest import check_directory as check_directory
from schemas.safetensors.manifest import manifest_of as manifest_of
from schemas.safetensors.manifest import require_same_model as require_same_model
from schemas.safetensors.paths import resolve_below as resolve_below
