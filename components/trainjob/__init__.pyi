import trainjob.wait_options
from trainjob.backends import connect as connect
from trainjob.backends.base import Backend as Backend
from trainjob.client import TrainJobClient as TrainJobClient
from trainjob.diagnosis import Category as Category
from trainjob.diagnosis import Diagnosis as Diagnosis
from trainjob.diagnosis import Evidence as Evidence
from trainjob.errors import (
    AlreadyExists as AlreadyExists,
)
from trainjob.errors import (
    BackendUnavailable as BackendUnavailable,
)
from trainjob.errors import (
    ChecksumMismatch as ChecksumMismatch,
)
from trainjob.errors import (
    ConfigurationError as ConfigurationError,
)
from trainjob.errors import (
    CorruptData as CorruptData,
)
from trainjob.errors import (
    DataError as DataError,
)
from trainjob.errors import (
    InvalidSpec as InvalidSpec,
)
from trainjob.errors import (
    LaunchError as LaunchError,
)
from trainjob.errors import (
    ModelNotFound as ModelNotFound,
)
from trainjob.errors import (
    NotFound as NotFound,
)
from trainjob.errors import (
    OutOfSpace as OutOfSpace,
)
from trainjob.errors import (
    Problem as Problem,
)
from trainjob.errors import (
    QueueTimeout as QueueTimeout,
)
from trainjob.errors import (
    RankCrashed as RankCrashed,
)
from trainjob.errors import (
    RegistryConflict as RegistryConflict,
)
from trainjob.errors import (
    RegistryError as RegistryError,
)
from trainjob.errors import (
    RegistryUnavailable as RegistryUnavailable,
)
from trainjob.errors import (
    Rejected as Rejected,
)
from trainjob.errors import (
    RuntimeNotFound as RuntimeNotFound,
)
from trainjob.errors import (
    RunTimeout as RunTimeout,
)
from trainjob.errors import (
    SourceNotFound as SourceNotFound,
)
from trainjob.errors import (
    SpecMismatch as SpecMismatch,
)
from trainjob.errors import (
    StartTimeout as StartTimeout,
)
from trainjob.errors import (
    StoreUnavailable as StoreUnavailable,
)
from trainjob.errors import (
    Stuck as Stuck,
)
from trainjob.errors import (
    TimedOut as TimedOut,
)
from trainjob.errors import (
    TrainJobError as TrainJobError,
)
from trainjob.errors import (
    TrainJobFailed as TrainJobFailed,
)
from trainjob.errors import (
    UnsafePath as UnsafePath,
)
from trainjob.lifecycle import cancel as cancel
from trainjob.lifecycle import launch as launch
from trainjob.logs import LogLine as LogLine
from trainjob.manifest import JobRef as JobRef
from trainjob.report import Report as Report
from trainjob.settings import Settings as Settings
from trainjob.spec import (
    EnvVarSource as EnvVarSource,
)
from trainjob.spec import (
    Function as Function,
)
from trainjob.spec import (
    Initializer as Initializer,
)
from trainjob.spec import (
    InitializerSource as InitializerSource,
)
from trainjob.spec import (
    LoraConfig as LoraConfig,
)
from trainjob.spec import (
    OwnerReference as OwnerReference,
)
from trainjob.spec import (
    Resources as Resources,
)
from trainjob.spec import (
    RuntimePatch as RuntimePatch,
)
from trainjob.spec import (
    RuntimeRef as RuntimeRef,
)
from trainjob.spec import (
    TorchTuneConfig as TorchTuneConfig,
)
from trainjob.spec import (
    TorchTuneInstructDataset as TorchTuneInstructDataset,
)
from trainjob.spec import (
    TrainJobSpec as TrainJobSpec,
)
from trainjob.status import Blocker as Blocker
from trainjob.status import Observation as Observation
from trainjob.status import Phase as Phase
from trainjob.verdicts import RetryVerdict as RetryVerdict
from trainjob.version import __version__ as __version__
from trainjob.wait_options import InvalidWaitOptions as InvalidWaitOptions
from trainjob.wait_options import WaitOptions as WaitOptions
from trainjob.waiting import TrainJobResult as TrainJobResult
from trainjob.waiting import follow as follow
from trainjob.waiting import wait as wait

Budgets = trainjob.wait_options.Budgets  # deprecated; not imported here, so that it is not among the public names
