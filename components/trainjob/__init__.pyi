from trainjob._backends import connect as connect
from trainjob._backends.base import Backend as Backend
from trainjob._diagnosis import diagnosis_of as diagnosis_of
from trainjob._diagnosis.evidence import Evidence as Evidence
from trainjob._jobs.cancellation import Cancelled as Cancelled, cancel as cancel, cancel_key as cancel_key
from trainjob._jobs.following import follow as follow
from trainjob._jobs.launching import launch as launch
from trainjob._jobs.report import Report as Report, diagnose as diagnose
from trainjob._jobs.results import TrainJobResult as TrainJobResult
from trainjob._jobs.waiting import wait as wait
from trainjob._spec import (
    Function as Function,
    Initializer as Initializer,
    InitializerSource as InitializerSource,
    LoraConfig as LoraConfig,
    OwnerReference as OwnerReference,
    Resources as Resources,
    RuntimeRef as RuntimeRef,
    TorchTuneConfig as TorchTuneConfig,
    TorchTuneInstructDataset as TorchTuneInstructDataset,
    TrainJobSpec as TrainJobSpec,
)
from trainjob._support.log_lines import LogLine as LogLine
from trainjob.client import TrainJobClient as TrainJobClient
from trainjob.errors import (
    AlreadyExists as AlreadyExists,
    BackendUnavailable as BackendUnavailable,
    Category as Category,
    ChecksumMismatch as ChecksumMismatch,
    ConfigurationError as ConfigurationError,
    CorruptData as CorruptData,
    DataError as DataError,
    Diagnosis as Diagnosis,
    InvalidGate as InvalidGate,
    InvalidSpec as InvalidSpec,
    InvalidStudy as InvalidStudy,
    JobHung as JobHung,
    LaunchError as LaunchError,
    ModelNotFound as ModelNotFound,
    NotFound as NotFound,
    OutOfSpace as OutOfSpace,
    Problem as Problem,
    QueueTimeout as QueueTimeout,
    RankCrashed as RankCrashed,
    RanksRemain as RanksRemain,
    RegistryConflict as RegistryConflict,
    RegistryError as RegistryError,
    RegistryUnavailable as RegistryUnavailable,
    Rejected as Rejected,
    RetryVerdict as RetryVerdict,
    RuntimeNotFound as RuntimeNotFound,
    RunTimeout as RunTimeout,
    SourceNotFound as SourceNotFound,
    SpecMismatch as SpecMismatch,
    StartTimeout as StartTimeout,
    StoreUnavailable as StoreUnavailable,
    Stuck as Stuck,
    StudyFailed as StudyFailed,
    TimedOut as TimedOut,
    TrainJobError as TrainJobError,
    TrainJobFailed as TrainJobFailed,
    UnsafePath as UnsafePath,
)
from trainjob.job import JobRef as JobRef
from trainjob.settings import Settings as Settings
from trainjob.status import Blocker as Blocker, Observation as Observation, Phase as Phase, observe as observe
from trainjob.version import __version__ as __version__
from trainjob.wait_options import InvalidWaitOptions as InvalidWaitOptions, WaitOptions as WaitOptions
