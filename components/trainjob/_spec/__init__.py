"""`TrainJobSpec` and its parts.

May import `_diagnosis`, and the layers below.

A spec defines *what* to run; the key given at launch defines *which piece of work* it is (see
`trainjob._manifest.render`). Field names are those of the Kubeflow SDK, if it has them; camelCase names of the TrainJob
API are accepted, too. The rules of the TrainJob CRD and webhooks of Trainer 2.1 to 2.3 (``pkg/apis/trainer/v1alpha1``,
``pkg/webhooks``) are checked here, so that an invalid spec is refused before anything is created.
"""

from trainjob._spec.function import Function
from trainjob._spec.initializers import Initializer, InitializerSource
from trainjob._spec.on_retry import ExcludeNodes, MoreMemory, OnRetry, OtherCapacity
from trainjob._spec.parts import (
    OwnerReference,
    Resources,
    RuntimeRef,
    SecretRef,
    env_api,
)
from trainjob._spec.pods import for_every_node
from trainjob._spec.torchtune import LoraConfig, TorchTuneConfig, TorchTuneInstructDataset
from trainjob._spec.trainjob import TrainJobSpec

__all__ = [
    "ExcludeNodes",
    "Function",
    "Initializer",
    "InitializerSource",
    "LoraConfig",
    "MoreMemory",
    "OnRetry",
    "OtherCapacity",
    "OwnerReference",
    "Resources",
    "RuntimeRef",
    "SecretRef",
    "TorchTuneConfig",
    "TorchTuneInstructDataset",
    "TrainJobSpec",
    "env_api",
    "for_every_node",
]
