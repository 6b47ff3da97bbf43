from trainjob import names as names
from trainjob._backends import BACKENDS as BACKENDS
from trainjob._backends.base import Snapshot as Snapshot, TrainJob as TrainJob
from trainjob._backends.kubernetes.credentials import Credentials as Credentials
from trainjob._backends.kubernetes.pods import disruption_of as disruption_of
from trainjob._backends.kubernetes.prepared import PreparedRequest as PreparedRequest
from trainjob._diagnosis.serialization import (
    pack_diagnosis as pack_diagnosis,
    pack_evidence as pack_evidence,
    unpack_diagnosis as unpack_diagnosis,
    unpack_evidence as unpack_evidence,
)
from trainjob._doctor import Finding as Finding, Level as Level
from trainjob._doctor.cluster import examine_jobs as examine_jobs
from trainjob._goodput import Goodput as Goodput
from trainjob._goodput.history import MetricHistory as MetricHistory
from trainjob._jobs.cancellation import (
    CrashAction as CrashAction,
    cancelling as cancelling,
    give_up as give_up,
    request_cancel as request_cancel,
)
from trainjob._jobs.fencing import suspend_failed as suspend_failed
from trainjob._jobs.launching import AfterFailure as AfterFailure
from trainjob._jobs.progress_log import (
    PROGRESS_SECONDS as PROGRESS_SECONDS,
    LogSink as LogSink,
    ProgressLogger as ProgressLogger,
    phase_text as phase_text,
)
from trainjob._jobs.records import mark_delivered as mark_delivered
from trainjob._jobs.report import (
    examine as examine,
    numeric as numeric,
    rounded as rounded,
    short as short,
    spent_text as spent_text,
)
from trainjob._jobs.results import (
    conclude as conclude,
    measured as measured,
    result_of as result_of,
    spent_so_far as spent_so_far,
)
from trainjob._jobs.stalls import StallWatch as StallWatch
from trainjob._jobs.successors import (
    JobReplaced as JobReplaced,
    check_given_up as check_given_up,
    check_verdict as check_verdict,
    last_observation as last_observation,
    resume_if_stale as resume_if_stale,
)
from trainjob._jobs.telemetry import record_goodput as record_goodput
from trainjob._jobs.waiting import attend as attend, until_hung as until_hung
from trainjob._manifest.attempts import (
    CancelAction as CancelAction,
    given_up as given_up,
    is_replaced as is_replaced,
    try_of as try_of,
)
from trainjob._manifest.render import (
    KEY as KEY,
    MANAGED_BY as MANAGED_BY,
    key_hash as key_hash,
    labels_of as labels_of,
    render as render,
)
from trainjob._manifest.unattended import SUSPEND as SUSPEND, policy_of as policy_of, unattended_for as unattended_for
from trainjob._manifest.workflow_labels import (
    KFP_PIPELINE as KFP_PIPELINE,
    KFP_RUN as KFP_RUN,
    KFP_TASK as KFP_TASK,
    STUDY as STUDY,
    airflow_label as airflow_label,
    kfp_label as kfp_label,
)
from trainjob._pages.document import (
    merge_documents as merge_documents,
    observed_document as observed_document,
    training_document as training_document,
    with_comparison as with_comparison,
    with_evaluation as with_evaluation,
    with_lineage as with_lineage,
    with_segments as with_segments,
    workflow_document as workflow_document,
)
from trainjob._pages.live import (
    LiveReader as LiveReader,
    read_attempts as read_attempts,
    take_document as take_document,
)
from trainjob._pages.page import page_html as page_html
from trainjob._pages.study import document_of_study as document_of_study, find_study as find_study
from trainjob._spec import for_every_node as for_every_node
from trainjob._spec.checks import RESERVED_PREFIX as RESERVED_PREFIX, metadata_problems as metadata_problems
from trainjob._spec.function import Function as Function
from trainjob._spec.literals import check_literals as check_literals, has_open as has_open
from trainjob._spec.parts import field_name as field_name
from trainjob._spec.reading import (
    check_limits as check_limits,
    load_spec as load_spec,
    read_spec_file as read_spec_file,
)
from trainjob._support.control_characters import plain as plain
from trainjob._support.kube_objects import mapping as mapping, parse_time as parse_time
from trainjob._support.log_lines import Throttle as Throttle
from trainjob.data.checks import check_options as check_options
from trainjob.data.locations import parse_store as parse_store
from trainjob.data.program import STEP_RUNTIME as STEP_RUNTIME, Step as Step, step_command as step_command
from trainjob.data.promotion import Evaluation as Evaluation
from trainjob.data.selection import as_patterns as as_patterns
from trainjob.data.stores.opening import open_writable as open_writable
from trainjob.status import observe as observe
from trainjob.tuning import (
    Study as Study,
    StudyResult as StudyResult,
    StudyState as StudyState,
    Trial as Trial,
    cancel_trials as cancel_trials,
    tune as tune,
)
from trainjob.tuning.journal import journal_location as journal_location, open_journal as open_journal
from trainjob.tuning.template import check_template as check_template, spec_of as spec_of

def preload() -> None: ...
